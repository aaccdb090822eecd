//! `cleat csi-provisioner` and `cleat csi-attacher` as separate processes, against an API server over TLS and the real driver.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cleat_testing::Machine;
use cleat_testing::stack::{EXTRA_CLASS, Stack, claim, clone_of, pod};

const CLEAT: &str = env!("CARGO_BIN_EXE_cleat");

/// A sidecar inside the machine's namespace, whose log the test reads.
struct Sidecar {
    process: Child,
    log: BufReader<std::process::ChildStderr>,
}

fn sidecar_command(machine: &Machine, command: &[&str], crash_at: Option<&str>) -> Command {
    let mut sidecar = machine.cleat();
    sidecar.args(command).arg("--kubeconfig").arg(machine.data().join("kubeconfig"));
    sidecar.arg("--csi-address").arg(machine.data().join("controller.sock"));
    sidecar.envs(crash_at.map(|point| ("CLEAT_CRASH_AT", point)));
    sidecar.env("CLEAT_LOG", "info").stdin(Stdio::null());
    sidecar
}

impl Sidecar {
    fn start(machine: &Machine, command: &[&str]) -> Self {
        let mut process = sidecar_command(machine, command, None).stderr(Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(process.stderr.take().unwrap());
        Self { process, log }
    }

    /// Reads the log up to a line that contains `text`, and returns that line.
    fn wait_log(&mut self, text: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.log.read_line(&mut line).unwrap() > 0, "the sidecar exited without logging {text:?}");
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Reads the rest of the log in the background: a full pipe would block the sidecar.
    fn drain_log(mut self) -> DrainedSidecar {
        let log = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = self.log.read_to_string(&mut text);
            text
        });
        DrainedSidecar { process: self.process, _log: log }
    }
}

/// A sidecar whose log is not needed any more. Killed when dropped.
struct DrainedSidecar {
    process: Child,
    _log: std::thread::JoinHandle<String>,
}

impl DrainedSidecar {
    /// Sends a signal and waits until the sidecar has exited.
    fn end(mut self, signal: rustix::process::Signal) -> std::process::ExitStatus {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.process), signal).unwrap();
        self.process.wait().unwrap()
    }
}

