//! Scheduling with real kubectl and real volumes: claims that wait for their first consumer, the reasons that unschedulable pods
//! report, and the changes that make them schedulable.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::fs;
use std::path::Path;

use cleat_testing::Machine;
use cleat_testing::stack::{Stack, stack_crashing_at};

const CLEAT: &str = env!("CARGO_BIN_EXE_cleat");

const SELECTED_NODE: &str = "{.metadata.annotations.volume\\.kubernetes\\.io/selected-node}";

fn example(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name)).unwrap()
}

fn claim(name: &str, class: &str, mode: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  storageClassName: {class}\n  \
         accessModes: [{mode}]\n  resources: {{requests: {{storage: 64Mi}}}}\n---\n"
    )
}

/// A pod without a node name. `more` are further fields of its spec, as YAML.
fn pod(name: &str, claims: &[&str], more: &str) -> String {
    let volumes = claims.iter().map(|c| format!("{{name: v-{c}, persistentVolumeClaim: {{claimName: {c}}}}}"));
    let mounts = claims.iter().map(|c| format!("{{name: v-{c}, mountPath: /{c}}}"));
    let list = |items: Vec<String>| items.join(", ");
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n  - {{name: main, image: busybox, \
         volumeMounts: [{}]}}\n  volumes: [{}]\n{more}\n---\n",
        list(mounts.collect()),
        list(volumes.collect()),
    )
}

fn wait_scheduled(stack: &Stack, pod: &str) -> String {
    stack.wait(&format!("pod/{pod}"), "condition=PodScheduled");
    stack.field(&format!("pod/{pod}"), "{.spec.nodeName}")
}

/// Waits until the pod's condition and an event report that it is unschedulable, with exactly this message.
fn wait_unschedulable(stack: &Stack, pod: &str, message: &str) {
    stack.wait_field(&format!("pod/{pod}"), "{.status.conditions[?(@.type==\"PodScheduled\")].message}", message);
    let reason = "{.status.conditions[?(@.type==\"PodScheduled\")].reason}";
    assert_eq!(stack.field(&format!("pod/{pod}"), reason), "Unschedulable");
    // Events are written after the condition.
    let selector = format!("involvedObject.name={pod},reason=FailedScheduling");
    let get_events = ["get", "events", "--field-selector", &selector, "-o", "jsonpath={.items[*].message}"];
    while !stack.kubectl(&get_events).contains(message) {}
}

/// Waits until both nodes have registered their driver.
fn wait_nodes(stack: &Stack) {
    for node in ["node-1", "node-2"] {
        let found = (0..600).any(|_| {
            let get_drivers = ["get", "csinode", node, "-o", "jsonpath={.spec.drivers[*].name}"];
            let output = stack.try_kubectl(&get_drivers, None);
            output.status.success() && output.stdout == b"block.cleat.dev"
        });
        assert!(found, "{node} does not register its driver");
    }
}

