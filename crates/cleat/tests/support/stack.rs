//! A running `cleat up`, and kubectl to talk to it.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Machine;

/// How long a single wait may take; far more than anything needs.
const PATIENCE: &str = "--timeout=60s";
const REQUEST_PATIENCE: &str = "--request-timeout=60s";

/// Starts a stack of two nodes that dies at `point`, and gives what takes steps with it. Each step can be repeated: it is,
/// whenever the stack died under it.
pub(crate) fn dying_at<'m>(machine: &'m Machine, point: &'m str) -> impl FnMut(&str, &dyn Fn(&Stack<'m>) -> bool) {
    let mut stack = Stack::start_with(machine, 2, Some(point));
    move |name, work| {
        for _ in 0..3 {
            if work(&stack) {
                return;
            }
            assert!(stack.is_dead(), "{point}: step {name:?} failed on a living stack");
            stack = Stack::start(machine, 2);
        }
        panic!("{point}: step {name:?} does not succeed");
    }
}

pub(crate) struct Stack<'m> {
    machine: &'m Machine,
    process: Option<Child>,
    /// Kept open: a stack that writes to it later must not find it closed.
    says: BufReader<ChildStdout>,
}

impl<'m> Stack<'m> {
    pub(crate) fn start(machine: &'m Machine, nodes: u16) -> Self {
        Self::start_with(machine, nodes, None)
    }

    /// Starts the stack so that it dies when it first reaches `crash_at`, which may be before it is up.
    pub(crate) fn start_with(machine: &'m Machine, nodes: u16, crash_at: Option<&str>) -> Self {
        Self::start_arguments(machine, nodes, crash_at, &[])
    }

    /// The same, with more arguments for `cleat up`.
    pub(crate) fn start_arguments(machine: &'m Machine, nodes: u16, crash_at: Option<&str>, more: &[&str]) -> Self {
        let mut stack = Self::begin(machine, nodes, crash_at, more);
        let mut line = String::new();
        stack.says.read_line(&mut line).unwrap();
        assert!(crash_at.is_some() || line.starts_with("cleat is up"), "the stack did not start: {line:?}");
        stack
    }

