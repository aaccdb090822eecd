//! Cases of the attach/detach decisions.

use std::time::Duration;

use cleat_api::Key;
use k8s_openapi::jiff::Timestamp;

use super::decide::*;
use State::{Confirmed, Leaving, Unconfirmed};

fn wanted(pod: &str, node: &str) -> Wanted {
    Wanted {
        since: None,
        pod: Key::namespaced("ns", pod),
        node: node.to_owned(),
        source: Source::Volume("pv".to_owned()),
    }
}

fn on(node: &str, state: State) -> Attached {
    Attached { node: node.to_owned(), state, error: None, age: Duration::from_secs(1) }
}

fn seen(wanted: &[&Wanted], attached: &[Attached]) -> VolumeSeen {
    VolumeSeen {
        unique: "v".to_owned(),
        many_nodes: false,
        attachable: true,
        wanted: wanted.iter().map(|w| (*w).clone()).collect(),
        attached: attached.to_vec(),
    }
}

fn wait(node: &str, why: Wait) -> VolumeDecision {
    VolumeDecision::Wait { node: node.to_owned(), why }
}

fn held_by(holder: &str, pods: &[&str]) -> Wait {
    Wait::HeldElsewhere {
        holder: holder.to_owned(),
        pods: pods.iter().map(|pod| Key::namespaced("ns", *pod)).collect(),
    }
}

#[test]
fn a_volume_is_attached_where_its_pod_is_and_on_one_node_only() {
    let attach = |node: &str| VolumeDecision::Attach { node: node.to_owned(), source: Source::Volume("pv".to_owned()) };
    let (a, b) = (wanted("p", "a"), wanted("q", "b"));
    let failing = Attached { error: Some("no".to_owned()), ..on("a", Unconfirmed) };
    let slow = Attached { age: ANSWER_WITHIN, ..on("a", Unconfirmed) };
    let early = Wanted { since: Timestamp::from_second(1).ok(), ..wanted("z", "b") };
    let late = Wanted { since: Timestamp::from_second(2).ok(), ..wanted("p", "a") };
    let soon = Wait::ForDriver(Duration::from_secs(119));
    for (case, seen, want) in [
        ("nobody wants it", seen(&[], &[]), vec![]),
        ("nobody wants it any more", seen(&[], &[on("a", Confirmed)]), vec![]),
        ("wanted and not attached", seen(&[&a], &[]), vec![attach("a")]),
        ("attached and wanted", seen(&[&a], &[on("a", Confirmed)]), vec![]),
        ("the driver has not answered", seen(&[&a], &[on("a", Unconfirmed)]), vec![wait("a", soon)]),
        ("the driver does not answer at all", seen(&[&a], &[slow]), vec![wait("a", Wait::Unanswered)]),
        ("the driver failed", seen(&[&a], &[failing]), vec![wait("a", Wait::Failing("no".to_owned()))]),
        ("wanted again while leaving", seen(&[&a], &[on("a", Leaving)]), vec![wait("a", Wait::ForDetach)]),
        ("a second node must wait", seen(&[&a, &b], &[on("a", Confirmed)]), vec![wait("b", held_by("a", &["p"]))]),
        (
            "an attachment nobody wants holds the place",
            seen(&[&b], &[on("a", Confirmed)]),
            vec![wait("b", held_by("a", &[]))],
        ),
        (
            "so does one that was never confirmed",
            seen(&[&b], &[on("a", Unconfirmed)]),
            vec![wait("b", held_by("a", &[]))],
        ),
        ("and one that is leaving", seen(&[&b], &[on("a", Leaving)]), vec![wait("b", held_by("a", &[]))]),
        (
            "two nodes at once: the older pod's",
            seen(&[&late, &early], &[]),
            vec![wait("a", held_by("b", &["z"])), attach("b")],
        ),
        (
            "shared volumes go everywhere",
            VolumeSeen { many_nodes: true, ..seen(&[&a, &b], &[on("a", Confirmed)]) },
            vec![attach("b")],
        ),
        ("the driver wants no attachments", VolumeSeen { attachable: false, ..seen(&[&a], &[]) }, vec![]),
    ] {
        assert_eq!(volume(&seen), want, "{case}");
    }
}

const LIMIT: Duration = Duration::from_secs(360);
const NEEDED: Need = Need::Wanted;
const UNNEEDED: Need = Need::Unwanted(Duration::from_secs(60));
const LONG_UNNEEDED: Need = Need::Unwanted(LIMIT);

fn volume_of(state: State, wanted: Need, usage: Usage) -> NodeVolume {
    NodeVolume { attachment: "va".to_owned(), unique: "v".to_owned(), device: String::new(), state, wanted, usage }
}

fn told() -> Option<Vec<Told>> {
    Some(vec![Told { unique: "v".to_owned(), device: String::new() }])
}

fn leaves(check: Check) -> Vec<Detach> {
    vec![Detach { attachment: "va".to_owned(), unique: "v".to_owned(), check }]
}

