//! Where a volume should be attached, and what a node is told and may lose. Pure.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;

/// Everything about one volume that the decision needs. Several PersistentVolumes with one handle are one volume.
#[derive(Clone, Debug, Default)]
pub struct VolumeSeen {
    /// The name in node status.
    pub unique: String,
    pub many_nodes: bool,
    /// The driver wants attachments at all.
    pub attachable: bool,
    pub wanted: Vec<Wanted>,
    /// The oldest first.
    pub attached: Vec<Attached>,
}

/// A pod that needs the volume on a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    pub since: Option<Timestamp>,
    pub pod: String,
    pub node: String,
    /// The PersistentVolume through which the pod asks.
    pub volume: String,
}

/// A VolumeAttachment.
#[derive(Clone, Debug)]
pub struct Attached {
    pub node: String,
    pub state: State,
    /// Why the last try to attach it failed.
    pub error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Made, and not confirmed: the driver may or may not have attached it.
    Unconfirmed,
    Confirmed,
    /// Deleted, and not gone yet.
    Leaving,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeDecision {
    Attach { node: String, volume: String },
    Wait { node: String, why: Wait },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Another node has the only place; these pods use it there.
    HeldElsewhere {
        holder: String,
        pods: Vec<String>,
    },
    ForDriver,
    /// The driver failed, and is asked again.
    Failing(String),
    /// The attachment is being taken away; a new one follows.
    ForDetach,
}

pub fn volume(seen: &VolumeSeen) -> Vec<VolumeDecision> {
    if !seen.attachable {
        return Vec::new();
    }
    let nodes: BTreeSet<&str> = seen.wanted.iter().map(|w| w.node.as_str()).collect();
    let holder = holder(seen);
    let decide = |node: &str| match holder {
        Some(holder) if holder != node => Some(held(seen, node, holder)),
        Some(_) | None => place(seen, node),
    };
    nodes.into_iter().filter_map(decide).collect()
}

/// Who has the only place, where there is only one. Whoever has an attachment holds it, in whatever state and wanted or
/// not, until it is gone; else the oldest pod's node gets it.
fn holder(seen: &VolumeSeen) -> Option<&str> {
    if seen.many_nodes {
        return None;
    }
    let attached = seen.attached.first().map(|a| a.node.as_str());
    attached.or_else(|| seen.wanted.iter().min().map(|w| w.node.as_str()))
}

fn held(seen: &VolumeSeen, node: &str, holder: &str) -> VolumeDecision {
    let users = seen.wanted.iter().filter(|w| w.node == holder);
    let why = Wait::HeldElsewhere { holder: holder.to_owned(), pods: users.map(|w| w.pod.clone()).collect() };
    VolumeDecision::Wait { node: node.to_owned(), why }
}

fn place(seen: &VolumeSeen, node: &str) -> Option<VolumeDecision> {
    let why = match seen.attached.iter().find(|a| a.node == node).map(|a| (a.state, &a.error)) {
        Some((State::Confirmed, _)) => return None,
        Some((State::Unconfirmed, None)) => Wait::ForDriver,
        Some((State::Unconfirmed, Some(error))) => Wait::Failing(error.clone()),
        Some((State::Leaving, _)) => Wait::ForDetach,
        None => {
            let asked = seen.wanted.iter().filter(|w| w.node == node).min()?;
            return Some(VolumeDecision::Attach { node: node.to_owned(), volume: asked.volume.clone() });
        }
    };
    Some(VolumeDecision::Wait { node: node.to_owned(), why })
}

/// Everything about one node that its report, and what leaves it, depend on.
#[derive(Clone, Debug, Default)]
pub struct NodeSeen {
    pub name: String,
    /// What `status.volumesAttached` lists now; `None` where there is no Node object.
    pub reported: Option<Vec<String>>,
    /// An administrator says that the machine is off.
    pub out_of_service: bool,
    pub volumes: Vec<NodeVolume>,
}

/// A VolumeAttachment of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeVolume {
    pub attachment: String,
    /// The PersistentVolume.
    pub volume: String,
    pub unique: String,
    pub state: State,
    pub wanted: bool,
    pub usage: Usage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// In `status.volumesInUse`.
    InUse,
    NotInUse,
    /// There is no Node object, and nobody saw the last one.
    Unknown,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDecision {
    /// What the node is to be told, if that differs from what it is told now.
    pub report: Option<Vec<String>>,
    /// What leaves the node, once it has been told so.
    pub detach: Vec<Detach>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detach {
    pub attachment: String,
    pub unique: String,
    pub check: Check,
}

/// Whether the node must be asked, live, that it does not use the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    NotInUse,
    Nothing,
}

pub fn node(seen: &NodeSeen) -> NodeDecision {
    let may_use = |v: &NodeVolume| v.wanted || (v.usage != Usage::NotInUse && !seen.out_of_service);
    let stays = |v: &&NodeVolume| v.state == State::Confirmed && may_use(v);
    let want: BTreeSet<&str> = seen.volumes.iter().filter(stays).map(|v| v.unique.as_str()).collect();
    let report = seen.reported.as_ref().and_then(|reported| {
        let have: BTreeSet<&str> = reported.iter().map(String::as_str).collect();
        (want != have).then(|| want.iter().map(|name| (*name).to_owned()).collect())
    });
    let check = if seen.out_of_service { Check::Nothing } else { Check::NotInUse };
    let leaves = |v: &&NodeVolume| v.state != State::Leaving && !may_use(v);
    let detach = seen.volumes.iter().filter(leaves).map(|v| Detach {
        attachment: v.attachment.clone(),
        unique: v.unique.clone(),
        check,
    });
    NodeDecision { report, detach: detach.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use State::{Confirmed, Leaving, Unconfirmed};

    fn wanted(pod: &str, node: &str) -> Wanted {
        Wanted { since: None, pod: pod.to_owned(), node: node.to_owned(), volume: "pv".to_owned() }
    }

    fn on(node: &str, state: State) -> Attached {
        Attached { node: node.to_owned(), state, error: None }
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
        Wait::HeldElsewhere { holder: holder.to_owned(), pods: pods.iter().map(ToString::to_string).collect() }
    }

    #[test]
    fn a_volume_is_attached_where_its_pod_is_and_on_one_node_only() {
        let attach = |node: &str| VolumeDecision::Attach { node: node.to_owned(), volume: "pv".to_owned() };
        let (a, b) = (wanted("p", "a"), wanted("q", "b"));
        let failing = Attached { error: Some("no".to_owned()), ..on("a", Unconfirmed) };
        let early = Wanted { since: Timestamp::from_second(1).ok(), ..wanted("z", "b") };
        let late = Wanted { since: Timestamp::from_second(2).ok(), ..wanted("p", "a") };
        for (case, seen, want) in [
            ("nobody wants it", seen(&[], &[]), vec![]),
            ("nobody wants it any more", seen(&[], &[on("a", Confirmed)]), vec![]),
            ("wanted and not attached", seen(&[&a], &[]), vec![attach("a")]),
            ("attached and wanted", seen(&[&a], &[on("a", Confirmed)]), vec![]),
            ("the driver has not answered", seen(&[&a], &[on("a", Unconfirmed)]), vec![wait("a", Wait::ForDriver)]),
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

    #[test]
    fn a_node_is_told_of_exactly_what_it_may_use_and_loses_the_rest() {
        use Usage::{InUse, NotInUse, Unknown};
        let v = |state, wanted, usage| NodeVolume {
            attachment: "va".to_owned(),
            volume: "pv".to_owned(),
            unique: "v".to_owned(),
            state,
            wanted,
            usage,
        };
        let told = Some(vec!["v".to_owned()]);
        let untold = Some(Vec::new());
        let stays = Vec::new();
        let leaves = |check| vec![Detach { attachment: "va".to_owned(), unique: "v".to_owned(), check }];
        let asked = || leaves(Check::NotInUse);
        let (on, off) = (false, true);
        for (case, reported, is_off, volume, report, detach) in [
            ("confirmed and wanted", untold.clone(), on, v(Confirmed, true, NotInUse), told.clone(), stays.clone()),
            ("told already", told.clone(), on, v(Confirmed, true, InUse), None, stays.clone()),
            ("not confirmed", untold.clone(), on, v(Unconfirmed, true, NotInUse), None, stays.clone()),
            ("unwanted but mounted", told.clone(), on, v(Confirmed, false, InUse), None, stays.clone()),
            ("unwanted and unmounted", told.clone(), on, v(Confirmed, false, NotInUse), untold.clone(), asked()),
            ("never confirmed, its pod moved away", untold.clone(), on, v(Unconfirmed, false, NotInUse), None, asked()),
            (
                "never confirmed, and the node says it uses it",
                untold.clone(),
                on,
                v(Unconfirmed, false, InUse),
                None,
                stays.clone(),
            ),
            ("leaving", told.clone(), on, v(Leaving, true, NotInUse), untold.clone(), stays.clone()),
            (
                "mounted on a machine that is off",
                told.clone(),
                off,
                v(Confirmed, false, InUse),
                untold,
                leaves(Check::Nothing),
            ),
            ("wanted on a machine that is off", told, off, v(Confirmed, true, InUse), None, stays.clone()),
            ("the Node is gone, it did not use the volume", None, on, v(Confirmed, false, NotInUse), None, asked()),
            ("the Node is gone, it used the volume", None, on, v(Confirmed, false, InUse), None, stays.clone()),
            ("the Node is gone, nobody knows", None, on, v(Confirmed, false, Unknown), None, stays),
        ] {
            let seen = NodeSeen { name: "n".to_owned(), reported, out_of_service: is_off, volumes: vec![volume] };
            assert_eq!(node(&seen), NodeDecision { report, detach }, "{case}");
        }
        let gone = NodeSeen { reported: Some(vec!["v".to_owned()]), ..NodeSeen::default() };
        assert_eq!(node(&gone).report, Some(Vec::new()), "its attachment is gone altogether");
    }
}