#[test]
fn a_waiting_claims_volume_is_created_for_the_node_of_its_pod() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    let (only_claim, only_pod) =
        example("waiting.yaml").split_once("---\n").map(|(c, p)| (c.to_owned(), p.to_owned())).unwrap();
    stack.apply(&only_claim);
    let selector = "involvedObject.name=waiting-claim,reason=WaitForFirstConsumer";
    while stack.kubectl(&["get", "events", "--field-selector", selector, "-o", "name"]).is_empty() {}
    assert_eq!(stack.names("pv"), [] as [&str; 0], "no volume is created before there is a pod");
    stack.apply(&only_pod);
    let volume = stack.wait_bound("waiting-claim");
    stack.wait_mounted("waiting-app");
    let node = stack.field("pod/waiting-app", "{.spec.nodeName}");
    assert_eq!(stack.field("pvc/waiting-claim", SELECTED_NODE), node);
    fs::write(stack.mount("waiting-app", &node, &volume).join("f"), "here").unwrap();
    stack.delete("pod/waiting-app");
    stack.delete("pvc/waiting-claim");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
    assert!(stack.stop().success());
    let log = fs::read_to_string(machine.scratch("audit.log")).unwrap();
    let refused: Vec<&str> = log.lines().filter(|line| line.contains(r#""code":403"#)).collect();
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn an_unschedulable_pod_reports_why_and_is_scheduled_when_the_cause_is_gone() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    stack.kubectl(&["cordon", "node-1"]);
    stack.kubectl(&["cordon", "node-2"]);
    stack.apply(&pod("cordoned", &[], ""));
    wait_unschedulable(&stack, "cordoned", "0/2 nodes are available: 2 node(s) were unschedulable.");
    stack.kubectl(&["uncordon", "node-2"]);
    assert_eq!(wait_scheduled(&stack, "cordoned"), "node-2");
    stack.kubectl(&["uncordon", "node-1"]);

    stack.apply(&pod("picky", &[], "  nodeSelector: {disk: ssd}"));
    let affinity = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.";
    wait_unschedulable(&stack, "picky", affinity);
    stack.kubectl(&["label", "node/node-1", "disk=ssd"]);
    assert_eq!(wait_scheduled(&stack, "picky"), "node-1");

    stack.kubectl(&["taint", "nodes", "node-1", "node-2", "gpu=yes:NoSchedule"]);
    stack.apply(&pod("intolerant", &[], ""));
    wait_unschedulable(&stack, "intolerant", "0/2 nodes are available: 2 node(s) had untolerated taint(s).");
    stack.kubectl(&["taint", "nodes", "node-2", "gpu-"]);
    assert_eq!(wait_scheduled(&stack, "intolerant"), "node-2");
    stack.kubectl(&["taint", "nodes", "node-1", "gpu-"]);

    // Each pod requests all CPUs of a node.
    let cpu = stack.field("node/node-1", "{.status.allocatable.cpu}");
    let large = |name: &str| {
        let container =
            format!("{{name: main, image: busybox, resources: {{requests: {{cpu: {cpu:?}}}}}, volumeMounts");
        pod(name, &[], "").replace("{name: main, image: busybox, volumeMounts", &container)
    };
    stack.apply(&(large("large-1") + &large("large-2")));
    wait_scheduled(&stack, "large-1");
    wait_scheduled(&stack, "large-2");
    stack.apply(&large("large-3"));
    wait_unschedulable(&stack, "large-3", "0/2 nodes are available: 2 Insufficient cpu.");
    let freed = stack.field("pod/large-1", "{.spec.nodeName}");
    stack.delete("pod/large-1");
    assert_eq!(wait_scheduled(&stack, "large-3"), freed);

    stack.apply(&pod("early", &["late"], ""));
    wait_unschedulable(&stack, "early", "0/2 nodes are available: persistentvolumeclaim \"late\" not found.");
    stack.apply(&claim("late", "cleat-block", "ReadWriteOnce"));
    stack.wait_mounted("early");
}

#[test]
fn a_read_write_once_pod_claim_is_used_by_one_pod_after_the_other() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    stack.apply(&(claim("mine", "cleat-block", "ReadWriteOncePod") + &pod("first", &["mine"], "")));
    stack.wait_mounted("first");
    stack.apply(&pod("second", &["mine"], ""));
    let in_use = "0/2 nodes are available: 2 node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod \
                 access mode already in-use by another pod.";
    wait_unschedulable(&stack, "second", in_use);
    stack.delete("pod/first");
    stack.wait_mounted("second");
}

