//! FlexVolumes in the whole stack, with a shell script as the driver: `attach` is called when a pod is on its node, `detach`
//! when the pod is deleted, also if the stack crashed in between.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use cleat_testing::Machine;
use cleat_testing::stack::{Stack, pod, stack_crashing_at};

const CLEAT: &str = env!("CARGO_BIN_EXE_cleat");

const UNIQUE_NAME: &str = "flexvolume-acme/disk/flex";

/// A FlexVolume driver. It keeps one file `volume@node` for each attached volume, and writes to the file `twice` if a volume is
/// attached to a second node.
const DRIVER_SCRIPT: &str = r#"#!/bin/sh
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

/// Installs the driver in the default directory.
fn install_driver(machine: &Machine) {
    let home = machine.data().join("flexvolume/acme~disk");
    fs::create_dir_all(&home).unwrap();
    fs::create_dir_all(machine.scratch("state")).unwrap();
    let script = DRIVER_SCRIPT.replace("STATE", &machine.scratch("state").display().to_string());
    fs::write(home.join("disk"), script).unwrap();
    fs::set_permissions(home.join("disk"), fs::Permissions::from_mode(0o755)).unwrap();
}

/// The volumes that the driver has attached, as `volume@node`.
fn attached(machine: &Machine) -> Vec<String> {
    let files = fs::read_dir(machine.scratch("state")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    files.filter(|name| name.contains('@')).collect()
}

fn assert_never_attached_twice(machine: &Machine) {
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

const VOLUMES_ATTACHED: &str = "{.status.volumesAttached[*].name} {.status.volumesAttached[*].devicePath}";

fn moves_between_nodes(point: &str) {
    let machine = Machine::new(CLEAT);
    install_driver(&machine);
    let mut step = stack_crashing_at(&machine, point);
    let reported = format!("{UNIQUE_NAME} /dev/acme/flex");
    let force_delete = |s: &Stack, pod: &str| {
        s.kubectl_succeeds(&["delete", pod, "--force", "--grace-period=0", "--ignore-not-found"])
    };

    step("volume", &|s| s.try_apply(VOLUME));
    step("bound", &|s| s.try_wait_field("pvc/c", "{.status.phase}", "Bound"));
    step("first pod", &|s| s.try_apply(&pod("first", "node-1", "c")));
    step("attached", &|s| s.try_wait_field("node/node-1", VOLUMES_ATTACHED, &reported));
    assert_eq!(attached(&machine), ["flex@node-1"], "{point}");
    step("first pod gone", &|s| force_delete(s, "pod/first"));
    step("second pod", &|s| s.try_apply(&pod("second", "node-2", "c")));
    step("attached elsewhere", &|s| s.try_wait_field("node/node-2", VOLUMES_ATTACHED, &reported));
    assert_eq!(attached(&machine), ["flex@node-2"], "{point}");
    step("second pod gone", &|s| force_delete(s, "pod/second"));
    step("not reported any more", &|s| s.try_wait_field("node/node-2", VOLUMES_ATTACHED, " "));
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
    assert_never_attached_twice(&machine);
}

#[test]
fn a_flex_volume_moves_with_its_pod_through_a_kill_at_every_crash_point() {
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
    let machine = Machine::new(CLEAT);
    install_driver(&machine);
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

    // The driver's call goes on without the stack. The pod is deleted, so the restarted stack must detach what the call attaches.
    let stack = Stack::start(&machine, 2);
    stack.kubectl(&["delete", "pod/p", "--force", "--grace-period=0"]);
    let detach_errors = "{.items[*].status.detachError.message}";
    let form = format!("jsonpath={detach_errors}");
    let busy = "an earlier call for this volume and node is still running";
    stack.wait_output(&["get", "volumeattachments", "-o", &form], |output| output == busy);
    assert_eq!(attached(&machine), [] as [&str; 0]);
    fs::write(&go, "").unwrap();
    stack.wait_output(&["get", "volumeattachments", "-o", "name"], str::is_empty);
    let log = fs::read_to_string(machine.scratch("state/log")).unwrap();
    assert_eq!(log.lines().last().unwrap(), "detach flex node-1");
    assert_eq!(attached(&machine), [] as [&str; 0], "what the interrupted call attached is detached");
}

#[test]
fn an_inline_volume_is_attached_and_a_missing_driver_is_reported() {
    let machine = Machine::new(CLEAT);
    let elsewhere = machine.scratch("elsewhere");
    let stack =
        Stack::start_with_arguments(&machine, 1, None, &["--flex-volume-plugin-dir", elsewhere.to_str().unwrap()]);
    stack.apply(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\nspec:\n  nodeName: node-1\n  containers:\n  - name: main\n    image: \
         busybox\n  volumes:\n  - name: own\n    flexVolume:\n      driver: acme/disk\n",
    );
    let events = ["get", "events", "--field-selector=involvedObject.name=p", "-o", "jsonpath={.items[*].message}"];
    stack.wait_output(&events, |output| output.contains("there is no FlexVolume driver acme/disk in"));
    install_driver(&machine);
    fs::create_dir_all(&elsewhere).unwrap();
    fs::rename(machine.data().join("flexvolume/acme~disk"), elsewhere.join("acme~disk")).unwrap();
    stack.wait_field("node/node-1", VOLUMES_ATTACHED, "flexvolume-acme/disk/own /dev/acme/own");
    stack.wait_output(&events, |output| output.contains("AttachVolume.Attach succeeded for volume \"own\""));
    stack.kubectl(&["delete", "pod/p", "--force", "--grace-period=0"]);
    stack.wait_output(&["get", "volumeattachments", "-o", "name"], str::is_empty);
    assert_eq!(attached(&machine), [] as [&str; 0]);
}
