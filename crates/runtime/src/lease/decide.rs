//! What a candidate does with the lease. Pure: the caller supplies the time since it observed the last change of the lease.
//!
//! The clocks of two candidates are never compared. A candidate takes over only after it has observed the lease unchanged for
//! the lease duration that its holder has set.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::LeaseSpec;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There is no lease: create it.
    Create,
    /// This candidate holds it: renew it.
    Renew,
    /// It has no holder, or its holder did not renew it in time.
    TakeOver,
    /// Another candidate holds it.
    Wait,
}

pub fn decide(lease: Option<&LeaseSpec>, unchanged_for: Duration, identity: &str) -> Step {
    let Some(lease) = lease else { return Step::Create };
    let holder = lease.holder_identity.as_deref().unwrap_or_default();
    let lease_seconds = u64::try_from(lease.lease_duration_seconds.unwrap_or_default()).unwrap_or_default();
    if holder == identity {
        Step::Renew
    } else if holder.is_empty() || unchanged_for >= Duration::from_secs(lease_seconds) {
        Step::TakeOver
    } else {
        Step::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_over_only_from_a_silent_holder() {
        let held_by = |holder: &str| {
            let holder_identity = Some(holder.to_owned()).filter(|h| !h.is_empty());
            Some(LeaseSpec { holder_identity, lease_duration_seconds: Some(15), ..LeaseSpec::default() })
        };
        for (case, lease, seconds, want) in [
            ("no lease yet", None, 0, Step::Create),
            ("ours", held_by("me"), 0, Step::Renew),
            ("ours, and late", held_by("me"), 60, Step::Renew),
            ("released", held_by(""), 0, Step::TakeOver),
            ("another's, and alive", held_by("other"), 14, Step::Wait),
            ("another's, and silent", held_by("other"), 15, Step::TakeOver),
        ] {
            assert_eq!(decide(lease.as_ref(), Duration::from_secs(seconds), "me"), want, "{case}");
        }
    }
}
