//! Decides to which nodes a volume is attached, which volumes a node reports as attached and which are detached. Pure:
//! ages and waiting times are part of the snapshots.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleat_api::Key;
use k8s_openapi::api::core::v1::PersistentVolumeSpec;
use k8s_openapi::jiff::Timestamp;

/// How long a VolumeAttachment may stay without an answer of its driver before the pods get an event.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(120);

/// Everything about one volume that [`volume`] reads. Several PersistentVolumes with the same driver and handle are one
/// volume.
#[derive(Clone, Debug, Default)]
pub struct AttachVolumeSnapshot {
    /// The volume's name in Node status.
    pub unique_name: String,
    pub allows_many_nodes: bool,
    /// Whether the driver needs VolumeAttachments. False also while that is unknown.
    pub needs_attach: bool,
    pub users: Vec<VolumeUser>,
    /// The oldest first.
    pub attachments: Vec<AttachmentSnapshot>,
}

/// A pod that needs the volume on a node.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeUser {
    /// When the pod was created.
    pub created: Option<Timestamp>,
    pub pod: Key,
    pub node: String,
    pub source: AttachmentSource,
}

/// What the VolumeAttachment's `spec.source` refers to.
#[derive(Clone, Debug, PartialEq)]
pub enum AttachmentSource {
    /// The PersistentVolume of this name.
    PersistentVolume(String),
    /// A volume that the pod defines inline, or a FlexVolume.
    Inline(Box<PersistentVolumeSpec>),
}

/// A VolumeAttachment of the volume.
#[derive(Clone, Debug)]
pub struct AttachmentSnapshot {
    pub node: String,
    pub state: AttachmentState,
    /// `status.attachError`: why the last attempt to attach failed.
    pub error: Option<String>,
    pub age: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachmentState {
    /// Created, and not confirmed: the driver may or may not have attached the volume.
    Unconfirmed,
    /// `status.attached` is true.
    Attached,
    /// A delete was requested, and the object still exists or may exist.
    Detaching,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AttachDecision {
    Attach { node: String, source: AttachmentSource },
    Wait { node: String, reason: AttachWait },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachWait {
    /// Multi-attach: the volume allows one node only (ReadWriteOnce), and this other node has it; these pods use it there.
    AttachedElsewhere { node: String, pods: Vec<Key> },
    /// The driver still has this long to answer.
    ForDriver(Duration),
    /// The driver has not answered within [`ATTACH_TIMEOUT`].
    DriverTimedOut,
    /// The driver failed with this message, and will be called again.
    DriverFailed(String),
    /// The node's attachment is being deleted. A new one is created afterwards.
    ForDetach,
}

/// What refers to a volume, as far as that is known without a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeReferences {
    pub has_pods: bool,
    pub has_attachments: bool,
}

/// Returns true if neither [`volume`] nor [`node`] can decide anything about a volume with these references: `volume`
/// decides per pod, `node` per attachment. Changes of such a volume or its claim need no reconcile.
pub fn is_noop(references: VolumeReferences) -> bool {
    !references.has_pods && !references.has_attachments
}

/// One decision for each node whose pods need the volume and do not have it yet.
pub fn volume(snapshot: &AttachVolumeSnapshot) -> Vec<AttachDecision> {
    if !snapshot.needs_attach {
        return Vec::new();
    }
    let nodes: BTreeSet<&str> = snapshot.users.iter().map(|user| user.node.as_str()).collect();
    let exclusive_node = exclusive_node(snapshot);
    let decide = |node: &str| match exclusive_node {
        Some(other) if other != node => Some(wait_for_other_node(snapshot, node, other)),
        Some(_) | None => attach_or_wait(snapshot, node),
    };
    nodes.into_iter().filter_map(decide).collect()
}

/// The only node that may have a volume which allows one node; `None` for volumes that allow many. A node with an
/// attachment in any state, needed or not, keeps the volume until that object is gone. Without attachments the oldest
/// pod's node gets it.
fn exclusive_node(snapshot: &AttachVolumeSnapshot) -> Option<&str> {
    if snapshot.allows_many_nodes {
        return None;
    }
    let attached = snapshot.attachments.first().map(|attachment| attachment.node.as_str());
    attached.or_else(|| oldest(snapshot.users.iter()).map(|user| user.node.as_str()))
}

fn oldest<'a>(users: impl Iterator<Item = &'a VolumeUser>) -> Option<&'a VolumeUser> {
    users.min_by_key(|user| (user.created, &user.pod, user.node.as_str()))
}