#[test]
fn a_node_is_told_of_exactly_what_it_may_use_and_loses_the_rest() {
    use Usage::{InUse, NotInUse, Unknown};
    let v = volume_of;
    let untold = Some(Vec::new());
    let stays = Vec::new();
    let asked = || leaves(Check::NotInUse);
    let (on, off) = (false, true);
    for (case, reported, is_off, volume, report, detach) in [
        ("confirmed and wanted", untold.clone(), on, v(Confirmed, NEEDED, NotInUse), told(), stays.clone()),
        ("told already", told(), on, v(Confirmed, NEEDED, InUse), None, stays.clone()),
        ("not confirmed", untold.clone(), on, v(Unconfirmed, NEEDED, NotInUse), None, stays.clone()),
        ("unwanted but mounted", told(), on, v(Confirmed, UNNEEDED, InUse), None, stays.clone()),
        ("unwanted and unmounted", told(), on, v(Confirmed, UNNEEDED, NotInUse), untold.clone(), asked()),
        ("never confirmed, its pod moved away", untold.clone(), on, v(Unconfirmed, UNNEEDED, NotInUse), None, asked()),
        ("never confirmed, but used", untold.clone(), on, v(Unconfirmed, UNNEEDED, InUse), None, stays.clone()),
        ("leaving", told(), on, v(Leaving, NEEDED, NotInUse), untold.clone(), stays.clone()),
        ("leaving, and unneeded", Some(Vec::new()), on, v(Leaving, UNNEEDED, NotInUse), None, stays.clone()),
        ("mounted where all is off", told(), off, v(Confirmed, UNNEEDED, InUse), untold, leaves(Check::Off)),
        ("wanted where all is off", told(), off, v(Confirmed, NEEDED, InUse), None, stays.clone()),
        ("the Node is gone, it did not use the volume", None, on, v(Confirmed, UNNEEDED, NotInUse), None, asked()),
        ("the Node is gone, it used the volume", None, on, v(Confirmed, UNNEEDED, InUse), None, stays.clone()),
        ("the Node is gone, nobody knows", None, on, v(Confirmed, UNNEEDED, Unknown), None, stays),
    ] {
        let seen = NodeSeen {
            name: "n".to_owned(),
            ready: reported.is_some(),
            reported,
            managed: true,
            out_of_service: is_off,
            volumes: vec![volume],
        };
        assert_eq!(node(&seen, None), NodeDecision { report, detach, again: None }, "{case}");
    }
    let gone = NodeSeen { reported: told(), managed: true, ..NodeSeen::default() };
    assert_eq!(node(&gone, None).report, Some(Vec::new()), "its attachment is gone altogether");
}

#[test]
fn only_a_node_that_is_not_ready_loses_what_it_uses_and_only_when_its_time_is_over() {
    use Usage::{InUse, NotInUse, Unknown};
    let rest = LIMIT - Duration::from_secs(60);
    let (ready, silent, gone) = ((told(), true), (told(), false), (None, false));
    for (case, (reported, ready), limit, volume, detach, again) in [
        ("ready, however long", &ready, Some(LIMIT), (LONG_UNNEEDED, InUse), vec![], None),
        ("silent, not long enough", &silent, Some(LIMIT), (UNNEEDED, InUse), vec![], Some(rest)),
        ("silent for too long", &silent, Some(LIMIT), (LONG_UNNEEDED, InUse), leaves(Check::Silent), None),
        ("silent, and nothing is forced", &silent, None, (LONG_UNNEEDED, InUse), vec![], None),
        ("silent, wanted", &silent, Some(LIMIT), (NEEDED, InUse), vec![], None),
        (
            "silent, not in use: asked all the same",
            &silent,
            Some(LIMIT),
            (LONG_UNNEEDED, NotInUse),
            leaves(Check::NotInUse),
            None,
        ),
        ("gone, not long enough", &gone, Some(LIMIT), (UNNEEDED, Unknown), vec![], Some(rest)),
        ("gone for too long", &gone, Some(LIMIT), (LONG_UNNEEDED, Unknown), leaves(Check::Silent), None),
    ] {
        let (wanted, usage) = volume;
        let seen = NodeSeen {
            name: "n".to_owned(),
            reported: reported.clone(),
            managed: true,
            ready: *ready,
            out_of_service: false,
            volumes: vec![volume_of(Confirmed, wanted, usage)],
        };
        let decision = node(&seen, limit);
        assert_eq!((decision.detach, decision.again), (detach, again), "{case}");
    }
}

#[test]
fn a_node_is_told_where_the_device_is() {
    let at = |device: &str| Some(vec![Told { unique: "v".to_owned(), device: device.to_owned() }]);
    for (case, reported, report) in [
        ("not told yet", Some(Vec::new()), at("/dev/b")),
        ("told", at("/dev/b"), None),
        ("it has moved", at("/dev/a"), at("/dev/b")),
        ("told without", told(), at("/dev/b")),
    ] {
        let volume = NodeVolume { device: "/dev/b".to_owned(), ..volume_of(Confirmed, NEEDED, Usage::InUse) };
        let seen = NodeSeen { reported, managed: true, ready: true, volumes: vec![volume], ..NodeSeen::default() };
        assert_eq!(node(&seen, None), NodeDecision { report, ..NodeDecision::default() }, "{case}");
    }
}

#[test]
fn a_node_that_attaches_by_itself_is_left_alone() {
    let seen = NodeSeen {
        reported: told(),
        managed: false,
        volumes: vec![volume_of(Confirmed, LONG_UNNEEDED, Usage::NotInUse)],
        ..NodeSeen::default()
    };
    assert_eq!(node(&seen, Some(LIMIT)), NodeDecision::default());
}

#[test]
fn a_waiting_pod_is_told_who_has_its_volume_but_no_names_from_other_namespaces() {
    let pods = |names: &[(&str, &str)]| names.iter().map(|(ns, name)| Key::namespaced(*ns, *name)).collect::<Vec<_>>();
    for (who, want) in [
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
        assert_eq!(holders(&who, Some("ns")), want);
    }
}
