//! The driver killed at each of its crash points: the repeated call completes, and nothing is left behind.
use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use cleat_csi::{CallError, Client, v1};
use cleat_drivers::block::{self, Config};
use cleat_host::filesystem::Format;

use crate::fixture::{BlockFixture, Volume, create_request, writer};

const DIRECTORY: &str = "CLEAT_TEST_DRIVER";
const POOL: &str = "CLEAT_TEST_POOL";

/// Not a test: the main function of the driver process that the tests start and kill.
#[tokio::test]
async fn child() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let directory = Path::new(&directory);
    let endpoint = cleat_csi::Endpoint::unix(directory.join("child.sock"));
    let config = Config::new(endpoint, std::env::var_os(POOL).unwrap(), "a");
    block::run(config, tokio_util::sync::CancellationToken::new()).await.unwrap();
}

pub(crate) struct DriverProcess(pub(crate) Child);

impl Drop for DriverProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) async fn start(fixture: &BlockFixture, crash_at: &str) -> (DriverProcess, Client) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::child", "--nocapture"])
        .env(DIRECTORY, fixture.directory.path())
        .env(POOL, fixture.pool())
        .env(cleat_crash::VARIABLE, crash_at)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let client = Client::new(cleat_csi::Endpoint::unix(fixture.path("child.sock")));
    client.wait_ready(Duration::from_secs(60)).await.unwrap();
    (DriverProcess(child), client)
}

/// All calls from CreateVolume to DeleteVolume. Each of them may have been completed before.
async fn use_all(fixture: &BlockFixture, client: &Client) -> Result<(), CallError> {
    let (staging, target) = (fixture.create_dir("staging"), fixture.path_string("target"));
    let volume = Volume::create(client, "pvc-1", writer("ext4")).await?;
    volume.attach(client, "a").await?;
    volume.stage(client, &staging).await?;
    volume.publish(client, &staging, &target).await?;
    fs::write(Path::new(&target).join("file"), "data").unwrap();
    delete_all(fixture, client).await
}

async fn delete_all(fixture: &BlockFixture, client: &Client) -> Result<(), CallError> {
    let (staging, target) = (fixture.create_dir("staging"), fixture.path_string("target"));
    let volume = Volume { id: "pvc-1".to_owned(), capability: writer("ext4") };
    volume.unpublish(client, &target).await?;
    volume.unstage(client, &staging).await?;
    volume.detach(client, "a").await?;
    volume.delete(client).await
}

const POINTS: [&str; 14] = [
    "driver:image-begun",
    "driver:recorded",
    "driver:image-created",
    "driver:attached",
    "driver:loop-attached",
    "driver:format-recorded",
    "driver:formatted",
    "driver:staged",
    "driver:published",
    "driver:unpublished",
    "driver:unstaged-mount",
    "driver:detached",
    "driver:deleting",
    "driver:image-removed",
];

#[tokio::test]
async fn repeated_calls_complete_after_a_kill_at_any_crash_point() {
    for point in POINTS {
        let fixture = BlockFixture::new();
        let (mut child, client) = start(&fixture, point).await;
        let error = use_all(&fixture, &client).await.expect_err(point);
        assert_eq!(error.class(), cleat_csi::ErrorClass::Uncertain, "{point}: {error}");
        child.0.wait().unwrap();
        let (_child, client) = start(&fixture, "").await;
        use_all(&fixture, &client).await.unwrap_or_else(|error| panic!("{point}: {error}"));
        fixture.assert_nothing_left("pvc-1");
    }
}

#[tokio::test]
async fn deleting_a_volume_after_a_kill_at_any_crash_point_leaves_nothing() {
    for point in POINTS {
        let fixture = BlockFixture::new();
        let (mut child, client) = start(&fixture, point).await;
        use_all(&fixture, &client).await.expect_err(point);
        child.0.wait().unwrap();
        let (_child, client) = start(&fixture, "").await;
        delete_all(&fixture, &client).await.unwrap_or_else(|error| panic!("{point}: {error}"));
        fixture.assert_nothing_left("pvc-1");
    }
}

#[tokio::test]
async fn an_unused_volume_can_be_deleted_or_created_again_after_a_kill_at_any_crash_point() {
    for point in
        ["driver:image-begun", "driver:recorded", "driver:image-created", "driver:deleting", "driver:image-removed"]
    {
        for again in [false, true] {
            let fixture = BlockFixture::new();
            let (mut child, client) = start(&fixture, point).await;
            let created = Volume::create(&client, "pvc-1", writer("ext4")).await;
            let deleted = async { created?.delete(&client).await };
            deleted.await.expect_err(point);
            child.0.wait().unwrap();
            let (_child, client) = start(&fixture, "").await;
            if again {
                Volume::create(&client, "pvc-1", writer("ext4")).await.unwrap_or_else(|e| panic!("{point}: {e}"));
                assert!(fs::metadata(fixture.image("pvc-1")).unwrap().len() > 0, "{point}");
            }
            let volume = Volume { id: "pvc-1".to_owned(), capability: writer("ext4") };
            volume.delete(&client).await.unwrap_or_else(|e| panic!("{point}: {e}"));
            fixture.assert_nothing_left("pvc-1");
        }
    }
}

