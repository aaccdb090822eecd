//! Reads caches into the snapshots that `decide` needs. Changes nothing and reserves nothing.

use std::sync::Arc;

use cleat_api::claim::{self, claim_class, claim_ref, claim_ref_key, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::{migrate, pod};
use cleat_runtime::write::{self, WriteError};
use cleat_runtime::{Cache, Caches, Change, Index};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;

use super::decide::{self, ClaimBindDecision, ClaimSnapshot, ReferencedClaim};
use super::{BindOptions, Binder};

#[derive(Clone)]
pub(super) struct BindObserver {
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) classes: Cache<StorageClass>,
    pub(super) pods: Cache<Pod>,
    /// Volumes by the claim that their `claimRef` names.
    volumes_by_claim: Index<PersistentVolume>,
    /// Claims that name no volume, by class.
    pending_claims: Index<PersistentVolumeClaim>,
    /// Claims by the volume they name.
    claims_by_volume: Index<PersistentVolumeClaim>,
    /// Pods that have not terminated, by the claims they name.
    pods_by_claim: Index<Pod>,
    options: Arc<BindOptions>,
}

/// The index term of claims without a class. A StorageClass cannot have this name.
const NO_CLASS: &str = "/no-class";

impl BindObserver {
    pub(super) fn new(caches: &Caches, options: BindOptions) -> Self {
        let (claims, volumes, pods) = (caches.claims(), caches.volumes(), caches.pods());
        Self {
            pods_by_claim: pods.index(|p| claims_of_pod(p).map(|claim| claim.to_string()).collect()),
            pods,
            volumes_by_claim: volumes
                .index(|v| claim_ref(v).map(|r| claim_ref_key(r).to_string()).into_iter().collect()),
            pending_claims: claims.index(|c| match volume_name(c) {
                None => vec![claim_class(c).unwrap_or(NO_CLASS).to_owned()],
                Some(_) => Vec::new(),
            }),
            claims_by_volume: claims.index(|c| volume_name(c).map(ToOwned::to_owned).into_iter().collect()),
            classes: caches.classes(),
            options: Arc::new(options),
            claims,
            volumes,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.classes.synced(), self.pods.synced());
    }

    /// Returns the snapshot of a claim. Its candidates are the volumes reserved for the claim; available volumes are
    /// not among them, because a caller must reserve one before it may use it.
    pub(super) fn claim(&self, claim: Arc<PersistentVolumeClaim>) -> ClaimSnapshot {
        let key = Key::of(&claim.metadata);
        let named = volume_name(&claim).and_then(|name| self.volumes.named(name));
        let needs_volume = !decide::is_bind_completed(&claim) && volume_name(&claim).is_none();
        let candidates = if needs_volume { self.reserved_for(&key) } else { Vec::new() };
        let default_class = if claim_class(&claim).is_none() && needs_volume { self.default_class() } else { None };
        let users = self.pods_by_claim.get(&key.to_string());
        let unscheduled = users.iter().filter(|p| pod::node_name(p).is_none());
        let mut consumers: Vec<String> = unscheduled.filter_map(|p| p.metadata.name.clone()).collect();
        consumers.sort();
        let in_use = users.iter().any(|p| pod::uses_claim(p, &claim));
        ClaimSnapshot { named, candidates, default_class, consumers, in_use, ..self.claim_with_class(claim) }
    }

    /// Returns a snapshot that contains only the claim and its class.
    fn claim_with_class(&self, claim: Arc<PersistentVolumeClaim>) -> ClaimSnapshot {
        let class = claim_class(&claim).filter(|name| !name.is_empty()).map(|name| self.classes.named(name));
        let provisioner = class.as_ref().and_then(Option::as_ref).map(|c| c.provisioner.as_str());
        let provisioner = provisioner.map(|name| migrate::driver_of(name).unwrap_or(name));
        let provisioner_holds = provisioner.is_some_and(|name| self.options.holding_provisioners.contains(name));
        ClaimSnapshot { class, provisioner_holds, ..ClaimSnapshot::minimal(claim, None) }
    }

    fn default_class(&self) -> Option<String> {
        let classes = self.classes.all();
        claim::default_class(classes.iter().map(Arc::as_ref)).and_then(|c| c.metadata.name.clone())
    }

    /// Returns the cached claims that name the volume and the claim that the volume is reserved for. A claim that is
    /// created later is queued by its own change.
    pub(super) fn claims_of(&self, volume: &PersistentVolume) -> impl Iterator<Item = Arc<PersistentVolumeClaim>> {
        let reserved = claim_ref(volume).and_then(|reference| self.claims.get(&claim_ref_key(reference)));
        let naming = self.claims_by_volume.get(volume.metadata.name.as_deref().unwrap_or_default());
        reserved.into_iter().chain(naming)
    }

