//! Expansion of volumes in use and not in use, full volumes, and many volumes at the same time.
use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::Path,
};

use cleat_csi::{Code, v1, v1::volume_capability::access_mode::Mode};
use cleat_host::filesystem::statfs;

use crate::fixture::{BlockFixture, GIB, Volume, create_request, raw, writer};

fn total(at: &str) -> i64 {
    statfs(Path::new(at)).unwrap().total_bytes as i64
}

/// Returns whether the kernel let the file system grow while it was mounted.
async fn grow_in_use(fs_type: &str) -> bool {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let (staging, target) = (fixture.create_dir("staging"), fixture.path_string("target"));
    let volume = Volume::create(&a, "pvc-1", writer(fs_type)).await.unwrap();
    volume.publish_and_stage(&a, "a", &staging).await;
    volume.publish(&a, &staging, &target).await.unwrap();
    fs::write(Path::new(&target).join("file"), "data").unwrap();

    let error = volume.node_expand(&a, &target, 2 * GIB).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "before the controller did: {error}");
    for _ in 0..2 {
        assert!(volume.expand(&a, 2 * GIB).await.unwrap(), "the node has to follow");
    }
    let online = match volume.node_expand(&a, &target, 2 * GIB).await {
        Ok(bytes) => {
            assert_eq!(bytes, 2 * GIB);
            assert!(total(&target) > 3 * GIB / 2, "{}", total(&target));
            volume.node_expand(&a, &target, 2 * GIB).await.unwrap();
            true
        }
        Err(error) => {
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            false
        }
    };
    assert_eq!(fs::read(Path::new(&target).join("file")).unwrap(), b"data");
    volume.unpublish(&a, &target).await.unwrap();
    volume.unstage(&a, &staging).await.unwrap();
    volume.stage(&a, &staging).await.unwrap();
    assert!(total(&staging) > 3 * GIB / 2, "at the latest with the next stage: {}", total(&staging));
    assert_eq!(fs::read(Path::new(&staging).join("file")).unwrap(), b"data");
    volume.unstage_and_unpublish(&a, "a", &staging).await;

    assert!(volume.expand(&a, GIB).await.is_ok(), "smaller than it is: nothing to do");
    let shrink = v1::ControllerExpandVolumeRequest {
        volume_id: volume.id.clone(),
        capacity_range: Some(v1::CapacityRange { required_bytes: 1, limit_bytes: GIB }),
        ..Default::default()
    };
    assert_eq!(a.controller_expand_volume(shrink).await.unwrap_err().code(), Code::OutOfRange);
    volume.delete(&a).await.unwrap();
    fixture.assert_nothing_left("pvc-1");
    online
}

#[tokio::test]
async fn xfs_grows_in_use() {
    assert!(grow_in_use("xfs").await);
}

#[tokio::test]
async fn btrfs_grows_in_use() {
    assert!(grow_in_use("btrfs").await);
}

#[tokio::test]
async fn ext4_grows_in_use_where_the_kernel_permits_it_and_with_the_next_stage_elsewhere() {
    // Bit 24 is CAP_SYS_RESOURCE.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    let permitted = u64::from_str_radix(effective, 16).unwrap() >> 24 & 1 == 1;
    assert_eq!(grow_in_use("ext4").await, permitted);
}

#[tokio::test]
async fn a_raw_device_grows_in_use() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let (staging, target) = (fixture.create_dir("staging"), fixture.path_string("device"));
    let volume = Volume::create(&a, "raw", raw(Mode::SingleNodeWriter)).await.unwrap();
    assert!(!volume.expand(&a, GIB + (1 << 20)).await.unwrap(), "no node has it");
    volume.publish_and_stage(&a, "a", &staging).await;
    volume.publish(&a, &staging, &target).await.unwrap();
    assert!(volume.expand(&a, 2 * GIB).await.unwrap());
    assert_eq!(volume.node_expand(&a, &target, 2 * GIB).await.unwrap(), 2 * GIB);
    let size = fs::File::open(&target).unwrap().seek(SeekFrom::End(0)).unwrap();
    assert_eq!(size as i64, 2 * GIB);
    let elsewhere = volume.node_expand(&a, &staging, 2 * GIB).await.unwrap_err();
    assert_eq!(elsewhere.code(), Code::NotFound, "{elsewhere}");
}

#[tokio::test]
async fn a_full_volume_is_full_for_its_writer_only() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let mut staged = Vec::new();
    for name in ["full", "other"] {
        let request = v1::CreateVolumeRequest {
            capacity_range: Some(v1::CapacityRange { required_bytes: 32 << 20, limit_bytes: 0 }),
            ..create_request(name, writer("ext4"))
        };
        a.create_volume(request).await.unwrap();
        let volume = Volume { id: name.to_owned(), capability: writer("ext4") };
        let at = fixture.create_dir(&format!("staging-{name}"));
        volume.publish_and_stage(&a, "a", &at).await;
        staged.push((volume, at));
    }
    let mut file = fs::File::create(Path::new(&staged[0].1).join("file")).unwrap();
    let chunk = vec![1; 1 << 20];
    let full = (0..64).find_map(|_| file.write_all(&chunk).err()).unwrap();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    drop(file);
    let other = Path::new(&staged[1].1).join("file");
    let mut file = fs::File::create(&other).unwrap();
    file.write_all(&vec![2; 16 << 20]).unwrap();
    file.sync_all().unwrap();
    Volume::create(&a, "third", writer("ext4")).await.unwrap();
    let stats = v1::NodeGetVolumeStatsRequest {
        volume_id: "full".to_owned(),
        volume_path: staged[0].1.clone(),
        ..Default::default()
    };
    let response = a.node_get_volume_stats(stats).await.unwrap();
    assert!(response.usage[0].available < 1 << 20, "{:?}", response.usage);
    assert!(!response.volume_condition.unwrap().abnormal, "full is not ill");
    assert!(fs::metadata(fixture.image("full")).unwrap().len() == 32 << 20, "the device is the limit");
}

#[tokio::test]
async fn sixty_four_volumes_are_staged_at_once() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let mut running = tokio::task::JoinSet::new();
    for number in 0..64 {
        let (a, staging) = (
            a.clone().with_deadline(std::time::Duration::from_secs(120)),
            fixture.create_dir(&format!("staging-{number}")),
        );
        running.spawn(async move {
            let volume = Volume::create(&a, &format!("many-{number}"), writer("ext4")).await.unwrap();
            volume.publish_and_stage(&a, "a", &staging).await;
            fs::write(Path::new(&staging).join("number"), number.to_string()).unwrap();
            (volume, staging, number)
        });
    }
    let staged = running.join_all().await;
    assert_eq!(fixture.mounts().len(), 64, "all of them at the same time");
    for (_, staging, number) in &staged {
        assert_eq!(fs::read_to_string(Path::new(staging).join("number")).unwrap(), number.to_string());
    }
    let mut running = tokio::task::JoinSet::new();
    for (volume, staging, _) in staged {
        let a = a.clone().with_deadline(std::time::Duration::from_secs(120));
        running.spawn(async move {
            volume.unstage_and_unpublish(&a, "a", &staging).await;
            volume.delete(&a).await.unwrap();
        });
    }
    running.join_all().await;
    fixture.assert_nothing_left("many-0");
}