/// The CSINode limits how many volumes of a driver a node can have.
#[test]
fn a_node_gets_at_most_as_many_volumes_as_its_csinode_allows() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    // A node that consists of objects only, with another driver: no agent changes its CSINode.
    stack.apply(&limited_node());
    // No agent renews its lease, so the pods must tolerate its taints.
    let limited = "  nodeSelector: {only: limited}\n  tolerations: [{operator: Exists}]";
    for name in ["a", "b", "c"] {
        stack.apply(&format!(
            "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
             capacity: {{storage: 1Gi}}\n  storageClassName: few\n  claimRef: {{namespace: default, name: {name}}}\n  csi: \
             {{driver: few.example.com, volumeHandle: handle-{name}}}\n---\n"
        ));
        stack.apply(&claim(name, "few", "ReadWriteOnce"));
        stack.wait_bound(name);
    }
    stack.apply(&pod("one", &["a"], limited));
    assert_eq!(wait_scheduled(&stack, "one"), "limited");
    stack.apply(&pod("same", &["a"], limited));
    assert_eq!(wait_scheduled(&stack, "same"), "limited", "a volume counts once");
    stack.apply(&pod("two", &["b"], limited));
    assert_eq!(wait_scheduled(&stack, "two"), "limited");
    stack.apply(&pod("three", &["c"], limited));
    let full = "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) exceed max volume count.";
    wait_unschedulable(&stack, "three", full);
    // Raise the limit.
    let more = r#"[{"op": "replace", "path": "/spec/drivers/0/allocatable/count", "value": 3}]"#;
    stack.kubectl(&["patch", "csinode", "limited", "--type=json", "-p", more]);
    assert_eq!(wait_scheduled(&stack, "three"), "limited");
}

fn limited_node() -> String {
    "apiVersion: v1\nkind: Node\nmetadata:\n  name: limited\n  labels: {only: limited}\nstatus:\n  allocatable: {cpu: '4', memory: \
     8Gi, pods: '110'}\n  conditions: [{type: Ready, status: 'True'}]\n---\napiVersion: storage.k8s.io/v1\nkind: CSINode\nmetadata: \
     {name: limited}\nspec:\n  drivers: [{name: few.example.com, nodeID: limited, topologyKeys: [], allocatable: {count: 2}}]\n\
     ---\napiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: few}\nprovisioner: kubernetes.io/no-provisioner\n---\n"
        .to_owned()
}

/// Zone labels on PersistentVolumes, which older clusters use instead of node affinity.
#[test]
fn a_pod_is_scheduled_to_the_zone_of_its_volumes_label() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    let zoned = |name: &str, label: &str| {
        format!(
            "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}, labels: {{{label}}}}}\nspec:\n  accessModes: \
             [ReadWriteOnce]\n  capacity: {{storage: 1Gi}}\n  storageClassName: ''\n  claimRef: {{namespace: default, name: {name}}}\n  \
             nfs: {{server: example.com, path: /}}\n---\n"
        )
    };
    stack.kubectl(&["label", "node/node-1", "topology.kubernetes.io/zone=east"]);
    stack.kubectl(&["label", "node/node-2", "topology.kubernetes.io/zone=west"]);
    for (name, label) in [
        ("west", "topology.kubernetes.io/zone: west"),
        ("set", "failure-domain.beta.kubernetes.io/zone: north__east"),
        ("north", "topology.kubernetes.io/zone: north"),
    ] {
        stack.apply(&(zoned(name, label) + &claim(name, "''", "ReadWriteOnce")));
        stack.wait_bound(name);
    }
    stack.apply(&(pod("p", &["west"], "") + &pod("q", &["set"], "") + &pod("r", &["north"], "")));
    assert_eq!(wait_scheduled(&stack, "p"), "node-2");
    assert_eq!(wait_scheduled(&stack, "q"), "node-1");
    wait_unschedulable(&stack, "r", "0/2 nodes are available: 2 node(s) had no available volume zone.");
    stack.kubectl(&["label", "--overwrite", "node/node-2", "topology.kubernetes.io/zone=north"]);
    assert_eq!(wait_scheduled(&stack, "r"), "node-2");
}

