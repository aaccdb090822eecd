//! Volumes among several nodes, with the real block driver: they move with their pods, outlive drivers and stacks that die, and
//! leave a dead node only when somebody says that it is dead.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

mod support;

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::Machine;
use support::stack::{Stack, claim, pod};

const PATIENCE: Duration = Duration::from_secs(120);

/// Far more than anything needs; ends as soon as the condition holds.
fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A node of which only the objects exist: nobody mounts anything there, and the test says what it has in use.
struct Ghost<'s> {
    stack: &'s Stack<'s>,
}

impl<'s> Ghost<'s> {
    fn new(machine: &Machine, stack: &'s Stack<'s>) -> Self {
        announce(machine);
        stack.apply(
            "apiVersion: storage.k8s.io/v1\nkind: CSINode\nmetadata:\n  name: ghost\nspec:\n  drivers:\n  - name: \
             block.cleat.dev\n    nodeID: ghost\n    topologyKeys: []\n",
        );
        let ghost = Self { stack };
        ghost.register();
        ghost
    }

    fn register(&self) {
        self.stack.apply(
            "apiVersion: v1\nkind: Node\nmetadata:\n  name: ghost\n  annotations:\n    \
             volumes.kubernetes.io/controller-managed-attach-detach: \"true\"\n",
        );
    }

    /// What its agent would say.
    fn says_in_use(&self, unique: &str) {
        let list = format!(r#"[{{"name":"{unique}","devicePath":""}}]"#);
        let status = format!(
            r#"{{"apiVersion":"v1","kind":"Node","metadata":{{"name":"ghost","annotations":
            {{"volumes.kubernetes.io/controller-managed-attach-detach":"true"}}}},
            "status":{{"volumesInUse":["{unique}"],"volumesAttached":{list}}}}}"#
        );
        let put = ["replace", "--raw", "/api/v1/nodes/ghost/status", "-f", "-"];
        let output = self.stack.try_kubectl(&put, Some(&status));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn is_told(&self) -> String {
        self.stack.field("node/ghost", "{.status.volumesAttached[*].name}")
    }
}

/// A node process announces itself in the pool, and stays known when it is gone.
fn announce(machine: &Machine) {
    let socket = machine.scratch("ghost.sock");
    let mut driver = Command::new(env!("CARGO_BIN_EXE_cleat"))
        .args(["driver", "block", "--mode", "node", "--node-id", "ghost", "--pool"])
        .arg(machine.data().join("pool"))
        .arg("--endpoint")
        .arg(&socket)
        .env("CLEAT_LOG", "error")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    until("the ghost's driver listens", || socket.exists());
    driver.kill().unwrap();
    driver.wait().unwrap();
}

fn attachments(stack: &Stack) -> Vec<String> {
    let nodes = stack.kubectl(&["get", "volumeattachments", "-o", "jsonpath={.items[*].spec.nodeName}"]);
    nodes.split_whitespace().map(ToOwned::to_owned).collect()
}

fn wait_event(stack: &Stack, pod: &str, part: &str) {
    let selector = format!("--field-selector=involvedObject.name={pod}");
    let said = || stack.kubectl(&["get", "events", &selector, "-o", "jsonpath={.items[*].message}"]);
    until(&format!("{pod} is told {part:?}"), || said().contains(part));
}

/// One volume, in use on the ghost, its pod gone by force, and its heir waiting on a real node.
fn orphan(stack: &Stack, ghost: &Ghost) -> String {
    stack.apply(&(claim("c") + &pod("p", "ghost", "c")));
    let volume = stack.wait_bound("c");
    let handle = stack.field(&format!("pv/{volume}"), "{.spec.csi.volumeHandle}");
    let unique = format!("kubernetes.io/csi/block.cleat.dev^{handle}");
    until("the ghost is told of its volume", || ghost.is_told() == unique);
    ghost.says_in_use(&unique);
    stack.kubectl(&["delete", "pod/p", "--force", "--grace-period=0", "--ignore-not-found"]);
    stack.apply(&pod("heir", "node-1", "c"));
    wait_event(stack, "heir", "Volume is already exclusively attached to one node");
    assert_eq!(attachments(stack), ["ghost"], "the heir has to wait");
    unique
}

