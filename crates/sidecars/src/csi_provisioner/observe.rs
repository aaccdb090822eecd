//! From the caches to the snapshot of one claim or volume. Objects that are not cached are read from the API server, free
//! capacity from the driver.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::claim::{claim_class, requested_storage, volume_class, volume_name};
use cleat_api::key::Meta as _;
use cleat_runtime::write::{self, WriteError};
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};
use tracing::debug;

use super::decide::reclaim::{DeletionSecret, ReclaimSnapshot};
use super::decide::source::{self, DataSource, RestoreSource};
use super::decide::topology::NodeTopology;
use super::decide::{ClaimSnapshot, FetchedObjects, ProvisionDraft, local};
use super::snapshots::{VolumeSnapshot, VolumeSnapshotContent};
use super::{ClaimId, Provisioner};

#[derive(Clone)]
pub(super) struct ProvisionerObserver {
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) classes: Cache<StorageClass>,
    pub(super) attachments: Cache<VolumeAttachment>,
    /// `None` if the driver does not support topology or the provisioner serves one node only.
    nodes: Option<(Cache<Node>, Cache<CSINode>)>,
    attachments_by_volume: Index<VolumeAttachment>,
    /// Claims by the claim that they are cloned from.
    clones: Index<PersistentVolumeClaim>,
    /// Claims by the VolumeSnapshot that they are restored from.
    restores: Index<PersistentVolumeClaim>,
}

impl ProvisionerObserver {
    pub(super) fn new(caches: &Caches, with_nodes: bool) -> Self {
        let (attachments, claims) = (caches.attachments(), caches.claims());
        let term = |key: Option<Key>| key.map(|key| key.to_string()).into_iter().collect();
        Self {
            clones: claims.index(move |c| term(source::clone_source(c))),
            restores: claims.index(move |c| term(source::restore_source(c))),
            claims,
            volumes: caches.volumes(),
            classes: caches.classes(),
            nodes: with_nodes.then(|| (caches.nodes(), caches.csi_nodes())),
            attachments_by_volume: attachments
                .index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            attachments,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.claims.synced(), self.volumes.synced(), self.classes.synced(), self.attachments.synced());
        if let Some((nodes, csi_nodes)) = &self.nodes {
            tokio::join!(nodes.synced(), csi_nodes.synced());
        }
    }

    pub(super) fn clones_of(&self, claim: &Key) -> Vec<Arc<PersistentVolumeClaim>> {
        self.clones.get(&claim.to_string())
    }

    pub(super) fn restores_of(&self, snapshot: &Key) -> Vec<Arc<PersistentVolumeClaim>> {
        self.restores.get(&snapshot.to_string())
    }

    /// The claim that `claim` is to be cloned from, if it exists.
    pub(super) fn source_of(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolumeClaim>> {
        source::clone_source(claim).and_then(|key| self.claims.get(&key))
    }

    fn data_source(&self, claim: &PersistentVolumeClaim) -> DataSource {
        if source::is_in_other_namespace(claim) {
            return DataSource::OtherNamespace;
        }
        if let Some(key) = source::clone_source(claim) {
            let source = self.claims.get(&key);
            let volume = source.as_deref().and_then(volume_name).and_then(|name| self.volumes.named(name));
            return DataSource::Claim { name: key.name, claim: source, volume };
        }
        match source::restore_source(claim) {
            Some(key) => DataSource::Snapshot(key),
            None if source::has_data_source(claim) => DataSource::OtherKind,
            None => DataSource::Unset,
        }
    }

    /// All nodes with their registrations of the driver.
    fn node_topologies(&self, driver: &str) -> Vec<NodeTopology> {
        let Some((nodes, csi_nodes)) = &self.nodes else { return Vec::new() };
        let keys = |node: &str| {
            let csi_node = csi_nodes.named(node)?;
            let registration = csi_node.spec.drivers.iter().find(|d| d.name == driver)?;
            Some(registration.topology_keys.clone().unwrap_or_default())
        };
        let topology = |node: &Arc<Node>| {
            let name = node.metadata.name.clone().unwrap_or_default();
            NodeTopology { keys: keys(&name), labels: node.metadata.labels.clone().unwrap_or_default(), name }
        };
        nodes.all().iter().map(topology).collect()
    }
}

impl Provisioner {
    /// The claim from the cache or, if it no longer exists, as it was when its pending CreateVolume was called. `None` if
    /// there is neither.
    pub(super) fn claim(&self, id: &ClaimId) -> Option<ClaimSnapshot> {
        let cached = self.observer.claims.get(&id.key).filter(|c| c.metadata.uid() == id.uid);
        let pending = self.calls.pending(&id.uid);
        let claim = cached.or_else(|| pending.as_ref().map(|p| p.claim.clone()))?;
        let class = claim_class(&claim).and_then(|name| self.observer.classes.named(name));
        let name = self.options.policy.volume_name(&id.uid);
        let class_uid = class.as_ref().map(|class| class.metadata.uid()).unwrap_or_default();
        let delays = self.calls.delays(&id.uid, class_uid);
        Some(ClaimSnapshot {
            source: self.observer.data_source(&claim),
            claim,
            class,
            volume_exists: self.observer.volumes.named(&name).is_some(),
            pending: pending.map(|p| p.plan),
            inherited: self.calls.is_inherited(&id.uid),
            delays,
        })
    }

