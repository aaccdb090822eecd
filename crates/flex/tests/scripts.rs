//! Calls real scripts in a plugin directory: discovery, the protocol, limits of time and output, and locks.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use cleat_flex::{CallError, Capabilities, Config, DriverState, Drivers, VolumeOptions};
use tokio_util::sync::CancellationToken;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const SUCCESS: &str = r#"echo '{"status":"Success"}'"#;

struct FlexFixture {
    dir: tempfile::TempDir,
    drivers: Drivers,
    stop: CancellationToken,
}

impl Drop for FlexFixture {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl FlexFixture {
    fn new() -> Self {
        Self::with_deadline(TEST_TIMEOUT)
    }

    fn with_deadline(deadline: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { deadline, ..Config::new(dir.path().join("exec"), dir.path().join("calls")) };
        let fixture = Self { drivers: Drivers::new(config), dir, stop: CancellationToken::new() };
        tokio::spawn(fixture.drivers.clone().run(fixture.stop.clone()));
        fixture
    }

    fn driver_dir(&self, driver_dir: &str) -> PathBuf {
        self.dir.path().join("exec").join(driver_dir)
    }

    /// Installs a script that logs its arguments, one call per line, and then runs the action of the command.
    fn install(&self, driver_dir: &str, commands: &[(&str, &str)]) {
        let file = driver_dir.rsplit('~').next().unwrap();
        fs::create_dir_all(self.driver_dir(driver_dir)).unwrap();
        let log = self.dir.path().join("log").display().to_string();
        let commands: String = commands.iter().map(|(command, action)| format!("{command}) {action} ;;\n")).collect();
        let script = format!(
            "#!/bin/sh\nprintf '%s|' \"$@\" >> {log}\necho >> {log}\ncase $1 in\n{commands}*) echo '{{\"status\":\"Not \
             supported\"}}'; exit 1 ;;\nesac\n"
        );
        // Renamed into place, so that no incomplete script is ever called.
        let new = self.driver_dir(driver_dir).join(".new");
        fs::write(&new, script).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, self.driver_dir(driver_dir).join(file)).unwrap();
    }

    fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        log.lines().filter(|line| *line != "init|").map(ToOwned::to_owned).collect()
    }

    async fn wait_for(&self, driver: &str, holds: impl Fn(&DriverState) -> bool) -> DriverState {
        let mut changes = self.drivers.changes();
        let wait = async {
            loop {
                let state = self.drivers.state(driver);
                if holds(&state) {
                    return state;
                }
                changes.changed().await.unwrap();
            }
        };
        let waited = tokio::time::timeout(TEST_TIMEOUT, wait).await;
        waited.unwrap_or_else(|_| panic!("{driver} is still {:?}", self.drivers.state(driver)))
    }

    async fn ready(&self, driver: &str) -> Capabilities {
        match self.wait_for(driver, |state| matches!(state, DriverState::Ready(_))).await {
            DriverState::Ready(capabilities) => capabilities,
            state => panic!("{state:?}"),
        }
    }
}

fn options() -> VolumeOptions {
    VolumeOptions { volume: "pv".to_owned(), fs_type: "ext4".to_owned(), ..VolumeOptions::default() }
}

const OPTIONS: &str =
    r#"{"kubernetes.io/fsType":"ext4","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw"}"#;

