//! `cleat csi-provisioner` and `cleat csi-attacher` as processes of their own, against an API server over TLS and the real driver.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use support::Machine;
use support::stack::{EXTRA, Stack, claim, clone_of, pod};

/// A sidecar inside the machine's namespace; killed with the test.
struct Sidecar {
    process: Child,
    /// What it logs, as it comes.
    log: BufReader<std::process::ChildStderr>,
}

fn sidecar(machine: &Machine, command: &[&str], crash_at: Option<&str>) -> Command {
    let mut sidecar = machine.command(env!("CARGO_BIN_EXE_cleat"));
    sidecar.args(command).arg("--kubeconfig").arg(machine.data().join("kubeconfig"));
    sidecar.arg("--csi-address").arg(machine.data().join("controller.sock"));
    sidecar.envs(crash_at.map(|point| ("CLEAT_CRASH_AT", point)));
    sidecar.env("CLEAT_LOG", "info").stdin(Stdio::null());
    sidecar
}

impl Sidecar {
    fn start(machine: &Machine, command: &[&str]) -> Self {
        let mut process = sidecar(machine, command, None).stderr(Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(process.stderr.take().unwrap());
        Self { process, log }
    }

    /// Reads the log up to a line that contains `text`.
    fn says(&mut self, text: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.log.read_line(&mut line).unwrap() > 0, "the sidecar ended without saying {text:?}");
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Reads on in the background: a full pipe would stop the sidecar.
    fn mute(mut self) -> Muted {
        let log = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = self.log.read_to_string(&mut text);
            text
        });
        Muted { process: self.process, _log: log }
    }
}

struct Muted {
    process: Child,
    _log: std::thread::JoinHandle<String>,
}

impl Muted {
    fn end(mut self, signal: rustix::process::Signal) -> std::process::ExitStatus {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.process), signal).unwrap();
        self.process.wait().unwrap()
    }
}

