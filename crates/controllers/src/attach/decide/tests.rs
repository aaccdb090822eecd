//! Table tests of the attach/detach decisions.

mod simulation;

use std::time::Duration;

use cleat_api::Key;
use k8s_openapi::jiff::Timestamp;

use super::*;
use AttachmentState::{Attached, Detaching, Unconfirmed};

fn user(pod: &str, node: &str) -> VolumeUser {
    VolumeUser {
        created: None,
        pod: Key::namespaced("ns", pod),
        node: node.to_owned(),
        source: AttachmentSource::PersistentVolume("pv".to_owned()),
    }
}

fn on(node: &str, state: AttachmentState) -> AttachmentSnapshot {
    AttachmentSnapshot { node: node.to_owned(), state, error: None, age: Duration::from_secs(1) }
}

fn snapshot(users: &[&VolumeUser], attachments: &[AttachmentSnapshot]) -> AttachVolumeSnapshot {
    AttachVolumeSnapshot {
        unique_name: "v".to_owned(),
        allows_many_nodes: false,
        needs_attach: true,
        users: users.iter().map(|user| (*user).clone()).collect(),
        attachments: attachments.to_vec(),
    }
}

fn wait(node: &str, reason: AttachWait) -> AttachDecision {
    AttachDecision::Wait { node: node.to_owned(), reason }
}

fn attached_elsewhere(node: &str, pods: &[&str]) -> AttachWait {
    AttachWait::AttachedElsewhere {
        node: node.to_owned(),
        pods: pods.iter().map(|pod| Key::namespaced("ns", *pod)).collect(),
    }
}

#[test]
fn a_volume_is_attached_where_its_pod_is_and_on_one_node_only() {
    let attach = |node: &str| AttachDecision::Attach {
        node: node.to_owned(),
        source: AttachmentSource::PersistentVolume("pv".to_owned()),
    };
    let (a, b) = (user("p", "a"), user("q", "b"));
    let failing = AttachmentSnapshot { error: Some("no".to_owned()), ..on("a", Unconfirmed) };
    let slow = AttachmentSnapshot { age: ATTACH_TIMEOUT, ..on("a", Unconfirmed) };
    let early = VolumeUser { created: Timestamp::from_second(1).ok(), ..user("z", "b") };
    let late = VolumeUser { created: Timestamp::from_second(2).ok(), ..user("p", "a") };
    let soon = AttachWait::ForDriver(Duration::from_secs(119));
    for (case, snapshot, want) in [
        ("no pod needs it", snapshot(&[], &[]), vec![]),
        ("attached, and no pod needs it any more", snapshot(&[], &[on("a", Attached)]), vec![]),
        ("needed and not attached", snapshot(&[&a], &[]), vec![attach("a")]),
        ("attached and needed", snapshot(&[&a], &[on("a", Attached)]), vec![]),
        ("the driver has not answered yet", snapshot(&[&a], &[on("a", Unconfirmed)]), vec![wait("a", soon)]),
        ("the driver has not answered in time", snapshot(&[&a], &[slow]), vec![wait("a", AttachWait::DriverTimedOut)]),
        ("the driver failed", snapshot(&[&a], &[failing]), vec![wait("a", AttachWait::DriverFailed("no".to_owned()))]),
        (
            "needed again while it is being detached",
            snapshot(&[&a], &[on("a", Detaching)]),
            vec![wait("a", AttachWait::ForDetach)],
        ),
        (
            "a second node must wait",
            snapshot(&[&a, &b], &[on("a", Attached)]),
            vec![wait("b", attached_elsewhere("a", &["p"]))],
        ),
        (
            "an attachment that no pod needs blocks other nodes",
            snapshot(&[&b], &[on("a", Attached)]),
            vec![wait("b", attached_elsewhere("a", &[]))],
        ),
        (
            "an unconfirmed attachment blocks other nodes",
            snapshot(&[&b], &[on("a", Unconfirmed)]),
            vec![wait("b", attached_elsewhere("a", &[]))],
        ),
        (
            "an attachment being deleted blocks other nodes",
            snapshot(&[&b], &[on("a", Detaching)]),
            vec![wait("b", attached_elsewhere("a", &[]))],
        ),
        (
            "pods on two nodes: the older pod's node gets it",
            snapshot(&[&late, &early], &[]),
            vec![wait("a", attached_elsewhere("b", &["z"])), attach("b")],
        ),
        (
            "a volume that allows many nodes",
            AttachVolumeSnapshot { allows_many_nodes: true, ..snapshot(&[&a, &b], &[on("a", Attached)]) },
            vec![attach("b")],
        ),
        (
            "the driver needs no attachments",
            AttachVolumeSnapshot { needs_attach: false, ..snapshot(&[&a], &[]) },
            vec![],
        ),
    ] {
        assert_eq!(volume(&snapshot), want, "{case}");
    }
}

