//! Which changes of objects queue which keys.
//!
//! A claim or volume for which `decide` would do nothing is not queued. This is safe because every change that alters the
//! decision is a change of an object subscribed to here.

use cleat_api::claim::{claim_phase, claim_ref, claim_ref_key, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_runtime::Change;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::{ClaimId, Provisioner, Queues, decide};

impl Provisioner {
    pub(super) fn subscribe(&self, queues: &Queues) {
        self.subscribe_to_claims(queues.clone());
        self.subscribe_to_volumes(queues.clone());
        let (q, observer) = (queues.claims.clone(), self.observer.clone());
        self.observer.classes.subscribe(move |_| {
            let without_volume = observer.claims.each().filter(|claim| volume_name(claim).is_none());
            without_volume.for_each(|claim| q.add_low_priority(ClaimId::of(&claim)));
        });
        let q = queues.volumes.clone();
        self.observer.attachments.subscribe(move |change| {
            if let Some(name) = &change.object().spec.source.persistent_volume_name {
                q.add(name.clone());
            }
        });
    }

    fn subscribe_to_claims(&self, q: Queues) {
        let (observer, calls) = (self.observer.clone(), self.calls.clone());
        let (driver, options) = (self.capabilities.clone(), self.options.clone());
        self.observer.claims.subscribe(move |change| {
            if !is_relevant(change) {
                return;
            }
            let claim = change.object();
            let needs_nothing = || is_deletion(change) || decide::is_noop(claim, &driver, &options.policy);
            if calls.contains(claim.metadata.uid()) || !needs_nothing() {
                q.claims.add(ClaimId::of(claim));
            }
            // Clones of this claim may wait for it to be bound; the source of this claim may wait for it to be cloned.
            let clones = observer.clones_of(&Key::of(&claim.metadata));
            clones.iter().for_each(|clone| q.claims.add(ClaimId::of(clone)));
            observer.source_of(claim).iter().for_each(|source| q.claims.add(ClaimId::of(source)));
            if let Some(snapshot) = decide::source::restore_source(claim) {
                q.snapshots.add(snapshot);
            }
        });
    }

    fn subscribe_to_volumes(&self, q: Queues) {
        let (observer, calls) = (self.observer.clone(), self.calls.clone());
        let (driver, options) = (self.capabilities.clone(), self.options.clone());
        self.observer.volumes.subscribe(move |change| {
            let volume = change.object();
            if !is_deletion(change) {
                if !decide::reclaim::is_noop(volume, &driver, options.policy.local.as_ref()) {
                    q.volumes.add(volume.metadata.name.clone().unwrap_or_default());
                }
                return;
            }
            // A volume that was deleted before it was bound leaves its claim without one.
            if let Some(claim) = claim_ref(volume) {
                let id = ClaimId { key: claim_ref_key(claim), uid: claim.uid.clone().unwrap_or_default() };
                let exists = observer.claims.get(&id.key).is_some_and(|claim| claim.metadata.uid() == id.uid);
                if exists || calls.contains(&id.uid) {
                    q.claims.add(id);
                }
            }
        });
    }
}

fn is_deletion<K>(change: &Change<K>) -> bool {
    matches!(change, Change::Deleted(_))
}

/// Returns false if only finalizers, labels or status fields other than the phase changed. The provisioner adds and
/// removes its finalizer with every failed call; if that queued the claim, there would be no backoff.
fn is_relevant(change: &Change<PersistentVolumeClaim>) -> bool {
    let Change::Applied { old: Some(old), new } = change else { return true };
    old.metadata.annotations != new.metadata.annotations
        || old.metadata.deletion_timestamp != new.metadata.deletion_timestamp
        || old.spec != new.spec
        || claim_phase(old) != claim_phase(new)
}