/// A pod with scheduling gates has the condition SchedulingGated from its creation, and is scheduled when the last gate is removed.
#[test]
fn a_gated_pod_waits_for_its_gates() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    stack.apply(&pod("held", &[], "  schedulingGates: [{name: example.com/a}, {name: example.com/b}]"));
    let scheduled = "{.status.conditions[?(@.type==\"PodScheduled\")]['status','reason','message']}";
    let gated = "False SchedulingGated Scheduling is blocked due to non-empty scheduling gates";
    assert_eq!(stack.field("pod/held", scheduled), gated);
    let remove_gate = r#"[{"op": "remove", "path": "/spec/schedulingGates/0"}]"#;
    stack.kubectl(&["patch", "pod/held", "--type=json", "-p", remove_gate]);
    // When another pod is scheduled, the scheduler has processed the change.
    stack.apply(&pod("free", &[], ""));
    wait_scheduled(&stack, "free");
    assert_eq!(stack.field("pod/held", scheduled), gated);
    stack.kubectl(&["patch", "pod/held", "--type=json", "-p", remove_gate]);
    wait_scheduled(&stack, "held");
}

/// No provisioner serves the class. The test removes the selected node, as a provisioner does that has no capacity for it.
#[test]
fn another_node_is_selected_when_the_provisioner_rejects_one() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    stack.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: absent}\nprovisioner: absent.example.com\n\
         volumeBindingMode: WaitForFirstConsumer\n---\n",
    );
    stack.apply(&(claim("c", "absent", "ReadWriteOnce") + &pod("p", &["c"], "")));
    stack.wait_field(
        "pvc/c",
        "{.metadata.annotations.volume\\.kubernetes\\.io/storage-provisioner}",
        "absent.example.com",
    );
    let first = stack.field("pvc/c", SELECTED_NODE);
    stack.kubectl(&["annotate", "pvc/c", "volume.kubernetes.io/selected-node-"]);
    let other = if first == "node-1" { "node-2" } else { "node-1" };
    stack.wait_field("pvc/c", SELECTED_NODE, other);
    let selector = "involvedObject.name=p,reason=FailedScheduling";
    let get_events = ["get", "events", "--field-selector", selector, "-o", "jsonpath={.items[*].message}"];
    while !stack.kubectl(&get_events).contains("binding volumes: provisioning failed for PVC \"c\"") {}
    assert_eq!(stack.field("pod/p", "{.spec.nodeName}"), "", "the pod is not scheduled before its volume exists");
}

/// An existing local volume is bound instead of a new one being provisioned, and determines the pod's node.
#[test]
fn a_pod_is_scheduled_to_the_node_of_its_existing_volume() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    stack.apply(&local_volume_on_node_2());
    stack.apply(&(claim("c", "by-hand", "ReadWriteOnce") + &pod("p", &["c"], "")));
    assert_eq!(wait_scheduled(&stack, "p"), "node-2");
    assert_eq!(stack.field("pvc/c", "{.spec.volumeName}"), "there");
    stack.apply(&(claim("d", "by-hand", "ReadWriteOnce") + &pod("q", &["d"], "")));
    wait_unschedulable(
        &stack,
        "q",
        "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind.",
    );
}

fn local_volume_on_node_2() -> String {
    "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: by-hand}\n\
     provisioner: kubernetes.io/no-provisioner\nvolumeBindingMode: WaitForFirstConsumer\n---\n\
     apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: there}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
     capacity: {storage: 1Gi}\n  storageClassName: by-hand\n  local: {path: /nonexistent}\n  nodeAffinity:\n    required:\n      \
     nodeSelectorTerms:\n      - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [node-2]}]\n---\n"
        .to_owned()
}