    pub(super) fn volume(&self, name: &str) -> Option<ReclaimSnapshot> {
        let volume = self.observer.volumes.named(name)?;
        let attached_to =
            self.observer.attachments_by_volume.get(name).iter().map(|a| a.spec.node_name.clone()).collect();
        Some(ReclaimSnapshot {
            class: self.observer.classes.named(volume_class(&volume)),
            volume,
            attached_to,
            driver: self.driver.name.clone(),
            deletes_volumes: self.capabilities.creates_volumes,
            local: self.options.policy.local.clone(),
        })
    }

    /// Reads the objects that the draft names. Most drafts name none, and then no request is made.
    pub(super) async fn fetch(
        &self,
        snapshot: &ClaimSnapshot,
        draft: &ProvisionDraft,
    ) -> Result<FetchedObjects, WriteError> {
        let nodes = match &self.options.policy.local {
            Some(local) => vec![local.node_topology()],
            None => self.observer.node_topologies(&self.driver.name),
        };
        let mut fetched = FetchedObjects { nodes, ..FetchedObjects::default() };
        if let DataSource::Snapshot(key) = &snapshot.source {
            fetched.snapshot = self.restore_source(key).await?;
        }
        if let Some(key) = &draft.plan.secrets.provision {
            fetched.secret = self.secret(key).await?;
        }
        if let Some(name) = &draft.attributes_class {
            fetched.attributes_class = write::get_live(&self.context.client, &Key::cluster(name)).await?;
        }
        Ok(fetched)
    }

    async fn restore_source(&self, key: &Key) -> Result<RestoreSource, WriteError> {
        let snapshot: Option<VolumeSnapshot> = write::get_live(&self.context.client, key).await?;
        let status = snapshot.as_ref().and_then(|s| s.status.as_ref());
        let content = match status.and_then(|s| s.bound_volume_snapshot_content_name.as_deref()) {
            Some(name) => write::get_live::<VolumeSnapshotContent>(&self.context.client, &Key::cluster(name)).await?,
            None => None,
        };
        Ok(RestoreSource { snapshot, content })
    }

    async fn secret(&self, key: &Key) -> Result<Option<HashMap<String, String>>, WriteError> {
        let secret: Option<Secret> = write::get_live(&self.context.client, key).await?;
        let decode = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(secret.map(|s| s.data.into_iter().flatten().map(|(key, value)| (key, decode(value.0))).collect()))
    }

    /// The content of the secret for DeleteVolume; `None` if none is named or it does not exist.
    pub(super) async fn deletion_secret(
        &self,
        secret: &DeletionSecret,
    ) -> Result<Option<HashMap<String, String>>, WriteError> {
        match secret {
            DeletionSecret::None => Ok(None),
            DeletionSecret::FromVolume(key) | DeletionSecret::FromClass(key) => self.secret(key).await,
        }
    }

    /// The cached version of the claim, if it still exists.
    pub(super) fn current(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolumeClaim>> {
        let cached = self.observer.claims.get(&Key::of(&claim.metadata))?;
        (cached.metadata.uid() == claim.metadata.uid()).then_some(cached)
    }

    /// Returns false if the driver reports too little free capacity for the claim on this node.
    ///
    /// Returns true if the capacity cannot be determined: the provisioners of all nodes would meet the same obstacle, and
    /// the one that takes the claim reports it to the user.
    pub(super) async fn has_capacity(&self, snapshot: &ClaimSnapshot) -> bool {
        let (driver, policy) = (&self.capabilities, &self.options.policy);
        let Some(requested) = requested_storage(&snapshot.claim).map(|size| size.to_bytes()) else { return true };
        let Some((snapshot, draft)) = local::draft_for_this_node(snapshot, driver, policy) else { return true };
        let Ok(fetched) = self.fetch(&snapshot, &draft).await else { return true };
        let Ok(plan) = draft.complete(&snapshot, fetched, driver, policy) else { return true };
        for request in local::capacity_requests(&plan.request) {
            match self.driver.client.get_capacity(request).await {
                Ok(reply) if reply.available_capacity < requested => {}
                Ok(_) => return true,
                Err(error) => {
                    debug!(%error, "driver does not report its capacity");
                    return true;
                }
            }
        }
        debug!(claim = %Key::of(&snapshot.claim.metadata), "no capacity for the claim on this node");
        false
    }
}
