//! The driver is killed at each crash point of snapshots, clones, expansion and group snapshots: the repeated call
//! completes or cleans up, no file system stays frozen, and nothing is left.
use std::{fs, path::Path, time::Duration};

use cleat_csi::{CallError, Client, Code, v1};
use cleat_drivers::block;

use crate::{
    crash::start,
    fixture::{
        BlockFixture, GIB, Volume, create_request, delete_snapshot, from_snapshot, from_volume, try_ready, writer,
    },
};

async fn copy(client: &Client, name: &str, source: v1::VolumeContentSource) -> Result<Volume, CallError> {
    let request =
        v1::CreateVolumeRequest { volume_content_source: Some(source), ..create_request(name, writer("xfs")) };
    client.create_volume(request).await?;
    Ok(Volume { id: name.to_owned(), capability: writer("xfs") })
}

async fn group(client: &Client) -> Result<(), CallError> {
    let request = v1::CreateVolumeGroupSnapshotRequest {
        name: "group".to_owned(),
        source_volume_ids: vec!["origin".to_owned(), "clone".to_owned()],
        ..Default::default()
    };
    client.create_volume_group_snapshot(request).await.map(drop)
}

async fn delete_group(client: &Client) -> Result<(), CallError> {
    let request = v1::DeleteVolumeGroupSnapshotRequest { group_snapshot_id: "group".to_owned(), ..Default::default() };
    client.delete_volume_group_snapshot(request).await.map(drop)
}

/// All calls that copy or expand, while the source is in use. Each of them may have been completed before. If `again`
/// is true, a snapshot whose copy was interrupted may be lost, if the driver reports DATA_LOSS.
async fn use_all(fixture: &BlockFixture, client: &Client, again: bool) -> Result<(), CallError> {
    let (staging, other) = (fixture.create_dir("staging"), fixture.create_dir("other"));
    let origin = Volume::create(client, "origin", writer("xfs")).await?;
    origin.attach(client, "a").await?;
    origin.stage(client, &staging).await?;
    fs::write(Path::new(&staging).join("file"), "data").unwrap();
    match origin.snapshot(client, "snap").await {
        Err(error) if again && error.code() == Code::DataLoss => {
            delete_snapshot(client, "snap").await?;
            origin.snapshot(client, "snap").await?;
        }
        other => drop(other?),
    }
    try_ready(client, "snap").await?;
    let clone = copy(client, "clone", from_volume("origin")).await?;
    let restored = copy(client, "restored", from_snapshot("snap")).await?;
    group(client).await?;
    origin.expand(client, 2 * GIB).await?;
    origin.node_expand(client, &staging, 2 * GIB).await?;
    for volume in [&clone, &restored] {
        volume.attach(client, "a").await?;
        volume.stage(client, &other).await?;
        assert_eq!(fs::read(Path::new(&other).join("file")).unwrap(), b"data");
        volume.unstage(client, &other).await?;
        volume.detach(client, "a").await?;
    }
    assert!(cleat_host::filesystem::statfs(Path::new(&staging)).unwrap().total_bytes as i64 > 3 * GIB / 2);
    delete_all(fixture, client).await
}

async fn delete_all(fixture: &BlockFixture, client: &Client) -> Result<(), CallError> {
    let (staging, other) = (fixture.create_dir("staging"), fixture.create_dir("other"));
    delete_group(client).await?;
    delete_snapshot(client, "snap").await?;
    for (name, at) in [("clone", &other), ("restored", &other), ("origin", &staging)] {
        let volume = Volume { id: name.to_owned(), capability: writer("xfs") };
        volume.unstage(client, at).await?;
        volume.detach(client, "a").await?;
        volume.delete(client).await?;
    }
    Ok(())
}

/// Crash points of pools with and without reflinks.
const BOTH: [&str; 14] = [
    "driver:snapshot-recorded",
    "driver:snapshot-copied",
    "driver:filled",
    "driver:group-recorded",
    "driver:frozen",
    "driver:group-copied",
    "driver:expansion-recorded",
    "driver:image-expanded",
    "driver:device-grown",
    "driver:grown",
    "driver:group-member-deleted",
    "driver:group-deleting",
    "driver:snapshot-deleting",
    "driver:snapshot-image-removed",
];
/// Crash points of pools without reflinks only.
const COPYING: [&str; 1] = ["driver:snapshot-copying"];

async fn kill_at(point: &str, fixture: BlockFixture, give_up: bool) {
    let (mut child, client) = start(&fixture, point).await;
    let error = use_all(&fixture, &client, false).await.expect_err(point);
    assert_eq!(error.code(), Code::Unavailable, "{point}: {error}");
    child.0.wait().unwrap();
    let (_child, client) = start(&fixture, "").await;
    if !give_up {
        let again = tokio::time::timeout(Duration::from_secs(120), use_all(&fixture, &client, true)).await;
        again.unwrap_or_else(|_| panic!("{point}: hangs")).unwrap_or_else(|error| panic!("{point}: {error}"));
    } else {
        delete_all(&fixture, &client).await.unwrap_or_else(|error| panic!("{point}: {error}"));
    }
    for name in ["clone", "restored", "origin"] {
        fixture.assert_nothing_left(name);
    }
}

#[tokio::test]
async fn repeated_calls_complete_after_a_kill_at_any_crash_point_of_a_copying_pool() {
    for point in BOTH.iter().chain(&COPYING) {
        kill_at(point, BlockFixture::new(), false).await;
    }
}

#[tokio::test]
async fn repeated_calls_complete_after_a_kill_at_any_crash_point_of_a_reflinking_pool() {
    for point in BOTH {
        kill_at(point, BlockFixture::on_xfs(4 << 30), false).await;
    }
}

#[tokio::test]
async fn deleting_everything_after_a_kill_at_any_crash_point_leaves_nothing() {
    for point in BOTH.iter().chain(&COPYING) {
        kill_at(point, BlockFixture::new(), true).await;
    }
}

#[tokio::test]
async fn the_audit_repairs_interrupted_calls_that_are_not_repeated() {
    for point in BOTH.iter().chain(&COPYING) {
        let fixture = BlockFixture::new();
        let (mut child, client) = start(&fixture, point).await;
        use_all(&fixture, &client, false).await.expect_err(point);
        child.0.wait().unwrap();
        block::audit(&fixture.pool(), true).unwrap();
        let left = block::audit(&fixture.pool(), false).unwrap();
        let is_unrepairable =
            |finding: &block::Finding| matches!(finding.outcome, block::RepairOutcome::Unrepairable(_));
        assert!(left.iter().all(is_unrepairable), "{point}: {left:?}");
        // The mounted volume still accepts writes.
        let file = fixture.path("staging").join("after");
        tokio::time::timeout(Duration::from_secs(30), tokio::fs::write(file, "x")).await.expect(point).unwrap();
    }
}

#[tokio::test]
async fn a_frozen_file_system_is_thawed_when_the_driver_starts_again() {
    let fixture = BlockFixture::new();
    let staging = fixture.create_dir("staging");
    let (mut child, client) = start(&fixture, "driver:frozen").await;
    let origin = Volume::create(&client, "origin", writer("ext4")).await.unwrap();
    origin.publish_and_stage(&client, "a", &staging).await;
    origin.snapshot(&client, "snap").await.unwrap_err();
    child.0.wait().unwrap();
    let (_child, _client) = start(&fixture, "").await;
    let file = Path::new(&staging).join("file");
    tokio::time::timeout(Duration::from_secs(30), tokio::fs::write(file, "x")).await.unwrap().unwrap();
}
