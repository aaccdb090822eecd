//! Runs `cleat up` in a [`Machine`] and calls kubectl against it.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::Machine;

/// Timeouts of kubectl, far above what a wait takes.
const WAIT_TIMEOUT_FLAG: &str = "--timeout=60s";
const REQUEST_TIMEOUT_FLAG: &str = "--request-timeout=60s";

/// Starts a stack of two nodes that kills itself at the crash point `point`, and returns a function that runs one named step.
/// A step must be repeatable: if the stack dies during the step, the stack is restarted and the step is run again.
pub fn stack_crashing_at<'m>(machine: &'m Machine, point: &'m str) -> impl FnMut(&str, &dyn Fn(&Stack<'m>) -> bool) {
    let mut stack = Stack::start_crashing_at(machine, 2, Some(point));
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

pub struct Stack<'m> {
    machine: &'m Machine,
    process: Option<Child>,
    /// Kept open until the stack exits: a closed pipe would make its later writes fail.
    stdout: BufReader<ChildStdout>,
}

impl<'m> Stack<'m> {
    pub fn start(machine: &'m Machine, nodes: u16) -> Self {
        Self::start_crashing_at(machine, nodes, None)
    }

    /// Starts a stack that kills itself when it first reaches the crash point `crash_at`, which may be before it is ready.
    pub fn start_crashing_at(machine: &'m Machine, nodes: u16, crash_at: Option<&str>) -> Self {
        Self::start_with_arguments(machine, nodes, crash_at, &[])
    }

    /// As [`Stack::start_crashing_at`], with additional arguments for `cleat up`.
    pub fn start_with_arguments(
        machine: &'m Machine,
        nodes: u16,
        crash_at: Option<&str>,
        extra_arguments: &[&str],
    ) -> Self {
        let mut stack = Self::spawn(machine, nodes, crash_at, extra_arguments);
        let mut line = String::new();
        stack.stdout.read_line(&mut line).unwrap();
        assert!(crash_at.is_some() || line.starts_with("cleat is up"), "the stack did not start: {line:?}");
        stack
    }