const FORCE_AFTER: Duration = Duration::from_secs(360);
const NEEDED: Need = Need::Needed;
const UNNEEDED: Need = Need::UnneededFor(Duration::from_secs(60));
const LONG_UNNEEDED: Need = Need::UnneededFor(FORCE_AFTER);

fn attachment(state: AttachmentState, need: Need, usage: VolumeUsage) -> NodeAttachment {
    NodeAttachment {
        name: "va".to_owned(),
        unique_name: "v".to_owned(),
        device_path: String::new(),
        state,
        need,
        usage,
    }
}

fn reported() -> Option<Vec<ReportedVolume>> {
    Some(vec![ReportedVolume { unique_name: "v".to_owned(), device_path: String::new() }])
}

fn detach(condition: DetachCondition) -> Vec<Detach> {
    vec![Detach { attachment: "va".to_owned(), unique_name: "v".to_owned(), condition }]
}

#[test]
fn a_node_reports_the_volumes_it_may_use_and_the_others_are_detached() {
    use VolumeUsage::{InUse, NotInUse, Unknown};
    let a = attachment;
    let nothing = Some(Vec::new());
    let keep = Vec::new();
    let if_not_in_use = || detach(DetachCondition::IfNotInUse);
    let (on, off) = (false, true);
    for (case, reported, is_out_of_service, volume, report, expected) in [
        ("attached and needed", nothing.clone(), on, a(Attached, NEEDED, NotInUse), reported(), keep.clone()),
        ("reported already", reported(), on, a(Attached, NEEDED, InUse), None, keep.clone()),
        ("unconfirmed", nothing.clone(), on, a(Unconfirmed, NEEDED, NotInUse), None, keep.clone()),
        ("unneeded but in use", reported(), on, a(Attached, UNNEEDED, InUse), None, keep.clone()),
        ("unneeded and not in use", reported(), on, a(Attached, UNNEEDED, NotInUse), nothing.clone(), if_not_in_use()),
        (
            "never confirmed, and unneeded",
            nothing.clone(),
            on,
            a(Unconfirmed, UNNEEDED, NotInUse),
            None,
            if_not_in_use(),
        ),
        ("never confirmed, but in use", nothing.clone(), on, a(Unconfirmed, UNNEEDED, InUse), None, keep.clone()),
        ("being detached", reported(), on, a(Detaching, NEEDED, NotInUse), nothing.clone(), keep.clone()),
        ("being detached, and unneeded", Some(Vec::new()), on, a(Detaching, UNNEEDED, NotInUse), None, keep.clone()),
        (
            "in use on a node that is out of service",
            reported(),
            off,
            a(Attached, UNNEEDED, InUse),
            nothing,
            detach(DetachCondition::NodeOutOfService),
        ),
        ("needed on a node that is out of service", reported(), off, a(Attached, NEEDED, InUse), None, keep.clone()),
        ("the Node is deleted, not in use", None, on, a(Attached, UNNEEDED, NotInUse), None, if_not_in_use()),
        ("the Node is deleted, in use", None, on, a(Attached, UNNEEDED, InUse), None, keep.clone()),
        ("the Node is deleted, usage unknown", None, on, a(Attached, UNNEEDED, Unknown), None, keep),
    ] {
        let snapshot = AttachNodeSnapshot {
            name: "n".to_owned(),
            is_ready: reported.is_some(),
            reported,
            is_managed: true,
            is_out_of_service,
            attachments: vec![volume],
        };
        assert_eq!(node(&snapshot, None), DetachPlan { report, detach: expected, retry_after: None }, "{case}");
    }
    let without_attachment =
        AttachNodeSnapshot { reported: reported(), is_managed: true, ..AttachNodeSnapshot::default() };
    assert_eq!(node(&without_attachment, None).report, Some(Vec::new()), "a volume without attachment is not reported");
}

