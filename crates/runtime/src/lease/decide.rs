//! Whose turn is it to lead? Pure: the caller says how long ago the lease was last seen to change.
//!
//! The clocks of two candidates are never compared. A candidate takes a lease over only after it has itself watched the
//! lease unchanged for as long as its holder asked for.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::LeaseSpec;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There is no lease: make it ours.
    Create,
    /// It is ours: say that we are still here.
    Renew,
    /// Nobody holds it, or its holder has fallen silent.
    Take,
    /// Somebody else leads.
    Wait,
}

pub fn step(lease: Option<&LeaseSpec>, unchanged_for: Duration, me: &str) -> Step {
    let Some(lease) = lease else { return Step::Create };
    let holder = lease.holder_identity.as_deref().unwrap_or_default();
    let promised = u64::try_from(lease.lease_duration_seconds.unwrap_or_default()).unwrap_or_default();
    if holder == me {
        Step::Renew
    } else if holder.is_empty() || unchanged_for >= Duration::from_secs(promised) {
        Step::Take
    } else {
        Step::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_only_from_somebody_silent() {
        let held = |holder: &str| {
            let holder_identity = Some(holder.to_owned()).filter(|h| !h.is_empty());
            Some(LeaseSpec { holder_identity, lease_duration_seconds: Some(15), ..LeaseSpec::default() })
        };
        for (case, lease, seconds, want) in [
            ("no lease yet", None, 0, Step::Create),
            ("ours", held("me"), 0, Step::Renew),
            ("ours, and late", held("me"), 60, Step::Renew),
            ("given back", held(""), 0, Step::Take),
            ("another's, and alive", held("other"), 14, Step::Wait),
            ("another's, and silent", held("other"), 15, Step::Take),
        ] {
            assert_eq!(step(lease.as_ref(), Duration::from_secs(seconds), "me"), want, "{case}");
        }
    }
}
