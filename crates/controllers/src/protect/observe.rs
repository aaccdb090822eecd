//! Claims, volumes, and the pods that use a claim.

use std::sync::Arc;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) pods: Cache<Pod>,
    by_claim: Index<Pod>,
}

impl Observed {
    pub(super) fn new(caches: &Caches) -> Self {
        let pods = caches.pods();
        let by_claim = pods.index(|p| pod::claim_volumes(p).into_iter().map(|v| v.claim.to_string()).collect());
        Self { claims: caches.claims(), volumes: caches.volumes(), pods, by_claim }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.pods.synced());
    }

    pub(super) fn users(&self, claim: &Key) -> Vec<Arc<Pod>> {
        self.by_claim.get(&claim.to_string())
    }
}
