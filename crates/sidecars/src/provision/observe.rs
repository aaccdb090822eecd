//! From caches to one claim's or one volume's snapshot.

use std::sync::Arc;

use cleat_api::Key;
use cleat_api::claim::{claim_class, volume_name};
use cleat_api::key::Meta as _;
use cleat_api::names;
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};

use super::decide::{ClaimSeen, Source, VolumeSeen};
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
    /// Claims by the claim they are to be a clone of.
    clones: Index<PersistentVolumeClaim>,
}

impl Observed {
    pub(super) fn new(caches: &Caches) -> Self {
        let (attachments, claims) = (caches.attachments(), caches.claims());
        Self {
            clones: claims.index(|c| source_claim(c).map(|key| key.to_string()).into_iter().collect()),
            claims,
            volumes: caches.volumes(),
            classes: caches.classes(),
            by_volume: attachments.index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            attachments,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.classes.synced(), self.attachments.synced(),);
    }

    pub(super) fn clones_of(&self, claim: &Key) -> Vec<Arc<PersistentVolumeClaim>> {
        self.clones.get(&claim.to_string())
    }

    /// The claim that `claim` is to be a clone of.
    pub(super) fn source_of(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolumeClaim>> {
        source_claim(claim).and_then(|key| self.claims.get(&key))
    }

    fn source(&self, claim: &PersistentVolumeClaim) -> Source {
        let Some(kind) = source_kind(claim) else { return Source::Nothing };
        match (source_claim(claim), kind) {
            (Some(key), _) => {
                let source = self.claims.get(&key);
                let volume = source.as_deref().and_then(volume_name).and_then(|name| self.volumes.named(name));
                Source::Claim { name: key.name, claim: source, volume }
            }
            (None, "VolumeSnapshot") => Source::Snapshot,
            (None, _) => Source::Other,
        }
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
            source: self.observed.source(&claim),
            claim,
            class,
            volume_exists,
            pending: pending.map(|p| p.plan),
            driver: self.driver.name.clone(),
            creates_volumes: self.driver.can(Capability::CreateDeleteVolume),
            clones_volumes: self.driver.can(Capability::CloneVolume),
            tells_writers_apart: self.driver.can(Capability::SingleNodeMultiWriter),
        })
    }
}

/// The kind of a claim's data source. The newer field wins; the server keeps both alike.
fn source_kind(claim: &PersistentVolumeClaim) -> Option<&str> {
    let spec = claim.spec.as_ref()?;
    let newer = spec.data_source_ref.as_ref().map(|r| r.kind.as_str());
    newer.or_else(|| spec.data_source.as_ref().map(|r| r.kind.as_str()))
}

fn source_claim(claim: &PersistentVolumeClaim) -> Option<Key> {
    let spec = claim.spec.as_ref()?;
    let newer = spec.data_source_ref.as_ref().map(|r| (&r.kind, &r.api_group, &r.name));
    let (kind, group, name) = newer.or_else(|| spec.data_source.as_ref().map(|r| (&r.kind, &r.api_group, &r.name)))?;
    let is_claim = kind == "PersistentVolumeClaim" && group.as_deref().unwrap_or_default().is_empty();
    is_claim.then(|| Key { namespace: claim.metadata.namespace.clone(), name: name.clone() })
}