/// The stack is killed after each of the scheduler's writes and restarted: the decision that was written is kept.
#[test]
fn a_scheduling_decision_survives_a_kill_at_every_crash_point() {
    for point in ["schedule:volume-reserved", "schedule:node-selected", "schedule:pod-bound"] {
        let machine = Machine::new(CLEAT);
        let mut step = stack_crashing_at(&machine, point);
        step("volume", &|s| s.try_apply(&local_volume_on_node_2()));
        step("claims", &|s| {
            s.try_apply(
                &(claim("made", "cleat-block-wait", "ReadWriteOnce") + &claim("found", "by-hand", "ReadWriteOnce")),
            )
        });
        step("pods", &|s| s.try_apply(&(pod("p", &["made"], "") + &pod("q", &["found"], ""))));
        step("placed", &|s| s.kubectl_succeeds(&["wait", "pod/q", "--for=condition=PodScheduled"]));
        step("mounted", &|s| s.kubectl_succeeds(&["wait", "pod/p", "--for=condition=cleat.dev/VolumesMounted"]));
        step("as chosen", &|s| {
            let field = |what: &str, path: &str| {
                let output = s.try_kubectl(&["get", what, "-o", &format!("jsonpath={path}")], None);
                output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
            };
            let Some((node, selected)) = field("pod/p", "{.spec.nodeName}").zip(field("pvc/made", SELECTED_NODE))
            else {
                return false;
            };
            assert_eq!(node, selected, "{point}");
            let Some((node, volume)) = field("pod/q", "{.spec.nodeName}").zip(field("pvc/found", "{.spec.volumeName}"))
            else {
                return false;
            };
            assert_eq!((node.as_str(), volume.as_str()), ("node-2", "there"), "{point}");
            true
        });
        assert!(machine.scratch("crashed").exists(), "{point} was never reached");
        step("gone", &|s| s.kubectl_succeeds(&["delete", "pod/p", "pod/q", "pvc/made", "--ignore-not-found"]));
    }
}

/// The pod is deleted, its node unmounts its volumes, they are detached, and the pod is gone.
#[test]
fn a_pod_is_evicted_from_a_node_whose_taint_it_does_not_tolerate() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    stack.apply(&(claim("c", "cleat-block", "ReadWriteOnce") + &pod("p", &["c"], "")));
    stack.wait_mounted("p");
    let node = stack.field("pod/p", "{.spec.nodeName}");
    stack.kubectl(&["taint", "nodes", &node, "broken=yes:NoExecute"]);
    // The result is ignored: some versions of kubectl fail for an object that no longer exists.
    stack.try_kubectl(&["wait", "pod/p", "--for=delete", "--timeout=60s"], None);
    assert_eq!(stack.names("pods"), [] as [&str; 0]);
    assert_eq!(machine.mounts(), []);
    stack.apply(&pod("q", &["c"], ""));
    stack.wait_mounted("q");
    assert_ne!(stack.field("pod/q", "{.spec.nodeName}"), node);
    stack.kubectl(&["cordon", &node]);
    let keys = "{.spec.taints[?(@.key==\"node.kubernetes.io/unschedulable\")].effect}";
    stack.wait_field(&format!("node/{node}"), keys, "NoSchedule");
}

/// The scheduler respects published capacity if the CSIDriver has storageCapacity set.
#[test]
fn a_claim_without_enough_free_capacity_waits() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    wait_nodes(&stack);
    let respect_capacity = r#"{"spec": {"storageCapacity": true}}"#;
    stack.kubectl(&["patch", "csidriver", "block.cleat.dev", "--type=merge", "-p", respect_capacity]);
    let large = claim("large", "cleat-block-wait", "ReadWriteOnce").replace("64Mi", "1Pi");
    stack.apply(&(large + &pod("greedy", &["large"], "")));
    wait_unschedulable(&stack, "greedy", "0/2 nodes are available: 2 node(s) did not have enough free storage.");
    stack.apply(&(claim("small", "cleat-block-wait", "ReadWriteOnce") + &pod("modest", &["small"], "")));
    stack.wait_mounted("modest");
    assert_eq!(
        stack.field("pvc/large", SELECTED_NODE),
        "",
        "no node is selected for a claim that cannot be provisioned"
    );
}
