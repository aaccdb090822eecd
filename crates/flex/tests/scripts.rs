//! Real scripts in a directory of drivers: they are found, called as the protocol says, and not believed too much.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use cleat_flex::{CallError, Capabilities, Config, Drivers, Options, State};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);
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
        Self::with_deadline(WAIT)
    }

    fn with_deadline(deadline: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { deadline, ..Config::new(dir.path().join("exec"), dir.path().join("calls")) };
        let rig = Self { drivers: Drivers::new(config), dir, stop: CancellationToken::new() };
        tokio::spawn(rig.drivers.clone().run(rig.stop.clone()));
        rig
    }

    fn home(&self, home: &str) -> PathBuf {
        self.dir.path().join("exec").join(home)
    }

    /// A script that notes its arguments, one call a line, and then goes through the commands' cases.
    fn install(&self, home: &str, cases: &[(&str, &str)]) {
        let file = home.rsplit('~').next().unwrap();
        fs::create_dir_all(self.home(home)).unwrap();
        let log = self.dir.path().join("log").display().to_string();
        let cases: String = cases.iter().map(|(command, does)| format!("{command}) {does} ;;\n")).collect();
        let script = format!(
            "#!/bin/sh\nprintf '%s|' \"$@\" >> {log}\necho >> {log}\ncase $1 in\n{cases}*) echo '{{\"status\":\"Not \
             supported\"}}'; exit 1 ;;\nesac\n"
        );
        // In place at once, as an installer should.
        let new = self.home(home).join(".new");
        fs::write(&new, script).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, self.home(home).join(file)).unwrap();
    }

    fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        log.lines().filter(|line| *line != "init|").map(ToOwned::to_owned).collect()
    }

    async fn until(&self, driver: &str, holds: impl Fn(&State) -> bool) -> State {
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
        let waited = tokio::time::timeout(WAIT, wait).await;
        waited.unwrap_or_else(|_| panic!("{driver} stays {:?}", self.drivers.state(driver)))
    }

    async fn ready(&self, driver: &str) -> Capabilities {
        match self.until(driver, |state| matches!(state, State::Ready(_))).await {
            State::Ready(capabilities) => capabilities,
            state => panic!("{state:?}"),
        }
    }
}

fn options() -> Options {
    Options { volume: "pv".to_owned(), fs_type: "ext4".to_owned(), ..Options::default() }
}

const OPTIONS: &str =
    r#"{"kubernetes.io/fsType":"ext4","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw"}"#;

