//! From caches to one claim's or one volume's snapshot, and from the server what no cache holds.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::claim::{claim_class, volume_class, volume_name};
use cleat_api::key::Meta as _;
use cleat_runtime::write::{self, WriteError};
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};

use super::decide::source::{self, SnapshotSeen, Source};
use super::decide::topology::NodeSeen;
use super::decide::volume::VolumeSeen;
use super::decide::{ClaimSeen, Fetched, Outline};
use super::snapshots::{VolumeSnapshot, VolumeSnapshotContent};
use super::{ClaimId, Provisioner};

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) classes: Cache<StorageClass>,
    pub(super) attachments: Cache<VolumeAttachment>,
    /// Only for drivers that know of topology.
    places: Option<(Cache<Node>, Cache<CSINode>)>,
    by_volume: Index<VolumeAttachment>,
    /// Claims by the claim they are to be a clone of, and by the snapshot they are to be restored from.
    clones: Index<PersistentVolumeClaim>,
    restores: Index<PersistentVolumeClaim>,
}

impl Observed {
    pub(super) fn new(caches: &Caches, topology: bool) -> Self {
        let (attachments, claims) = (caches.attachments(), caches.claims());
        let term = |key: Option<Key>| key.map(|key| key.to_string()).into_iter().collect();
        Self {
            clones: claims.index(move |c| term(source::cloned(c))),
            restores: claims.index(move |c| term(source::restored(c))),
            claims,
            volumes: caches.volumes(),
            classes: caches.classes(),
            places: topology.then(|| (caches.nodes(), caches.csi_nodes())),
            by_volume: attachments.index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            attachments,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.classes.synced(), self.attachments.synced());
        if let Some((nodes, csi_nodes)) = &self.places {
            tokio::join!(nodes.synced(), csi_nodes.synced());
        }
    }

    pub(super) fn clones_of(&self, claim: &Key) -> Vec<Arc<PersistentVolumeClaim>> {
        self.clones.get(&claim.to_string())
    }

    pub(super) fn restored_from(&self, snapshot: &Key) -> Vec<Arc<PersistentVolumeClaim>> {
        self.restores.get(&snapshot.to_string())
    }

    /// The claim that `claim` is to be a clone of.
    pub(super) fn source_of(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolumeClaim>> {
        source::cloned(claim).and_then(|key| self.claims.get(&key))
    }

    fn source(&self, claim: &PersistentVolumeClaim) -> Source {
        if source::is_elsewhere(claim) {
            return Source::Elsewhere;
        }
        if let Some(key) = source::cloned(claim) {
            let source = self.claims.get(&key);
            let volume = source.as_deref().and_then(volume_name).and_then(|name| self.volumes.named(name));
            return Source::Claim { name: key.name, claim: source, volume };
        }
        match source::restored(claim) {
            Some(key) => Source::Snapshot(key),
            None if source::has_any(claim) => Source::Other,
            None => Source::Nothing,
        }
    }

    /// Every node with what the driver has said about it.
    fn nodes(&self, driver: &str) -> Vec<NodeSeen> {
        let Some((nodes, csi_nodes)) = &self.places else { return Vec::new() };
        let keys = |node: &str| {
            let registered = csi_nodes.named(node)?;
            let known = registered.spec.drivers.iter().find(|d| d.name == driver)?;
            Some(known.topology_keys.clone().unwrap_or_default())
        };
        let seen = |node: &Arc<Node>| {
            let name = node.metadata.name.clone().unwrap_or_default();
            NodeSeen { keys: keys(&name), labels: node.metadata.labels.clone().unwrap_or_default(), name }
        };
        nodes.all().iter().map(seen).collect()
    }
}

impl Provisioner {
    /// The claim as the cache has it or, if it is gone, as it was when its CreateVolume was called.
    pub(super) fn claim(&self, id: &ClaimId) -> Option<ClaimSeen> {
        let cached = self.observed.claims.get(&id.key).filter(|c| c.metadata.uid() == id.uid);
        let pending = self.ledger.pending(&id.uid);
        let claim = cached.or_else(|| pending.as_ref().map(|p| p.claim.clone()))?;
        let class = claim_class(&claim).and_then(|name| self.observed.classes.named(name));
        let name = self.options.choices.volume_name(&id.uid);
        Some(ClaimSeen {
            source: self.observed.source(&claim),
            claim,
            class,
            volume_exists: self.observed.volumes.named(&name).is_some(),
            pending: pending.map(|p| p.plan),
            inherited: self.ledger.is_inherited(&id.uid),
        })
    }

    pub(super) fn volume(&self, name: &str) -> Option<VolumeSeen> {
        let volume = self.observed.volumes.named(name)?;
        let attached_to = self.observed.by_volume.get(name).iter().map(|a| a.spec.node_name.clone()).collect();
        Some(VolumeSeen {
            class: self.observed.classes.named(volume_class(&volume)),
            volume,
            attached_to,
            driver: self.driver.name.clone(),
            deletes_volumes: self.can.creates_volumes,
            local: self.options.choices.local.clone(),
        })
    }

    /// What the outline names. Most name nothing, and then nothing is asked.
    pub(super) async fn fetch(&self, seen: &ClaimSeen, outline: &Outline) -> Result<Fetched, WriteError> {
        let nodes = match &self.options.choices.local {
            Some(local) => vec![local.seen()],
            None => self.observed.nodes(&self.driver.name),
        };
        let mut fetched = Fetched { nodes, ..Fetched::default() };
        if let Source::Snapshot(key) = &seen.source {
            fetched.snapshot = self.snapshot(key).await?;
        }
        if let Some(key) = &outline.secrets.provision {
            fetched.secret = self.secret(key).await?;
        }
        if let Some(name) = &outline.attributes {
            fetched.attributes = write::get_live(&self.context.client, &Key::cluster(name)).await?;
        }
        Ok(fetched)
    }

    async fn snapshot(&self, key: &Key) -> Result<SnapshotSeen, WriteError> {
        let snapshot: Option<VolumeSnapshot> = write::get_live(&self.context.client, key).await?;
        let status = snapshot.as_ref().and_then(|s| s.status.as_ref());
        let content = match status.and_then(|s| s.bound_volume_snapshot_content_name.as_deref()) {
            Some(name) => write::get_live::<VolumeSnapshotContent>(&self.context.client, &Key::cluster(name)).await?,
            None => None,
        };
        Ok(SnapshotSeen { snapshot, content })
    }

    pub(super) async fn secret(&self, key: &Key) -> Result<Option<HashMap<String, String>>, WriteError> {
        let secret: Option<Secret> = write::get_live(&self.context.client, key).await?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(secret.map(|s| s.data.into_iter().flatten().map(|(key, value)| (key, text(value.0))).collect()))
    }
}
