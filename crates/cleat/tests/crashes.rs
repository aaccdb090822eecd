//! The round trip of a claim with a SIGKILL of the stack or the driver at every crash point, followed by a restart.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::fs;
use std::time::{Duration, Instant};

use cleat_testing::Machine;
use cleat_testing::stack::{EXTRA_CLASS, Stack, claim, clone_of, pod, stack_crashing_at};

const CLEAT: &str = env!("CARGO_BIN_EXE_cleat");

/// The crash points of the stack's components, in the order of the round trip. A point that is never reached fails the test.
const STACK_CRASH_POINTS: &[&str] = &[
    "store:committed",
    "bind:provisioner-named",
    "provision:claim-held",
    "provision:volume-created",
    "provision:volume-recorded",
    "bind:volume-bound",
    "bind:claim-pointed",
    "attach:requested",
    "publish:volume-held",
    "publish:attachment-held",
    "publish:published",
    "publish:confirmed",
    "attach:reported",
    "node:in-use-reported",
    "node:stage-recorded",
    "node:staged",
    "node:published",
    "node:mounted-reported",
    "node:unpublished",
    "node:unstaged",
    "node:in-use-dropped",
    "attach:unreported",
    "attach:detach-requested",
    "publish:unpublished",
    "publish:let-go",
    "publish:volume-let-go",
    "provision:volume-deleted",
    "provision:record-released",
];

const DRIVER_CRASH_POINTS: &[&str] = &[
    "driver:image-begun",
    "driver:recorded",
    "driver:image-created",
    "driver:attached",
    "driver:loop-attached",
    "driver:format-recorded",
    "driver:formatted",
    "driver:staged",
    "driver:published",
    "driver:unpublished",
    "driver:unstaged-mount",
    "driver:detached",
    "driver:deleting",
    "driver:image-removed",
];

#[test]
fn the_round_trip_survives_a_kill_of_the_stack_at_every_crash_point() {
    selected(STACK_CRASH_POINTS).for_each(round_trip);
}

#[test]
fn the_round_trip_survives_a_kill_of_the_driver_at_every_crash_point() {
    selected(DRIVER_CRASH_POINTS).for_each(round_trip);
}

/// All points, or the one that `CLEAT_TEST_POINT` names.
fn selected(points: &'static [&'static str]) -> impl Iterator<Item = &'static str> {
    let only = std::env::var("CLEAT_TEST_POINT").ok();
    points.iter().copied().filter(move |point| only.as_deref().is_none_or(|only| only == *point))
}

fn round_trip(point: &str) {
    let machine = Machine::new(CLEAT);
    let mut step = stack_crashing_at(&machine, point);
    let mounted = "--for=condition=cleat.dev/VolumesMounted";

    step("claim", &|s| s.try_apply(&claim("c")));
    step("bound", &|s| s.try_wait_field("pvc/c", "{.status.phase}", "Bound"));
    step("first pod", &|s| s.try_apply(&pod("first", "node-1", "c")));
    step("mounted", &|s| s.kubectl_succeeds(&["wait", "pod/first", mounted]));
    step("written", &|s| {
        // If the stack died, the step fails and is repeated.
        let Some(target) = s.try_mount("first", "node-1", "c") else { return false };
        fs::write(target.join("f"), "kept").unwrap();
        true
    });
    step("first deleted", &|s| s.kubectl_succeeds(&["delete", "pod/first", "--ignore-not-found"]));
    step("second pod", &|s| s.try_apply(&pod("second", "node-2", "c")));
    step("mounted elsewhere", &|s| s.kubectl_succeeds(&["wait", "pod/second", mounted]));
    step("read", &|s| {
        let Some(target) = s.try_mount("second", "node-2", "c") else { return false };
        assert_eq!(fs::read_to_string(target.join("f")).unwrap(), "kept", "{point}");
        true
    });
    step("second deleted", &|s| s.kubectl_succeeds(&["delete", "pod/second", "--ignore-not-found"]));
    step("claim deleted", &|s| s.kubectl_succeeds(&["delete", "pvc/c", "--ignore-not-found"]));
    step("volume gone", &|s| s.try_wait_no_volumes());
    assert!(machine.scratch("crashed").exists(), "{point} was never reached");
    machine.assert_nothing_left();
}

/// The crash points of cloning and of publishing capacity, which the round trip does not reach.
#[test]
fn cloning_and_published_capacity_survive_a_kill_of_the_stack_at_every_crash_point() {
    for point in selected(&["provision:source-held", "capacity:written", "capacity:deleted"]) {
        let machine = Machine::new(CLEAT);
        let mut step = stack_crashing_at(&machine, point);
        let classes =
            ["get", "csistoragecapacities", "-n", "kube-system", "-o", "jsonpath={.items[*].storageClassName}"];
        let has_capacity = |s: &Stack, class: &str| {
            let output = s.try_kubectl(&classes, None);
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).split(' ').any(|c| c == class))
        };
        let wait_capacity = |s: &Stack, expected: bool| {
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                match has_capacity(s, "extra") {
                    Some(found) if found == expected => return true,
                    Some(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
                    Some(_) | None => return false,
                }
            }
        };
        step("class", &|s| s.try_apply(EXTRA_CLASS));
        step("capacity published", &|s| wait_capacity(s, true));
        step("source", &|s| s.try_apply(&claim("src")));
        step("clone", &|s| s.try_apply(&clone_of("copy", "src")));
        step("bound", &|s| s.try_wait_field("pvc/copy", "{.status.phase}", "Bound"));
        step("source deleted", &|s| s.kubectl_succeeds(&["delete", "pvc/src", "--ignore-not-found"]));
        step("clone deleted", &|s| s.kubectl_succeeds(&["delete", "pvc/copy", "--ignore-not-found"]));
        step("class deleted", &|s| s.kubectl_succeeds(&["delete", "storageclass/extra", "--ignore-not-found"]));
        step("capacity deleted", &|s| wait_capacity(s, false));
        step("volumes gone", &|s| s.try_wait_no_volumes());
        assert!(machine.scratch("crashed").exists(), "{point} was never reached");
        machine.assert_nothing_left();
    }
}