impl Drop for DrainedSidecar {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_separate_provisioner_accepts_the_flags_of_external_provisioner() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start_with_arguments(&machine, 1, None, &["--without=provisioner"]);
    stack.apply(&claim("c"));
    // No provisioner has put a finalizer on it, so it can be deleted at once.
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
    let listening = sidecar.wait_log("metrics are served");
    let address = listening.split("address=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    sidecar.wait_log("lease acquired");
    let sidecar = sidecar.drain_log();
    let volume = stack.wait_bound("c");
    let uid = stack.field("pvc/c", "{.metadata.uid}");
    assert_eq!(volume, format!("disk-{uid}"));
    assert_eq!(stack.field("pvc/c", "{.metadata.finalizers}"), "[\"kubernetes.io/pvc-protection\"]");
    let lease = ["get", "lease", "block.cleat.dev", "-n", "kube-system", "-o", "jsonpath={.spec.holderIdentity}"];
    let holder = stack.kubectl(&lease);
    assert!(!holder.is_empty(), "the lease has a holder");
    let metrics = http_get(&address, "/metrics");
    for name in ["csi_operations_seconds_count{method_name=\"CreateVolume\"", "workqueue_depth{name=\"provision\"}"] {
        assert!(metrics.contains(name), "{name} is missing in\n{metrics}");
    }
    assert!(http_get(&address, "/healthz/leader-election").ends_with("ok"));
    for class in ["cleat-block", "cleat-block-wait"] {
        let path = format!("{{.items[?(@.storageClassName==\"{class}\")].capacity}}");
        // Published when the node has registered the driver.
        stack.wait_output(&["get", "csistoragecapacities", "-o", &format!("jsonpath={path}")], |free| !free.is_empty());
    }
    stack.kubectl(&["delete", "storageclass", "cleat-block-wait"]);
    let classes = ["get", "csistoragecapacities", "-o", "jsonpath={.items[*].storageClassName}"];
    stack.wait_output(&classes, |left| left == "cleat-block");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
    assert!(sidecar.end(rustix::process::Signal::TERM).success(), "the sidecar exits cleanly");
    let holder = stack.kubectl(&lease);
    assert_eq!(holder, "", "the lease is released");
}

/// A sidecar that is restarted whenever it exits, as a pod's container is.
struct RestartedSidecar {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl RestartedSidecar {
    fn start(machine: &Machine, command: &[&str], crash_at: &str) -> Self {
        let command = sidecar_command(machine, command, Some(crash_at));
        let stop = Arc::new(AtomicBool::new(false));
        let ended = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut command = command;
            while !ended.load(Ordering::Relaxed) {
                let mut process = command.stderr(Stdio::null()).spawn().unwrap();
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

impl Drop for RestartedSidecar {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

#[test]
fn a_provisioner_resumes_after_a_kill_at_every_crash_point() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start_with_arguments(&machine, 1, None, &["--without=provisioner"]);
    let classes_with_capacity = ["get", "csistoragecapacities", "-o", "jsonpath={.items[*].storageClassName}"];
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
        let _sidecar = RestartedSidecar::start(&machine, &command, &at);
        stack.apply(EXTRA_CLASS);
        stack.wait_output(&classes_with_capacity, |classes| classes.split(' ').any(|class| class == "extra"));
        stack.apply(&(claim("src") + &clone_of("copy", "src")));
        stack.wait_bound("copy");
        stack.delete("pvc/src");
        stack.delete("pvc/copy");
        stack.kubectl(&["delete", "storageclass/extra"]);
        stack.wait_output(&classes_with_capacity, |classes| classes.split(' ').all(|class| class != "extra"));
        stack.wait_no_volumes();
        assert!(marker.exists(), "{point} was never reached");
        machine.assert_nothing_left();
    }
}

#[test]
fn a_provisioner_for_one_node_provisions_immediate_claims_on_it() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start_with_arguments(&machine, 1, None, &["--without=provisioner"]);
    let mut start = machine.cleat();
    start.args(["csi-provisioner", "--node-deployment", "--node-deployment-base-delay=100ms", "--enable-capacity"]);
    start.arg("--kubeconfig").arg(machine.data().join("kubeconfig"));
    // A driver on the node that serves the controller service too.
    let driver = KillOnDrop(start_node_local_driver(&machine));
    start.arg("--csi-address").arg(machine.scratch("own.sock"));
    let _sidecar = KillOnDrop(start.env("NODE_NAME", "node-1").stdin(Stdio::null()).spawn().unwrap());
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
    let files = || Machine::volume_files_in(machine.scratch("own-pool"));
    let affinity = stack.field(&format!("pv/{volume}"), "{.spec.nodeAffinity}");
    assert!(affinity.contains("node-1"), "the volume is accessible from its node only: {affinity}");
    assert!(!files().is_empty(), "the volume is in the node's own pool");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    assert_eq!(files(), [] as [PathBuf; 0]);
    drop(driver);
}

/// Starts a driver with controller and node service and a local pool, as it is deployed on every node.
fn start_node_local_driver(machine: &Machine) -> Child {
    let mut driver = machine.cleat();
    fs::create_dir(machine.scratch("own-pool")).unwrap();
    driver.args(["driver", "block", "--node-local", "--node-id", "node-1", "--pool"]).arg(machine.scratch("own-pool"));
    driver.arg("--endpoint").arg(format!("unix://{}", machine.scratch("own.sock").display()));
    driver.stdin(Stdio::null()).spawn().unwrap()
}

/// A process that is killed when it is dropped.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn another_provisioner_takes_over_when_the_leader_dies() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start_with_arguments(&machine, 1, None, &["--without=provisioner"]);
    let election = [
        "sidecars",
        "--controllers=provisioner",
        "--leader-election",
        "--leader-election-lease-duration=3s",
        "--leader-election-renew-deadline=2s",
        "--leader-election-retry-period=500ms",
    ];
    let mut first = Sidecar::start(&machine, &election);
    first.wait_log("lease acquired");
    let first = first.drain_log();
    stack.apply(&claim("a"));
    stack.wait_bound("a");
    let mut second = Sidecar::start(&machine, &election);
    second.wait_log("driver connected");
    first.end(rustix::process::Signal::KILL);
    stack.apply(&claim("b"));
    second.wait_log("lease acquired");
    let _second = second.drain_log();
    stack.wait_bound("b");
    stack.delete("pvc/a");
    stack.delete("pvc/b");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_separate_attacher_attaches_and_publishes_again_what_the_driver_lost() {
    use cleat_csi::{Client, Endpoint, v1};
    let machine = Machine::new(CLEAT);
    let stack = Stack::start_with_arguments(&machine, 1, None, &["--without=attacher"]);
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
    sidecar.wait_log("lease acquired");
    sidecar.wait_log("volume published");
    stack.wait_mounted("p");
    let held = stack.field(&format!("pv/{volume}"), "{.metadata.finalizers}");
    assert!(held.contains("external-attacher/block-cleat-dev"), "{held}");

    // Unpublish the volume without the attacher's knowledge.
    let handle = stack.field(&format!("pv/{volume}"), "{.spec.csi.volumeHandle}");
    let driver = Client::new(Endpoint::unix(machine.data().join("controller.sock")));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let unpublish = v1::ControllerUnpublishVolumeRequest { volume_id: handle, ..Default::default() };
    runtime.block_on(driver.controller_unpublish_volume(unpublish)).unwrap();
    sidecar.wait_log("driver contradicts the attachment");
    sidecar.wait_log("volume published");
    let listed = runtime.block_on(driver.list_volumes(v1::ListVolumesRequest::default())).unwrap();
    let nodes = listed.entries[0].status.as_ref().unwrap().published_node_ids.clone();
    assert_eq!(nodes, ["node-1"]);

    let sidecar = sidecar.drain_log();
    stack.delete("pod/p");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    assert_eq!(stack.names("volumeattachments"), [] as [&str; 0]);
    machine.assert_nothing_left();
    assert!(sidecar.end(rustix::process::Signal::TERM).success(), "the sidecar exits cleanly");
}

#[test]
fn invalid_flags_are_refused_with_an_explanation() {
    for (arguments, expected) in [
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
        let output = std::process::Command::new(CLEAT).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} succeeded");
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
}

fn http_get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}
