//! What this provisioner knows about its own calls, and what it cannot know about an earlier one's.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cleat_api::key::Meta as _;
use cleat_api::well_known::finalizer;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::LocalOptions;
use super::decide::Plan;

/// How long a request that the driver called impossible is not repeated.
const HOLD_OFF: Duration = Duration::from_secs(300);

/// A call that must be repeated as it was, whatever became of its claim and class meanwhile: the volume may be there.
#[derive(Clone)]
pub(super) struct Pending {
    pub(super) claim: Arc<PersistentVolumeClaim>,
    pub(super) plan: Arc<Plan>,
}

/// All by the uid of the claim.
#[derive(Default)]
struct Entries {
    pending: HashMap<String, Pending>,
    /// Held when we began: an earlier provisioner may have called.
    inherited: HashSet<String>,
    /// Until when, and the uid of the class under which it was impossible.
    infeasible: HashMap<String, (Instant, String)>,
    /// When we try to take a claim, and how often we have tried.
    turns: HashMap<String, (Instant, u32)>,
}

#[derive(Clone)]
pub(super) struct Ledger(Arc<Mutex<Entries>>);

impl Ledger {
    pub(super) fn inheriting(claims: impl Iterator<Item = Arc<PersistentVolumeClaim>>) -> Self {
        let held = claims.filter(|c| c.metadata.has_finalizer(finalizer::PROVISIONING));
        let inherited = held.map(|c| c.metadata.uid().to_owned()).collect();
        Self(Arc::new(Mutex::new(Entries { inherited, ..Entries::default() })))
    }

    /// Is anything known about this claim that is not on it?
    pub(super) fn has(&self, uid: &str) -> bool {
        let entries = self.0.lock();
        entries.pending.contains_key(uid)
            || entries.inherited.contains(uid)
            || entries.infeasible.contains_key(uid)
            || entries.turns.contains_key(uid)
    }

    pub(super) fn pending(&self, uid: &str) -> Option<Pending> {
        self.0.lock().pending.get(uid).cloned()
    }

    pub(super) fn is_inherited(&self, uid: &str) -> bool {
        self.0.lock().inherited.contains(uid)
    }

    pub(super) fn calling(&self, uid: &str, pending: Pending) {
        self.0.lock().pending.insert(uid.to_owned(), pending);
    }

    /// No call for this claim is in doubt any more.
    pub(super) fn settled(&self, uid: &str) {
        let mut entries = self.0.lock();
        entries.pending.remove(uid);
        entries.inherited.remove(uid);
        entries.infeasible.remove(uid);
        entries.turns.remove(uid);
    }

    /// How long we still leave an open claim to others; `None` when it is our turn.
    pub(super) fn until_turn(&self, uid: &str, pace: &LocalOptions) -> Option<Duration> {
        let mut entries = self.0.lock();
        let first = || (Instant::now() + pace.delay(0), 0);
        let (at, _) = entries.turns.entry(uid.to_owned()).or_insert_with(first);
        Some(at.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    /// Our turn came to nothing: how long until the next.
    pub(super) fn next_turn(&self, uid: &str, pace: &LocalOptions) -> Duration {
        let mut entries = self.0.lock();
        let tries = entries.turns.get(uid).map_or(0, |(_, tries)| tries + 1);
        let delay = pace.delay(tries);
        entries.turns.insert(uid.to_owned(), (Instant::now() + delay, tries));
        delay
    }

    pub(super) fn hold_off(&self, uid: &str, class_uid: &str) -> Duration {
        self.0.lock().infeasible.insert(uid.to_owned(), (Instant::now() + HOLD_OFF, class_uid.to_owned()));
        HOLD_OFF
    }

    /// How long the claim's request is still not to be repeated; another class of the same name is another request.
    pub(super) fn held_off(&self, uid: &str, class_uid: &str) -> Option<Duration> {
        let entries = self.0.lock();
        let (until, class) = entries.infeasible.get(uid)?;
        let left = until.saturating_duration_since(Instant::now());
        (class == class_uid && !left.is_zero()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    #[test]
    fn what_was_held_before_us_is_in_doubt_until_settled() {
        let mut held = build::claim("ns", "held", None, "1Gi");
        held.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
        let ledger = Ledger::inheriting([held, build::claim("ns", "free", None, "1Gi")].into_iter().map(Arc::new));
        assert!(ledger.is_inherited("uid-held"));
        assert!(!ledger.is_inherited("uid-free"));
        assert!(ledger.has("uid-held") && !ledger.has("uid-free"));
        ledger.settled("uid-held");
        assert!(!ledger.is_inherited("uid-held") && !ledger.has("uid-held"));
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_claim_is_left_to_others_for_a_while_that_grows() {
        let seconds = Duration::from_secs;
        let pace =
            LocalOptions { node: "n".to_owned(), immediate: true, base_delay: seconds(20), max_delay: seconds(60) };
        let ledger = Ledger::inheriting(std::iter::empty());
        let first = ledger.until_turn("c", &pace).unwrap();
        assert!(first <= seconds(20), "{first:?}");
        assert!(ledger.has("c"));
        assert_eq!(ledger.until_turn("c", &pace), Some(first), "asked again, it is no longer");
        tokio::time::advance(first).await;
        assert_eq!(ledger.until_turn("c", &pace), None);
        for (most, least) in [(40, 20), (60, 40), (60, 40)] {
            let next = ledger.next_turn("c", &pace);
            assert!(next <= seconds(most) && next >= seconds(least), "{next:?}");
        }
        ledger.settled("c");
        assert!(ledger.until_turn("c", &pace).unwrap() <= seconds(20), "it begins anew");
    }

    #[tokio::test(start_paused = true)]
    async fn an_impossible_request_waits_unless_its_class_is_another() {
        let ledger = Ledger::inheriting(std::iter::empty());
        ledger.hold_off("c", "class-1");
        assert!(ledger.has("c"));
        assert!(ledger.held_off("c", "class-1").is_some());
        assert!(ledger.held_off("c", "class-2").is_none());
        tokio::time::advance(HOLD_OFF).await;
        assert!(ledger.held_off("c", "class-1").is_none());
    }
}