impl Drop for Muted {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_provisioner_of_its_own_serves_claims_with_the_flags_of_the_go_one() {
    let machine = Machine::new();
    let stack = Stack::start_arguments(&machine, 1, None, &["--without=provisioner"]);
    stack.apply(&claim("c"));
    // Nobody serves it, so it is let go at once when it is deleted.
    stack.apply(&claim("early"));
    stack.wait_field(
        "pvc/early",
        "{.metadata.annotations.volume\\.kubernetes\\.io/storage-provisioner}",
        "block.cleat.dev",
    );
    stack.delete("pvc/early");
    let mut sidecar = Sidecar::start(
        &machine,
        &[
            "csi-provisioner",
            "--leader-election=true",
            "--leader-election-namespace=kube-system",
            "--http-endpoint=127.0.0.1:0",
            "--timeout=20s",
            "--worker-threads=10",
            "--retry-interval-start=500ms",
            "--extra-create-metadata",
            "--feature-gates=Topology=true",
            "--volume-name-prefix=disk",
            "--default-fstype=ext4",
            "--kube-api-qps=5",
            "--enable-capacity",
            "--capacity-for-immediate-binding",
            "-v=2",
        ],
    );
    let listening = sidecar.says("metrics are served");
    let address = listening.split("address=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    sidecar.says("leading");
    let sidecar = sidecar.mute();
    let volume = stack.wait_bound("c");
    let uid = stack.field("pvc/c", "{.metadata.uid}");
    assert_eq!(volume, format!("disk-{uid}"));
    assert_eq!(stack.field("pvc/c", "{.metadata.finalizers}"), "[\"kubernetes.io/pvc-protection\"]");
    let lease = ["get", "lease", "block.cleat.dev", "-n", "kube-system", "-o", "jsonpath={.spec.holderIdentity}"];
    let holder = stack.kubectl(&lease);
    assert!(!holder.is_empty(), "the lease has a holder");
    let metrics = ask(&address, "/metrics");
    for name in ["csi_operations_seconds_count{method_name=\"CreateVolume\"", "workqueue_depth{name=\"provision\"}"] {
        assert!(metrics.contains(name), "{name} is missing in\n{metrics}");
    }
    assert!(ask(&address, "/healthz/leader-election").ends_with("ok"));
    for class in ["cleat-block", "cleat-block-wait"] {
        let path = format!("{{.items[?(@.storageClassName==\"{class}\")].capacity}}");
        // Published as soon as the node is registered.
        stack.wait_output(&["get", "csistoragecapacities", "-o", &format!("jsonpath={path}")], |free| !free.is_empty());
    }
    stack.kubectl(&["delete", "storageclass", "cleat-block-wait"]);
    let classes = ["get", "csistoragecapacities", "-o", "jsonpath={.items[*].storageClassName}"];
    stack.wait_output(&classes, |left| left == "cleat-block");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
    assert!(sidecar.end(rustix::process::Signal::TERM).success(), "it ends cleanly");
    let holder = stack.kubectl(&lease);
    assert_eq!(holder, "", "and gives the lease back");
}

/// A sidecar that is started again whenever it dies, as a pod's container is.
struct Supervised {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Supervised {
    fn start(machine: &Machine, command: &[&str], crash_at: &str) -> Self {
        let start = sidecar(machine, command, Some(crash_at));
        let stop = Arc::new(AtomicBool::new(false));
        let ended = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut start = start;
            while !ended.load(Ordering::Relaxed) {
                let mut process = start.stderr(Stdio::null()).spawn().unwrap();
                while process.try_wait().unwrap().is_none() {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    if ended.load(Ordering::Relaxed) {
                        process.kill().unwrap();
                    }
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

#[test]
fn a_provisioner_killed_at_any_boundary_goes_on_where_it_was() {
    let machine = Machine::new();
    let stack = Stack::start_arguments(&machine, 1, None, &["--without=provisioner"]);
    let room = ["get", "csistoragecapacities", "-o", "jsonpath={.items[*].storageClassName}"];
    for (number, point) in [
        "provision:claim-held",
        "provision:source-held",
        "provision:volume-created",
        "provision:volume-recorded",
        "provision:volume-deleted",
        "capacity:written",
        "capacity:deleted",
    ]
    .into_iter()
    .enumerate()
    {
        let marker = machine.scratch(&format!("died-{number}"));
        let at = format!("{point}@{}", marker.display());
        let command = ["csi-provisioner", "--enable-capacity", "--retry-interval-start=100ms"];
        let _sidecar = Supervised::start(&machine, &command, &at);
        stack.apply(EXTRA);
        stack.wait_output(&room, |classes| classes.split(' ').any(|class| class == "extra"));
        stack.apply(&(claim("src") + &clone_of("copy", "src")));
        stack.wait_bound("copy");
        stack.delete("pvc/src");
        stack.delete("pvc/copy");
        stack.kubectl(&["delete", "storageclass/extra"]);
        stack.wait_output(&room, |classes| classes.split(' ').all(|class| class != "extra"));
        stack.wait_no_volumes();
        assert!(marker.exists(), "{point} was never reached");
        machine.assert_nothing_left();
    }
}

#[test]
fn a_provisioner_for_one_node_takes_open_claims_for_it() {
    let machine = Machine::new();
    let stack = Stack::start_arguments(&machine, 1, None, &["--without=provisioner"]);
    let mut start = machine.command(env!("CARGO_BIN_EXE_cleat"));
    start.args(["csi-provisioner", "--node-deployment", "--node-deployment-base-delay=100ms", "--enable-capacity"]);
    start.arg("--kubeconfig").arg(machine.data().join("kubeconfig"));
    // The node's own driver, which can make volumes as well.
    let driver = Process(own_driver(&machine));
    start.arg("--csi-address").arg(machine.scratch("own.sock"));
    let _sidecar = Process(start.env("NODE_NAME", "node-1").stdin(Stdio::null()).spawn().unwrap());
    stack.apply(&claim("c"));
    let volume = stack.wait_bound("c");
    let chosen = stack.field("pvc/c", "{.metadata.annotations.volume\\.kubernetes\\.io/selected-node}");
    assert_eq!(chosen, "node-1");
    let by = [
        "get",
        "csistoragecapacities",
        "-o",
        "jsonpath={.items[*].metadata.labels.csi\\.storage\\.k8s\\.io/managed-by}",
    ];
    stack.wait_output(&by, |managers| managers == "external-provisioner-node-1");
    let files = || Machine::files_of(machine.scratch("own-pool"));
    let affinity = stack.field(&format!("pv/{volume}"), "{.spec.nodeAffinity}");
    assert!(affinity.contains("node-1"), "it is reached from here only: {affinity}");
    assert!(!files().is_empty(), "the volume is in the node's own pool");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    assert_eq!(files(), [] as [PathBuf; 0]);
    drop(driver);
}

/// A driver that is both a controller and a node, as one that is deployed on nodes is.
fn own_driver(machine: &Machine) -> Child {
    let mut driver = machine.command(env!("CARGO_BIN_EXE_cleat"));
    fs::create_dir(machine.scratch("own-pool")).unwrap();
    driver.args(["driver", "block", "--node-local", "--node-id", "node-1", "--pool"]).arg(machine.scratch("own-pool"));
    driver.arg("--endpoint").arg(format!("unix://{}", machine.scratch("own.sock").display()));
    driver.stdin(Stdio::null()).spawn().unwrap()
}

/// Ended with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_next_provisioner_takes_over_when_the_leader_dies() {
    let machine = Machine::new();
    let stack = Stack::start_arguments(&machine, 1, None, &["--without=provisioner"]);
    let election = [
        "sidecars",
        "--controllers=provisioner",
        "--leader-election",
        "--leader-election-lease-duration=3s",
        "--leader-election-renew-deadline=2s",
        "--leader-election-retry-period=500ms",
    ];
    let mut first = Sidecar::start(&machine, &election);
    first.says("leading");
    let first = first.mute();
    stack.apply(&claim("a"));
    stack.wait_bound("a");
    let mut second = Sidecar::start(&machine, &election);
    second.says("driver connected");
    first.end(rustix::process::Signal::KILL);
    stack.apply(&claim("b"));
    second.says("leading");
    let _second = second.mute();
    stack.wait_bound("b");
    stack.delete("pvc/a");
    stack.delete("pvc/b");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn an_attacher_of_its_own_attaches_and_repairs_what_the_driver_has_lost() {
    use cleat_csi::{Client, Endpoint, v1};
    let machine = Machine::new();
    let stack = Stack::start_arguments(&machine, 1, None, &["--without=attacher"]);
    stack.apply(&(claim("c") + &pod("p", "node-1", "c")));
    let volume = stack.wait_bound("c");
    let mut sidecar = Sidecar::start(
        &machine,
        &[
            "csi-attacher",
            "--leader-election",
            "--leader-election-namespace=kube-system",
            "--timeout=20s",
            "--worker-threads=4",
            "--retry-interval-start=500ms",
            "--retry-interval-max=10s",
            "--reconcile-sync=300ms",
            "--max-entries=1",
            "--default-fstype=ext4",
            "--resync=10m",
            "-v=2",
        ],
    );
    sidecar.says("leading");
    sidecar.says("volume published");
    stack.wait_mounted("p");
    let held = stack.field(&format!("pv/{volume}"), "{.metadata.finalizers}");
    assert!(held.contains("external-attacher/block-cleat-dev"), "{held}");

    // Behind everybody's back: the driver forgets that the volume is published.
    let handle = stack.field(&format!("pv/{volume}"), "{.spec.csi.volumeHandle}");
    let driver = Client::new(Endpoint::unix(machine.data().join("controller.sock")));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let forget = v1::ControllerUnpublishVolumeRequest { volume_id: handle, ..Default::default() };
    runtime.block_on(driver.controller_unpublish_volume(forget)).unwrap();
    sidecar.says("the driver shows another state");
    sidecar.says("volume published");
    let listed = runtime.block_on(driver.list_volumes(v1::ListVolumesRequest::default())).unwrap();
    let nodes = listed.entries[0].status.as_ref().unwrap().published_node_ids.clone();
    assert_eq!(nodes, ["node-1"]);

    let sidecar = sidecar.mute();
    stack.delete("pod/p");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    assert_eq!(stack.names("volumeattachments"), [] as [&str; 0]);
    machine.assert_nothing_left();
    assert!(sidecar.end(rustix::process::Signal::TERM).success(), "it ends cleanly");
}

#[test]
fn wrong_flags_are_refused_with_a_sentence() {
    for (arguments, said) in [
        (&["csi-provisioner", "--timeout=ten"][..], "not a duration"),
        (&["csi-provisioner", "--feature-gates=Topology=maybe"], "a gate is true or false"),
        (&["csi-provisioner", "--node-deployment"], "--node-deployment needs the node's name in $NODE_NAME"),
        (&["csi-provisioner", "--node-deployment", "--leader-election"], "exclude each other"),
        (&["csi-provisioner"], "no --kubeconfig, and not in a pod"),
        (&["csi-attacher", "--reconcile-sync=soon"], "not a duration"),
        (&["csi-attacher", "--max-entries=-1"], "--max-entries"),
        (&["csi-attacher"], "no --kubeconfig, and not in a pod"),
        (&["sidecars", "--controllers=nonsense"], "invalid value 'nonsense'"),
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_cleat")).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} succeeded");
        assert!(text.contains(said), "{arguments:?}: {text}");
    }
}

fn ask(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}