fn wait_for_other_node(snapshot: &AttachVolumeSnapshot, node: &str, other: &str) -> AttachDecision {
    let users = snapshot.users.iter().filter(|user| user.node == other);
    let pods = users.map(|user| user.pod.clone()).collect();
    let reason = AttachWait::AttachedElsewhere { node: other.to_owned(), pods };
    AttachDecision::Wait { node: node.to_owned(), reason }
}

/// The part of an event's message that says which pods have the volume. It is for a pod of `namespace`, and does not
/// reveal the names of pods in other namespaces.
pub fn describe_users(pods: &[Key], namespace: Option<&str>) -> String {
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

fn attach_or_wait(snapshot: &AttachVolumeSnapshot, node: &str) -> Option<AttachDecision> {
    let attachment = snapshot.attachments.iter().find(|attachment| attachment.node == node);
    let reason = match attachment.map(|attachment| (attachment.state, &attachment.error, attachment.age)) {
        Some((AttachmentState::Attached, _, _)) => return None,
        Some((AttachmentState::Unconfirmed, Some(error), _)) => AttachWait::DriverFailed(error.clone()),
        Some((AttachmentState::Unconfirmed, None, age)) if age >= ATTACH_TIMEOUT => AttachWait::DriverTimedOut,
        Some((AttachmentState::Unconfirmed, None, age)) => AttachWait::ForDriver(ATTACH_TIMEOUT - age),
        Some((AttachmentState::Detaching, _, _)) => AttachWait::ForDetach,
        None => {
            let user = oldest(snapshot.users.iter().filter(|user| user.node == node))?;
            return Some(AttachDecision::Attach { node: node.to_owned(), source: user.source.clone() });
        }
    };
    Some(AttachDecision::Wait { node: node.to_owned(), reason })
}

/// Everything about one node that [`node`] reads.
#[derive(Clone, Debug, Default)]
pub struct AttachNodeSnapshot {
    pub name: String,
    /// What `status.volumesAttached` lists now; `None` if the Node object does not exist.
    pub reported: Option<Vec<ReportedVolume>>,
    /// This controller attaches for the node. True if the Node object does not exist.
    pub is_managed: bool,
    pub is_ready: bool,
    /// The Node has the `out-of-service` taint: an administrator says that the machine is off.
    pub is_out_of_service: bool,
    /// The attachments of the node that this controller owns or that a pod needs.
    pub attachments: Vec<NodeAttachment>,
}

/// One entry of `status.volumesAttached`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedVolume {
    pub unique_name: String,
    /// Empty if the node finds the device without it.
    pub device_path: String,
}

