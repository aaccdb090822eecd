//! The pod condition `cleat.dev/VolumesMounted`: whether the volumes of a pod are mounted and, if not, why. Pure.

use crate::decide::{AttachmentState, WaitReason};
use crate::desired::ResolveError;

/// The status of one volume of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeStatus {
    Mounted,
    /// Reconstructed at the start and not confirmed by its driver yet.
    Unconfirmed,
    /// A step for the volume runs or is queued.
    InProgress,
    Unresolved(ResolveError),
    Waiting(WaitReason),
    Failed(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionUpdate {
    Mounted,
    NotMounted {
        reason: &'static str,
        message: String,
    },
    /// The condition is not written: the status will change soon, or the earlier condition may still be true.
    Unchanged,
}

/// Returns the condition of a pod from the statuses of its volumes, by volume name.
pub fn condition_update(volumes: &[(String, VolumeStatus)]) -> ConditionUpdate {
    if volumes.iter().all(|(_, s)| *s == VolumeStatus::Mounted) {
        return ConditionUpdate::Mounted;
    }
    let reasons: Vec<(&'static str, String)> = volumes
        .iter()
        .filter_map(|(name, status)| {
            let (reason, why) = explain(status)?;
            Some((reason, format!("volume {name:?}: {why}")))
        })
        .collect();
    match reasons.first() {
        None => ConditionUpdate::Unchanged,
        Some((reason, _)) => {
            let lines: Vec<&str> = reasons.iter().map(|(_, line)| line.as_str()).collect();
            ConditionUpdate::NotMounted { reason, message: lines.join("; ") }
        }
    }
}

/// The reason and message for one volume; `None` if its status is not reported.
fn explain(status: &VolumeStatus) -> Option<(&'static str, String)> {
    Some(match status {
        VolumeStatus::Mounted | VolumeStatus::Unconfirmed | VolumeStatus::InProgress => return None,
        VolumeStatus::Unresolved(unresolved) => (unresolved.reason(), unresolved.to_string()),
        VolumeStatus::Failed(message) => ("MountFailed", message.clone()),
        VolumeStatus::Waiting(wait) => match wait {
            // They end within about one write; reporting them would cost another write.
            WaitReason::InUseNotReported | WaitReason::AnotherPodFirst => return None,
            WaitReason::LastAttemptFailed => ("MountFailed", "the last attempt failed and will be repeated".into()),
            WaitReason::DriverNotRegistered => {
                ("DriverNotRegistered", "its driver is not in the list of registered CSI drivers".into())
            }
            WaitReason::UsedByAnotherPod => (
                "UsedByAnotherPod",
                "volume uses the ReadWriteOncePod access mode and is already in use by another pod".into(),
            ),
            WaitReason::NotAttached(attachment) => ("NotAttached", not_attached(attachment)),
        },
    })
}

fn not_attached(attachment: &AttachmentState) -> String {
    match attachment {
        // One message for all normal states, because each change would be a write. The VolumeAttachment has the details.
        AttachmentState::Missing | AttachmentState::Pending | AttachmentState::Attached => {
            "waiting to be attached to this node".into()
        }
        AttachmentState::Deleting => "volume attachment is being deleted".into(),
        AttachmentState::Failed(error) => format!("attach failed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_condition_names_the_volumes_that_are_not_mounted() {
        let unresolved = || VolumeStatus::Unresolved(ResolveError::VolumeMissing("pv".into()));
        let missing = || VolumeStatus::Waiting(WaitReason::NotAttached(AttachmentState::Missing));
        let not = |reason, message: &str| ConditionUpdate::NotMounted { reason, message: message.into() };
        for (case, statuses, want) in [
            ("no volumes at all", vec![], ConditionUpdate::Mounted),
            ("all mounted", vec![VolumeStatus::Mounted, VolumeStatus::Mounted], ConditionUpdate::Mounted),
            ("a restart does not withdraw the condition", vec![VolumeStatus::Unconfirmed], ConditionUpdate::Unchanged),
            ("in progress", vec![VolumeStatus::InProgress, VolumeStatus::Mounted], ConditionUpdate::Unchanged),
            (
                "a wait that is shorter than a write",
                vec![VolumeStatus::Waiting(WaitReason::InUseNotReported)],
                ConditionUpdate::Unchanged,
            ),
            (
                "one of two is missing",
                vec![VolumeStatus::Mounted, missing()],
                not("NotAttached", "volume \"1\": waiting to be attached to this node"),
            ),
            (
                "the first reason is the reason, all messages are listed",
                vec![unresolved(), missing()],
                not(
                    "VolumeMissing",
                    "volume \"0\": PV pv does not exist; volume \"1\": waiting to be attached to this node",
                ),
            ),
        ] {
            let volumes: Vec<_> = statuses.into_iter().enumerate().map(|(i, s)| (i.to_string(), s)).collect();
            assert_eq!(condition_update(&volumes), want, "{case}");
        }
    }
}
