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

struct Rig {
    dir: tempfile::TempDir,
    drivers: Drivers,
    stop: CancellationToken,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Rig {
    fn new() -> Self {
        Self::with_deadline(TEST_TIMEOUT)
    }

    fn with_deadline(deadline: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { deadline, ..Config::new(dir.path().join("exec"), dir.path().join("calls")) };
        let rig = Self { drivers: Drivers::new(config), dir, stop: CancellationToken::new() };
        tokio::spawn(rig.drivers.clone().run(rig.stop.clone()));
        rig
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
    let rig = Rig::new();
    rig.install(
        "acme~disk",
        &[
            ("init", SUCCESS),
            ("attach", r#"echo '{"status":"Success","device":"/dev/acme"}'"#),
            ("isattached", r#"echo '{"status":"Success","attached":true}'"#),
            ("detach", SUCCESS),
        ],
    );
    assert!(rig.ready("acme/disk").await.attach);
    let drivers = &rig.drivers;
    assert_eq!(drivers.attach("acme/disk", &options(), "n1").await.unwrap(), "/dev/acme");
    assert_eq!(drivers.is_attached("acme/disk", &options(), "n1").await.unwrap(), Some(true));
    drivers.detach("acme/disk", "pv", "n1").await.unwrap();
    let want = [format!("attach|{OPTIONS}|n1|"), format!("isattached|{OPTIONS}|n1|"), "detach|pv|n1|".to_owned()];
    assert_eq!(rig.calls(), want);
}

#[tokio::test]
async fn unsupported_commands_count_as_done_and_are_not_called_again() {
    let rig = Rig::new();
    rig.install("plain", &[("init", SUCCESS)]);
    rig.ready("plain").await;
    for _ in 0..2 {
        assert_eq!(rig.drivers.attach("plain", &options(), "n1").await.unwrap(), "");
        assert_eq!(rig.drivers.is_attached("plain", &options(), "n1").await.unwrap(), None);
        rig.drivers.detach("plain", "pv", "n1").await.unwrap();
    }
    assert_eq!(rig.calls().len(), 3, "{:?}", rig.calls());

    // Another executable may support more.
    rig.install("plain", &[("init", SUCCESS), ("attach", r#"echo '{"status":"Success","device":"/dev/new"}'"#)]);
    tokio::time::timeout(TEST_TIMEOUT, async {
        while rig.drivers.attach("plain", &options(), "n1").await.ok().as_deref() != Some("/dev/new") {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the new executable is called");
}

#[tokio::test]
async fn errors_contain_the_message_of_the_driver() {
    let rig = Rig::new();
    let broken = [
        ("failure", r#"echo '{"status":"Failure","message":"no such disk"}'; exit 1"#, "reason: no such disk"),
        ("quiet-failure", r#"echo '{"status":"Failure","message":"busy"}'"#, "status: Failure, reason: busy"),
        ("nonsense", "echo oops >&2", "not one JSON object"),
        ("chatty", r#"set -x; echo '{"status":"Success"}'"#, "not one JSON object"),
        ("bug", r#"echo '{"status":"Success"}'; exit 3"#, "exit status: 3"),
        ("endless", "head -c 100000 /dev/zero | tr '\\0' ' '", "longer than 65536 bytes"),
    ];
    for (driver, action, _) in broken {
        rig.install(driver, &[("init", SUCCESS), ("attach", action)]);
    }
    for (driver, _, want) in broken {
        rig.ready(driver).await;
        let error = rig.drivers.attach(driver, &options(), "n1").await.unwrap_err().to_string();
        assert!(error.contains(want) && error.starts_with("attach command failed"), "{driver}: {error}");
    }
}

#[tokio::test]
async fn a_hanging_call_is_killed_and_the_next_call_succeeds() {
    let rig = Rig::with_deadline(Duration::from_secs(5));
    let marker = rig.dir.path().join("hung");
    let action = format!("if mkdir {} 2> /dev/null; then sleep 600; fi; {SUCCESS}", marker.display());
    rig.install("slow", &[("init", SUCCESS), ("attach", &action)]);
    rig.ready("slow").await;
    let error = rig.drivers.attach("slow", &options(), "n1").await.unwrap_err();
    assert!(matches!(error, CallError::Deadline { .. }), "{error}");
    let retried = async {
        // The killed processes hold the lock until they have ended.
        loop {
            match rig.drivers.attach("slow", &options(), "n1").await {
                Err(CallError::Busy) => tokio::task::yield_now().await,
                other => return other,
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, retried).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_abandoned_call_holds_its_lock_until_it_ends() {
    let rig = Rig::new();
    let (begun, go) = (rig.dir.path().join("begun"), rig.dir.path().join("go"));
    let action = format!("echo > {}; cat {} > /dev/null; {SUCCESS}", begun.display(), go.display());
    rig.install("slow", &[("init", SUCCESS), ("attach", &action), ("detach", SUCCESS)]);
    rustix::fs::mknodat(rustix::fs::CWD, &go, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    rig.ready("slow").await;
    let (drivers, abandoned) = (rig.drivers.clone(), options());
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
        assert!(matches!(rig.drivers.detach("slow", "pv", "n1").await, Err(CallError::Busy)));
    }
    rig.drivers.detach("slow", "pv", "n2").await.unwrap();

    fs::write(&go, "").unwrap();
    let ended = async {
        while matches!(rig.drivers.detach("slow", "pv", "n1").await, Err(CallError::Busy)) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, ended).await.expect("the script ends");
    let detached = "detach|pv|n1|".to_owned();
    assert_eq!(rig.calls().into_iter().filter(|call| *call == detached).count(), 1);
}

#[tokio::test]
async fn drivers_are_added_replaced_and_removed_at_run_time() {
    let rig = Rig::new();
    rig.wait_for("acme/disk", |state| *state == DriverState::Absent).await;
    let error = rig.drivers.attach("acme/disk", &options(), "n1").await.unwrap_err();
    assert!(error.to_string().starts_with("there is no FlexVolume driver acme/disk in"), "{error}");

    rig.install("acme~disk", &[("init", r#"echo '{"status":"Success","capabilities":{"attach":false}}'"#)]);
    assert!(!rig.ready("acme/disk").await.attach);
    rig.install("acme~disk", &[("init", SUCCESS)]);
    rig.wait_for("acme/disk", |state| *state == DriverState::Ready(Capabilities::default())).await;

    // Hidden directories and directories without the executable are ignored.
    rig.install(".hidden", &[("init", SUCCESS)]);
    fs::create_dir(rig.driver_dir("empty")).unwrap();
    rig.install("last", &[("init", SUCCESS)]);
    rig.ready("last").await;
    assert_eq!(rig.drivers.state(".hidden"), DriverState::Absent);
    assert_eq!(rig.drivers.state("empty"), DriverState::Absent);

    fs::remove_file(rig.driver_dir("acme~disk").join("disk")).unwrap();
    rig.wait_for("acme/disk", |state| *state == DriverState::Absent).await;
    fs::remove_dir_all(rig.dir.path().join("exec")).unwrap();
    rig.wait_for("last", |state| *state == DriverState::Absent).await;
    let recreated = async {
        while !rig.dir.path().join("exec").exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, recreated).await.expect("the directory is created again");
    rig.install("last", &[("init", SUCCESS)]);
    rig.ready("last").await;
}

#[tokio::test]
async fn a_failed_init_is_repeated() {
    let rig = Rig::new();
    let healthy = rig.dir.path().join("healthy");
    let init = format!("if [ -e {} ]; then {SUCCESS}; else echo later; fi", healthy.display());
    rig.install("flaky", &[("init", &init)]);
    let state = rig.wait_for("flaky", |state| matches!(state, DriverState::Failing(_))).await;
    let DriverState::Failing(why) = state else { panic!("{state:?}") };
    assert!(why.contains("not one JSON object"), "{why}");
    fs::write(healthy, "").unwrap();
    rig.ready("flaky").await;
}
