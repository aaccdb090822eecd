//! The life of a volume from create to delete: data is preserved when it is unpublished and published again, on any
//! node.
use std::{fs, io::Write, path::Path};

use cleat_csi::{Client, Code, v1, v1::volume_capability::access_mode::Mode};

use crate::fixture::{BlockFixture, GIB, Volume, create_request, mounted, raw, writer};

async fn round_trip(fs_type: &str) {
    let fixture = BlockFixture::new();
    let (a, b) = (fixture.driver("a").await, fixture.driver("b").await);
    let volume = Volume::create(&a, "pvc-1", writer(fs_type)).await.unwrap();
    assert_eq!(volume.id, "pvc-1");
    assert_eq!(fs::metadata(fixture.image("pvc-1")).unwrap().len(), GIB as u64);

    let (staging, target) = (fixture.create_dir("a/staging"), fixture.path_string("a/target"));
    volume.attach(&a, "a").await.unwrap();
    volume.stage(&a, &staging).await.unwrap();
    volume.publish(&a, &staging, &target).await.unwrap();
    fs::write(Path::new(&target).join("hello"), "written on a").unwrap();
    volume.unpublish(&a, &target).await.unwrap();
    assert!(!Path::new(&target).exists(), "the driver removes the target that it created");
    volume.unstage(&a, &staging).await.unwrap();
    assert!(Path::new(&staging).exists(), "the staging directory is the caller's");
    assert_eq!(fixture.loop_devices("pvc-1"), 0);
    volume.detach(&a, "a").await.unwrap();

    let (staging, target) = (fixture.create_dir("b/staging"), fixture.path_string("b/target"));
    volume.attach(&b, "b").await.unwrap();
    volume.stage(&b, &staging).await.unwrap();
    volume.publish(&b, &staging, &target).await.unwrap();
    assert_eq!(fs::read(Path::new(&target).join("hello")).unwrap(), b"written on a");
    let stats = v1::NodeGetVolumeStatsRequest {
        volume_id: volume.id.clone(),
        volume_path: target.clone(),
        ..Default::default()
    };
    let usage = b.node_get_volume_stats(stats).await.unwrap().usage;
    assert!(usage.len() == 2 && usage[0].total > GIB / 2 && usage[0].available > 0, "{usage:?}");
    volume.unpublish(&b, &target).await.unwrap();
    volume.unstage(&b, &staging).await.unwrap();
    volume.detach(&b, "b").await.unwrap();
    volume.delete(&b).await.unwrap();
    fixture.assert_nothing_left("pvc-1");
}

#[tokio::test]
async fn ext4_keeps_its_data_from_node_to_node() {
    round_trip("ext4").await;
}

#[tokio::test]
async fn xfs_keeps_its_data_from_node_to_node() {
    round_trip("xfs").await;
}

#[tokio::test]
async fn every_call_may_be_repeated() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let (staging, target) = (fixture.create_dir("staging"), fixture.path_string("target"));
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    for _ in 0..2 {
        assert_eq!(Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap().id, volume.id);
        volume.attach(&a, "a").await.unwrap();
        volume.stage(&a, &staging).await.unwrap();
        volume.publish(&a, &staging, &target).await.unwrap();
    }
    assert_eq!(fixture.mounts().len(), 2, "nothing is mounted twice");
    assert_eq!(fixture.loop_devices("pvc-1"), 1);
    for _ in 0..2 {
        volume.unpublish(&a, &target).await.unwrap();
    }
    for _ in 0..2 {
        volume.unstage(&a, &staging).await.unwrap();
    }
    for _ in 0..2 {
        volume.detach(&a, "a").await.unwrap();
    }
    for _ in 0..2 {
        volume.delete(&a).await.unwrap();
    }
    volume.unpublish(&a, &target).await.unwrap();
    volume.unstage(&a, &staging).await.unwrap();
    volume.detach(&a, "a").await.unwrap();
    fixture.assert_nothing_left("pvc-1");
}