#[tokio::test]
async fn leftovers_prevent_a_new_volume_only_if_they_may_be_user_data() {
    let (empty, data): (&[u8], &[u8]) = (b"", &[0xa5; 65536]);
    for (left, refused) in [
        (&[("pvc-1.img", empty)][..], false),
        (&[("pvc-1.json", empty)], false),
        (&[("pvc-1.gone", b"{}")], false),
        (&[("pvc-1.gone", b"{}"), (".pvc-1.json", b"{}")], false),
        (&[("pvc-1.img", empty), ("pvc-1.gone", b"{}")], false),
        (&[("pvc-1.img", data), ("pvc-1.gone", b"{}")], false),
        (&[("pvc-1.img", data)], true),
        (&[("pvc-1.img", data), ("pvc-1.json", empty)], true),
    ] {
        let fixture = BlockFixture::new();
        let (_child, client) = start(&fixture, "").await;
        for (name, bytes) in left {
            fs::write(fixture.pool().join("volumes").join(name), bytes).unwrap();
        }
        let created = Volume::create(&client, "pvc-1", writer("ext4")).await;
        assert_eq!(created.is_err(), refused, "{left:?}");
        match created {
            Err(_) => assert_eq!(fs::read(fixture.image("pvc-1")).unwrap(), data),
            Ok(volume) => {
                let image = fs::metadata(fixture.image("pvc-1")).unwrap();
                assert_eq!(std::os::unix::fs::MetadataExt::blocks(&image), 0, "{left:?}");
                assert!(!fixture.pool().join("volumes/pvc-1.gone").exists(), "{left:?}");
                volume.delete(&client).await.unwrap();
                fixture.assert_nothing_left("pvc-1");
            }
        }
    }
}

#[tokio::test]
async fn acknowledged_changes_survive_a_power_failure() {
    for options in [&[][..], &["-O", "^has_journal"]] {
        let fixture = BlockFixture::on(Format::Ext4, options, 64 << 20);
        let client = fixture.driver("a").await;
        for round in 0..3 {
            let volume = Volume::create(&client, "pvc-1", writer("ext4")).await.unwrap();
            let found = fixture.volumes_after_power_failure();
            assert!(found.contains(&"pvc-1.json".to_owned()), "{options:?}, round {round}: {found:?}");
            volume.delete(&client).await.unwrap();
            let found = fixture.volumes_after_power_failure();
            assert!(found.is_empty(), "{options:?}, round {round}: {found:?}");
        }
    }
}

#[tokio::test]
async fn a_failed_creation_on_a_full_pool_leaves_no_files() {
    let fixture = BlockFixture::on(Format::Ext4, &["-N", "128"], 64 << 20);
    let client = fixture.driver("a").await;
    let filler = |n: usize| fixture.pool().join(format!("filler-{n}"));
    // Creating a volume takes up to three inodes, for a lock, an image and a record. Each of them may be missing.
    for left in 0..3 {
        let mut fillers = 0;
        while rustix::fs::statvfs(fixture.pool()).unwrap().f_ffree > left {
            fs::write(filler(fillers), "").unwrap();
            fillers += 1;
        }
        let id = format!("pvc-{left}");
        Volume::create(&client, &id, writer("ext4")).await.map(drop).expect_err(&id);
        let names = fs::read_dir(fixture.pool().join("volumes")).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), [""; 0], "{left} left");
        (0..fillers).for_each(|n| fs::remove_file(filler(n)).unwrap());
        let volume = Volume::create(&client, &id, writer("ext4")).await.expect(&id);
        volume.delete(&client).await.unwrap();
    }
}

#[tokio::test]
async fn an_interrupted_format_is_repeated_but_a_finished_one_is_not() {
    let fixture = BlockFixture::new();
    let staging = fixture.create_dir("staging");
    let volume = Volume { id: "pvc-1".to_owned(), capability: writer("xfs") };
    {
        let (mut child, client) = start(&fixture, "driver:format-recorded").await;
        client.create_volume(create_request("pvc-1", writer("xfs"))).await.unwrap();
        volume.attach(&client, "a").await.unwrap();
        volume.stage(&client, &staging).await.unwrap_err();
        child.0.wait().unwrap();
    }
    assert!(fs::read_to_string(fixture.record("pvc-1")).unwrap().contains("formatting"));
    // As an interrupted mkfs may leave it.
    let image = fs::OpenOptions::new().write(true).open(fixture.image("pvc-1")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&image, &[0xa5; 65536], 65536).unwrap();
    drop(image);

    let (_child, client) = start(&fixture, "").await;
    volume.stage(&client, &staging).await.unwrap();
    fs::write(Path::new(&staging).join("file"), "data").unwrap();
    volume.unstage(&client, &staging).await.unwrap();
    assert!(!fs::read_to_string(fixture.record("pvc-1")).unwrap().contains("formatting"));
    volume.stage(&client, &staging).await.unwrap();
    assert_eq!(fs::read(Path::new(&staging).join("file")).unwrap(), b"data");
    let capabilities = v1::ValidateVolumeCapabilitiesRequest {
        volume_id: "pvc-1".to_owned(),
        volume_capabilities: vec![writer("xfs")],
        ..Default::default()
    };
    assert!(client.validate_volume_capabilities(capabilities).await.unwrap().confirmed.is_some());
}
