//! Clones and snapshots, on a pool whose files can share blocks and on one whose files cannot.
use std::{fs, io::Write, path::Path};

use cleat_csi::{Client, Code, v1, v1::volume_capability::access_mode::Mode};

use crate::fixture::{
    BlockFixture, GIB, Volume, create_request, delete_snapshot, from_snapshot, from_volume, raw, ready, writer,
};

const XFS_POOL: u64 = 4 << 30;

async fn copy(client: &Client, name: &str, volume: &Volume, source: v1::VolumeContentSource, bytes: i64) -> Volume {
    let request = v1::CreateVolumeRequest {
        capacity_range: Some(v1::CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
        volume_content_source: Some(source.clone()),
        ..create_request(name, volume.capability.clone())
    };
    let created = client.create_volume(request.clone()).await.unwrap().volume.unwrap();
    assert_eq!(created.content_source, Some(source));
    assert_eq!(client.create_volume(request).await.unwrap().volume.unwrap(), created, "and again");
    Volume { id: created.volume_id, capability: volume.capability.clone() }
}

async fn read(client: &Client, volume: &Volume, at: &str, file: &str) -> Option<String> {
    volume.publish_and_stage(client, "a", at).await;
    let contents = fs::read_to_string(Path::new(at).join(file)).ok();
    volume.unstage_and_unpublish(client, "a", at).await;
    contents
}

/// Snapshots and clones contain the data of the volume at the time they were cut, also if the volume is in use.
async fn copies_contain_the_data_of_their_time(fixture: BlockFixture, fs_type: &str) {
    let a = fixture.driver("a").await;
    let (staging, other) = (fixture.create_dir("staging"), fixture.create_dir("other"));
    let volume = Volume::create(&a, "origin", writer(fs_type)).await.unwrap();
    volume.publish_and_stage(&a, "a", &staging).await;
    let file = Path::new(&staging).join("file");
    // Not synced: the driver has to flush it.
    fs::write(&file, "first").unwrap();
    let snapshot = volume.snapshot(&a, "snap").await.unwrap();
    assert_eq!((snapshot.source_volume_id.as_str(), snapshot.size_bytes), ("origin", GIB));
    ready(&a, &snapshot.snapshot_id).await;
    fs::write(&file, "second").unwrap();
    let clone = copy(&a, "clone", &volume, from_volume("origin"), 0).await;
    fs::write(&file, "third").unwrap();

    let restored = copy(&a, "restored", &volume, from_snapshot(&snapshot.snapshot_id), 0).await;
    let larger = copy(&a, "larger", &volume, from_snapshot(&snapshot.snapshot_id), 2 * GIB).await;
    // Mounted beside their source, which has the same UUID.
    assert_eq!(read(&a, &restored, &other, "file").await.as_deref(), Some("first"));
    assert_eq!(read(&a, &clone, &other, "file").await.as_deref(), Some("second"));
    assert_eq!(fs::read_to_string(&file).unwrap(), "third", "the source is still writable");

    larger.publish_and_stage(&a, "a", &other).await;
    assert_eq!(fs::read_to_string(Path::new(&other).join("file")).unwrap(), "first");
    let total = cleat_host::filesystem::statfs(Path::new(&other)).unwrap().total_bytes;
    assert!(total > 3 * (1 << 29), "the file system fills the larger volume: {total}");
    larger.unstage_and_unpublish(&a, "a", &other).await;

    volume.unstage_and_unpublish(&a, "a", &staging).await;
    volume.delete(&a).await.unwrap();
    assert_eq!(read(&a, &clone, &other, "file").await.as_deref(), Some("second"), "copies outlive their origin");
    for volume in [clone, restored, larger] {
        volume.delete(&a).await.unwrap();
    }
    for _ in 0..2 {
        delete_snapshot(&a, &snapshot.snapshot_id).await.unwrap();
    }
    fixture.assert_nothing_left("origin");
}

#[tokio::test]
async fn copies_of_ext4_by_copying_contain_the_data_of_their_time() {
    copies_contain_the_data_of_their_time(BlockFixture::new(), "ext4").await;
}

#[tokio::test]
async fn copies_of_xfs_by_copying_contain_the_data_of_their_time() {
    copies_contain_the_data_of_their_time(BlockFixture::new(), "xfs").await;
}

#[tokio::test]
async fn copies_of_ext4_by_reflink_contain_the_data_of_their_time() {
    copies_contain_the_data_of_their_time(BlockFixture::on_xfs(XFS_POOL), "ext4").await;
}

#[tokio::test]
async fn copies_of_xfs_by_reflink_contain_the_data_of_their_time() {
    copies_contain_the_data_of_their_time(BlockFixture::on_xfs(XFS_POOL), "xfs").await;
}

#[tokio::test]
async fn a_reflinked_copy_takes_no_space_and_no_time() {
    let fixture = BlockFixture::on_xfs(XFS_POOL);
    let a = fixture.driver("a").await;
    let volume = Volume::create(&a, "origin", raw(Mode::SingleNodeWriter)).await.unwrap();
    let mut image = fs::OpenOptions::new().write(true).open(fixture.image("origin")).unwrap();
    image.write_all(&vec![7; 256 << 20]).unwrap();
    image.sync_all().unwrap();
    let available = |fixture: &BlockFixture| cleat_host::filesystem::statfs(&fixture.pool()).unwrap().available_bytes;
    let before = available(&fixture);
    let snapshot = volume.snapshot(&a, "snap").await.unwrap();
    assert!(snapshot.ready_to_use, "there is nothing to wait for");
    let clone = copy(&a, "clone", &volume, from_snapshot("snap"), 0).await;
    assert!(before - available(&fixture) < 32 << 20);
    assert_eq!(fixture.bytes("clone", 200 << 20, 4096), [7; 4096]);
    for volume in [volume, clone] {
        volume.delete(&a).await.unwrap();
    }
    delete_snapshot(&a, "snap").await.unwrap();
    fixture.assert_nothing_left("origin");
}

#[tokio::test]
async fn a_copied_snapshot_is_not_ready_until_its_copy_is_complete() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let request = v1::CreateVolumeRequest {
        capacity_range: Some(v1::CapacityRange { required_bytes: 3 * GIB, limit_bytes: 0 }),
        ..create_request("origin", raw(Mode::SingleNodeWriter))
    };
    a.create_volume(request).await.unwrap();
    let volume = Volume { id: "origin".to_owned(), capability: raw(Mode::SingleNodeWriter) };
    let mut image = fs::OpenOptions::new().write(true).open(fixture.image("origin")).unwrap();
    for _ in 0..24 {
        image.write_all(&vec![7; 64 << 20]).unwrap();
    }
    drop(image);
    let snapshot = volume.snapshot(&a, "snap").await.unwrap();
    assert!(!snapshot.ready_to_use, "a copy of 1.5 GiB is not done at once");
    let again = volume.snapshot(&a, "snap").await.unwrap();
    assert_eq!(again.creation_time, snapshot.creation_time, "the same point in time");
    let early = v1::CreateVolumeRequest {
        volume_content_source: Some(from_snapshot("snap")),
        ..create_request("early", raw(Mode::SingleNodeWriter))
    };
    if !again.ready_to_use {
        let error = a.create_volume(early).await.err();
        assert!(error.is_none_or(|error| error.code() == Code::Unavailable));
    }
    let done = ready(&a, "snap").await;
    assert_eq!(done.creation_time, snapshot.creation_time);
    let copied = fs::read(fixture.pool().join("snapshots/snap.img")).unwrap();
    assert!(copied[..1536 << 20].iter().all(|byte| *byte == 7) && copied.len() == 3 << 30);
}