/// A VolumeAttachment of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAttachment {
    /// The name of the VolumeAttachment.
    pub name: String,
    pub unique_name: String,
    /// The device path in the attachment's status; empty if there is none.
    pub device_path: String,
    pub state: AttachmentState,
    pub need: Need,
    pub usage: VolumeUsage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Needed,
    /// No pod has needed the volume on the node for this long, counted from when this process first noticed.
    UnneededFor(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeUsage {
    /// In `status.volumesInUse`, or in that of the last Node object of this name.
    InUse,
    NotInUse,
    /// The Node object does not exist, and this process did not see its last state.
    Unknown,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DetachPlan {
    /// The new `status.volumesAttached`, if it must change.
    pub report: Option<Vec<ReportedVolume>>,
    /// The attachments to delete, after the report was written.
    pub detach: Vec<Detach>,
    /// When the next volume may be detached by force, if nothing changes until then.
    pub retry_after: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detach {
    /// The name of the VolumeAttachment.
    pub attachment: String,
    pub unique_name: String,
    pub condition: DetachCondition,
}

/// Under which condition on the live Node the attachment may be deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetachCondition {
    /// Only if the live Node does not list the volume as in use.
    IfNotInUse,
    /// Also if it is listed as in use: an administrator says that the machine is off.
    NodeOutOfService,
    /// Also if it is listed as in use: the node has not been ready for too long.
    NodeTimedOut,
}

/// Whether an attachment stays on its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DetachVerdict {
    Keep,
    /// In use on a node that is not ready: detach by force after this long.
    KeepFor(Duration),
    Detach(DetachCondition),
}

/// `force_after`: how long a node that is not ready may keep a volume that no pod needs there; `None` for no limit.
pub fn node(snapshot: &AttachNodeSnapshot, force_after: Option<Duration>) -> DetachPlan {
    if !snapshot.is_managed {
        return DetachPlan::default();
    }
    let verdicts: Vec<(&NodeAttachment, DetachVerdict)> = snapshot
        .attachments
        .iter()
        .map(|attachment| (attachment, verdict(snapshot, attachment, force_after)))
        .collect();
    let kept = verdicts.iter().filter(|(attachment, verdict)| {
        attachment.state == AttachmentState::Attached && !matches!(verdict, DetachVerdict::Detach(_))
    });
    let desired: BTreeMap<&str, &str> =
        kept.map(|(attachment, _)| (attachment.unique_name.as_str(), attachment.device_path.as_str())).collect();
    let report = snapshot.reported.as_ref().and_then(|reported| {
        let current: BTreeMap<&str, &str> =
            reported.iter().map(|volume| (volume.unique_name.as_str(), volume.device_path.as_str())).collect();
        let entry = |(unique_name, device_path): (&&str, &&str)| ReportedVolume {
            unique_name: (*unique_name).into(),
            device_path: (*device_path).into(),
        };
        (desired != current).then(|| desired.iter().map(entry).collect())
    });
    let not_detaching = verdicts.iter().filter(|(attachment, _)| attachment.state != AttachmentState::Detaching);
    let detach = not_detaching.filter_map(|(attachment, verdict)| match verdict {
        DetachVerdict::Detach(condition) => Some(Detach {
            attachment: attachment.name.clone(),
            unique_name: attachment.unique_name.clone(),
            condition: *condition,
        }),
        DetachVerdict::Keep | DetachVerdict::KeepFor(_) => None,
    });
    let deadlines = verdicts.iter().filter_map(|(_, verdict)| match verdict {
        DetachVerdict::KeepFor(time) => Some(*time),
        DetachVerdict::Keep | DetachVerdict::Detach(_) => None,
    });
    DetachPlan { report, detach: detach.collect(), retry_after: deadlines.min() }
}

fn verdict(snapshot: &AttachNodeSnapshot, attachment: &NodeAttachment, force_after: Option<Duration>) -> DetachVerdict {
    let Need::UnneededFor(unneeded) = attachment.need else { return DetachVerdict::Keep };
    match (attachment.usage, force_after) {
        // The taint guarantees that nothing runs on the machine any more.
        _ if snapshot.is_out_of_service => DetachVerdict::Detach(DetachCondition::NodeOutOfService),
        (VolumeUsage::NotInUse, _) => DetachVerdict::Detach(DetachCondition::IfNotInUse),
        // A ready node unmounts by itself, however long that takes.
        _ if snapshot.is_ready => DetachVerdict::Keep,
        (VolumeUsage::InUse | VolumeUsage::Unknown, None) => DetachVerdict::Keep,
        (VolumeUsage::InUse | VolumeUsage::Unknown, Some(limit)) if unneeded < limit => {
            DetachVerdict::KeepFor(limit - unneeded)
        }
        (VolumeUsage::InUse | VolumeUsage::Unknown, Some(_)) => DetachVerdict::Detach(DetachCondition::NodeTimedOut),
    }
}

#[cfg(test)]
mod tests;
