//! Where a volume should be attached, where it may leave, and what a node is told. Pure.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;

/// Everything about one volume that the decision needs.
#[derive(Clone, Debug, Default)]
pub struct VolumeSeen {
    /// The PersistentVolume.
    pub volume: String,
    /// The name in node status.
    pub unique: String,
    pub many_nodes: bool,
    /// The driver wants attachments at all.
    pub attachable: bool,
    pub wanted: Vec<Wanted>,
    pub attached: Vec<Attached>,
}

/// A pod that needs the volume on a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    pub since: Option<Timestamp>,
    pub pod: String,
    pub node: String,
}

/// A VolumeAttachment, with what its node says.
#[derive(Clone, Debug)]
pub struct Attached {
    pub node: String,
    pub state: State,
    /// In `node.status.volumesAttached`.
    pub reported: bool,
    /// In `node.status.volumesInUse`.
    pub in_use: bool,
    pub out_of_service: bool,
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
    Attach { node: String },
    Detach { node: String, check: Check },
    Wait { node: String, why: Wait },
}

/// Whether the node must be asked, live, that it does not use the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    NotInUse,
    /// An administrator says that the machine is off.
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Another node has the only place; these pods use it there.
    HeldElsewhere {
        holder: String,
        pods: Vec<String>,
    },
    ForDriver,
    /// The node still has it mounted.
    ForUnmount,
    /// The node still is told that it is attached.
    ForReport,
    /// The attachment is being taken away.
    ForDetach,
}

pub fn volume(seen: &VolumeSeen) -> Vec<VolumeDecision> {
    let wanted = if seen.attachable { chosen(seen) } else { Chosen::default() };
    let mut decisions: Vec<_> = seen
        .attached
        .iter()
        .filter(|a| !wanted.nodes.contains(a.node.as_str()) || a.state != State::Confirmed)
        .filter_map(|a| if wanted.nodes.contains(a.node.as_str()) { pending(a) } else { leave(a) })
        .collect();
    let present = |node: &str| seen.attached.iter().any(|a| a.node == node);
    for node in wanted.nodes.iter().filter(|n| !present(n)) {
        decisions.push(VolumeDecision::Attach { node: (*node).to_owned() });
    }
    for (node, holder) in wanted.refused {
        let users = seen.wanted.iter().filter(|w| w.node == holder);
        let pods = users.map(|w| w.pod.clone()).collect();
        let why = Wait::HeldElsewhere { holder: holder.to_owned(), pods };
        decisions.push(VolumeDecision::Wait { node: node.to_owned(), why });
    }
    decisions
}

#[derive(Default)]
struct Chosen<'a> {
    nodes: BTreeSet<&'a str>,
    /// Nodes that must wait, and who holds the volume.
    refused: Vec<(&'a str, &'a str)>,
}

/// The nodes that get the volume. With one place only, whoever has it keeps it while it is wanted there; an attachment
/// that nobody wants any more still holds the place until it is gone.
fn chosen(seen: &VolumeSeen) -> Chosen<'_> {
    let nodes: BTreeSet<&str> = seen.wanted.iter().map(|w| w.node.as_str()).collect();
    if seen.many_nodes {
        return Chosen { nodes, refused: Vec::new() };
    }
    let holder = seen.attached.first().map(|a| a.node.as_str());
    let first = || seen.wanted.iter().min().map(|w| w.node.as_str());
    let Some(holder) = holder.or_else(first) else { return Chosen::default() };
    let refused = nodes.iter().filter(|n| **n != holder).map(|n| (*n, holder)).collect();
    Chosen { nodes: nodes.into_iter().filter(|n| *n == holder).collect(), refused }
}

fn pending(attached: &Attached) -> Option<VolumeDecision> {
    let why = match attached.state {
        State::Confirmed => return None,
        State::Unconfirmed => Wait::ForDriver,
        State::Leaving => Wait::ForDetach,
    };
    Some(VolumeDecision::Wait { node: attached.node.clone(), why })
}

