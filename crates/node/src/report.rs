//! The pod condition that tells whether its volumes are mounted, and if not, why. Pure.

use crate::decide::{Attachment, Wait};
use crate::desired::Blocked;

/// How one volume of a pod stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    Mounted,
    /// Found mounted at start and not confirmed by its driver yet.
    Found,
    /// A step is under way, or will be as soon as others are done.
    Working,
    Blocked(Blocked),
    Waiting(Wait),
    Failed(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Mounted,
    NotMounted {
        reason: &'static str,
        message: String,
    },
    /// Nothing worth a write: what the condition says now may stay.
    Unchanged,
}

/// The condition for a pod whose volumes stand like this.
pub fn verdict(volumes: &[(String, Standing)]) -> Verdict {
    if volumes.iter().all(|(_, s)| *s == Standing::Mounted) {
        return Verdict::Mounted;
    }
    let told: Vec<(&'static str, String)> = volumes
        .iter()
        .filter_map(|(name, standing)| {
            let (reason, why) = tell(standing)?;
            Some((reason, format!("volume {name:?}: {why}")))
        })
        .collect();
    match told.first() {
        None => Verdict::Unchanged,
        Some((reason, _)) => {
            let lines: Vec<&str> = told.iter().map(|(_, line)| line.as_str()).collect();
            Verdict::NotMounted { reason, message: lines.join("; ") }
        }
    }
}

fn tell(standing: &Standing) -> Option<(&'static str, String)> {
    Some(match standing {
        Standing::Mounted | Standing::Found | Standing::Working => return None,
        Standing::Blocked(blocked) => (blocked.reason(), blocked.to_string()),
        Standing::Failed(message) => ("MountFailed", message.clone()),
        Standing::Waiting(wait) => match wait {
            // Over within a write; telling it would cost another.
            Wait::InUseNotReported | Wait::Turn => return None,
            Wait::Retry => ("MountFailed", "the last attempt failed and will be repeated".into()),
            Wait::DriverNotRegistered => {
                ("DriverNotRegistered", "its driver is not in the list of registered CSI drivers".into())
            }
            Wait::UsedByAnotherPod => (
                "UsedByAnotherPod",
                "volume uses the ReadWriteOncePod access mode and is already in use by another pod".into(),
            ),
            Wait::NotAttached(attachment) => ("NotAttached", not_attached(attachment)),
        },
    })
}

fn not_attached(attachment: &Attachment) -> String {
    match attachment {
        // One text for all that goes well: the VolumeAttachment tells how far it is, and each change here is a write.
        Attachment::Missing | Attachment::Pending | Attachment::Attached => {
            "waiting to be attached to this node".into()
        }
        Attachment::Deleting => "volume attachment is being deleted".into(),
        Attachment::Failed(error) => format!("attach failed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_condition_says_what_is_missing() {
        let blocked = || Standing::Blocked(Blocked::VolumeMissing("pv".into()));
        let missing = || Standing::Waiting(Wait::NotAttached(Attachment::Missing));
        let not = |reason, message: &str| Verdict::NotMounted { reason, message: message.into() };
        for (case, standings, want) in [
            ("no volumes at all", vec![], Verdict::Mounted),
            ("all mounted", vec![Standing::Mounted, Standing::Mounted], Verdict::Mounted),
            ("a restart does not take back what was said", vec![Standing::Found], Verdict::Unchanged),
            ("under way", vec![Standing::Working, Standing::Mounted], Verdict::Unchanged),
            ("a wait shorter than a write", vec![Standing::Waiting(Wait::InUseNotReported)], Verdict::Unchanged),
            (
                "one of two is missing",
                vec![Standing::Mounted, missing()],
                not("NotAttached", "volume \"1\": waiting to be attached to this node"),
            ),
            (
                "the first reason leads, all are told",
                vec![blocked(), missing()],
                not(
                    "VolumeMissing",
                    "volume \"0\": PV pv does not exist; volume \"1\": waiting to be attached to this node",
                ),
            ),
        ] {
            let volumes: Vec<_> = standings.into_iter().enumerate().map(|(i, s)| (i.to_string(), s)).collect();
            assert_eq!(verdict(&volumes), want, "{case}");
        }
    }
}
