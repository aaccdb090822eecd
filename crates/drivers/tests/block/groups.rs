//! Group snapshots: all members are cut at one point in time, and are created and deleted together.
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cleat_csi::{CallError, Client, Code, v1};

use crate::fixture::{BlockFixture, Volume, create_request, delete_snapshot, from_snapshot, writer};

async fn create(client: &Client, name: &str, volumes: &[&str]) -> Result<v1::VolumeGroupSnapshot, CallError> {
    let request = v1::CreateVolumeGroupSnapshotRequest {
        name: name.to_owned(),
        source_volume_ids: volumes.iter().map(|id| (*id).to_owned()).collect(),
        ..Default::default()
    };
    client.create_volume_group_snapshot(request).await.map(|response| response.group_snapshot.unwrap())
}

/// Writes increasing numbers, each to the first volume and then to the second.
fn write_in_order(stop: Arc<AtomicBool>, files: [PathBuf; 2]) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        for number in 0u64.. {
            for file in &files {
                fs::write(file.with_extension("new"), number.to_string()).unwrap();
                fs::rename(file.with_extension("new"), file).unwrap();
            }
            if stop.load(Ordering::Relaxed) {
                return;
            }
        }
    })
}

async fn members_are_cut_at_one_point_in_time(fixture: BlockFixture) {
    let a = fixture.driver("a").await;
    let mut staged = Vec::new();
    for name in ["one", "two"] {
        let volume = Volume::create(&a, name, writer("ext4")).await.unwrap();
        let at = fixture.create_dir(&format!("staging-{name}"));
        volume.publish_and_stage(&a, "a", &at).await;
        staged.push((volume, at));
    }
    let files = [0, 1].map(|index: usize| Path::new(&staged[index].1).join("number"));
    for file in &files {
        fs::write(file, "0").unwrap();
    }
    let stop = Arc::new(AtomicBool::new(false));
    let writing = write_in_order(Arc::clone(&stop), files);
    let group = create(&a, "group", &["one", "two"]).await.unwrap();
    stop.store(true, Ordering::Relaxed);
    writing.join().unwrap();
    assert!(group.ready_to_use && group.snapshots.len() == 2);
    assert_eq!(create(&a, "group", &["two", "one"]).await.unwrap(), group, "and again");
    let error = create(&a, "group", &["one"]).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists, "{error}");

    let mut numbers = Vec::new();
    for (snapshot, name) in group.snapshots.iter().zip(["r1", "r2"]) {
        assert_eq!(snapshot.group_snapshot_id, group.group_snapshot_id);
        assert_eq!(snapshot.creation_time, group.creation_time);
        let request = v1::CreateVolumeRequest {
            volume_content_source: Some(from_snapshot(&snapshot.snapshot_id)),
            ..create_request(name, writer("ext4"))
        };
        a.create_volume(request).await.unwrap();
        let volume = Volume { id: name.to_owned(), capability: writer("ext4") };
        let at = fixture.create_dir(name);
        volume.publish_and_stage(&a, "a", &at).await;
        numbers.push(fs::read_to_string(Path::new(&at).join("number")).unwrap().parse::<u64>().unwrap());
        volume.unstage_and_unpublish(&a, "a", &at).await;
        volume.delete(&a).await.unwrap();
    }
    let (first, second) = (numbers[0].max(numbers[1]), numbers[0].min(numbers[1]));
    assert!(first - second <= 1, "{numbers:?}: written between the two cuts");

    let member = &group.snapshots[0].snapshot_id;
    assert_eq!(delete_snapshot(&a, member).await.unwrap_err().code(), Code::InvalidArgument);
    let get =
        v1::GetVolumeGroupSnapshotRequest { group_snapshot_id: group.group_snapshot_id.clone(), ..Default::default() };
    assert_eq!(a.get_volume_group_snapshot(get.clone()).await.unwrap().group_snapshot, Some(group.clone()));
    let delete = v1::DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: group.group_snapshot_id.clone(),
        snapshot_ids: vec![member.clone()],
        ..Default::default()
    };
    let partial = a.delete_volume_group_snapshot(delete.clone()).await.unwrap_err();
    assert_eq!(partial.code(), Code::InvalidArgument, "{partial}");
    for _ in 0..2 {
        let all = v1::DeleteVolumeGroupSnapshotRequest { snapshot_ids: Vec::new(), ..delete.clone() };
        a.delete_volume_group_snapshot(all).await.unwrap();
    }
    assert_eq!(a.get_volume_group_snapshot(get).await.unwrap_err().code(), Code::NotFound);
    for (volume, at) in staged {
        volume.unstage_and_unpublish(&a, "a", &at).await;
        volume.delete(&a).await.unwrap();
    }
    fixture.assert_nothing_left("one");
}

#[tokio::test]
async fn members_are_cut_at_one_point_in_time_by_copying() {
    members_are_cut_at_one_point_in_time(BlockFixture::new()).await;
}

#[tokio::test]
async fn members_are_cut_at_one_point_in_time_by_reflink() {
    members_are_cut_at_one_point_in_time(BlockFixture::on_xfs(4 << 30)).await;
}

#[tokio::test]
async fn a_group_with_a_missing_volume_is_refused() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let volume = Volume::create(&a, "one", writer("ext4")).await.unwrap();
    assert_eq!(create(&a, "group", &["one", "none"]).await.unwrap_err().code(), Code::NotFound);
    volume.delete(&a).await.unwrap();
    fixture.assert_nothing_left("one");
}
