//! From caches to one claim's or one volume's snapshot.

use cleat_api::claim::claim_class;
use cleat_api::key::Meta as _;
use cleat_api::names;
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};

use super::decide::{ClaimSeen, VolumeSeen};
use super::{ClaimId, Provisioner};
use crate::Driver;
use crate::driver::Capability;

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) classes: Cache<StorageClass>,
    pub(super) attachments: Cache<VolumeAttachment>,
    by_volume: Index<VolumeAttachment>,
}

impl Observed {
    pub(super) fn new(caches: &Caches) -> Self {
        let attachments = caches.attachments();
        Self {
            claims: caches.claims(),
            volumes: caches.volumes(),
            classes: caches.classes(),
            by_volume: attachments.index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            attachments,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.classes.synced(), self.attachments.synced(),);
    }

    pub(super) fn volume(&self, name: &str, driver: &Driver) -> Option<VolumeSeen> {
        let volume = self.volumes.named(name)?;
        let attached_to = self.by_volume.get(name).iter().map(|a| a.spec.node_name.clone()).collect();
        Some(VolumeSeen { volume, attached_to, driver: driver.name.clone() })
    }
}

impl Provisioner {
    /// The claim as the cache has it or, if it is gone, as it was when its CreateVolume was called.
    pub(super) fn claim(&self, id: &ClaimId) -> Option<ClaimSeen> {
        let cached = self.observed.claims.get(&id.key).filter(|c| c.metadata.uid() == id.uid);
        let pending = self.uncertain.lock().get(&id.uid).cloned();
        let claim = cached.or_else(|| pending.as_ref().map(|p| p.claim.clone()))?;
        let class = claim_class(&claim).and_then(|name| self.observed.classes.named(name));
        let volume_exists = self.observed.volumes.named(&names::provisioned_volume(&id.uid)).is_some();
        Some(ClaimSeen {
            claim,
            class,
            volume_exists,
            pending: pending.map(|p| p.plan),
            driver: self.driver.name.clone(),
            creates_volumes: self.driver.can(Capability::CreateDeleteVolume),
            tells_writers_apart: self.driver.can(Capability::SingleNodeMultiWriter),
        })
    }
}