    /// Does not wait until the stack is up.
    pub(crate) fn begin(machine: &'m Machine, nodes: u16, crash_at: Option<&str>, more: &[&str]) -> Self {
        let mut command = machine.command(env!("CARGO_BIN_EXE_cleat"));
        command.args(["up", "--listen", "127.0.0.1:0", "--nodes", &nodes.to_string(), "--data-dir"]);
        command.arg(machine.data()).arg("--audit-log").arg(machine.scratch("audit.log"));
        command.args(more).stdin(Stdio::null()).stdout(Stdio::piped());
        command.env("CLEAT_LOG", std::env::var("CLEAT_LOG").unwrap_or_else(|_| "error".to_owned()));
        if let Some(point) = crash_at {
            command.env("CLEAT_CRASH_AT", format!("{point}@{}", machine.scratch("crashed").display()));
        }
        let mut process = command.spawn().expect("nsenter is part of util-linux: apt-get install util-linux");
        let says = BufReader::new(process.stdout.take().unwrap());
        Self { machine, process: Some(process), says }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Whether the stack has died. A process whose sockets have just closed may take a moment to be seen as dead.
    pub(crate) fn is_dead(&mut self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if self.process.as_mut().unwrap().try_wait().unwrap().is_some() {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }

    /// SIGKILL; the drivers die with it.
    pub(crate) fn kill(mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// SIGTERM, as a service manager would.
    pub(crate) fn stop(mut self) -> ExitStatus {
        let mut process = self.process.take().unwrap();
        let pid = Pid::from_child(&process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        process.wait().unwrap()
    }

    pub(crate) fn try_kubectl(&self, arguments: &[&str], input: Option<&str>) -> Output {
        let mut command = self.command(arguments);
        if let Some(text) = input {
            let file = self.machine.scratch("input.yaml");
            fs::write(&file, text).unwrap();
            command.stdin(fs::File::open(file).unwrap());
        } else {
            command.stdin(Stdio::null());
        }
        command.output().expect("kubectl is needed: apt-get install kubernetes-client, or ./scripts/setup")
    }

    /// Runs kubectl for as long as the stack lives: one that waits would go on asking a dead server.
    pub(crate) fn kubectl_while_alive(&self, arguments: &[&str]) -> bool {
        let mut child =
            self.command(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let handle = |child: &Child| pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
        let (asking, stack) = (handle(&child), handle(self.process.as_ref().unwrap()));
        let mut ends = [PollFd::new(&asking, PollFlags::IN), PollFd::new(&stack, PollFlags::IN)];
        poll(&mut ends, None).unwrap();
        if ends[0].revents().is_empty() {
            let _ = child.kill();
        }
        child.wait().unwrap().success()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.arg("--kubeconfig").arg(self.machine.data().join("kubeconfig")).args(arguments);
        // Discovery must not be remembered from another test's server on the same port.
        command.arg("--cache-dir").arg(self.machine.scratch("kubectl"));
        command
    }

    /// Runs kubectl and returns what it prints.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        said(arguments, &self.try_kubectl(arguments, None))
    }

    pub(crate) fn apply(&self, yaml: &str) {
        said(&["apply"], &self.try_kubectl(&["apply", "-f", "-"], Some(yaml)));
    }

    /// For a stack that may die.
    pub(crate) fn applied(&self, yaml: &str) -> bool {
        self.try_kubectl(&["apply", "-f", "-"], Some(yaml)).status.success()
    }

    /// The same of a kubectl that waits.
    pub(crate) fn holds(&self, arguments: &[&str]) -> bool {
        self.kubectl_while_alive(&[arguments, &[PATIENCE]].concat())
    }

    pub(crate) fn wait(&self, what: &str, condition: &str) {
        self.kubectl(&["wait", what, &format!("--for={condition}"), PATIENCE]);
    }

    /// Waits until a field has a value; false if the server goes away first.
    pub(crate) fn try_wait_field(&self, what: &str, path: &str, value: &str) -> bool {
        let (kind, name) = what.split_once('/').unwrap();
        let form = format!("jsonpath={path}{{\"\\n\"}}");
        // By selector: of a single object kubectl drops the first event of its watch, which may be the one waited for.
        let selector = format!("--field-selector=metadata.name={name}");
        let mut watch = self.command(&["get", kind, &selector, "--watch", "-o", &form, REQUEST_PATIENCE]);
        let mut watch = watch.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
        let found = lines.any(|line| line.is_ok_and(|line| line == value));
        let _ = watch.kill();
        let _ = watch.wait();
        found
    }

    pub(crate) fn wait_field(&self, what: &str, path: &str, value: &str) {
        assert!(self.try_wait_field(what, path, value), "{what}: {path} did not become {value}");
    }

    /// Asks until the answer is as wanted.
    pub(crate) fn wait_output(&self, arguments: &[&str], wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let said = self.kubectl(arguments);
            if wanted(&said) {
                return said;
            }
            assert!(Instant::now() < deadline, "kubectl {arguments:?} still says {said:?}");
        }
    }

    pub(crate) fn wait_bound(&self, claim: &str) -> String {
        self.wait_field(&format!("pvc/{claim}"), "{.status.phase}", "Bound");
        self.field(&format!("pvc/{claim}"), "{.spec.volumeName}")
    }

    pub(crate) fn wait_mounted(&self, pod: &str) {
        self.wait(&format!("pod/{pod}"), "condition=cleat.dev/VolumesMounted");
    }

    pub(crate) fn delete(&self, what: &str) {
        self.kubectl(&["delete", what, "--ignore-not-found", PATIENCE]);
    }

    pub(crate) fn field(&self, what: &str, path: &str) -> String {
        self.kubectl(&["get", what, "-o", &format!("jsonpath={path}")])
    }

    /// Waits until no PersistentVolume is left; false if one stays or the server goes away.
    pub(crate) fn try_wait_no_volumes(&self) -> bool {
        let names = || {
            let output = self.try_kubectl(&["get", "pv", "-o", "name"], None);
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        };
        for volume in names().unwrap_or_default().lines() {
            // One that is gone already is an error to some versions of kubectl; the look afterwards decides.
            self.try_kubectl(&["wait", volume, "--for=delete", PATIENCE], None);
        }
        names().is_some_and(|left| left.is_empty())
    }

    pub(crate) fn wait_no_volumes(&self) {
        assert!(self.try_wait_no_volumes(), "volumes are left: {:?}", self.names("pv"));
    }

    /// Names of all objects of a kind.
    pub(crate) fn names(&self, kind: &str) -> Vec<String> {
        self.kubectl(&["get", kind, "-A", "-o", "name"]).lines().map(ToOwned::to_owned).collect()
    }

    /// Where a pod's volume is mounted, as the test can reach it.
    pub(crate) fn mount(&self, pod: &str, node: &str, volume: &str) -> PathBuf {
        let uid = self.field(&format!("pod/{pod}"), "{.metadata.uid}");
        self.machine.see(&self.target(node, &uid, volume))
    }

    /// The same, found by claim; `None` if the stack does not answer.
    pub(crate) fn try_mount(&self, pod: &str, node: &str, claim: &str) -> Option<PathBuf> {
        let ask = |what: &str, path: &str| {
            let output = self.try_kubectl(&["get", what, "-o", &format!("jsonpath={path}")], None);
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        };
        let volume = ask(&format!("pvc/{claim}"), "{.spec.volumeName}")?;
        let uid = ask(&format!("pod/{pod}"), "{.metadata.uid}")?;
        Some(self.machine.see(&self.target(node, &uid, &volume)))
    }

    fn target(&self, node: &str, pod_uid: &str, volume: &str) -> PathBuf {
        let pods = self.machine.data().join("nodes").join(node).join("pods");
        pods.join(pod_uid).join("volumes/kubernetes.io~csi").join(volume).join("mount")
    }
}

fn said(arguments: &[&str], output: &Output) -> String {
    assert!(
        output.status.success(),
        "kubectl {} failed ({}): {}",
        arguments.join(" "),
        output.status.code().or(output.status.signal()).unwrap_or_default(),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).unwrap()
}

impl Drop for Stack<'_> {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A claim of the default class.
pub(crate) fn claim(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata:\n  name: {name}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         resources:\n    requests:\n      storage: 64Mi\n---\n"
    )
}

/// A pod on a node with one claim at /data.
/// A claim whose volume is a copy of another's.
pub(crate) fn clone_of(name: &str, source: &str) -> String {
    let plain = claim(name);
    let spec = plain.trim_end_matches("---\n");
    format!("{spec}  dataSource: {{ kind: PersistentVolumeClaim, name: {source} }}\n---\n")
}

/// One more class of claims that wait.
pub(crate) const EXTRA: &str = "apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: { name: extra }
provisioner: block.cleat.dev
volumeBindingMode: WaitForFirstConsumer
";

pub(crate) fn pod(name: &str, node: &str, claim: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  nodeName: {node}\n  containers:\n  - name: main\n    \
         image: busybox\n    volumeMounts:\n    - {{name: data, mountPath: /data}}\n  volumes:\n  - name: data\n    \
         persistentVolumeClaim:\n      claimName: {claim}\n---\n"
    )
}
