//! FlexVolumes in the whole stack: a driver that is a script is called when a pod has found its node, and again when the pod is
//! gone, whatever died in between.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use support::Machine;
use support::stack::{Stack, dying_at, pod};

const UNIQUE: &str = "flexvolume-acme/disk/flex";

/// Keeps one file for each volume on a node, and refuses a second node.
const SCRIPT: &str = r#"#!/bin/sh
state=STATE
echo "$1 $2 $3" >> "$state/log"
name() { echo "$1" | sed 's/.*"kubernetes.io\/pvOrVolumeName":"\([^"]*\)".*/\1/'; }
case $1 in
init) echo '{"status":"Success"}' ;;
attach)
    volume=$(name "$2")
    for other in "$state/$volume@"*; do
        if [ -e "$other" ] && [ "$other" != "$state/$volume@$3" ]; then
            echo "$volume is on $other" >> "$state/twice"
        fi
    done
    echo > "$state/$volume@$3"
    echo "{\"status\":\"Success\",\"device\":\"/dev/acme/$volume\"}" ;;
detach) rm -f "$state/$2@$3"; echo '{"status":"Success"}' ;;
*) echo '{"status":"Not supported"}'; exit 1 ;;
esac
"#;

/// Where the stack looks for drivers unless it is told otherwise.
fn install(machine: &Machine) {
    let home = machine.data().join("flexvolume/acme~disk");
    fs::create_dir_all(&home).unwrap();
    fs::create_dir_all(machine.scratch("state")).unwrap();
    let script = SCRIPT.replace("STATE", &machine.scratch("state").display().to_string());
    fs::write(home.join("disk"), script).unwrap();
    fs::set_permissions(home.join("disk"), fs::Permissions::from_mode(0o755)).unwrap();
}

