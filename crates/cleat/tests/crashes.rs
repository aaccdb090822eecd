//! The round trip with the stack killed at every boundary between two effects, and started again.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

mod support;

use std::fs;
use std::time::{Duration, Instant};

use support::Machine;
use support::stack::{EXTRA, Stack, claim, clone_of, dying_at, pod};

/// The points of each component, as its module documents them. A point that is never reached fails the test.
const STACK: &[&str] = &[
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

const DRIVER: &[&str] = &[
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
fn the_round_trip_survives_a_kill_of_the_stack_at_every_boundary() {
    chosen(STACK).for_each(round_trip);
}

#[test]
fn the_round_trip_survives_a_kill_of_the_driver_at_every_boundary() {
    chosen(DRIVER).for_each(round_trip);
}

/// All points, or the one that `CLEAT_TEST_POINT` names.
fn chosen(points: &'static [&'static str]) -> impl Iterator<Item = &'static str> {
    let only = std::env::var("CLEAT_TEST_POINT").ok();
    points.iter().copied().filter(move |point| only.as_deref().is_none_or(|only| only == *point))
}

fn round_trip(point: &str) {
    let machine = Machine::new();
    let mut step = dying_at(&machine, point);
    let mounted = "--for=condition=cleat.dev/VolumesMounted";

    step("claim", &|s| s.applied(&claim("c")));
    step("bound", &|s| s.try_wait_field("pvc/c", "{.status.phase}", "Bound"));
    step("first pod", &|s| s.applied(&pod("first", "node-1", "c")));
    step("mounted", &|s| s.holds(&["wait", "pod/first", mounted]));
    step("written", &|s| {
        // The stack may die at any moment; then the question is asked again.
        let Some(target) = s.try_mount("first", "node-1", "c") else { return false };
        fs::write(target.join("f"), "kept").unwrap();
        true
    });
    step("first deleted", &|s| s.holds(&["delete", "pod/first", "--ignore-not-found"]));
    step("second pod", &|s| s.applied(&pod("second", "node-2", "c")));
    step("mounted elsewhere", &|s| s.holds(&["wait", "pod/second", mounted]));
    step("read", &|s| {
        let Some(target) = s.try_mount("second", "node-2", "c") else { return false };
        assert_eq!(fs::read_to_string(target.join("f")).unwrap(), "kept", "{point}");
        true
    });
    step("second deleted", &|s| s.holds(&["delete", "pod/second", "--ignore-not-found"]));
    step("claim deleted", &|s| s.holds(&["delete", "pvc/c", "--ignore-not-found"]));
    step("volume gone", &|s| s.try_wait_no_volumes());
    assert!(machine.scratch("crashed").exists(), "{point} was never reached");
    machine.assert_nothing_left();
}

/// What a clone and the published room go through besides.
#[test]
fn clones_and_published_room_survive_a_kill_of_the_stack_at_every_boundary() {
    for point in chosen(&["provision:source-held", "capacity:written", "capacity:deleted"]) {
        let machine = Machine::new();
        let mut step = dying_at(&machine, point);
        let classes =
            ["get", "csistoragecapacities", "-n", "kube-system", "-o", "jsonpath={.items[*].storageClassName}"];
        let told = |s: &Stack, class: &str| {
            let output = s.try_kubectl(&classes, None);
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).split(' ').any(|c| c == class))
        };
        let until_told = |s: &Stack, there: bool| {
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                match told(s, "extra") {
                    Some(now) if now == there => return true,
                    Some(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
                    Some(_) | None => return false,
                }
            }
        };
        step("class", &|s| s.applied(EXTRA));
        step("its room is told", &|s| until_told(s, true));
        step("source", &|s| s.applied(&claim("src")));
        step("clone", &|s| s.applied(&clone_of("copy", "src")));
        step("bound", &|s| s.try_wait_field("pvc/copy", "{.status.phase}", "Bound"));
        step("source deleted", &|s| s.holds(&["delete", "pvc/src", "--ignore-not-found"]));
        step("clone deleted", &|s| s.holds(&["delete", "pvc/copy", "--ignore-not-found"]));
        step("class deleted", &|s| s.holds(&["delete", "storageclass/extra", "--ignore-not-found"]));
        step("nothing is told of it", &|s| until_told(s, false));
        step("volumes gone", &|s| s.try_wait_no_volumes());
        assert!(machine.scratch("crashed").exists(), "{point} was never reached");
        machine.assert_nothing_left();
    }
}