#[test]
fn only_a_node_that_is_not_ready_loses_volumes_in_use_and_only_after_the_time_limit() {
    use VolumeUsage::{InUse, NotInUse, Unknown};
    let remaining = FORCE_AFTER - Duration::from_secs(60);
    let (ready, not_ready, deleted) = ((reported(), true), (reported(), false), (None, false));
    for (case, (reported, ready), limit, volume, detach, retry_after) in [
        ("ready, for any time", &ready, Some(FORCE_AFTER), (LONG_UNNEEDED, InUse), vec![], None),
        ("not ready, within the limit", &not_ready, Some(FORCE_AFTER), (UNNEEDED, InUse), vec![], Some(remaining)),
        (
            "not ready, past the limit",
            &not_ready,
            Some(FORCE_AFTER),
            (LONG_UNNEEDED, InUse),
            detach(DetachCondition::NodeTimedOut),
            None,
        ),
        ("not ready, without a limit", &not_ready, None, (LONG_UNNEEDED, InUse), vec![], None),
        ("not ready, needed", &not_ready, Some(FORCE_AFTER), (NEEDED, InUse), vec![], None),
        (
            "not ready, not in use: the live Node is read all the same",
            &not_ready,
            Some(FORCE_AFTER),
            (LONG_UNNEEDED, NotInUse),
            detach(DetachCondition::IfNotInUse),
            None,
        ),
        ("deleted, within the limit", &deleted, Some(FORCE_AFTER), (UNNEEDED, Unknown), vec![], Some(remaining)),
        (
            "deleted, past the limit",
            &deleted,
            Some(FORCE_AFTER),
            (LONG_UNNEEDED, Unknown),
            detach(DetachCondition::NodeTimedOut),
            None,
        ),
    ] {
        let (need, usage) = volume;
        let snapshot = AttachNodeSnapshot {
            name: "n".to_owned(),
            reported: reported.clone(),
            is_managed: true,
            is_ready: *ready,
            is_out_of_service: false,
            attachments: vec![attachment(Attached, need, usage)],
        };
        let plan = node(&snapshot, limit);
        assert_eq!((plan.detach, plan.retry_after), (detach, retry_after), "{case}");
    }
}

#[test]
fn a_node_reports_the_device_path_of_the_attachment() {
    let reported_at =
        |device: &str| Some(vec![ReportedVolume { unique_name: "v".to_owned(), device_path: device.to_owned() }]);
    for (case, reported, report) in [
        ("not reported yet", Some(Vec::new()), reported_at("/dev/b")),
        ("reported", reported_at("/dev/b"), None),
        ("the device has changed", reported_at("/dev/a"), reported_at("/dev/b")),
        ("reported without a device", reported(), reported_at("/dev/b")),
    ] {
        let attachment =
            NodeAttachment { device_path: "/dev/b".to_owned(), ..attachment(Attached, NEEDED, VolumeUsage::InUse) };
        let snapshot = AttachNodeSnapshot {
            reported,
            is_managed: true,
            is_ready: true,
            attachments: vec![attachment],
            ..AttachNodeSnapshot::default()
        };
        assert_eq!(node(&snapshot, None), DetachPlan { report, ..DetachPlan::default() }, "{case}");
    }
}

#[test]
fn a_node_that_attaches_by_itself_is_left_alone() {
    let snapshot = AttachNodeSnapshot {
        reported: reported(),
        is_managed: false,
        attachments: vec![attachment(Attached, LONG_UNNEEDED, VolumeUsage::NotInUse)],
        ..AttachNodeSnapshot::default()
    };
    assert_eq!(node(&snapshot, Some(FORCE_AFTER)), DetachPlan::default());
}

#[test]
fn the_event_of_a_waiting_pod_names_no_pods_of_other_namespaces() {
    let pods = |names: &[(&str, &str)]| names.iter().map(|(ns, name)| Key::namespaced(*ns, *name)).collect::<Vec<_>>();
    for (users, want) in [
        (
            pods(&[]),
            "Volume is already exclusively attached to one node, waiting on detach before it can be attached to another node",
        ),
        (pods(&[("ns", "a"), ("ns", "b")]), "Volume is already used by pod(s) a, b"),
        (
            pods(&[("ns", "a"), ("x", "b"), ("y", "a")]),
            "Volume is already used by pod(s) a and 2 pod(s) in different namespaces",
        ),
        (pods(&[("x", "b")]), "Volume is already used by 1 pod(s) in different namespaces"),
    ] {
        assert_eq!(describe_users(&users, Some("ns")), want);
    }
}

/// The subscriptions skip changes of such volumes.
#[test]
fn a_volume_without_pods_and_attachments_needs_no_decision() {
    for (has_pods, has_attachments) in [(false, false), (true, false), (false, true), (true, true)] {
        let users = if has_pods { vec![user("p", "a")] } else { Vec::new() };
        let attachments = if has_attachments { vec![on("b", Attached)] } else { Vec::new() };
        let snapshot = snapshot(&users.iter().collect::<Vec<_>>(), &attachments);
        let on_node = has_attachments.then(|| attachment(Attached, UNNEEDED, VolumeUsage::NotInUse));
        let node_snapshot = AttachNodeSnapshot {
            is_managed: true,
            reported: Some(Vec::new()),
            attachments: on_node.into_iter().collect(),
            ..AttachNodeSnapshot::default()
        };
        let is_decided = !volume(&snapshot).is_empty() || node(&node_snapshot, None) != DetachPlan::default();
        let references = VolumeReferences { has_pods, has_attachments };
        assert_eq!(is_noop(references), !is_decided, "{references:?}");
    }
}