    /// Returns the volumes that a change of a claim may concern: the volume that the claim names and, if it names one
    /// or is deleted, the volumes reserved for it, since the claim will not use the others.
    pub(super) fn volumes_of(
        &self,
        change: &Change<PersistentVolumeClaim>,
        key: &Key,
    ) -> impl Iterator<Item = Arc<PersistentVolume>> {
        let name = volume_name(change.object());
        let is_deleted = matches!(change, Change::Deleted(_));
        let reserved = if name.is_some() || is_deleted { self.reserved_for(key) } else { Vec::new() };
        let named = name.and_then(|name| self.volumes.named(name));
        named.into_iter().chain(reserved)
    }

    /// Returns false if a reconcile of the claim after this change would write and report nothing new.
    pub(super) fn needs_reconcile(&self, change: &Change<PersistentVolumeClaim>) -> bool {
        let Change::Applied { old, new } = change else { return false };
        if self.is_claim_settled(new) {
            return false;
        }
        // The binder reported the request when it wrote it.
        let is_own_request =
            |old: &Arc<PersistentVolumeClaim>| decide::is_request_written(&self.claim_with_class(old.clone()), new);
        !old.as_ref().is_some_and(is_own_request)
    }

    /// Returns true if the claim was bound and `decide` finds nothing to do for it.
    pub(super) fn is_claim_settled(&self, claim: &Arc<PersistentVolumeClaim>) -> bool {
        let named = || volume_name(claim).and_then(|name| self.volumes.named(name));
        decide::is_bind_completed(claim)
            && decide::claim(&ClaimSnapshot::minimal(claim.clone(), named())) == ClaimBindDecision::Settled
    }

    /// Returns true if `decide` finds nothing to do for the volume, or leaves it to the reconcile of its claim.
    pub(super) fn is_volume_settled(&self, volume: &PersistentVolume) -> bool {
        decide::volume(volume, &self.referenced_claim(volume)).is_noop()
    }

    /// Returns the claim that the volume's `claimRef` identifies, according to the cache.
    pub(super) fn referenced_claim(&self, volume: &PersistentVolume) -> ReferencedClaim {
        let Some((key, uid)) = claim_identity(volume) else { return ReferencedClaim::Unset };
        let claim = self.claims.get(&key).filter(|claim| claim.metadata.uid() == uid);
        claim.map_or(ReferencedClaim::Gone, ReferencedClaim::Exists)
    }

    fn reserved_for(&self, claim: &Key) -> Vec<Arc<PersistentVolume>> {
        self.volumes_by_claim.get(&claim.to_string())
    }

    /// Returns the claims without a volume that an available volume of this class could serve.
    pub(super) fn pending_of_class(&self, class: &str) -> Vec<Arc<Key>> {
        let mut claims = self.pending_claims.keys(class);
        if class.is_empty() {
            claims.extend(self.pending_claims.keys(NO_CLASS));
        }
        claims
    }

    /// Returns the claims that a new or changed class may concern.
    pub(super) fn unbound_claims(&self) -> Vec<Arc<PersistentVolumeClaim>> {
        self.claims.each().filter(|c| volume_name(c).is_none()).collect()
    }
}

/// Returns the claims that the pod names; none if the pod has terminated.
fn claims_of_pod(pod: &Pod) -> impl Iterator<Item = Key> {
    let claims = if pod::is_terminated(pod) { Vec::new() } else { pod::claim_volumes(pod) };
    claims.into_iter().map(|used| used.claim)
}

/// Returns the claims that the pod names; none if the pod has a node or has terminated.
pub(super) fn claims_of_unscheduled(pod: &Pod) -> impl Iterator<Item = Key> {
    claims_of_pod(pod).filter(|_| pod::node_name(pod).is_none())
}

/// Returns the key and the uid in the volume's `claimRef`; `None` if there is no `claimRef` or it has no uid.
fn claim_identity(volume: &PersistentVolume) -> Option<(Key, &str)> {
    let reference = claim_ref(volume)?;
    let uid = reference.uid.as_deref().filter(|uid| !uid.is_empty())?;
    Some((claim_ref_key(reference), uid))
}

impl Binder {
    /// Returns the claim that the volume's `claimRef` identifies. If the cache does not show it, it is read live: a
    /// volume is released, and then deleted, because this returns `Gone`.
    pub(super) async fn live_referenced_claim(&self, volume: &PersistentVolume) -> Result<ReferencedClaim, WriteError> {
        let cached = self.observer.referenced_claim(volume);
        let (ReferencedClaim::Gone, Some((key, uid))) = (&cached, claim_identity(volume)) else { return Ok(cached) };
        let live = write::get_live::<PersistentVolumeClaim>(&self.context.client, &key).await?;
        Ok(match live.filter(|c| c.metadata.uid() == uid) {
            Some(claim) => ReferencedClaim::Exists(Arc::new(claim)),
            None => ReferencedClaim::Gone,
        })
    }
}