/// What the driver has attached where, as `volume@node`.
fn attached(machine: &Machine) -> Vec<String> {
    let files = fs::read_dir(machine.scratch("state")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    files.filter(|name| name.contains('@')).collect()
}

fn assert_one_place(machine: &Machine) {
    let twice = fs::read_to_string(machine.scratch("state/twice")).unwrap_or_default();
    assert_eq!(twice, "", "attached twice");
}

/// A volume and its claim, bound by name.
const VOLUME: &str = "apiVersion: v1
kind: PersistentVolume
metadata:
  name: flex
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ''
  flexVolume: {driver: acme/disk, options: {lun: '7'}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: c
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: ''
  volumeName: flex
  resources:
    requests: {storage: 1Gi}
---
";

const TOLD: &str = "{.status.volumesAttached[*].name} {.status.volumesAttached[*].devicePath}";

fn moves_between_nodes(point: &str) {
    let machine = Machine::new();
    install(&machine);
    let mut step = dying_at(&machine, point);
    let told = format!("{UNIQUE} /dev/acme/flex");
    let forget = |s: &Stack, pod: &str| s.holds(&["delete", pod, "--force", "--grace-period=0", "--ignore-not-found"]);

    step("volume", &|s| s.applied(VOLUME));
    step("bound", &|s| s.try_wait_field("pvc/c", "{.status.phase}", "Bound"));
    step("first pod", &|s| s.applied(&pod("first", "node-1", "c")));
    step("attached", &|s| s.try_wait_field("node/node-1", TOLD, &told));
    assert_eq!(attached(&machine), ["flex@node-1"], "{point}");
    step("first pod gone", &|s| forget(s, "pod/first"));
    step("second pod", &|s| s.applied(&pod("second", "node-2", "c")));
    step("attached elsewhere", &|s| s.try_wait_field("node/node-2", TOLD, &told));
    assert_eq!(attached(&machine), ["flex@node-2"], "{point}");
    step("second pod gone", &|s| forget(s, "pod/second"));
    step("not told any more", &|s| s.try_wait_field("node/node-2", TOLD, " "));
    step("no attachment is left", &|s| {
        let names = || s.try_kubectl(&["get", "volumeattachments", "-o", "name"], None);
        for name in String::from_utf8(names().stdout).unwrap().lines() {
            s.try_kubectl(&["wait", name, "--for=delete", "--timeout=60s"], None);
        }
        let left = names();
        left.status.success() && left.stdout.is_empty()
    });
    assert!(machine.scratch("crashed").exists(), "{point} was never reached");
    assert_eq!(attached(&machine), [] as [&str; 0], "{point}");
    assert_one_place(&machine);
}

#[test]
fn a_flex_volume_moves_with_its_pod_through_a_kill_at_every_boundary() {
    let points = [
        "attach:requested",
        "callout:held",
        "callout:attached",
        "attach:reported",
        "attach:unreported",
        "attach:detach-requested",
        "callout:detached",
    ];
    points.into_iter().for_each(moves_between_nodes);
}

#[test]
fn an_attach_that_was_running_when_the_stack_died_is_finished_or_undone() {
    let machine = Machine::new();
    install(&machine);
    let go = machine.scratch("go");
    assert!(std::process::Command::new("mkfifo").arg(&go).status().unwrap().success());
    let script = machine.data().join("flexvolume/acme~disk/disk");
    let slow = format!("attach)\n    echo > {0}.begun; cat {0} > /dev/null", go.display());
    fs::write(&script, fs::read_to_string(&script).unwrap().replace("attach)", &slow)).unwrap();

    let stack = Stack::start(&machine, 2);
    stack.apply(VOLUME);
    stack.wait_bound("c");
    stack.apply(&pod("p", "node-1", "c"));
    let begun = machine.scratch("go.begun");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !begun.exists() {
        assert!(std::time::Instant::now() < deadline, "the driver is not called");
        std::thread::yield_now();
    }
    stack.kill();

    // The call goes on without the stack; nobody wants the volume any more, and the next stack must know of it.
    let stack = Stack::start(&machine, 2);
    stack.kubectl(&["delete", "pod/p", "--force", "--grace-period=0"]);
    let errors = "{.items[*].status.detachError.message}";
    let form = format!("jsonpath={errors}");
    let busy = "an earlier call for this volume and node is still running";
    stack.wait_output(&["get", "volumeattachments", "-o", &form], |said| said == busy);
    assert_eq!(attached(&machine), [] as [&str; 0]);
    fs::write(&go, "").unwrap();
    stack.wait_output(&["get", "volumeattachments", "-o", "name"], str::is_empty);
    let log = fs::read_to_string(machine.scratch("state/log")).unwrap();
    assert_eq!(log.lines().last().unwrap(), "detach flex node-1");
    assert_eq!(attached(&machine), [] as [&str; 0], "what the forgotten call attached is detached");
}

#[test]
fn a_pods_own_volume_is_attached_and_a_missing_driver_is_named() {
    let machine = Machine::new();
    let elsewhere = machine.scratch("elsewhere");
    let stack = Stack::start_arguments(&machine, 1, None, &["--flex-volume-plugin-dir", elsewhere.to_str().unwrap()]);
    stack.apply(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  nodeName: node-1\n  containers:\n  - name: main\n    image: \
         busybox\n  volumes:\n  - name: own\n    flexVolume:\n      driver: acme/disk\n",
    );
    let events = ["get", "events", "--field-selector=involvedObject.name=p", "-o", "jsonpath={.items[*].message}"];
    stack.wait_output(&events, |said| said.contains("there is no FlexVolume driver acme/disk in"));
    install(&machine);
    fs::create_dir_all(&elsewhere).unwrap();
    fs::rename(machine.data().join("flexvolume/acme~disk"), elsewhere.join("acme~disk")).unwrap();
    stack.wait_field("node/node-1", TOLD, "flexvolume-acme/disk/own /dev/acme/own");
    stack.wait_output(&events, |said| said.contains("AttachVolume.Attach succeeded for volume \"own\""));
    stack.kubectl(&["delete", "pod/p", "--force", "--grace-period=0"]);
    stack.wait_output(&["get", "volumeattachments", "-o", "name"], str::is_empty);
    assert_eq!(attached(&machine), [] as [&str; 0]);
}
