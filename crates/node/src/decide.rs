//! Decides the next step for one volume on this node. Pure: it takes the observed volume with its pods, and returns one step
//! and, for every pod that cannot have the volume yet, the reason why it waits.
//!
//! The caller is the only one that works on the volume. It carries out the step and calls [`decide`] again, so that
//! every step is based on the outcome of the previous one.

use std::collections::BTreeMap;

use crate::actual::Presence;
use crate::layout::PodUid;

/// What a pod needs of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodNeed {
    /// The volume must be mounted.
    Mount,
    /// The pod is terminating: an existing mount stays, no new one is made.
    Keep,
    /// The pod has terminated or is deleted: the volume must be unmounted.
    Release,
    /// The pod is not in the cache and has not been read from the server yet: nothing changes.
    Unconfirmed,
}

/// One pod of the volume.
#[derive(Clone, Debug)]
pub struct ObservedPod {
    pub uid: PodUid,
    pub need: PodNeed,
    pub published: Presence,
    /// The volume's only access mode is ReadWriteOncePod.
    pub exclusive: bool,
    /// A step for this pod failed in this reconcile. It is repeated in the next one, so that other pods are not delayed.
    pub failed: bool,
}

/// The attachment of the volume to this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachState {
    /// The driver requires no attachment.
    NotRequired,
    Required {
        /// The server has acknowledged the volume in `volumesInUse` of this node.
        in_use_reported: bool,
        /// The Node, read after that acknowledgement, lists the volume in `volumesAttached`.
        listed_as_attached: bool,
        attachment: AttachmentState,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachmentState {
    Missing,
    Deleting,
    Pending,
    Failed(String),
    Attached,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverState {
    NotRegistered,
    Registered { stages: bool },
}

/// One volume on this node, as [`decide`] needs it.
#[derive(Clone, Debug)]
pub struct ObservedVolume {
    /// Oldest first: the pod that was created first is served first.
    pub pods: Vec<ObservedPod>,
    pub staged: Presence,
    /// Staging or unstaging failed in this reconcile.
    pub stage_failed: bool,
    pub attach: AttachState,
    pub driver: DriverState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Unpublish(PodUid),
    /// With the volume spec of this pod.
    Stage(PodUid),
    Publish(PodUid),
    Unstage,
    /// Nothing of the volume is left on this node: it may leave `volumesInUse`.
    Forget,
}

/// Why a pod does not have the volume yet, or still has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    DriverNotRegistered,
    InUseNotReported,
    NotAttached(AttachmentState),
    UsedByAnotherPod,
    /// The last attempt failed. The caller has the message and repeats the step after a backoff.
    LastAttemptFailed,
    /// The step of another pod is carried out first.
    AnotherPodFirst,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub next: Option<Step>,
    pub waiting: BTreeMap<PodUid, WaitReason>,
}

pub fn decide(volume: &ObservedVolume) -> Plan {
    let mut plan = Plan::default();
    // Unpublish first: other pods may wait for an exclusive volume.
    for pod in volume.pods.iter().filter(|p| p.need == PodNeed::Release && p.published.may_be_present()) {
        plan.add(pod, unpublish(pod, volume.driver));
    }
    for pod in volume.pods.iter().filter(|p| p.need == PodNeed::Mount && p.published != Presence::Present) {
        plan.add(pod, mount(pod, volume));
    }
    let in_use =
        volume.pods.iter().any(|p| p.published.may_be_present() || matches!(p.need, PodNeed::Mount | PodNeed::Keep));
    if plan.next.is_none() && !in_use {
        plan.next = unstage_or_forget(volume);
    }
    plan
}

impl Plan {
    fn add(&mut self, pod: &ObservedPod, step: Result<Step, WaitReason>) {
        match step {
            Ok(step) if self.next.is_none() => self.next = Some(step),
            Ok(_) => {
                self.waiting.insert(pod.uid.clone(), WaitReason::AnotherPodFirst);
            }
            Err(wait) => {
                self.waiting.insert(pod.uid.clone(), wait);
            }
        }
    }
}

fn unpublish(pod: &ObservedPod, driver: DriverState) -> Result<Step, WaitReason> {
    match driver {
        _ if pod.failed => Err(WaitReason::LastAttemptFailed),
        DriverState::NotRegistered => Err(WaitReason::DriverNotRegistered),
        DriverState::Registered { .. } => Ok(Step::Unpublish(pod.uid.clone())),
    }
}

fn mount(pod: &ObservedPod, volume: &ObservedVolume) -> Result<Step, WaitReason> {
    match &volume.attach {
        AttachState::NotRequired => {}
        AttachState::Required { in_use_reported: false, .. } => return Err(WaitReason::InUseNotReported),
        AttachState::Required { attachment, listed_as_attached, .. }
            if *attachment != AttachmentState::Attached || !listed_as_attached =>
        {
            // The attach/detach controller updates `volumesAttached` after the attachment. The volume may be used only then.
            let attachment =
                if *attachment == AttachmentState::Attached { &AttachmentState::Pending } else { attachment };
            return Err(WaitReason::NotAttached(attachment.clone()));
        }
        AttachState::Required { .. } => {}
    }
    let DriverState::Registered { stages } = volume.driver else { return Err(WaitReason::DriverNotRegistered) };
    let used_by_others = volume.pods.iter().any(|other| other.uid != pod.uid && other.published.may_be_present());
    if pod.exclusive && used_by_others {
        return Err(WaitReason::UsedByAnotherPod);
    }
    if pod.failed {
        return Err(WaitReason::LastAttemptFailed);
    }
    match (stages, volume.staged) {
        (true, Presence::Absent | Presence::Uncertain) if volume.stage_failed => Err(WaitReason::LastAttemptFailed),
        (true, Presence::Absent | Presence::Uncertain) => Ok(Step::Stage(pod.uid.clone())),
        (true, Presence::Present) | (false, _) => Ok(Step::Publish(pod.uid.clone())),
    }
}

fn unstage_or_forget(volume: &ObservedVolume) -> Option<Step> {
    match (volume.staged, volume.driver) {
        (Presence::Absent, _) => Some(Step::Forget),
        _ if volume.stage_failed => None,
        (_, DriverState::Registered { .. }) => Some(Step::Unstage),
        (_, DriverState::NotRegistered) => None,
    }
}

#[cfg(test)]
mod tests;