/// The claim is deleted while nobody can finish what was begun for it; then everything runs again.
fn deleted_after(point: &str) {
    let machine = Machine::new();
    let mut stack = Stack::start_with(&machine, 1, Some(point));
    assert!(stack.applied(&claim("c")) || stack.is_dead(), "{point}");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !stack.is_dead() {
        assert!(Instant::now() < deadline, "{point} was never reached");
    }
    let stack = Stack::start_arguments(&machine, 1, None, &["--without=provisioner"]);
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
    points.into_iter().for_each(deleted_after);
}

#[test]
fn a_claim_deleted_while_its_volume_is_made_leaves_none() {
    let machine = Machine::new();
    let stack = Stack::start(&machine, 1);
    wait_for_drivers(&machine, 2);
    stack.apply(&claim("first"));
    stack.wait_bound("first");
    let driver = controller_of(&machine);
    signal(driver, rustix::process::Signal::STOP);
    stack.apply(&claim("c"));
    stack.wait_field("pvc/c", "{.metadata.finalizers[1]}", "cleat.dev/provisioning");
    stack.kubectl(&["delete", "pvc/c", "--wait=false"]);
    // Its protector lets it go, the provisioner does not yet: CreateVolume may be under way.
    stack.wait_field("pvc/c", "{.metadata.finalizers}", "[\"cleat.dev/provisioning\"]");
    signal(driver, rustix::process::Signal::CONT);
    stack.kubectl(&["wait", "pvc/c", "--for=delete", "--timeout=60s"]);
    stack.delete("pvc/first");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_restart_does_not_disturb_what_is_mounted() {
    let machine = Machine::new();
    let stack = Stack::start(&machine, 1);
    stack.apply(&(claim("c") + &pod("p", "node-1", "c")));
    let volume = stack.wait_bound("c");
    stack.wait_mounted("p");
    let before = machine.mounts();
    assert_eq!(before.len(), 2, "one stage, one publish: {before:?}");
    let open = fs::File::create(stack.mount("p", "node-1", &volume).join("held-open")).unwrap();
    stack.kill();
    assert_eq!(machine.mounts(), before, "mounts live without the stack");

    let stack = Stack::start(&machine, 1);
    // A pod made after the restart shows that the agent has looked at everything.
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
fn a_clean_stop_ends_the_drivers_and_leaves_the_mounts() {
    let machine = Machine::new();
    let stack = Stack::start(&machine, 1);
    stack.apply(&(claim("c") + &pod("p", "node-1", "c")));
    stack.wait_bound("c");
    stack.wait_mounted("p");
    let before = machine.mounts();
    assert!(stack.stop().success());
    assert_eq!(machine.mounts(), before);
    assert_eq!(drivers_of(&machine), 0, "no driver outlives the stack");

    let stack = Stack::start(&machine, 1);
    wait_for_drivers(&machine, 2);
    stack.delete("pod/p");
    stack.delete("pvc/c");
    stack.wait_no_volumes();
    machine.assert_nothing_left();
}

#[test]
fn a_killed_stack_takes_its_drivers_with_it() {
    let machine = Machine::new();
    let stack = Stack::start(&machine, 2);
    // One controller, and one for each node.
    wait_for_drivers(&machine, 3);
    stack.kill();
    wait_for_drivers(&machine, 0);
}

fn wait_for_drivers(machine: &Machine, count: usize) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while drivers_of(machine) != count {
        assert!(Instant::now() < deadline, "{} drivers instead of {count}", drivers_of(machine));
        std::thread::yield_now();
    }
}

/// Processes that serve this machine's pool, each with its command line.
fn drivers(machine: &Machine) -> Vec<(i32, String)> {
    let pool = machine.data().join("pool");
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let numbered = processes.filter_map(|p| Some((p.file_name().to_str()?.parse().ok()?, p.path().join("cmdline"))));
    let lines = numbered.filter_map(|(pid, file)| Some((pid, fs::read_to_string(file).ok()?)));
    lines.filter(|(_, line)| line.contains("\0driver\0") && line.contains(&*pool.to_string_lossy())).collect()
}

fn drivers_of(machine: &Machine) -> usize {
    drivers(machine).len()
}

/// The process that makes volumes.
fn controller_of(machine: &Machine) -> i32 {
    let found = drivers(machine).into_iter().find(|(_, line)| line.contains("\0--mode\0controller\0"));
    found.expect("the controller's driver runs").0
}

fn signal(process: i32, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(process).unwrap(), signal).unwrap();
}