#[tokio::test]
async fn a_raw_device_in_use_is_copied_only_by_reflink() {
    for (fixture, want) in
        [(BlockFixture::new(), Some(Code::FailedPrecondition)), (BlockFixture::on_xfs(XFS_POOL), None)]
    {
        let a = fixture.driver("a").await;
        let (staging, target) = (fixture.create_dir("staging"), fixture.path_string("device"));
        let volume = Volume::create(&a, "origin", raw(Mode::SingleNodeWriter)).await.unwrap();
        volume.publish_and_stage(&a, "a", &staging).await;
        volume.publish(&a, &staging, &target).await.unwrap();
        let mut device = fs::OpenOptions::new().write(true).open(&target).unwrap();
        device.write_all(&[9; 8192]).unwrap();
        let taken = volume.snapshot(&a, "snap").await;
        assert_eq!(taken.as_ref().err().map(|error| error.code()), want);
        drop(device);
        if want.is_none() {
            copy(&a, "clone", &volume, from_snapshot("snap"), 0).await;
            assert_eq!(fixture.bytes("clone", 0, 8192), [9; 8192], "flushed before it was cut");
        }
    }
}

async fn snapshots(client: &Client, request: v1::ListSnapshotsRequest) -> (Vec<String>, String) {
    let response = client.list_snapshots(request).await.unwrap();
    let ids = response.entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id).collect();
    (ids, response.next_token)
}

