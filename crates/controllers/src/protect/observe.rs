//! Reads claims, volumes, VolumeAttributesClasses and the pods that use a claim, from caches and live. Changes nothing.

use std::sync::Arc;

use cleat_api::key::{Key, Meta as _};
use cleat_api::pod;
use cleat_runtime::write::{self, WriteError};
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;

use super::Protector;

#[derive(Clone)]
pub(super) struct ProtectionObserver {
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) pods: Cache<Pod>,
    pub(super) attributes_classes: Cache<VolumeAttributesClass>,
    pods_by_claim: Index<Pod>,
}

impl ProtectionObserver {
    pub(super) fn new(caches: &Caches) -> Self {
        let pods = caches.pods();
        Self {
            claims: caches.claims(),
            volumes: caches.volumes(),
            attributes_classes: caches.attributes_classes(),
            pods_by_claim: pods.index(|p| pod::claim_volumes(p).into_iter().map(|v| v.claim.to_string()).collect()),
            pods,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.pods.synced(), self.attributes_classes.synced());
    }

    /// Returns the names of the VolumeAttributesClasses that are being deleted.
    pub(super) fn deleting_attributes_classes(&self) -> impl Iterator<Item = String> {
        let classes = self.attributes_classes.all().into_iter();
        classes.filter(|c| c.metadata.is_deleting()).filter_map(|c| c.metadata.name.clone())
    }

    /// Returns the cached pods that name the claim, in any phase.
    pub(super) fn pods_of(&self, claim: &Key) -> Vec<Arc<Pod>> {
        self.pods_by_claim.get(&claim.to_string())
    }
}

impl Protector {
    pub(super) async fn live_pods(&self, claim: &PersistentVolumeClaim) -> Result<Vec<Pod>, WriteError> {
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        write::list_live(&self.context.client, Some(namespace)).await
    }

    pub(super) async fn live_claims_and_volumes(
        &self,
    ) -> Result<(Vec<PersistentVolumeClaim>, Vec<PersistentVolume>), WriteError> {
        let claims = write::list_all_namespaces(&self.context.client).await?;
        let volumes = write::list_live(&self.context.client, None).await?;
        Ok((claims, volumes))
    }
}
