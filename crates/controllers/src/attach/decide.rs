//! Where a volume should be attached, and what a node is told and may lose. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleat_api::Key;
use k8s_openapi::api::core::v1::PersistentVolumeSpec;
use k8s_openapi::jiff::Timestamp;

/// How long a driver may leave an attachment unanswered before the pods are told.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(120);

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
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    pub since: Option<Timestamp>,
    pub pod: Key,
    pub node: String,
    pub source: Source,
}

/// What the pod asks through.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// The PersistentVolume of that name.
    Volume(String),
    /// The pod itself describes the volume.
    Inline(Box<PersistentVolumeSpec>),
}

/// A VolumeAttachment.
#[derive(Clone, Debug)]
pub struct Attached {
    pub node: String,
    pub state: State,
    /// Why the last try to attach it failed.
    pub error: Option<String>,
    pub age: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Made, and not confirmed: the driver may or may not have attached it.
    Unconfirmed,
    Confirmed,
    /// Deleted, and not gone yet.
    Leaving,
}

#[derive(Clone, Debug, PartialEq)]
pub enum VolumeDecision {
    Attach { node: String, source: Source },
    Wait { node: String, why: Wait },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Another node has the only place; these pods use it there.
    HeldElsewhere { holder: String, pods: Vec<Key> },
    /// Look again after this long.
    ForDriver(Duration),
    /// The driver has not answered for so long that the pods should know.
    Unanswered,
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
    attached.or_else(|| first(seen.wanted.iter()).map(|w| w.node.as_str()))
}

fn first<'a>(wanted: impl Iterator<Item = &'a Wanted>) -> Option<&'a Wanted> {
    wanted.min_by_key(|w| (w.since, &w.pod, w.node.as_str()))
}

fn held(seen: &VolumeSeen, node: &str, holder: &str) -> VolumeDecision {
    let users = seen.wanted.iter().filter(|w| w.node == holder);
    let why = Wait::HeldElsewhere { holder: holder.to_owned(), pods: users.map(|w| w.pod.clone()).collect() };
    VolumeDecision::Wait { node: node.to_owned(), why }
}

/// Who has the volume, in words for a pod of this namespace: names of pods elsewhere are not for it.
pub fn holders(pods: &[Key], namespace: Option<&str>) -> String {
    let (here, elsewhere): (Vec<&Key>, Vec<&Key>) = pods.iter().partition(|pod| pod.namespace.as_deref() == namespace);
    let names = here.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>().join(", ");
    match (here.len(), elsewhere.len()) {
        (0, 0) => "Volume is already exclusively attached to one node, waiting on detach before it can be attached to \
                   another node"
            .to_owned(),
        (0, others) => format!("Volume is already used by {others} pod(s) in different namespaces"),
        (_, 0) => format!("Volume is already used by pod(s) {names}"),
        (_, others) => format!("Volume is already used by pod(s) {names} and {others} pod(s) in different namespaces"),
    }
}

fn place(seen: &VolumeSeen, node: &str) -> Option<VolumeDecision> {
    let attached = seen.attached.iter().find(|a| a.node == node);
    let why = match attached.map(|a| (a.state, &a.error, a.age)) {
        Some((State::Confirmed, _, _)) => return None,
        Some((State::Unconfirmed, Some(error), _)) => Wait::Failing(error.clone()),
        Some((State::Unconfirmed, None, age)) if age >= ANSWER_WITHIN => Wait::Unanswered,
        Some((State::Unconfirmed, None, age)) => Wait::ForDriver(ANSWER_WITHIN - age),
        Some((State::Leaving, _, _)) => Wait::ForDetach,
        None => {
            let asked = first(seen.wanted.iter().filter(|w| w.node == node))?;
            return Some(VolumeDecision::Attach { node: node.to_owned(), source: asked.source.clone() });
        }
    };
    Some(VolumeDecision::Wait { node: node.to_owned(), why })
}