#[tokio::test]
async fn snapshots_are_found_by_id_by_volume_and_page_by_page() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let one = Volume::create(&a, "one", writer("ext4")).await.unwrap();
    let two = Volume::create(&a, "two", writer("ext4")).await.unwrap();
    for (volume, name) in [(&one, "s1"), (&one, "s2"), (&two, "s3")] {
        for _ in 0..2 {
            assert_eq!(volume.snapshot(&a, name).await.unwrap().snapshot_id, name);
        }
    }
    let error = two.snapshot(&a, "s1").await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists, "{error}");
    let missing = Volume { id: "missing".to_owned(), capability: writer("") };
    assert_eq!(missing.snapshot(&a, "s4").await.unwrap_err().code(), Code::NotFound);

    let request = v1::ListSnapshotsRequest::default();
    assert_eq!(snapshots(&a, request.clone()).await.0, ["s1", "s2", "s3"]);
    let (ids, token) = snapshots(&a, v1::ListSnapshotsRequest { max_entries: 2, ..request.clone() }).await;
    assert_eq!(ids, ["s1", "s2"]);
    let next = v1::ListSnapshotsRequest { max_entries: 2, starting_token: token, ..request.clone() };
    assert_eq!(snapshots(&a, next).await, (vec!["s3".to_owned()], String::new()));
    let of_one = v1::ListSnapshotsRequest { source_volume_id: "one".to_owned(), max_entries: 1, ..request.clone() };
    let (ids, token) = snapshots(&a, of_one.clone()).await;
    assert_eq!(ids, ["s1"]);
    let next = v1::ListSnapshotsRequest { starting_token: token, ..of_one };
    assert_eq!(snapshots(&a, next).await, (vec!["s2".to_owned()], String::new()));
    let by_id = |id: &str| v1::ListSnapshotsRequest { snapshot_id: id.to_owned(), ..Default::default() };
    assert_eq!(snapshots(&a, by_id("s2")).await.0, ["s2"]);
    assert!(snapshots(&a, by_id("../volumes/one")).await.0.is_empty());
    let missing = v1::GetSnapshotRequest { snapshot_id: "s9".to_owned(), ..Default::default() };
    assert_eq!(a.get_snapshot(missing).await.unwrap_err().code(), Code::NotFound);
    delete_snapshot(&a, "../volumes/one").await.unwrap();
    assert!(fixture.image("one").exists());
}

#[tokio::test]
async fn a_source_that_does_not_fit_is_refused() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let volume = Volume::create(&a, "origin", writer("ext4")).await.unwrap();
    volume.snapshot(&a, "snap").await.unwrap();
    ready(&a, "snap").await;
    let request = |name: &str, source, fs_type: &str, limit_bytes| v1::CreateVolumeRequest {
        volume_content_source: Some(source),
        capacity_range: Some(v1::CapacityRange { required_bytes: 0, limit_bytes }),
        ..create_request(name, writer(fs_type))
    };
    for (case, request, want) in [
        ("no such snapshot", request("x", from_snapshot("none"), "ext4", 0), Code::NotFound),
        ("no such volume", request("x", from_volume("none"), "ext4", 0), Code::NotFound),
        ("a volume's id for a snapshot", request("x", from_snapshot("origin"), "ext4", 0), Code::NotFound),
        ("another file system", request("x", from_snapshot("snap"), "xfs", 0), Code::InvalidArgument),
        ("smaller than its source", request("x", from_snapshot("snap"), "ext4", GIB / 2), Code::OutOfRange),
        ("a path", request("x", from_volume("../locks"), "ext4", 0), Code::NotFound),
    ] {
        assert_eq!(a.create_volume(request).await.unwrap_err().code(), want, "{case}");
        assert!(!fixture.image("x").exists() && !fixture.record("x").exists(), "{case}");
    }
    a.create_volume(request("made", from_snapshot("snap"), "", 0)).await.unwrap();
    let other = a.create_volume(request("made", from_volume("origin"), "", 0)).await.unwrap_err();
    assert_eq!(other.code(), Code::AlreadyExists, "of another source: {other}");
    // A repeated call for a complete volume succeeds, also if its source was deleted.
    delete_snapshot(&a, "snap").await.unwrap();
    a.create_volume(request("made", from_snapshot("snap"), "", 0)).await.unwrap();
}