    /// Starts the process and does not wait until the stack is ready.
    pub fn spawn(machine: &'m Machine, nodes: u16, crash_at: Option<&str>, extra_arguments: &[&str]) -> Self {
        let mut command = machine.cleat();
        command.args(["up", "--listen", "127.0.0.1:0", "--nodes", &nodes.to_string(), "--data-dir"]);
        command.arg(machine.data()).arg("--audit-log").arg(machine.scratch("audit.log"));
        command.args(extra_arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        command.env("CLEAT_LOG", std::env::var("CLEAT_LOG").unwrap_or_else(|_| "error".to_owned()));
        if let Some(point) = crash_at {
            command.env("CLEAT_CRASH_AT", format!("{point}@{}", machine.scratch("crashed").display()));
        }
        let mut process = command.spawn().expect("nsenter is part of util-linux: apt-get install util-linux");
        let stdout = BufReader::new(process.stdout.take().unwrap());
        Self { machine, process: Some(process), stdout }
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Whether the stack's process has exited. Waits up to 5 seconds: the kernel closes its sockets before it can be reaped.
    pub fn is_dead(&mut self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if self.process.as_mut().unwrap().try_wait().unwrap().is_some() {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }

    /// Sends SIGKILL to the stack. Its drivers are killed with it.
    pub fn kill(mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Sends SIGTERM to the stack and waits until it has exited.
    pub fn stop(mut self) -> ExitStatus {
        let mut process = self.process.take().unwrap();
        let pid = Pid::from_child(&process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        process.wait().unwrap()
    }

    pub fn try_kubectl(&self, arguments: &[&str], input: Option<&str>) -> Output {
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

    /// Runs kubectl until it exits or the stack exits: `kubectl wait` would go on retrying against a dead server.
    pub fn kubectl_while_alive(&self, arguments: &[&str]) -> bool {
        let mut child =
            self.command(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let handle = |child: &Child| pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
        let (kubectl, stack) = (handle(&child), handle(self.process.as_ref().unwrap()));
        let mut exits = [PollFd::new(&kubectl, PollFlags::IN), PollFd::new(&stack, PollFlags::IN)];
        poll(&mut exits, None).unwrap();
        if exits[0].revents().is_empty() {
            let _ = child.kill();
        }
        child.wait().unwrap().success()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.arg("--kubeconfig").arg(self.machine.data().join("kubeconfig")).args(arguments);
        // A cache of its own: another test's server may have had the same port and other resources.
        command.arg("--cache-dir").arg(self.machine.scratch("kubectl"));
        command
    }

    /// Runs kubectl and returns its stdout. Panics if it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        stdout_of(arguments, &self.try_kubectl(arguments, None))
    }

    pub fn apply(&self, yaml: &str) {
        stdout_of(&["apply"], &self.try_kubectl(&["apply", "-f", "-"], Some(yaml)));
    }

    /// Applies a manifest; false if kubectl fails, for example because the stack died.
    pub fn try_apply(&self, yaml: &str) -> bool {
        self.try_kubectl(&["apply", "-f", "-"], Some(yaml)).status.success()
    }

    /// Runs a kubectl command that waits; false if it fails or the stack exits first.
    pub fn kubectl_succeeds(&self, arguments: &[&str]) -> bool {
        self.kubectl_while_alive(&[arguments, &[WAIT_TIMEOUT_FLAG]].concat())
    }

    pub fn wait(&self, what: &str, condition: &str) {
        self.kubectl(&["wait", what, &format!("--for={condition}"), WAIT_TIMEOUT_FLAG]);
    }

    /// Waits until a field has a value; false if the server stops answering or the timeout passes first.
    pub fn try_wait_field(&self, what: &str, path: &str, value: &str) -> bool {
        let (kind, name) = what.split_once('/').unwrap();
        let form = format!("jsonpath={path}{{\"\\n\"}}");
        // By field selector: when it watches a single object by name, kubectl drops the first event, which may be the expected one.
        let selector = format!("--field-selector=metadata.name={name}");
        let mut watch = self.command(&["get", kind, &selector, "--watch", "-o", &form, REQUEST_TIMEOUT_FLAG]);
        let mut watch = watch.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
        let found = lines.any(|line| line.is_ok_and(|line| line == value));
        let _ = watch.kill();
        let _ = watch.wait();
        found
    }

    pub fn wait_field(&self, what: &str, path: &str, value: &str) {
        assert!(self.try_wait_field(what, path, value), "{what}: {path} did not become {value}");
    }

    /// Repeats a kubectl command until its output satisfies `is_expected`, and returns that output.
    pub fn wait_output(&self, arguments: &[&str], is_expected: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let output = self.kubectl(arguments);
            if is_expected(&output) {
                return output;
            }
            assert!(Instant::now() < deadline, "kubectl {arguments:?} still prints {output:?}");
        }
    }

    pub fn wait_bound(&self, claim: &str) -> String {
        self.wait_field(&format!("pvc/{claim}"), "{.status.phase}", "Bound");
        self.field(&format!("pvc/{claim}"), "{.spec.volumeName}")
    }

    pub fn wait_mounted(&self, pod: &str) {
        self.wait(&format!("pod/{pod}"), "condition=cleat.dev/VolumesMounted");
    }

    pub fn delete(&self, what: &str) {
        self.kubectl(&["delete", what, "--ignore-not-found", WAIT_TIMEOUT_FLAG]);
    }

    pub fn field(&self, what: &str, path: &str) -> String {
        self.kubectl(&["get", what, "-o", &format!("jsonpath={path}")])
    }

    /// Waits until no PersistentVolume exists; false if one remains or the server stops answering.
    pub fn try_wait_no_volumes(&self) -> bool {
        let names = || {
            let output = self.try_kubectl(&["get", "pv", "-o", "name"], None);
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        };
        for volume in names().unwrap_or_default().lines() {
            // The result is ignored: some versions of kubectl fail for an object that no longer exists. The list below decides.
            self.try_kubectl(&["wait", volume, "--for=delete", WAIT_TIMEOUT_FLAG], None);
        }
        names().is_some_and(|left| left.is_empty())
    }

    pub fn wait_no_volumes(&self) {
        assert!(self.try_wait_no_volumes(), "volumes are left: {:?}", self.names("pv"));
    }

    /// The names of all objects of a kind, in all namespaces.
    pub fn names(&self, kind: &str) -> Vec<String> {
        self.kubectl(&["get", kind, "-A", "-o", "name"]).lines().map(ToOwned::to_owned).collect()
    }

    /// The path of a pod's mount, as seen from outside the namespace.
    pub fn mount(&self, pod: &str, node: &str, volume: &str) -> PathBuf {
        let uid = self.field(&format!("pod/{pod}"), "{.metadata.uid}");
        self.machine.path_in_namespace(&self.target(node, &uid, volume))
    }

    /// As [`Stack::mount`], found by claim; `None` if the stack does not answer.
    pub fn try_mount(&self, pod: &str, node: &str, claim: &str) -> Option<PathBuf> {
        let get = |what: &str, path: &str| {
            let output = self.try_kubectl(&["get", what, "-o", &format!("jsonpath={path}")], None);
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        };
        let volume = get(&format!("pvc/{claim}"), "{.spec.volumeName}")?;
        let uid = get(&format!("pod/{pod}"), "{.metadata.uid}")?;
        Some(self.machine.path_in_namespace(&self.target(node, &uid, &volume)))
    }

    fn target(&self, node: &str, pod_uid: &str, volume: &str) -> PathBuf {
        let pods = self.machine.data().join("nodes").join(node).join("pods");
        pods.join(pod_uid).join("volumes/kubernetes.io~csi").join(volume).join("mount")
    }
}

fn stdout_of(arguments: &[&str], output: &Output) -> String {
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

/// A claim of the default StorageClass.
pub fn claim(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata:\n  name: {name}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         resources:\n    requests:\n      storage: 64Mi\n---\n"
    )
}

/// A claim whose volume is a clone of another claim's.
pub fn clone_of(name: &str, source: &str) -> String {
    let plain = claim(name);
    let spec = plain.trim_end_matches("---\n");
    format!("{spec}  dataSource: {{ kind: PersistentVolumeClaim, name: {source} }}\n---\n")
}

/// A further StorageClass with WaitForFirstConsumer.
pub const EXTRA_CLASS: &str = "apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: { name: extra }
provisioner: block.cleat.dev
volumeBindingMode: WaitForFirstConsumer
";

/// A pod on a node, with one claim mounted at /data.
pub fn pod(name: &str, node: &str, claim: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  nodeName: {node}\n  containers:\n  - name: main\n    \
         image: busybox\n    volumeMounts:\n    - {{name: data, mountPath: /data}}\n  volumes:\n  - name: data\n    \
         persistentVolumeClaim:\n      claimName: {claim}\n---\n"
    )
}