#[tokio::test]
async fn two_pods_share_one_stage_and_each_has_its_own_access() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let (staging, first, second) =
        (fixture.create_dir("staging"), fixture.path_string("first"), fixture.path_string("second"));
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    volume.attach(&a, "a").await.unwrap();
    volume.stage(&a, &staging).await.unwrap();
    volume.publish(&a, &staging, &first).await.unwrap();
    volume.publish_as(&a, &staging, &second, true).await.unwrap();
    assert_eq!(fixture.loop_devices("pvc-1"), 1);
    fs::write(Path::new(&first).join("shared"), "x").unwrap();
    assert_eq!(fs::read(Path::new(&second).join("shared")).unwrap(), b"x");
    let refused = fs::write(Path::new(&second).join("shared"), "y").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);

    let error = volume.publish_as(&a, &staging, &second, false).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists, "{error}");
    let error = volume.unstage(&a, &staging).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "pods still use it: {error}");
    volume.unpublish(&a, &first).await.unwrap();
    assert_eq!(fs::read(Path::new(&second).join("shared")).unwrap(), b"x", "the other pod is not disturbed");
    volume.unpublish(&a, &second).await.unwrap();
    volume.unstage(&a, &staging).await.unwrap();

    let exclusive = Volume { capability: mounted("ext4", Mode::SingleNodeSingleWriter), ..volume.clone() };
    exclusive.stage(&a, &staging).await.unwrap();
    exclusive.publish(&a, &staging, &first).await.unwrap();
    exclusive.publish(&a, &staging, &first).await.unwrap();
    let error = exclusive.publish(&a, &staging, &second).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
}

#[tokio::test]
async fn a_raw_volume_appears_as_a_device_on_every_node_that_shares_it() {
    let fixture = BlockFixture::new();
    let (a, b) = (fixture.driver("a").await, fixture.driver("b").await);
    let volume = Volume::create(&a, "raw", raw(Mode::MultiNodeMultiWriter)).await.unwrap();
    let (on_a, on_b) = (fixture.path_string("device-a"), fixture.path_string("device-b"));
    let (staging_a, staging_b) = (fixture.create_dir("staging-a"), fixture.create_dir("staging-b"));
    for (client, node, staging, target) in [(&a, "a", &staging_a, &on_a), (&b, "b", &staging_b, &on_b)] {
        volume.attach(client, node).await.unwrap();
        for _ in 0..2 {
            volume.stage(client, staging).await.unwrap();
            volume.publish(client, staging, target).await.unwrap();
        }
    }
    let mut device = fs::OpenOptions::new().write(true).open(&on_a).unwrap();
    device.write_all(&[7; 4096]).unwrap();
    device.sync_all().unwrap();
    drop(device);
    assert_eq!(fixture.bytes("raw", 0, 4096), [7; 4096]);

    volume.unpublish(&a, &on_a).await.unwrap();
    volume.unstage(&a, &staging_a).await.unwrap();
    assert_eq!(fixture.loop_devices("raw"), 1, "the other node still has it");
    volume.detach(&a, "a").await.unwrap();
    let error = volume.delete(&a).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    volume.unpublish(&b, &on_b).await.unwrap();
    volume.unstage(&b, &staging_b).await.unwrap();
    volume.detach(&b, "b").await.unwrap();
    volume.delete(&b).await.unwrap();
    fixture.assert_nothing_left("raw");
}

#[tokio::test]
async fn volumes_do_not_wait_for_each_other() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let mut running = tokio::task::JoinSet::new();
    for number in 0..16 {
        let (a, staging, target) = (
            a.clone(),
            fixture.create_dir(&format!("staging-{number}")),
            fixture.path_string(&format!("target-{number}")),
        );
        running.spawn(async move {
            let volume = Volume::create(&a, &format!("pvc-{number}"), writer("ext4")).await.unwrap();
            volume.attach(&a, "a").await.unwrap();
            volume.stage(&a, &staging).await.unwrap();
            volume.publish(&a, &staging, &target).await.unwrap();
            fs::write(Path::new(&target).join("number"), number.to_string()).unwrap();
            volume.unpublish(&a, &target).await.unwrap();
            volume.unstage(&a, &staging).await.unwrap();
            volume.detach(&a, "a").await.unwrap();
            volume.delete(&a).await.unwrap();
        });
    }
    running.join_all().await;
    fixture.assert_nothing_left("pvc-0");
}

