//! A claim from its creation to its deletion, with real kubectl, loop devices and mounts.

use std::fs;
use std::path::Path;

use cleat_testing::Machine;
use cleat_testing::stack::{Stack, claim, pod};
use cleat_testing::wait::block_until;

const CLEAT: &str = env!("CARGO_BIN_EXE_cleat");

fn example(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name))
        .expect("the examples are part of the repository")
}

/// The examples as a user applies them. The pod names no node and is scheduled to the only one.
#[test]
fn the_examples_are_mounted_and_deleted_without_leftovers() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    stack.apply(&example("claim.yaml"));
    stack.apply(&example("pod.yaml"));
    let claim_name = stack.names("pvc").pop().unwrap().replace("persistentvolumeclaim/", "");
    let pod_name = stack.names("pods").pop().unwrap().replace("pod/", "");
    let volume = stack.wait_bound(&claim_name);
    stack.wait_mounted(&pod_name);
    assert_eq!(stack.field(&format!("pod/{pod_name}"), "{.spec.nodeName}"), "node-1");
    assert_eq!(stack.field(&format!("pvc/{claim_name}"), "{.status.capacity.storage}"), "5Gi");

    let mount = stack.mount(&pod_name, "node-1", &volume);
    fs::write(mount.join("greeting"), "hello").unwrap();
    let table = stack.kubectl(&["get", "pvc,pv,volumeattachments,csinodes,storageclasses,nodes,pods"]);
    assert!(table.contains("Bound") && table.contains(&volume), "{table}");

    stack.delete(&format!("pod/{pod_name}"));
    stack.delete(&format!("pvc/{claim_name}"));
    stack.wait_no_volumes();
    assert_eq!(stack.names("volumeattachments"), [] as [&str; 0]);
    machine.assert_nothing_left();
    assert!(stack.stop().success());
    // No component made a request that its role does not allow.
    let log = fs::read_to_string(machine.scratch("audit.log")).unwrap();
    assert!(log.contains("system:cleat:binder") && log.contains("system:node:node-1"), "the components are in the log");
    let refused: Vec<&str> = log.lines().filter(|line| line.contains(r#""code":403"#)).collect();
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

/// One endpoint serves the metrics of all components of the process.
#[test]
fn the_stack_serves_the_metrics_of_all_components() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    stack.apply(&(claim("c") + &pod("p", "node-1", "c")));
    stack.wait_bound("c");
    stack.wait_mounted("p");
    let metrics = stack.kubectl(&["get", "--raw", "/metrics"]);
    let value = |series: &str| -> f64 {
        let line = metrics.lines().find(|line| line.starts_with(series));
        let line = line.unwrap_or_else(|| panic!("{series} is missing in\n{metrics}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    for queue in ["bind", "protect", "ephemeral", "provision", "delete", "capacity", "attach", "publish", "collect"] {
        assert!(value(&format!("workqueue_depth{{name=\"{queue}\"}}")) >= 0.0, "{queue}");
    }
    assert!(value("workqueue_reconciles_total{name=\"bind\",result=\"done\"}") >= 1.0);
    assert!(value("workqueue_queue_duration_seconds_count{name=\"bind\"}") >= 1.0);
    assert!(value("csi_operations_seconds_count{method_name=\"CreateVolume\"") >= 1.0);
    assert!(value("csi_operations_seconds_count{method_name=\"NodePublishVolume\"") >= 1.0);
    stack.delete("pod/p");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
}

#[test]
fn a_file_written_on_one_node_is_read_on_the_other() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    stack.apply(&(claim("c") + &pod("first", "node-1", "c")));
    let volume = stack.wait_bound("c");
    stack.wait_mounted("first");
    fs::write(stack.mount("first", "node-1", &volume).join("f"), "kept").unwrap();
    stack.delete("pod/first");
    stack.apply(&pod("second", "node-2", "c"));
    stack.wait_mounted("second");
    assert_eq!(fs::read_to_string(stack.mount("second", "node-2", &volume).join("f")).unwrap(), "kept");
    stack.delete("pod/second");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn two_pods_on_one_node_share_one_staged_volume() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    stack.apply(&(claim("c") + &pod("a", "node-1", "c") + &pod("b", "node-1", "c")));
    let volume = stack.wait_bound("c");
    stack.wait_mounted("a");
    stack.wait_mounted("b");
    let staged = || machine.mounts().iter().filter(|(_, path)| path.ends_with("globalmount")).count();
    let published = || machine.mounts().iter().filter(|(_, path)| path.ends_with("mount")).count();
    assert_eq!((staged(), published(), machine.loop_files().len()), (1, 2, 1));

    fs::write(stack.mount("a", "node-1", &volume).join("f"), "shared").unwrap();
    let mount_of_b = stack.mount("b", "node-1", &volume);
    stack.delete("pod/a");
    assert_eq!(fs::read_to_string(mount_of_b.join("f")).unwrap(), "shared", "the other pod's mount is unchanged");
    assert_eq!((staged(), published()), (1, 1));
    stack.delete("pod/b");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_second_node_is_refused_while_the_volume_is_attached_to_the_first() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    stack.apply(&(claim("c") + &pod("holder", "node-1", "c")));
    stack.wait_bound("c");
    stack.wait_mounted("holder");
    stack.apply(&pod("waiter", "node-2", "c"));
    // When the event exists, the controller has processed both pods.
    let get_events =
        ["get", "events", "--field-selector", "involvedObject.name=waiter,reason=FailedAttachVolume", "-o", "name"];
    while stack.kubectl(&get_events).is_empty() {}
    let nodes = stack.field("volumeattachments", "{.items[*].spec.nodeName}");
    assert_eq!(nodes, "node-1", "one attachment, to the first node");
    assert!(!machine.mounts().iter().any(|(_, path)| path.to_string_lossy().contains("node-2")));

    stack.delete("pod/holder");
    stack.wait_mounted("waiter");
    assert_eq!(stack.field("volumeattachments", "{.items[*].spec.nodeName}"), "node-2");
}

#[test]
fn an_existing_volume_is_bound_and_keeps_its_data() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    let class = "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: keep}\n\
                 provisioner: block.cleat.dev\nreclaimPolicy: Retain\n\
                 parameters: {csi.storage.k8s.io/fstype: ext4}\n---\n";
    let retained = claim("old").replace("spec:\n", "spec:\n  storageClassName: keep\n");
    stack.apply(&(class.to_owned() + &retained + &pod("p", "node-1", "old")));
    let volume = stack.wait_bound("old");
    stack.wait_mounted("p");
    fs::write(stack.mount("p", "node-1", &volume).join("f"), "survivor").unwrap();
    let handle = stack.field(&format!("pv/{volume}"), "{.spec.csi.volumeHandle}");
    stack.delete("pod/p");
    stack.delete("pvc/old");
    stack.wait_field(&format!("pv/{volume}"), "{.status.phase}", "Released");
    stack.delete(&format!("pv/{volume}"));
    assert!(!machine.pool_files().is_empty(), "Retain keeps the image");

    let static_volume = format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: by-hand}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         capacity: {{storage: 64Mi}}\n  storageClassName: manual\n  persistentVolumeReclaimPolicy: Delete\n  \
         csi: {{driver: block.cleat.dev, volumeHandle: {handle}, fsType: ext4}}\n---\n"
    );
    let claim_of_class = claim("new").replace("spec:\n", "spec:\n  storageClassName: manual\n");
    stack.apply(&(static_volume + &claim_of_class + &pod("q", "node-1", "new")));
    assert_eq!(stack.wait_bound("new"), "by-hand");
    stack.wait_mounted("q");
    assert_eq!(fs::read_to_string(stack.mount("q", "node-1", "by-hand").join("f")).unwrap(), "survivor");
    stack.delete("pod/q");
    stack.delete("pvc/new");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_claim_in_use_outlives_its_deletion_until_the_pod_is_gone() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    stack.apply(&(claim("c") + &pod("p", "node-1", "c")));
    stack.wait_bound("c");
    stack.wait_mounted("p");
    stack.kubectl(&["delete", "pvc/c", "--wait=false"]);
    assert!(!stack.field("pvc/c", "{.metadata.deletionTimestamp}").is_empty());
    assert_eq!(stack.field("pvc/c", "{.status.phase}"), "Bound");
    stack.delete("pod/p");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn the_demo_passes_and_leaves_nothing() {
    let machine = Machine::new(CLEAT);
    let output = machine.cleat().arg("demo").env("TMPDIR", machine.scratch("")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("All of it held"), "{text}");
    let left = fs::read_dir(machine.scratch("")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(left.filter(|name| name.starts_with("cleat-")).collect::<Vec<_>>(), [] as [&str; 0]);
}

/// The deletion of a Node object does not mean that the machine is off: it may still write to its volumes.
#[test]
fn a_deleted_node_object_does_not_detach_mounted_volumes() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    stack.apply(&(claim("c") + &pod("holder", "node-1", "c")));
    let volume = stack.wait_bound("c");
    stack.wait_mounted("holder");
    let attachment = stack.field("volumeattachments", "{.items[0].metadata.uid}");
    let mounts = machine.mounts();
    stack.apply(&pod("waiter", "node-2", "c"));
    stack.kubectl(&["delete", "node/node-1", "--wait=false"]);
    // The agent runs, so it registers the node and the driver again.
    let ids = "{.metadata.annotations.csi\\.volume\\.kubernetes\\.io/nodeid}";
    // While the Node does not exist, kubectl ends its watch; then it is started again.
    let again = (0..100).any(|_| stack.try_wait_field("node/node-1", ids, "{\"block.cleat.dev\":\"node-1\"}"));
    assert!(again, "the node registers again");
    let unique_name = format!("kubernetes.io/csi/block.cleat.dev^{volume}");
    stack.wait_field("node/node-1", "{.status.volumesAttached[0].name}", &unique_name);
    assert_eq!(stack.field("volumeattachments", "{.items[*].metadata.uid}"), attachment, "never detached");
    assert_eq!(machine.mounts(), mounts);
    stack.delete("pod/holder");
    stack.wait_mounted("waiter");
}

#[test]
fn a_stop_while_the_stack_starts_is_a_clean_stop() {
    for reached in ["store.redb", "kubeconfig", "pool"] {
        let machine = Machine::new(CLEAT);
        let stack = Stack::spawn(&machine, 2, None, &[]);
        // The file is created during the start, so the signal arrives before or just when the stack is ready.
        let file = machine.data().join(reached);
        block_until(&format!("{reached} exists"), || file.exists());
        let status = stack.stop();
        assert!(status.success(), "stopped when {reached} existed: {status}");
        machine.assert_nothing_left();
        assert!(Stack::start(&machine, 2).stop().success(), "the interrupted start is completed");
    }
}