fn leave(attached: &Attached) -> Option<VolumeDecision> {
    let node = attached.node.clone();
    let why = match attached.state {
        State::Leaving => Wait::ForDetach,
        _ if attached.in_use && !attached.out_of_service => Wait::ForUnmount,
        _ if attached.reported => Wait::ForReport,
        _ => {
            let check = if attached.out_of_service { Check::Nothing } else { Check::NotInUse };
            return Some(VolumeDecision::Detach { node, check });
        }
    };
    Some(VolumeDecision::Wait { node, why })
}

/// Everything about one node that its report needs.
#[derive(Clone, Debug, Default)]
pub struct NodeSeen {
    pub name: String,
    /// What `status.volumesAttached` lists now, in its order.
    pub reported: Vec<String>,
    pub volumes: Vec<NodeVolume>,
}

/// A VolumeAttachment of the node.
#[derive(Clone, Debug)]
pub struct NodeVolume {
    /// The PersistentVolume.
    pub volume: String,
    pub unique: String,
    pub state: State,
    pub wanted: bool,
    pub in_use: bool,
    pub out_of_service: bool,
}

/// What the node is to be told, if that differs from what it is told now: exactly the volumes whose attachment is
/// confirmed and that it may use or still uses.
pub fn report(seen: &NodeSeen) -> Option<Vec<String>> {
    let belongs = |v: &&NodeVolume| v.state == State::Confirmed && (v.wanted || (v.in_use && !v.out_of_service));
    let want: BTreeSet<&str> = seen.volumes.iter().filter(belongs).map(|v| v.unique.as_str()).collect();
    let have: BTreeSet<&str> = seen.reported.iter().map(String::as_str).collect();
    (want != have).then(|| want.into_iter().map(ToOwned::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(pod: &str, node: &str) -> Wanted {
        Wanted { since: None, pod: pod.to_owned(), node: node.to_owned() }
    }

    fn on(node: &str, state: State) -> Attached {
        Attached { node: node.to_owned(), state, reported: false, in_use: false, out_of_service: false }
    }

    fn reported(attached: Attached) -> Attached {
        Attached { reported: true, ..attached }
    }

    fn in_use(attached: Attached) -> Attached {
        Attached { in_use: true, ..attached }
    }

    fn seen(wanted: &[Wanted], attached: &[Attached]) -> VolumeSeen {
        VolumeSeen {
            volume: "pv".to_owned(),
            unique: "v".to_owned(),
            many_nodes: false,
            attachable: true,
            wanted: wanted.to_vec(),
            attached: attached.to_vec(),
        }
    }

    fn wait(node: &str, why: Wait) -> VolumeDecision {
        VolumeDecision::Wait { node: node.to_owned(), why }
    }

    fn held(holder: &str, pods: &[&str]) -> Wait {
        Wait::HeldElsewhere { holder: holder.to_owned(), pods: pods.iter().map(ToString::to_string).collect() }
    }

    #[test]
    fn a_volume_is_attached_where_its_pod_is_and_on_one_node_only() {
        use State::{Confirmed, Leaving, Unconfirmed};
        let attach = |node: &str| VolumeDecision::Attach { node: node.to_owned() };
        let detach = |node: &str, check| VolumeDecision::Detach { node: node.to_owned(), check };
        let (a, b) = (wanted("p", "a"), wanted("q", "b"));
        let dead = Attached { out_of_service: true, ..in_use(on("a", Confirmed)) };
        let early = Wanted { since: Timestamp::from_second(1).ok(), ..wanted("z", "b") };
        let late = Wanted { since: Timestamp::from_second(2).ok(), ..wanted("p", "a") };
        for (case, seen, want) in [
            ("nobody wants it", seen(&[], &[]), vec![]),
            ("wanted and not attached", seen(std::slice::from_ref(&a), &[]), vec![attach("a")]),
            ("attached and wanted", seen(std::slice::from_ref(&a), &[on("a", Confirmed)]), vec![]),
            (
                "the driver has not answered",
                seen(std::slice::from_ref(&a), &[on("a", Unconfirmed)]),
                vec![wait("a", Wait::ForDriver)],
            ),
            (
                "wanted again while leaving",
                seen(std::slice::from_ref(&a), &[on("a", Leaving)]),
                vec![wait("a", Wait::ForDetach)],
            ),
            (
                "unwanted, mounted",
                seen(&[], &[reported(in_use(on("a", Confirmed)))]),
                vec![wait("a", Wait::ForUnmount)],
            ),
            (
                "unwanted, unmounted, reported",
                seen(&[], &[reported(on("a", Confirmed))]),
                vec![wait("a", Wait::ForReport)],
            ),
            ("unwanted and free to go", seen(&[], &[on("a", Confirmed)]), vec![detach("a", Check::NotInUse)]),
            ("never confirmed, pod moved away", seen(&[], &[on("a", Unconfirmed)]), vec![detach("a", Check::NotInUse)]),
            ("the machine is off by word of an administrator", seen(&[], &[dead]), vec![detach("a", Check::Nothing)]),
            (
                "a second node must wait",
                seen(&[a.clone(), b.clone()], &[on("a", Confirmed)]),
                vec![wait("b", held("a", &["p"]))],
            ),
            (
                "an unconfirmed attachment holds the place too",
                seen(std::slice::from_ref(&b), &[on("a", Unconfirmed)]),
                vec![detach("a", Check::NotInUse), wait("b", held("a", &[]))],
            ),
            (
                "so does one that is leaving",
                seen(std::slice::from_ref(&b), &[on("a", Leaving)]),
                vec![wait("a", Wait::ForDetach), wait("b", held("a", &[]))],
            ),
            (
                "two nodes at once: the older pod's",
                seen(&[late, early], &[]),
                vec![attach("b"), wait("a", held("b", &["z"]))],
            ),
            (
                "shared volumes go everywhere",
                VolumeSeen { many_nodes: true, ..seen(&[a.clone(), b], &[on("a", Confirmed)]) },
                vec![attach("b")],
            ),
            (
                "the driver wants no attachments any more",
                VolumeSeen { attachable: false, ..seen(&[a], &[on("a", Confirmed)]) },
                vec![detach("a", Check::NotInUse)],
            ),
        ] {
            assert_eq!(volume(&seen), want, "{case}");
        }
    }

    #[test]
    fn a_node_is_told_of_exactly_what_it_may_use() {
        use State::{Confirmed, Leaving, Unconfirmed};
        let v = |state, wanted, in_use| NodeVolume {
            volume: "pv".to_owned(),
            unique: "v".to_owned(),
            state,
            wanted,
            in_use,
            out_of_service: false,
        };
        let off = NodeVolume { out_of_service: true, ..v(Confirmed, false, true) };
        let (told, untold): (&[&str], &[&str]) = (&["v"], &[]);
        for (case, reported, volume, want) in [
            ("confirmed and wanted", untold, v(Confirmed, true, false), Some(told)),
            ("told already", told, v(Confirmed, true, true), None),
            ("not confirmed", untold, v(Unconfirmed, true, false), None),
            ("unwanted but mounted", told, v(Confirmed, false, true), None),
            ("unwanted and unmounted", told, v(Confirmed, false, false), Some(untold)),
            ("leaving", told, v(Leaving, true, false), Some(untold)),
            ("mounted on a machine that is off", told, off, Some(untold)),
        ] {
            let strings = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
            let seen = NodeSeen { name: "n".to_owned(), reported: strings(reported), volumes: vec![volume] };
            assert_eq!(report(&seen), want.map(strings), "{case}");
        }
        let gone = NodeSeen { name: "n".to_owned(), reported: vec!["v".to_owned()], volumes: Vec::new() };
        assert_eq!(report(&gone), Some(Vec::new()), "its attachment is gone altogether");
    }
}