#[tokio::test]
async fn calls_carry_what_the_protocol_says_and_answers_come_back() {
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
async fn what_a_driver_does_not_support_counts_as_done_and_is_not_asked_again() {
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
    tokio::time::timeout(WAIT, async {
        while rig.drivers.attach("plain", &options(), "n1").await.ok().as_deref() != Some("/dev/new") {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the new executable is called");
}

#[tokio::test]
async fn failures_say_what_the_driver_said() {
    let rig = Rig::new();
    let broken = [
        ("failure", r#"echo '{"status":"Failure","message":"no such disk"}'; exit 1"#, "reason: no such disk"),
        ("quiet-failure", r#"echo '{"status":"Failure","message":"busy"}'"#, "status: Failure, reason: busy"),
        ("nonsense", "echo oops >&2", "not one JSON object"),
        ("chatty", r#"set -x; echo '{"status":"Success"}'"#, "not one JSON object"),
        ("bug", r#"echo '{"status":"Success"}'; exit 3"#, "exit status: 3"),
        ("endless", "head -c 100000 /dev/zero | tr '\\0' ' '", "longer than 65536 bytes"),
    ];
    for (driver, does, _) in broken {
        rig.install(driver, &[("init", SUCCESS), ("attach", does)]);
    }
    for (driver, _, want) in broken {
        rig.ready(driver).await;
        let error = rig.drivers.attach(driver, &options(), "n1").await.unwrap_err().to_string();
        assert!(error.contains(want) && error.starts_with("attach command failed"), "{driver}: {error}");
    }
}

#[tokio::test]
async fn a_call_that_hangs_is_ended_and_the_next_one_goes_through() {
    let rig = Rig::with_deadline(Duration::from_secs(5));
    let marker = rig.dir.path().join("hung");
    let does = format!("if mkdir {} 2> /dev/null; then sleep 600; fi; {SUCCESS}", marker.display());
    rig.install("slow", &[("init", SUCCESS), ("attach", &does)]);
    rig.ready("slow").await;
    let error = rig.drivers.attach("slow", &options(), "n1").await.unwrap_err();
    assert!(matches!(error, CallError::Deadline { .. }), "{error}");
    let retried = async {
        // Until the dead have left the lock.
        loop {
            match rig.drivers.attach("slow", &options(), "n1").await {
                Err(CallError::Busy) => tokio::task::yield_now().await,
                other => return other,
            }
        }
    };
    tokio::time::timeout(WAIT, retried).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_any_more_keeps_others_out_until_it_ends() {
    let rig = Rig::new();
    let (begun, go) = (rig.dir.path().join("begun"), rig.dir.path().join("go"));
    let does = format!("echo > {}; cat {} > /dev/null; {SUCCESS}", begun.display(), go.display());
    rig.install("slow", &[("init", SUCCESS), ("attach", &does), ("detach", SUCCESS)]);
    rustix::fs::mknodat(rustix::fs::CWD, &go, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    rig.ready("slow").await;
    let (drivers, forgotten) = (rig.drivers.clone(), options());
    let call = tokio::spawn(async move { drivers.attach("slow", &forgotten, "n1").await });
    tokio::time::timeout(WAIT, async {
        while !begun.exists() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the script runs");
    // As if this process had died.
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
    tokio::time::timeout(WAIT, ended).await.expect("the script ends");
    let detached = "detach|pv|n1|".to_owned();
    assert_eq!(rig.calls().into_iter().filter(|call| *call == detached).count(), 1);
}

#[tokio::test]
async fn drivers_come_change_and_go_while_others_run() {
    let rig = Rig::new();
    rig.until("acme/disk", |state| *state == State::Absent).await;
    let error = rig.drivers.attach("acme/disk", &options(), "n1").await.unwrap_err();
    assert!(error.to_string().starts_with("there is no FlexVolume driver acme/disk in"), "{error}");

    rig.install("acme~disk", &[("init", r#"echo '{"status":"Success","capabilities":{"attach":false}}'"#)]);
    assert!(!rig.ready("acme/disk").await.attach);
    rig.install("acme~disk", &[("init", SUCCESS)]);
    rig.until("acme/disk", |state| *state == State::Ready(Capabilities::default())).await;

    // What is hidden, and what holds no executable, is no driver.
    rig.install(".hidden", &[("init", SUCCESS)]);
    fs::create_dir(rig.home("empty")).unwrap();
    rig.install("last", &[("init", SUCCESS)]);
    rig.ready("last").await;
    assert_eq!(rig.drivers.state(".hidden"), State::Absent);
    assert_eq!(rig.drivers.state("empty"), State::Absent);

    fs::remove_file(rig.home("acme~disk").join("disk")).unwrap();
    rig.until("acme/disk", |state| *state == State::Absent).await;
    fs::remove_dir_all(rig.dir.path().join("exec")).unwrap();
    rig.until("last", |state| *state == State::Absent).await;
    let made = async {
        while !rig.dir.path().join("exec").exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(WAIT, made).await.expect("the directory is made again");
    rig.install("last", &[("init", SUCCESS)]);
    rig.ready("last").await;
}

#[tokio::test]
async fn a_driver_that_fails_to_start_is_asked_again() {
    let rig = Rig::new();
    let well = rig.dir.path().join("well");
    let init = format!("if [ -e {} ]; then {SUCCESS}; else echo later; fi", well.display());
    rig.install("moody", &[("init", &init)]);
    let state = rig.until("moody", |state| matches!(state, State::Failing(_))).await;
    let State::Failing(why) = state else { panic!("{state:?}") };
    assert!(why.contains("not one JSON object"), "{why}");
    fs::write(well, "").unwrap();
    rig.ready("moody").await;
}
