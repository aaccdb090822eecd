//! What the provisioner remembers between reconciles: calls whose outcome is not known, and delays.
//!
//! Contract: entries are keyed by the uid of the claim and removed together by [`CallState::forget`], when the outcome of
//! every call for the claim is certain.
//!
//! If the memory is lost, for example in a restart:
//! - A pending call is found again by the provisioning finalizer, which was written before the call: [`CallState::new`]
//!   marks every claim that carries it as inherited, and for such a claim CreateVolume is called again even if the claim is
//!   being deleted. The request is then built from the claim and class as they are now.
//! - An infeasible request is repeated once more before it is delayed again.
//! - The delays of a competition start again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cleat_api::key::Meta as _;
use cleat_api::well_known::finalizer;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::NodeDeploymentOptions;
use super::decide::{Competition, ProvisionPlan, RetryDelays};

/// How long a request that the driver called infeasible is not repeated.
const INFEASIBLE_RETRY_DELAY: Duration = Duration::from_secs(300);

/// A CreateVolume call that must be repeated unchanged, even if its claim or class has changed or is gone: the volume may
/// exist.
#[derive(Clone)]
pub(super) struct PendingCall {
    pub(super) claim: Arc<PersistentVolumeClaim>,
    pub(super) plan: Arc<ProvisionPlan>,
}

struct InfeasibleRequest {
    retry_at: Instant,
    /// A class that was deleted and created again under the same name makes a new request.
    class_uid: String,
}

struct ScheduledAttempt {
    at: Instant,
    /// How many attempts were scheduled before this one.
    earlier: u32,
}

/// All by the uid of the claim.
#[derive(Default)]
struct Entries {
    pending: HashMap<String, PendingCall>,
    inherited: HashSet<String>,
    infeasible: HashMap<String, InfeasibleRequest>,
    attempts: HashMap<String, ScheduledAttempt>,
}

#[derive(Clone)]
pub(super) struct CallState(Arc<Mutex<Entries>>);

impl CallState {
    /// Marks the claims with the provisioning finalizer as inherited. `claims` are all claims at the start of the process.
    pub(super) fn new(claims: impl Iterator<Item = Arc<PersistentVolumeClaim>>) -> Self {
        let finalized = claims.filter(|claim| claim.metadata.has_finalizer(finalizer::PROVISIONING));
        let inherited = finalized.map(|claim| claim.metadata.uid().to_owned()).collect();
        Self(Arc::new(Mutex::new(Entries { inherited, ..Entries::default() })))
    }

    /// Returns true if anything is remembered about the claim.
    pub(super) fn contains(&self, uid: &str) -> bool {
        let entries = self.0.lock();
        entries.pending.contains_key(uid)
            || entries.inherited.contains(uid)
            || entries.infeasible.contains_key(uid)
            || entries.attempts.contains_key(uid)
    }

    pub(super) fn pending(&self, uid: &str) -> Option<PendingCall> {
        self.0.lock().pending.get(uid).cloned()
    }

    pub(super) fn is_inherited(&self, uid: &str) -> bool {
        self.0.lock().inherited.contains(uid)
    }

    /// Must be called before the driver is.
    pub(super) fn record_call(&self, uid: &str, call: PendingCall) {
        self.0.lock().pending.insert(uid.to_owned(), call);
    }

    /// Removes everything about the claim.
    pub(super) fn forget(&self, uid: &str) {
        let mut entries = self.0.lock();
        entries.pending.remove(uid);
        entries.inherited.remove(uid);
        entries.infeasible.remove(uid);
        entries.attempts.remove(uid);
    }

    /// The delays of a claim whose class has this uid.
    pub(super) fn delays(&self, uid: &str, class_uid: &str) -> RetryDelays {
        let entries = self.0.lock();
        let left =
            |until: Instant| Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
        let infeasible = entries.infeasible.get(uid).filter(|request| request.class_uid == class_uid);
        let competition = match entries.attempts.get(uid) {
            None => Competition::NotScheduled,
            Some(attempt) => left(attempt.at).map_or(Competition::Due, Competition::Scheduled),
        };
        RetryDelays { infeasible: infeasible.and_then(|request| left(request.retry_at)), competition }
    }

    /// Schedules the first or the next attempt to take the claim, and returns the time until then.
    pub(super) fn schedule_attempt(&self, uid: &str, options: &NodeDeploymentOptions) -> Duration {
        let mut entries = self.0.lock();
        let earlier = entries.attempts.get(uid).map_or(0, |attempt| attempt.earlier + 1);
        let delay = options.delay(earlier);
        entries.attempts.insert(uid.to_owned(), ScheduledAttempt { at: Instant::now() + delay, earlier });
        delay
    }

    /// Delays the next request for the claim, and returns the delay.
    pub(super) fn delay_infeasible(&self, uid: &str, class_uid: &str) -> Duration {
        let retry_at = Instant::now() + INFEASIBLE_RETRY_DELAY;
        let request = InfeasibleRequest { retry_at, class_uid: class_uid.to_owned() };
        self.0.lock().infeasible.insert(uid.to_owned(), request);
        INFEASIBLE_RETRY_DELAY
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    fn empty() -> CallState {
        CallState::new(std::iter::empty())
    }

    #[test]
    fn claims_with_the_finalizer_at_the_start_are_inherited_until_forgotten() {
        let mut finalized = build::claim("ns", "held", None, "1Gi");
        finalized.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
        let calls = CallState::new([finalized, build::claim("ns", "free", None, "1Gi")].into_iter().map(Arc::new));
        assert!(calls.is_inherited("uid-held"));
        assert!(!calls.is_inherited("uid-free"));
        assert!(calls.contains("uid-held") && !calls.contains("uid-free"));
        calls.forget("uid-held");
        assert!(!calls.is_inherited("uid-held") && !calls.contains("uid-held"));
    }

    #[tokio::test(start_paused = true)]
    async fn each_attempt_to_take_a_claim_is_delayed_longer_up_to_the_maximum() {
        let seconds = Duration::from_secs;
        let options = NodeDeploymentOptions {
            node: "n".to_owned(),
            immediate: true,
            base_delay: seconds(20),
            max_delay: seconds(60),
        };
        let calls = empty();
        let competition = || calls.delays("c", "").competition;
        assert_eq!(competition(), Competition::NotScheduled);
        let first = calls.schedule_attempt("c", &options);
        assert!(first <= seconds(20), "{first:?}");
        assert!(calls.contains("c"));
        assert_eq!(competition(), Competition::Scheduled(first), "reading the delay does not extend it");
        tokio::time::advance(first).await;
        assert_eq!(competition(), Competition::Due);
        for (most, least) in [(40, 20), (60, 40), (60, 40)] {
            let next = calls.schedule_attempt("c", &options);
            assert!(next <= seconds(most) && next >= seconds(least), "{next:?}");
        }
        calls.forget("c");
        assert!(calls.schedule_attempt("c", &options) <= seconds(20), "the first delay again");
    }

    #[tokio::test(start_paused = true)]
    async fn an_infeasible_request_is_delayed_unless_its_class_is_another() {
        let calls = empty();
        calls.delay_infeasible("c", "class-1");
        assert!(calls.contains("c"));
        assert!(calls.delays("c", "class-1").infeasible.is_some());
        assert!(calls.delays("c", "class-2").infeasible.is_none());
        tokio::time::advance(INFEASIBLE_RETRY_DELAY).await;
        assert!(calls.delays("c", "class-1").infeasible.is_none());
    }
}