/// Deletes the claim while no provisioner runs that could finish or undo what was started before the crash, and then restarts
/// the whole stack.
fn delete_claim_after_crash_at(point: &str) {
    let machine = Machine::new(CLEAT);
    let mut stack = Stack::start_crashing_at(&machine, 1, Some(point));
    assert!(stack.try_apply(&claim("c")) || stack.is_dead(), "{point}");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !stack.is_dead() {
        assert!(Instant::now() < deadline, "{point} was never reached");
    }
    let stack = Stack::start_with_arguments(&machine, 1, None, &["--without=provisioner"]);
    stack.kubectl(&["delete", "pvc/c", "--wait=false"]);
    stack.kill();
    let stack = Stack::start(&machine, 1);
    stack.kubectl(&["wait", "pvc/c", "--for=delete", "--timeout=60s"]);
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_claim_deleted_right_after_a_crash_leaves_no_volume() {
    let points =
        ["bind:provisioner-named", "provision:claim-held", "provision:volume-created", "provision:volume-recorded"];
    points.into_iter().for_each(delete_claim_after_crash_at);
}

#[test]
fn a_claim_deleted_during_create_volume_leaves_no_volume() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    wait_for_drivers(&machine, 2);
    stack.apply(&claim("first"));
    stack.wait_bound("first");
    let driver = controller_pid(&machine);
    send_signal(driver, rustix::process::Signal::STOP);
    stack.apply(&claim("c"));
    stack.wait_field("pvc/c", "{.metadata.finalizers[1]}", "cleat.dev/provisioning");
    stack.kubectl(&["delete", "pvc/c", "--wait=false"]);
    // The PVC protection finalizer is removed, the provisioner's is not: CreateVolume may still be running.
    stack.wait_field("pvc/c", "{.metadata.finalizers}", "[\"cleat.dev/provisioning\"]");
    send_signal(driver, rustix::process::Signal::CONT);
    stack.kubectl(&["wait", "pvc/c", "--for=delete", "--timeout=60s"]);
    stack.delete("pvc/first");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_restart_does_not_change_existing_mounts() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    stack.apply(&(claim("c") + &pod("p", "node-1", "c")));
    let volume = stack.wait_bound("c");
    stack.wait_mounted("p");
    let before = machine.mounts();
    assert_eq!(before.len(), 2, "one stage, one publish: {before:?}");
    let open = fs::File::create(stack.mount("p", "node-1", &volume).join("held-open")).unwrap();
    stack.kill();
    assert_eq!(machine.mounts(), before, "mounts remain without the stack");

    let stack = Stack::start(&machine, 1);
    // When a pod created after the restart is mounted, the agent has processed all older pods.
    stack.apply(&pod("q", "node-1", "c"));
    stack.wait_mounted("q");
    stack.wait_mounted("p");
    let after = machine.mounts();
    assert!(before.iter().all(|mount| after.contains(mount)), "{before:?} then {after:?}");
    drop(open);
    stack.delete("pod/p");
    stack.delete("pod/q");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_clean_stop_stops_the_drivers_and_keeps_the_mounts() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 1);
    stack.apply(&(claim("c") + &pod("p", "node-1", "c")));
    stack.wait_bound("c");
    stack.wait_mounted("p");
    let before = machine.mounts();
    assert!(stack.stop().success());
    assert_eq!(machine.mounts(), before);
    assert_eq!(driver_count(&machine), 0, "no driver outlives the stack");

    let stack = Stack::start(&machine, 1);
    wait_for_drivers(&machine, 2);
    stack.delete("pod/p");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn the_drivers_of_a_killed_stack_exit() {
    let machine = Machine::new(CLEAT);
    let stack = Stack::start(&machine, 2);
    // One controller service, and one node service per node.
    wait_for_drivers(&machine, 3);
    stack.kill();
    wait_for_drivers(&machine, 0);
}

fn wait_for_drivers(machine: &Machine, count: usize) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while driver_count(machine) != count {
        assert!(Instant::now() < deadline, "{} drivers instead of {count}", driver_count(machine));
        std::thread::yield_now();
    }
}

/// The driver processes of this machine's pool: process id and command line.
fn driver_processes(machine: &Machine) -> Vec<(i32, String)> {
    let pool = machine.data().join("pool");
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let numbered = processes.filter_map(|p| Some((p.file_name().to_str()?.parse().ok()?, p.path().join("cmdline"))));
    let lines = numbered.filter_map(|(pid, file)| Some((pid, fs::read_to_string(file).ok()?)));
    lines.filter(|(_, line)| line.contains("\0driver\0") && line.contains(&*pool.to_string_lossy())).collect()
}

fn driver_count(machine: &Machine) -> usize {
    driver_processes(machine).len()
}

/// The process id of the driver's controller service.
fn controller_pid(machine: &Machine) -> i32 {
    let found = driver_processes(machine).into_iter().find(|(_, line)| line.contains("\0--mode\0controller\0"));
    found.expect("the controller's driver runs").0
}

fn send_signal(process: i32, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(process).unwrap(), signal).unwrap();
}