/// Everything about one node that its report, and what leaves it, depend on.
#[derive(Clone, Debug, Default)]
pub struct NodeSeen {
    pub name: String,
    /// What `status.volumesAttached` lists now; `None` where there is no Node object.
    pub reported: Option<Vec<Told>>,
    /// The node leaves attaching to this controller. One that is gone did.
    pub managed: bool,
    pub ready: bool,
    /// An administrator says that the machine is off.
    pub out_of_service: bool,
    pub volumes: Vec<NodeVolume>,
}

/// One entry of `status.volumesAttached`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub unique: String,
    /// Empty where the node finds the device by itself.
    pub device: String,
}

/// A VolumeAttachment of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeVolume {
    pub attachment: String,
    pub unique: String,
    /// What the attachment says of the device.
    pub device: String,
    pub state: State,
    pub wanted: Need,
    pub usage: Usage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Wanted,
    /// No pod has needed it here for this long, as far as this process can tell.
    Unwanted(Duration),
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
    pub report: Option<Vec<Told>>,
    /// What leaves the node, once it has been told so.
    pub detach: Vec<Detach>,
    /// When the next volume may be taken by force, if nothing changes.
    pub again: Option<Duration>,
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
    /// The machine is off, an administrator says.
    Off,
    /// The node has been silent for too long.
    Silent,
}

/// What a volume that nobody needs on this node may come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stays,
    /// In use on a node that says nothing: it is taken after this long.
    StaysFor(Duration),
    Leaves(Check),
}

/// `force_after`: how long a node that is not ready may keep what nobody needs there; `None` for ever.
pub fn node(seen: &NodeSeen, force_after: Option<Duration>) -> NodeDecision {
    if !seen.managed {
        return NodeDecision::default();
    }
    let fates: Vec<(&NodeVolume, Fate)> = seen.volumes.iter().map(|v| (v, fate(seen, v, force_after))).collect();
    let stays = fates.iter().filter(|(v, f)| v.state == State::Confirmed && !matches!(f, Fate::Leaves(_)));
    let want: BTreeMap<&str, &str> = stays.map(|(v, _)| (v.unique.as_str(), v.device.as_str())).collect();
    let report = seen.reported.as_ref().and_then(|reported| {
        let have: BTreeMap<&str, &str> = reported.iter().map(|t| (t.unique.as_str(), t.device.as_str())).collect();
        let told = |(unique, device): (&&str, &&str)| Told { unique: (*unique).into(), device: (*device).into() };
        (want != have).then(|| want.iter().map(told).collect())
    });
    let leaves = fates.iter().filter(|(v, _)| v.state != State::Leaving).filter_map(|(v, fate)| match fate {
        Fate::Leaves(check) => {
            Some(Detach { attachment: v.attachment.clone(), unique: v.unique.clone(), check: *check })
        }
        Fate::Stays | Fate::StaysFor(_) => None,
    });
    let waits = fates.iter().filter_map(|(_, fate)| match fate {
        Fate::StaysFor(time) => Some(*time),
        Fate::Stays | Fate::Leaves(_) => None,
    });
    NodeDecision { report, detach: leaves.collect(), again: waits.min() }
}

fn fate(seen: &NodeSeen, volume: &NodeVolume, force_after: Option<Duration>) -> Fate {
    let Need::Unwanted(since) = volume.wanted else { return Fate::Stays };
    match (volume.usage, force_after) {
        // The taint is an administrator's word that nothing runs there any more.
        _ if seen.out_of_service => Fate::Leaves(Check::Off),
        (Usage::NotInUse, _) => Fate::Leaves(Check::NotInUse),
        // A node that is ready is waited for, however long it takes to unmount.
        _ if seen.ready => Fate::Stays,
        (Usage::InUse | Usage::Unknown, None) => Fate::Stays,
        (Usage::InUse | Usage::Unknown, Some(limit)) if since < limit => Fate::StaysFor(limit - since),
        (Usage::InUse | Usage::Unknown, Some(_)) => Fate::Leaves(Check::Silent),
    }
}
