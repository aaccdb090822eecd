//! Class parameters and flags: file systems, provisioning, pools, topology, limits, mutable parameters and volume
//! health.
use std::{collections::HashMap, fs, os::unix::fs::MetadataExt, path::Path};

use cleat_csi::{Client, Code, v1, v1::volume_capability::AccessType};
use cleat_host::{loopdev, mount};

use crate::fixture::{
    BlockFixture, GIB, Volume, create_request, delete_snapshot, from_snapshot, from_volume, ready, writer,
};

fn request_with(parameters: &[(&str, &str)], name: &str, fs_type: &str) -> v1::CreateVolumeRequest {
    let parameters = parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    v1::CreateVolumeRequest { parameters, ..create_request(name, writer(fs_type)) }
}

async fn create(client: &Client, request: v1::CreateVolumeRequest) -> Volume {
    let capability = request.volume_capabilities[0].clone();
    Volume { id: client.create_volume(request).await.unwrap().volume.unwrap().volume_id, capability }
}

#[tokio::test]
async fn class_parameters_set_properties_of_the_file_system() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let small = create(&a, request_with(&[("mkfsOptions", "-b 1024 -L mine")], "small", "ext4")).await;
    small.publish_and_stage(&a, "a", &staging).await;
    assert_eq!(rustix::fs::statvfs(staging.as_str()).unwrap().f_frsize, 1024);
    small.unstage_and_unpublish(&a, "a", &staging).await;

    let class = create(&a, request_with(&[("fsType", "btrfs")], "class", "")).await;
    class.publish_and_stage(&a, "a", &staging).await;
    assert_eq!(mount::find(Path::new(&staging)).unwrap().unwrap().fstype, "btrfs");
    class.unstage_and_unpublish(&a, "a", &staging).await;
    let error = a.create_volume(request_with(&[("mkfsOptions", "-F /dev/sda")], "x", "ext4")).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");

    let mut capability = writer("ext4");
    if let Some(AccessType::Mount(mount)) = &mut capability.access_type {
        mount.mount_flags = vec!["noatime,nodev".to_owned(), "data=journal".to_owned()];
    }
    let volume = Volume::create(&a, "flags", capability).await.unwrap();
    volume.publish_and_stage(&a, "a", &staging).await;
    let mounted = mount::find(Path::new(&staging)).unwrap().unwrap();
    assert!(mounted.options.iter().any(|option| option == "noatime") && mounted.options.iter().any(|o| o == "nodev"));
    assert!(mounted.super_options.iter().any(|option| option == "data=journal"), "{:?}", mounted.super_options);
    volume.unstage_and_unpublish(&a, "a", &staging).await;
    let mut nonsense = volume.clone();
    if let Some(AccessType::Mount(mount)) = &mut nonsense.capability.access_type {
        mount.mount_flags = vec!["remount".to_owned()];
    }
    nonsense.attach(&a, "a").await.unwrap();
    assert_eq!(nonsense.stage(&a, &staging).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_thick_volume_has_its_blocks_or_is_not_created() {
    let fixture = BlockFixture::on_xfs(2 << 30);
    let a = fixture.driver("a").await;
    let thin = create(&a, request_with(&[("provisioning", "thin")], "thin", "ext4")).await;
    let thick = create(&a, request_with(&[("provisioning", "thick")], "thick", "ext4")).await;
    let blocks = |id: &str| fs::metadata(fixture.image(id)).unwrap().blocks() as i64 * 512;
    assert!(blocks("thin") < 1 << 20 && blocks("thick") >= GIB, "{} {}", blocks("thin"), blocks("thick"));
    let error = a.create_volume(request_with(&[("provisioning", "thick")], "more", "ext4")).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    assert!(!fixture.image("more").exists() && !fixture.record("more").exists(), "nothing is left of it");
    let error = thick.expand(&a, 8 * GIB).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    let get = v1::ControllerGetVolumeRequest { volume_id: "thick".to_owned() };
    assert_eq!(a.controller_get_volume(get).await.unwrap().volume.unwrap().capacity_bytes, GIB, "not promised");

    let capacity = |parameters: &[(&str, &str)]| v1::GetCapacityRequest {
        parameters: parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        ..Default::default()
    };
    let thick_capacity = a.get_capacity(capacity(&[("provisioning", "thick")])).await.unwrap();
    assert!(thick_capacity.available_capacity < GIB);
    assert_eq!(thick_capacity.maximum_volume_size, Some(thick_capacity.available_capacity));
    let thin_capacity = a.get_capacity(capacity(&[])).await.unwrap();
    assert!(thin_capacity.maximum_volume_size > thick_capacity.maximum_volume_size);

    // A thick volume must not share blocks: a later write could then fail because the pool is full.
    for (volume, name, shared) in [(&thick, "of-thick", false), (&thin, "of-thin", true)] {
        let image = fs::OpenOptions::new().write(true).open(fixture.image(&volume.id)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&image, &[7; 1 << 20], 0).unwrap();
        volume.snapshot(&a, name).await.unwrap();
        ready(&a, name).await;
        let listing = std::process::Command::new("filefrag").arg("-v").arg(fixture.image(&volume.id)).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&listing.stdout).contains("shared"), shared, "{name}");
        delete_snapshot(&a, name).await.unwrap();
    }
    thick.delete(&a).await.unwrap();
    thin.delete(&a).await.unwrap();
    fixture.assert_nothing_left("thick");
}

