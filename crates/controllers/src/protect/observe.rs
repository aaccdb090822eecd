//! Claims, volumes, attributes, and the pods that use a claim.

use std::sync::Arc;

use cleat_api::key::{Key, Meta as _};
use cleat_api::pod;
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) pods: Cache<Pod>,
    pub(super) attributes: Cache<VolumeAttributesClass>,
    by_claim: Index<Pod>,
}

impl Observed {
    pub(super) fn new(caches: &Caches) -> Self {
        let pods = caches.pods();
        let by_claim = pods.index(|p| pod::claim_volumes(p).into_iter().map(|v| v.claim.to_string()).collect());
        Self { claims: caches.claims(), volumes: caches.volumes(), attributes: caches.attributes_classes(), pods, by_claim }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.pods.synced(), self.attributes.synced());
    }

    /// The names of the classes that somebody asked to delete.
    pub(super) fn ending_attributes(&self) -> impl Iterator<Item = String> {
        self.attributes.all().into_iter().filter(|c| c.metadata.is_deleting()).filter_map(|c| c.metadata.name.clone())
    }

    pub(super) fn users(&self, claim: &Key) -> Vec<Arc<Pod>> {
        self.by_claim.get(&claim.to_string())
    }
}
