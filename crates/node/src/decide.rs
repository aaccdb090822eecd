//! What is to be done next about one volume on this node? Pure: what is wanted and what is there go in, one step comes out,
//! and for every pod that cannot have the volume yet the reason it waits.
//!
//! The caller owns the volume alone while it asks, carries the step out, and asks again. One step at a time keeps every
//! step based on what the one before it brought.

use std::collections::BTreeMap;

use crate::actual::Presence;
use crate::layout::PodUid;

/// What a pod means to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Desire {
    /// It needs the volume.
    Mount,
    /// Its containers are being stopped: what it has stays, nothing new is begun.
    Keep,
    /// It is known to be done with all of its volumes.
    Release,
    /// It is not in the cache, and nobody has asked the server yet.
    Unconfirmed,
}

/// One pod in the eyes of the volume.
#[derive(Clone, Debug)]
pub struct PodView {
    pub uid: PodUid,
    pub desire: Desire,
    pub published: Presence,
    /// The volume's only access mode is ReadWriteOncePod.
    pub exclusive: bool,
    /// A step for this pod failed since the caller last came here: it is not tried again before others had their turn.
    pub failed: bool,
}

/// The attachment of the volume to this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attach {
    /// The driver needs none.
    NotRequired,
    Required {
        /// The server has acknowledged that this node lists the volume as in use.
        reported: bool,
        /// Read after that acknowledgement, the Node lists the volume as attached.
        listed: bool,
        attachment: Attachment,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attachment {
    Missing,
    Deleting,
    Pending,
    Failed(String),
    Attached,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    NotRegistered,
    Registered { stages: bool },
}

#[derive(Clone, Debug)]
pub struct Seen {
    /// Oldest first: the pod that has waited longest is served first.
    pub pods: Vec<PodView>,
    pub staged: Presence,
    /// Staging or unstaging failed since the caller last came here.
    pub stage_failed: bool,
    pub attach: Attach,
    pub driver: Driver,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Unpublish(PodUid),
    /// With the settings of this pod's volume.
    Stage(PodUid),
    Publish(PodUid),
    Unstage,
    /// Nothing of the volume is left here: it may leave volumesInUse.
    Forget,
}

/// Why a pod does not have the volume yet, or still has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    DriverNotRegistered,
    InUseNotReported,
    NotAttached(Attachment),
    UsedByAnotherPod,
    /// The last attempt failed; its message is with the caller.
    Retry,
    /// Another pod's step comes first.
    Turn,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub next: Option<Step>,
    pub waiting: BTreeMap<PodUid, Wait>,
}

pub fn decide(seen: &Seen) -> Plan {
    let mut plan = Plan::default();
    // Taking away comes first: it frees what others wait for.
    for pod in seen.pods.iter().filter(|p| p.desire == Desire::Release && p.published.possible()) {
        plan.add(pod, unpublish(pod, seen.driver));
    }
    for pod in seen.pods.iter().filter(|p| p.desire == Desire::Mount && p.published != Presence::Present) {
        plan.add(pod, mount(pod, seen));
    }
    let in_use = seen.pods.iter().any(|p| p.published.possible() || matches!(p.desire, Desire::Mount | Desire::Keep));
    if plan.next.is_none() && !in_use {
        plan.next = leave(seen);
    }
    plan
}

impl Plan {
    fn add(&mut self, pod: &PodView, step: Result<Step, Wait>) {
        match step {
            Ok(step) if self.next.is_none() => self.next = Some(step),
            Ok(_) => {
                self.waiting.insert(pod.uid.clone(), Wait::Turn);
            }
            Err(wait) => {
                self.waiting.insert(pod.uid.clone(), wait);
            }
        }
    }
}

fn unpublish(pod: &PodView, driver: Driver) -> Result<Step, Wait> {
    match driver {
        _ if pod.failed => Err(Wait::Retry),
        Driver::NotRegistered => Err(Wait::DriverNotRegistered),
        Driver::Registered { .. } => Ok(Step::Unpublish(pod.uid.clone())),
    }
}

fn mount(pod: &PodView, seen: &Seen) -> Result<Step, Wait> {
    match &seen.attach {
        Attach::NotRequired => {}
        Attach::Required { reported: false, .. } => return Err(Wait::InUseNotReported),
        Attach::Required { attachment, listed, .. } if *attachment != Attachment::Attached || !listed => {
            // The list follows the attachment; until it does, "attached" alone is not enough.
            let attachment = if *attachment == Attachment::Attached { &Attachment::Pending } else { attachment };
            return Err(Wait::NotAttached(attachment.clone()));
        }
        Attach::Required { .. } => {}
    }
    let Driver::Registered { stages } = seen.driver else { return Err(Wait::DriverNotRegistered) };
    let others = seen.pods.iter().any(|other| other.uid != pod.uid && other.published.possible());
    if pod.exclusive && others {
        return Err(Wait::UsedByAnotherPod);
    }
    if pod.failed {
        return Err(Wait::Retry);
    }
    match (stages, seen.staged) {
        (true, Presence::Absent | Presence::Uncertain) if seen.stage_failed => Err(Wait::Retry),
        (true, Presence::Absent | Presence::Uncertain) => Ok(Step::Stage(pod.uid.clone())),
        (true, Presence::Present) | (false, _) => Ok(Step::Publish(pod.uid.clone())),
    }
}

fn leave(seen: &Seen) -> Option<Step> {
    match (seen.staged, seen.driver) {
        (Presence::Absent, _) => Some(Step::Forget),
        _ if seen.stage_failed => None,
        (_, Driver::Registered { .. }) => Some(Step::Unstage),
        (_, Driver::NotRegistered) => None,
    }
}

#[cfg(test)]
#[path = "decide_table.rs"]
mod table;
