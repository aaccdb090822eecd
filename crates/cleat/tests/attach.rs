//! Attachments among several nodes, with the real block driver: volumes move with their pods, survive crashes of drivers and
//! stack, and are detached from a dead node only when the node is marked out of service or registers again without them.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::fs;
use std::process::{Command, Stdio};

use cleat_testing::Machine;
use cleat_testing::stack::{Stack, claim, pod};
use cleat_testing::wait::block_until;

const CLEAT: &str = env!("CARGO_BIN_EXE_cleat");

/// A node that consists of objects only: no agent mounts volumes there, and the test writes its `volumesInUse`.
struct AgentlessNode<'s> {
    stack: &'s Stack<'s>,
}

impl<'s> AgentlessNode<'s> {
    fn new(machine: &Machine, stack: &'s Stack<'s>) -> Self {
        announce_in_pool(machine);
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

    /// Writes the status that the node's agent would write while it uses the volume.
    fn report_in_use(&self, unique_name: &str) {
        let list = format!(r#"[{{"name":"{unique_name}","devicePath":""}}]"#);
        let status = format!(
            r#"{{"apiVersion":"v1","kind":"Node","metadata":{{"name":"ghost","annotations":
            {{"volumes.kubernetes.io/controller-managed-attach-detach":"true"}}}},
            "status":{{"volumesInUse":["{unique_name}"],"volumesAttached":{list}}}}}"#
        );
        let put = ["replace", "--raw", "/api/v1/nodes/ghost/status", "-f", "-"];
        let output = self.stack.try_kubectl(&put, Some(&status));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn volumes_attached(&self) -> String {
        self.stack.field("node/ghost", "{.status.volumesAttached[*].name}")
    }
}

/// Announces the node in the pool by running its driver once. The announcement remains when the driver exits.
fn announce_in_pool(machine: &Machine) {
    let socket = machine.scratch("ghost.sock");
    let mut driver = Command::new(CLEAT)
        .args(["driver", "block", "--mode", "node", "--node-id", "ghost", "--pool"])
        .arg(machine.data().join("pool"))
        .arg("--endpoint")
        .arg(&socket)
        .env("CLEAT_LOG", "error")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    block_until("the driver listens", || socket.exists());
    driver.kill().unwrap();
    driver.wait().unwrap();
}

fn attachments(stack: &Stack) -> Vec<String> {
    let nodes = stack.kubectl(&["get", "volumeattachments", "-o", "jsonpath={.items[*].spec.nodeName}"]);
    nodes.split_whitespace().map(ToOwned::to_owned).collect()
}

/// Waits until an event of the pod contains `part`.
fn wait_event(stack: &Stack, pod: &str, part: &str) {
    let selector = format!("--field-selector=involvedObject.name={pod}");
    let messages = || stack.kubectl(&["get", "events", &selector, "-o", "jsonpath={.items[*].message}"]);
    block_until(&format!("an event of {pod} contains {part:?}"), || messages().contains(part));
}

/// Creates a volume in use on the agentless node, deletes its pod by force, and creates a second pod on a real node, which then
/// waits for the volume. Returns the unique volume name.
fn create_orphaned_volume(stack: &Stack, ghost: &AgentlessNode) -> String {
    stack.apply(&(claim("c") + &pod("p", "ghost", "c")));
    let volume = stack.wait_bound("c");
    let handle = stack.field(&format!("pv/{volume}"), "{.spec.csi.volumeHandle}");
    let unique_name = format!("kubernetes.io/csi/block.cleat.dev^{handle}");
    block_until("the volume is in the node's volumesAttached", || ghost.volumes_attached() == unique_name);
    ghost.report_in_use(&unique_name);
    stack.kubectl(&["delete", "pod/p", "--force", "--grace-period=0", "--ignore-not-found"]);
    stack.apply(&pod("heir", "node-1", "c"));
    wait_event(stack, "heir", "Volume is already exclusively attached to one node");
    assert_eq!(attachments(stack), ["ghost"], "the second pod must wait");
    unique_name
}

fn clean_up(machine: &Machine, stack: &Stack) {
    stack.delete("pod/heir");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_dead_nodes_volume_moves_when_the_node_is_marked_out_of_service() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    let ghost = AgentlessNode::new(&machine, &stack);
    create_orphaned_volume(&stack, &ghost);
    stack.kubectl(&["taint", "node", "ghost", "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"]);
    stack.wait_mounted("heir");
    assert_eq!(attachments(&stack), ["node-1"]);
    assert_eq!(ghost.volumes_attached(), "");
    clean_up(&machine, &stack);
}

#[test]
fn a_deleted_nodes_volume_stays_until_the_node_is_back_without_it() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    let ghost = AgentlessNode::new(&machine, &stack);
    create_orphaned_volume(&stack, &ghost);
    stack.delete("node/ghost");
    // When another volume has been attached, the controller has processed the deletion.
    stack.apply(&(claim("d") + &pod("q", "node-1", "d")));
    stack.wait_mounted("q");
    assert!(attachments(&stack).contains(&"ghost".to_owned()), "the machine may still write to the volume");
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
    let machine = Machine::new(CLEAT);
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
            // While the volumes are being attached.
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
            assert_eq!(before, "x".repeat(round), "volume {v} has the data of all rounds");
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