#[tokio::test]
async fn a_class_names_another_pool() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let error = a.create_volume(request_with(&[("pool", "fast")], "pvc-1", "ext4")).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "the pool does not exist: {error}");
    for name in ["..", "a/b", "../volumes"] {
        let error = a.create_volume(request_with(&[("pool", name)], "pvc-1", "ext4")).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{name:?}");
    }
    fs::create_dir_all(fixture.pool().join("pools/fast")).unwrap();
    let volume = create(&a, request_with(&[("pool", "fast")], "pvc-1", "ext4")).await;
    assert_eq!(volume.id, "fast:pvc-1");
    assert!(fixture.pool().join("pools/fast/volumes/pvc-1.img").exists());
    let twice = a.create_volume(request_with(&[], "pvc-1", "ext4")).await.unwrap_err();
    assert_eq!(twice.code(), Code::AlreadyExists, "one name, one volume: {twice}");

    volume.publish_and_stage(&a, "a", &staging).await;
    fs::write(Path::new(&staging).join("file"), "data").unwrap();
    let snapshot = volume.snapshot(&a, "snap").await.unwrap();
    assert_eq!(snapshot.snapshot_id, "fast:snap");
    ready(&a, "fast:snap").await;
    volume.unstage_and_unpublish(&a, "a", &staging).await;
    // From one pool to another, and back.
    for (name, pool, source) in [("here", "", from_snapshot("fast:snap")), ("there", "fast", from_volume("here"))] {
        let request = request_with(&[("pool", pool)], name, "ext4");
        let copy = create(&a, v1::CreateVolumeRequest { volume_content_source: Some(source), ..request }).await;
        copy.publish_and_stage(&a, "a", &staging).await;
        assert_eq!(fs::read(Path::new(&staging).join("file")).unwrap(), b"data");
        copy.unstage_and_unpublish(&a, "a", &staging).await;
    }
    let listed = a.list_volumes(v1::ListVolumesRequest::default()).await.unwrap();
    let ids: Vec<_> = listed.entries.into_iter().map(|entry| entry.volume.unwrap().volume_id).collect();
    assert_eq!(ids, ["fast:pvc-1", "fast:there", "here"]);
    for id in ids {
        Volume { id, capability: writer("") }.delete(&a).await.unwrap();
    }
    delete_snapshot(&a, "fast:snap").await.unwrap();
    assert_eq!(fs::read_dir(fixture.pool().join("pools/fast/volumes")).unwrap().count(), 0);
    fixture.assert_nothing_left("here");
}