fn clean_up(machine: &Machine, stack: &Stack) {
    stack.delete("pod/heir");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_dead_nodes_volume_moves_when_the_node_is_marked_out_of_service() {
    let machine = Machine::new();
    let stack = Stack::start(&machine, 1);
    let ghost = Ghost::new(&machine, &stack);
    orphan(&stack, &ghost);
    stack.kubectl(&["taint", "node", "ghost", "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"]);
    stack.wait_mounted("heir");
    assert_eq!(attachments(&stack), ["node-1"]);
    assert_eq!(ghost.is_told(), "");
    clean_up(&machine, &stack);
}

#[test]
fn a_deleted_nodes_volume_stays_until_the_node_is_back_without_it() {
    let machine = Machine::new();
    let stack = Stack::start(&machine, 1);
    let ghost = Ghost::new(&machine, &stack);
    orphan(&stack, &ghost);
    stack.delete("node/ghost");
    // Another volume's whole way shows that the controller has seen it.
    stack.apply(&(claim("d") + &pod("q", "node-1", "d")));
    stack.wait_mounted("q");
    assert!(attachments(&stack).contains(&"ghost".to_owned()), "its machine may still write");
    ghost.register();
    stack.wait_mounted("heir");
    stack.delete("pod/q");
    stack.delete("pvc/d");
    clean_up(&machine, &stack);
}

#[test]
fn volumes_follow_their_pods_through_kills_of_driver_and_stack() {
    const NODES: u16 = 3;
    const VOLUMES: usize = 3;
    let machine = Machine::new();
    let mut stack = Stack::start(&machine, NODES);
    let name = |v: usize| format!("c{v}");
    let node = |v: usize, round: usize| format!("node-{}", (v + round) % usize::from(NODES) + 1);
    for v in 0..VOLUMES {
        stack.apply(&claim(&name(v)));
    }
    for round in 0..4 {
        let pods: String = (0..VOLUMES).map(|v| pod(&format!("p{v}-{round}"), &node(v, round), &name(v))).collect();
        stack.apply(&pods);
        match round {
            // In the middle of it.
            1 => kill_controller_driver(&machine),
            2 => {
                stack.kill();
                stack = Stack::start(&machine, NODES);
            }
            _ => {}
        }
        for v in 0..VOLUMES {
            let current = format!("p{v}-{round}");
            stack.wait_mounted(&current);
            let volume = stack.wait_bound(&name(v));
            let file = stack.mount(&current, &node(v, round), &volume).join("rounds");
            let before = fs::read_to_string(&file).unwrap_or_default();
            assert_eq!(before, "x".repeat(round), "volume {v} brought everything along");
            fs::write(&file, before + "x").unwrap();
        }
        assert_eq!(attachments(&stack).len(), VOLUMES);
        for v in 0..VOLUMES {
            stack.delete(&format!("pod/p{v}-{round}"));
        }
    }
    (0..VOLUMES).for_each(|v| stack.delete(&format!("pvc/{}", name(v))));
    stack.wait_no_volumes();
    assert_eq!(attachments(&stack), [] as [&str; 0]);
    machine.assert_nothing_left();
}

fn kill_controller_driver(machine: &Machine) {
    let pool = machine.data().join("pool");
    let serves = |line: &str| {
        line.contains("\0driver\0") && line.contains("\0controller\0") && line.contains(&*pool.to_string_lossy())
    };
    for process in fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
        let line = fs::read_to_string(process.path().join("cmdline")).unwrap_or_default();
        if let (true, Some(pid)) = (serves(&line), process.file_name().to_str().and_then(|n| n.parse().ok())) {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
    }
}
