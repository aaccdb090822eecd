//! Reads a pod and the claims of its ephemeral volumes from the caches. Changes nothing.

use std::sync::Arc;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use super::decide::{EphemeralPodSnapshot, EphemeralVolume};

#[derive(Clone)]
pub(super) struct EphemeralObserver {
    pub(super) pods: Cache<Pod>,
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pods_by_claim: Index<Pod>,
}

impl EphemeralObserver {
    pub(super) fn new(caches: &Caches) -> Self {
        let pods = caches.pods();
        Self {
            pods_by_claim: pods.index(|p| ephemeral_claims(p).map(|claim| claim.to_string()).collect()),
            pods,
            claims: caches.claims(),
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.pods.synced(), self.claims.synced());
    }

    pub(super) fn pod(&self, key: &Key) -> Option<EphemeralPodSnapshot> {
        let pod = self.pods.get(key)?;
        let volumes = pod::claim_volumes(&pod).into_iter().filter(|v| v.ephemeral);
        let volumes = volumes
            .map(|v| EphemeralVolume { existing: self.claims.get(&v.claim), name: v.volume, claim: v.claim })
            .collect();
        Some(EphemeralPodSnapshot { pod, volumes })
    }

    /// Returns the cached pods that have an ephemeral volume with this claim.
    pub(super) fn pods_of(&self, claim: &Key) -> Vec<Arc<Pod>> {
        self.pods_by_claim.get(&claim.to_string())
    }
}

/// Returns the claims of the pod's ephemeral volumes, whether they exist or not.
pub(super) fn ephemeral_claims(pod: &Pod) -> impl Iterator<Item = Key> {
    pod::claim_volumes(pod).into_iter().filter(|v| v.ephemeral).map(|v| v.claim)
}