async fn modify(client: &Client, id: &str, pairs: &[(&str, &str)]) -> Result<(), cleat_csi::CallError> {
    let request = v1::ControllerModifyVolumeRequest {
        volume_id: id.to_owned(),
        mutable_parameters: pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        ..Default::default()
    };
    client.controller_modify_volume(request).await.map(drop)
}

#[tokio::test]
async fn a_volume_can_be_modified_during_its_life() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    volume.publish_and_stage(&a, "a", &staging).await;
    fs::write(Path::new(&staging).join("file"), "data").unwrap();
    let depth = || {
        let device = loopdev::find(&fixture.image("pvc-1")).unwrap().remove(0);
        fs::read_to_string(format!("/sys/block/loop{}/queue/nr_requests", device.number)).unwrap().trim().to_owned()
    };
    modify(&a, "pvc-1", &[("bandwidth", "low")]).await.unwrap();
    assert_eq!(depth(), "4", "at once");
    volume.unstage(&a, &staging).await.unwrap();
    volume.stage(&a, &staging).await.unwrap();
    assert_eq!(depth(), "4", "and with the next stage");
    volume.unstage_and_unpublish(&a, "a", &staging).await;

    modify(&a, "pvc-1", &[("readOnly", "true")]).await.unwrap();
    let publish = v1::ControllerPublishVolumeRequest {
        volume_id: "pvc-1".to_owned(),
        node_id: "a".to_owned(),
        volume_capability: Some(writer("ext4")),
        ..Default::default()
    };
    let context = a.controller_publish_volume(publish).await.unwrap().publish_context;
    assert_eq!(context["access"], "ro");
    volume.stage(&a, &staging).await.unwrap();
    let refused = fs::write(Path::new(&staging).join("file"), "other").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    volume.unstage_and_unpublish(&a, "a", &staging).await;
    modify(&a, "pvc-1", &[("readOnly", "false")]).await.unwrap();
    volume.publish_and_stage(&a, "a", &staging).await;
    fs::write(Path::new(&staging).join("file"), "other").unwrap();

    for (case, id, pairs, want) in [
        ("unknown key", "pvc-1", ("colour", "red"), Code::InvalidArgument),
        ("unknown class", "pvc-1", ("bandwidth", "12M"), Code::InvalidArgument),
        ("what cannot change", "pvc-1", ("fsType", "xfs"), Code::InvalidArgument),
        ("no volume", "none", ("bandwidth", "low"), Code::NotFound),
    ] {
        assert_eq!(modify(&a, id, &[pairs]).await.unwrap_err().code(), want, "{case}");
    }
}

#[tokio::test]
async fn a_node_local_pool_reports_its_topology() {
    let fixture = BlockFixture::new();
    let config = cleat_drivers::block::Config { node_local: true, max_volumes: 2, ..fixture.config("a") };
    let a = fixture.driver_with(config).await;
    let info = a.node_get_info().await.unwrap();
    let here = info.accessible_topology.unwrap();
    assert_eq!(here.segments, HashMap::from([("topology.block.cleat.dev/node".to_owned(), "a".to_owned())]));
    assert_eq!(info.max_volumes_per_node, 2);
    let elsewhere =
        v1::Topology { segments: HashMap::from([("topology.block.cleat.dev/node".to_owned(), "b".to_owned())]) };
    let request = |topology: &v1::Topology, name: &str| v1::CreateVolumeRequest {
        accessibility_requirements: Some(v1::TopologyRequirement {
            requisite: vec![topology.clone()],
            preferred: Vec::new(),
        }),
        ..create_request(name, writer("ext4"))
    };
    let error = a.create_volume(request(&elsewhere, "x")).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "another topology may have space: {error}");
    let created = a.create_volume(request(&here, "v1")).await.unwrap().volume.unwrap();
    assert_eq!(created.accessible_topology, std::slice::from_ref(&here));
    let capacity = |topology: &v1::Topology| v1::GetCapacityRequest {
        accessible_topology: Some(topology.clone()),
        ..Default::default()
    };
    assert!(a.get_capacity(capacity(&here)).await.unwrap().available_capacity > 0);
    assert_eq!(a.get_capacity(capacity(&elsewhere)).await.unwrap().available_capacity, 0);

    let mut volumes = Vec::new();
    for name in ["v1", "v2", "v3"] {
        volumes.push(Volume::create(&a, name, writer("ext4")).await.unwrap());
    }
    for volume in &volumes[..2] {
        volume.attach(&a, "a").await.unwrap();
        volume.attach(&a, "a").await.unwrap();
    }
    let error = volumes[2].attach(&a, "a").await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    volumes[0].detach(&a, "a").await.unwrap();
    volumes[2].attach(&a, "a").await.unwrap();
}

