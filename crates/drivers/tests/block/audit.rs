//! The audit finds inconsistencies, repairs those it can, and never removes user data.
use std::{fs, path::Path};

use cleat_drivers::block::{self, RepairOutcome};
use cleat_host::{Access, loopdev, mount};

use crate::fixture::{BlockFixture, Volume, writer};

/// The object and the outcome of each finding.
fn audit(fixture: &BlockFixture, repair: bool) -> Vec<(String, &'static str)> {
    let outcome = |outcome: &RepairOutcome| match outcome {
        RepairOutcome::NotAttempted(_) => "would",
        RepairOutcome::Repaired(_) => "repaired",
        RepairOutcome::Failed(_) => "failed",
        RepairOutcome::Unrepairable(_) => "unrepairable",
    };
    let findings = block::audit(&fixture.pool(), repair).unwrap();
    findings.iter().map(|found| (found.object.clone(), outcome(&found.outcome))).collect()
}

#[track_caller]
fn finds_and_repairs(fixture: &BlockFixture, object: &str) {
    let found = audit(fixture, false);
    assert!(found.len() == 1 && found[0].0.starts_with(object) && found[0].1 == "would", "{found:?}");
    let repaired = audit(fixture, true);
    assert!(repaired.len() == 1 && repaired[0].1 == "repaired", "{repaired:?}");
    assert_eq!(audit(fixture, false), []);
}

#[tokio::test]
async fn a_consistent_pool_has_no_findings() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    assert_eq!(audit(&fixture, true), []);
    volume.publish_and_stage(&a, "a", &staging).await;
    volume.snapshot(&a, "snap").await.unwrap();
    assert_eq!(audit(&fixture, true), [], "in use");
    assert!(mount::is_mount_point(Path::new(&staging)).unwrap());
}

#[tokio::test]
async fn leftovers_of_interrupted_calls_are_found_and_repaired() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    for name in ["v", "empty", "short"] {
        Volume::create(&a, name, writer("ext4")).await.unwrap();
    }
    // A device that a crash has left attached.
    loopdev::attach(&fixture.image("v"), Access::ReadWrite).unwrap();
    finds_and_repairs(&fixture, "volume v on /dev/loop");
    assert_eq!(fixture.loop_devices("v"), 0);
    // A device whose image was removed.
    let orphan = fixture.image("orphan");
    fs::File::create(&orphan).unwrap().set_len(1 << 20).unwrap();
    loopdev::attach(&orphan, Access::ReadWrite).unwrap();
    fs::remove_file(&orphan).unwrap();
    finds_and_repairs(&fixture, "volume orphan on /dev/loop");

    fs::File::create(&orphan).unwrap().set_len(1 << 20).unwrap();
    finds_and_repairs(&fixture, "volume orphan");
    assert!(!orphan.exists());
    fs::remove_file(fixture.image("empty")).unwrap();
    finds_and_repairs(&fixture, "volume empty");
    assert!(fixture.image("empty").exists());
    fs::OpenOptions::new().write(true).open(fixture.image("short")).unwrap().set_len(1 << 20).unwrap();
    finds_and_repairs(&fixture, "volume short");

    fs::rename(fixture.record("short"), fixture.record("short").with_extension("gone")).unwrap();
    finds_and_repairs(&fixture, "volume short");
    assert!(!fixture.image("short").exists());
    fs::write(fixture.record("unacknowledged"), "").unwrap();
    finds_and_repairs(&fixture, "volume unacknowledged");
    fs::write(fixture.pool().join("volumes/.v.json"), "{").unwrap();
    finds_and_repairs(&fixture, "volume v");
}

#[tokio::test]
async fn interrupted_copies_are_found_and_repaired() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let volume = Volume::create(&a, "v", writer("ext4")).await.unwrap();
    volume.snapshot(&a, "snap").await.unwrap();
    crate::fixture::ready(&a, "snap").await;
    let record = fixture.pool().join("snapshots/snap.json");
    let ready = fs::read_to_string(&record).unwrap();
    assert!(ready.contains(r#""state":"ready""#), "{ready}");

    let modified = fs::metadata(fixture.image("v")).unwrap();
    use std::os::unix::fs::MetadataExt;
    let copying = format!(r#""state":{{"copying":{{"unchanged":[{},{}]}}}}"#, modified.mtime(), modified.mtime_nsec());
    fs::write(&record, ready.replace(r#""state":"ready""#, &copying)).unwrap();
    fs::write(fixture.pool().join("snapshots/snap.img"), "half").unwrap();
    finds_and_repairs(&fixture, "snapshot snap");
    assert_eq!(fs::metadata(fixture.pool().join("snapshots/snap.img")).unwrap().len(), 1 << 30, "copied again");

    // The volume has changed since the snapshot was cut, so the copy cannot be repeated.
    fs::write(&record, ready.replace(r#""state":"ready""#, r#""state":{"copying":{"unchanged":[1,1]}}"#)).unwrap();
    audit(&fixture, true);
    assert_eq!(audit(&fixture, true), [("snapshot snap".to_owned(), "unrepairable")]);
    let error = volume.snapshot(&a, "snap").await.unwrap_err();
    assert_eq!(error.code(), cleat_csi::Code::DataLoss, "{error}");
    crate::fixture::delete_snapshot(&a, "snap").await.unwrap();

    fs::write(&record, ready.replace(r#""state":"ready""#, r#""state":"cutting""#)).unwrap();
    finds_and_repairs(&fixture, "snapshot snap");
    assert!(!record.exists());
    let filling = fs::read_to_string(fixture.record("v")).unwrap().replacen('{', r#"{"filling":true,"#, 1);
    fs::write(fixture.record("copy"), filling).unwrap();
    fs::write(fixture.image("copy"), "half").unwrap();
    finds_and_repairs(&fixture, "volume copy");
    assert!(!fixture.image("copy").exists());
}

#[tokio::test]
async fn a_file_system_left_frozen_is_thawed() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let volume = Volume::create(&a, "v", writer("ext4")).await.unwrap();
    volume.publish_and_stage(&a, "a", &staging).await;
    fs::write(fixture.pool().join("held/v"), fs::canonicalize(&staging).unwrap().to_str().unwrap()).unwrap();
    cleat_host::freeze::freeze(Path::new(&staging)).unwrap();
    finds_and_repairs(&fixture, "volume v");
    fs::write(Path::new(&staging).join("file"), "data").unwrap();
}

#[tokio::test]
async fn possible_user_data_is_only_reported() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    Volume::create(&a, "lost", writer("ext4")).await.unwrap();
    fs::write(fixture.image("stray"), "somebody's letters").unwrap();
    fs::write(fixture.record("broken"), "{").unwrap();
    let record = fs::read_to_string(fixture.record("lost")).unwrap();
    fs::write(fixture.record("lost"), record.replace(r#""contents":"nothing""#, r#""contents":"data""#)).unwrap();
    fs::remove_file(fixture.image("lost")).unwrap();
    for repair in [false, true] {
        let found = audit(&fixture, repair);
        let want = ["broken", "lost", "stray"].map(|id| (format!("volume {id}"), "unrepairable"));
        assert_eq!(found, want, "{repair}");
    }
    assert_eq!(fs::read(fixture.image("stray")).unwrap(), b"somebody's letters");
}