async fn page(client: &Client, max_entries: i32, starting_token: &str) -> (Vec<String>, String) {
    let request = v1::ListVolumesRequest { max_entries, starting_token: starting_token.to_owned() };
    let response = client.list_volumes(request).await.unwrap();
    let id = |entry: v1::list_volumes_response::Entry| entry.volume.unwrap().volume_id;
    (response.entries.into_iter().map(id).collect(), response.next_token)
}

#[tokio::test]
async fn volumes_are_listed_page_by_page_with_their_nodes() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    for name in ["v1", "v2", "v3"] {
        Volume::create(&a, name, writer("")).await.unwrap().attach(&a, "a").await.unwrap();
    }
    let (ids, token) = page(&a, 2, "").await;
    assert_eq!(ids, ["v1", "v2"]);
    let foreign = v1::ListVolumesRequest { max_entries: 0, starting_token: "v1".to_owned() };
    assert_eq!(a.list_volumes(foreign).await.unwrap_err().code(), Code::Aborted);
    assert_eq!(page(&a, 2, &token).await, (vec!["v3".to_owned()], String::new()));
    let all = a.list_volumes(v1::ListVolumesRequest::default()).await.unwrap();
    assert!(all.entries.iter().all(|entry| entry.status.as_ref().unwrap().published_node_ids == ["a"]));
}

#[tokio::test]
async fn create_volume_is_idempotent_and_refuses_incompatible_requests() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let request = create_request("pvc-1", writer("ext4"));
    let created = a.create_volume(request.clone()).await.unwrap();
    assert_eq!(a.create_volume(request.clone()).await.unwrap(), created);
    let with_size = |required_bytes, limit_bytes| v1::CreateVolumeRequest {
        capacity_range: Some(v1::CapacityRange { required_bytes, limit_bytes }),
        ..request.clone()
    };
    assert_eq!(a.create_volume(with_size(GIB / 2, 2 * GIB)).await.unwrap(), created, "the range admits it");
    let other_parameters =
        v1::CreateVolumeRequest { parameters: [("noFormat".to_owned(), "true".to_owned())].into(), ..request.clone() };
    for (case, request, code) in [
        ("larger", with_size(2 * GIB, 0), Code::AlreadyExists),
        ("limit below", with_size(0, GIB / 2), Code::AlreadyExists),
        ("other file system", create_request("pvc-1", writer("xfs")), Code::AlreadyExists),
        ("other parameters", other_parameters, Code::AlreadyExists),
        ("no name", create_request("", writer("")), Code::InvalidArgument),
        ("too large", with_size(i64::MAX, 0), Code::OutOfRange),
        (
            "no capability",
            v1::CreateVolumeRequest { volume_capabilities: vec![], ..request.clone() },
            Code::InvalidArgument,
        ),
        ("shared file system", create_request("s", mounted("", Mode::MultiNodeMultiWriter)), Code::InvalidArgument),
    ] {
        assert_eq!(a.create_volume(request).await.unwrap_err().code(), code, "{case}");
    }
    let default = v1::CreateVolumeRequest { capacity_range: None, ..create_request("default", writer("")) };
    assert_eq!(a.create_volume(default).await.unwrap().volume.unwrap().capacity_bytes, GIB);
    let small = v1::CreateVolumeRequest {
        capacity_range: Some(v1::CapacityRange { required_bytes: 1, limit_bytes: 0 }),
        ..create_request("small-xfs", writer("xfs"))
    };
    assert_eq!(a.create_volume(small).await.unwrap().volume.unwrap().capacity_bytes, 300 << 20);
}