#[tokio::test]
async fn volumes_are_published_only_to_registered_nodes() {
    let fixture = BlockFixture::new();
    let config = cleat_drivers::block::Config { node: false, ..fixture.config("controller") };
    let controller = fixture.driver_with(config).await;
    let volume = Volume::create(&controller, "pvc-1", writer("ext4")).await.unwrap();
    assert_eq!(volume.attach(&controller, "b").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(volume.attach(&controller, "controller").await.unwrap_err().code(), Code::NotFound);
    let _b = fixture.driver_with(cleat_drivers::block::Config { controller: false, ..fixture.config("b") }).await;
    volume.attach(&controller, "b").await.unwrap();
}

#[tokio::test]
async fn problems_of_a_volume_are_reported() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    volume.publish_and_stage(&a, "a", &staging).await;
    let get = v1::ControllerGetVolumeRequest { volume_id: "pvc-1".to_owned() };
    let status = a.controller_get_volume(get.clone()).await.unwrap().status.unwrap();
    assert_eq!(status.published_node_ids, ["a"]);
    assert!(!status.volume_condition.unwrap().abnormal);
    let on_node = v1::NodeGetVolumeHealthRequest {
        volume_id: "pvc-1".to_owned(),
        staging_target_path: staging.clone(),
        ..Default::default()
    };
    assert!(a.node_get_volume_health(on_node.clone()).await.unwrap().volume_health.unwrap().health_statuses.is_empty());
    assert!(a.node_get_storage_health(Default::default()).await.unwrap().backend_health.is_empty());

    // As the kernel does when it cannot write the journal any more.
    remount_read_only(&staging);
    let stats = v1::NodeGetVolumeStatsRequest {
        volume_id: "pvc-1".to_owned(),
        volume_path: staging.clone(),
        ..Default::default()
    };
    let condition = a.node_get_volume_stats(stats).await.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("read-only"), "{condition:?}");
    let ill = a.node_get_volume_health(on_node).await.unwrap().volume_health.unwrap();
    assert_eq!(ill.health_statuses[0].status(), v1::VolumeHealthErrorType::Degraded);

    fs::remove_file(fixture.image("pvc-1")).unwrap();
    let status = a.controller_get_volume(get).await.unwrap().status.unwrap();
    assert!(status.volume_condition.unwrap().abnormal);
    let health = v1::ControllerGetVolumeHealthRequest { volume_id: "pvc-1".to_owned(), ..Default::default() };
    let health = a.controller_get_volume_health(health).await.unwrap().volume_health.unwrap();
    assert_eq!(health.health_statuses[0].status(), v1::VolumeHealthErrorType::DataLoss);
    let all = a.controller_list_volume_health(Default::default()).await.unwrap().entries;
    assert_eq!((all.len(), all[0].health_statuses.len()), (1, 1));
    let listed = a.list_volumes(Default::default()).await.unwrap().entries.remove(0);
    assert!(listed.status.unwrap().volume_condition.unwrap().abnormal);
    mount::unmount(Path::new(&staging)).unwrap();
}

fn remount_read_only(at: &str) {
    rustix::mount::mount_remount(at, rustix::mount::MountFlags::RDONLY, "").unwrap();
}
