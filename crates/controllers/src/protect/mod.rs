//! Protection: claims that pods use, bound volumes, and VolumeAttributesClasses in use are not deleted.
//!
//! Guarantees: the protection finalizer is removed from a claim only after a live list of the pods in its namespace,
//! and with the revision at which the claim was read; from a volume only if it is not Bound; from a
//! VolumeAttributesClass only after a live list of claims and volumes.
//!
//! Also keeps the condition `Unused` of bound claims up to date. The binder writes it first, together with the phase
//! Bound.
//!
//! There is no state between reconciles and no crash point: each write is complete in itself and is repeated if it is
//! lost.

mod act;
pub mod decide;
mod observe;

use std::time::Duration;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Change, Outcome, Queue, work};
use tokio_util::sync::CancellationToken;

use crate::Context;
use decide::ProtectionDecision;
use observe::ProtectionObserver;

const MAX_CONCURRENT_PROTECTIONS: usize = 256;

/// The delay until a claim is checked again if only a live list showed the pod that uses it. The pod may be deleted
/// while the watch of pods restarts; then no event for it ever arrives.
const UNCACHED_POD_RECHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The key of one unit of work.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ProtectionKey {
    Claim(Key),
    Volume(String),
    AttributesClass(String),
}

#[derive(Clone)]
struct Protector {
    context: Context,
    observer: ProtectionObserver,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let observer = ProtectionObserver::new(&context.caches);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observer.synced() => {}
    }
    subscribe(&observer, &queue);
    let protector = Protector { context, observer };
    work("protect", queue, MAX_CONCURRENT_PROTECTIONS, stop, move |key| protector.clone().reconcile(key)).await;
}

/// Queues the objects that a change concerns. Claims and volumes for which `decide` gives no work are not queued,
/// because most changes of them do not concern protection. Deleted objects need no protection.
fn subscribe(observer: &ProtectionObserver, queue: &Queue<ProtectionKey>) {
    let (q, observed) = (queue.clone(), observer.clone());
    observer.claims.subscribe(move |change| {
        let Change::Applied { new: claim, .. } = change else { return };
        let key = Key::of(&claim.metadata);
        let pods = observed.pods_of(&key);
        if decide::claim(claim, &pods).needs_write() || decide::usage_update(claim, &pods).is_some() {
            q.add(ProtectionKey::Claim(key));
        }
    });
    let q = queue.clone();
    observer.volumes.subscribe(move |change| {
        let Change::Applied { new: volume, .. } = change else { return };
        if decide::volume(volume).needs_write() {
            q.add(ProtectionKey::Volume(volume.metadata.name.clone().unwrap_or_default()));
        }
    });
    let q = queue.clone();
    observer.attributes_classes.subscribe(move |change| {
        q.add(ProtectionKey::AttributesClass(change.object().metadata.name.clone().unwrap_or_default()));
    });
    // A changed claim or volume may have been the last user of a class, and its new version does not name that class
    // any more. So every class that is being deleted is queued; there are few of them.
    let (q, observed) = (queue.clone(), observer.clone());
    observer.claims.subscribe(move |_| {
        observed.deleting_attributes_classes().for_each(|name| q.add(ProtectionKey::AttributesClass(name)));
    });
    let (q, observed) = (queue.clone(), observer.clone());
    observer.volumes.subscribe(move |_| {
        observed.deleting_attributes_classes().for_each(|name| q.add(ProtectionKey::AttributesClass(name)));
    });
    let q = queue.clone();
    observer.pods.subscribe(move |change| {
        for volume in pod::claim_volumes(change.object()) {
            q.add(ProtectionKey::Claim(volume.claim));
        }
    });
}

impl Protector {
    async fn reconcile(self, key: ProtectionKey) -> Result<Outcome, WriteError> {
        match key {
            ProtectionKey::Claim(key) => return self.reconcile_claim(&key).await,
            ProtectionKey::Volume(name) => self.reconcile_volume(&name).await?,
            ProtectionKey::AttributesClass(name) => self.reconcile_attributes_class(&name).await?,
        }
        Ok(Outcome::Done)
    }

    async fn reconcile_claim(&self, key: &Key) -> Result<Outcome, WriteError> {
        let Some(claim) = self.observer.claims.get(key) else { return Ok(Outcome::Done) };
        let pods = self.observer.pods_of(key);
        let mut decision = decide::claim(&claim, &pods);
        let mut outcome = Outcome::Done;
        // The cache may not show a pod that was scheduled a moment ago.
        if decision == ProtectionDecision::RemoveFinalizer {
            decision = decide::claim(&claim, &self.live_pods(&claim).await?);
            if let ProtectionDecision::Keep(_) = decision {
                outcome = Outcome::RequeueAfter(UNCACHED_POD_RECHECK_INTERVAL);
            }
        }
        self.apply_to_claim(&claim, decision).await?;
        if let Some(in_use) = decide::usage_update(&claim, &pods) {
            self.report_usage(&claim, in_use).await?;
        }
        Ok(outcome)
    }

    async fn reconcile_volume(&self, name: &str) -> Result<(), WriteError> {
        let Some(volume) = self.observer.volumes.named(name) else { return Ok(()) };
        self.apply_to_volume(&volume, decide::volume(&volume)).await
    }

    async fn reconcile_attributes_class(&self, name: &str) -> Result<(), WriteError> {
        let Some(class) = self.observer.attributes_classes.named(name) else { return Ok(()) };
        let (claims, volumes) = (self.observer.claims.all(), self.observer.volumes.all());
        let mut decision = decide::attributes_class(&class, &claims, &volumes);
        // The caches may not show a claim or volume that began to use the class a moment ago.
        if decision == ProtectionDecision::RemoveFinalizer {
            let (claims, volumes) = self.live_claims_and_volumes().await?;
            decision = decide::attributes_class(&class, &claims, &volumes);
        }
        self.apply_to_attributes_class(&class, decision).await
    }
}