#[tokio::test]
async fn calls_and_responses_follow_the_protocol() {
    let fixture = FlexFixture::new();
    fixture.install(
        "acme~disk",
        &[
            ("init", SUCCESS),
            ("attach", r#"echo '{"status":"Success","device":"/dev/acme"}'"#),
            ("isattached", r#"echo '{"status":"Success","attached":true}'"#),
            ("detach", SUCCESS),
        ],
    );
    assert!(fixture.ready("acme/disk").await.attach);
    let drivers = &fixture.drivers;
    assert_eq!(drivers.attach("acme/disk", &options(), "n1").await.unwrap(), "/dev/acme");
    assert_eq!(drivers.is_attached("acme/disk", &options(), "n1").await.unwrap(), Some(true));
    drivers.detach("acme/disk", "pv", "n1").await.unwrap();
    let want = [format!("attach|{OPTIONS}|n1|"), format!("isattached|{OPTIONS}|n1|"), "detach|pv|n1|".to_owned()];
    assert_eq!(fixture.calls(), want);
}

#[tokio::test]
async fn unsupported_commands_count_as_done_and_are_not_called_again() {
    let fixture = FlexFixture::new();
    fixture.install("plain", &[("init", SUCCESS)]);
    fixture.ready("plain").await;
    for _ in 0..2 {
        assert_eq!(fixture.drivers.attach("plain", &options(), "n1").await.unwrap(), "");
        assert_eq!(fixture.drivers.is_attached("plain", &options(), "n1").await.unwrap(), None);
        fixture.drivers.detach("plain", "pv", "n1").await.unwrap();
    }
    assert_eq!(fixture.calls().len(), 3, "{:?}", fixture.calls());

    // Another executable may support more.
    fixture.install("plain", &[("init", SUCCESS), ("attach", r#"echo '{"status":"Success","device":"/dev/new"}'"#)]);
    tokio::time::timeout(TEST_TIMEOUT, async {
        while fixture.drivers.attach("plain", &options(), "n1").await.ok().as_deref() != Some("/dev/new") {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the new executable is called");
}

#[tokio::test]
async fn errors_contain_the_message_of_the_driver() {
    let fixture = FlexFixture::new();
    let broken = [
        ("failure", r#"echo '{"status":"Failure","message":"no such disk"}'; exit 1"#, "reason: no such disk"),
        ("quiet-failure", r#"echo '{"status":"Failure","message":"busy"}'"#, "status: Failure, reason: busy"),
        ("nonsense", "echo oops >&2", "not one JSON object"),
        ("chatty", r#"set -x; echo '{"status":"Success"}'"#, "not one JSON object"),
        ("bug", r#"echo '{"status":"Success"}'; exit 3"#, "exit status: 3"),
        ("endless", "head -c 100000 /dev/zero | tr '\\0' ' '", "longer than 65536 bytes"),
    ];
    for (driver, action, _) in broken {
        fixture.install(driver, &[("init", SUCCESS), ("attach", action)]);
    }
    for (driver, _, want) in broken {
        fixture.ready(driver).await;
        let error = fixture.drivers.attach(driver, &options(), "n1").await.unwrap_err().to_string();
        assert!(error.contains(want) && error.starts_with("attach command failed"), "{driver}: {error}");
    }
}

#[tokio::test]
async fn a_hanging_call_is_killed_and_the_next_call_succeeds() {
    let fixture = FlexFixture::with_deadline(Duration::from_secs(5));
    let marker = fixture.dir.path().join("hung");
    let action = format!("if mkdir {} 2> /dev/null; then sleep 600; fi; {SUCCESS}", marker.display());
    fixture.install("slow", &[("init", SUCCESS), ("attach", &action)]);
    fixture.ready("slow").await;
    let error = fixture.drivers.attach("slow", &options(), "n1").await.unwrap_err();
    assert!(matches!(error, CallError::Deadline { .. }), "{error}");
    let retried = async {
        // The killed processes hold the lock until they have ended.
        loop {
            match fixture.drivers.attach("slow", &options(), "n1").await {
                Err(CallError::Busy) => tokio::task::yield_now().await,
                other => return other,
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, retried).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_abandoned_call_holds_its_lock_until_it_ends() {
    let fixture = FlexFixture::new();
    let (begun, go) = (fixture.dir.path().join("begun"), fixture.dir.path().join("go"));
    let action = format!("echo > {}; cat {} > /dev/null; {SUCCESS}", begun.display(), go.display());
    fixture.install("slow", &[("init", SUCCESS), ("attach", &action), ("detach", SUCCESS)]);
    rustix::fs::mknodat(rustix::fs::CWD, &go, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    fixture.ready("slow").await;
    let (drivers, abandoned) = (fixture.drivers.clone(), options());
    let call = tokio::spawn(async move { drivers.attach("slow", &abandoned, "n1").await });
    tokio::time::timeout(TEST_TIMEOUT, async {
        while !begun.exists() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the script runs");
    // Simulates that this process has died.
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    for _ in 0..3 {
        assert!(matches!(fixture.drivers.detach("slow", "pv", "n1").await, Err(CallError::Busy)));
    }
    fixture.drivers.detach("slow", "pv", "n2").await.unwrap();

    fs::write(&go, "").unwrap();
    let ended = async {
        while matches!(fixture.drivers.detach("slow", "pv", "n1").await, Err(CallError::Busy)) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, ended).await.expect("the script ends");
    let detached = "detach|pv|n1|".to_owned();
    assert_eq!(fixture.calls().into_iter().filter(|call| *call == detached).count(), 1);
}

#[tokio::test]
async fn drivers_are_added_replaced_and_removed_at_run_time() {
    let fixture = FlexFixture::new();
    fixture.wait_for("acme/disk", |state| *state == DriverState::Absent).await;
    let error = fixture.drivers.attach("acme/disk", &options(), "n1").await.unwrap_err();
    assert!(error.to_string().starts_with("there is no FlexVolume driver acme/disk in"), "{error}");

    fixture.install("acme~disk", &[("init", r#"echo '{"status":"Success","capabilities":{"attach":false}}'"#)]);
    assert!(!fixture.ready("acme/disk").await.attach);
    fixture.install("acme~disk", &[("init", SUCCESS)]);
    fixture.wait_for("acme/disk", |state| *state == DriverState::Ready(Capabilities::default())).await;

    // Hidden directories and directories without the executable are ignored.
    fixture.install(".hidden", &[("init", SUCCESS)]);
    fs::create_dir(fixture.driver_dir("empty")).unwrap();
    fixture.install("last", &[("init", SUCCESS)]);
    fixture.ready("last").await;
    assert_eq!(fixture.drivers.state(".hidden"), DriverState::Absent);
    assert_eq!(fixture.drivers.state("empty"), DriverState::Absent);

    fs::remove_file(fixture.driver_dir("acme~disk").join("disk")).unwrap();
    fixture.wait_for("acme/disk", |state| *state == DriverState::Absent).await;
    fs::remove_dir_all(fixture.dir.path().join("exec")).unwrap();
    fixture.wait_for("last", |state| *state == DriverState::Absent).await;
    let recreated = async {
        while !fixture.dir.path().join("exec").exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, recreated).await.expect("the directory is created again");
    fixture.install("last", &[("init", SUCCESS)]);
    fixture.ready("last").await;
}

#[tokio::test]
async fn a_failed_init_is_repeated() {
    let fixture = FlexFixture::new();
    let healthy = fixture.dir.path().join("healthy");
    let init = format!("if [ -e {} ]; then {SUCCESS}; else echo later; fi", healthy.display());
    fixture.install("flaky", &[("init", &init)]);
    let state = fixture.wait_for("flaky", |state| matches!(state, DriverState::Failing(_))).await;
    let DriverState::Failing(why) = state else { panic!("{state:?}") };
    assert!(why.contains("not one JSON object"), "{why}");
    fs::write(healthy, "").unwrap();
    fixture.ready("flaky").await;
}
