//! Reads storage classes, nodes and published objects from the caches, and free capacity from the driver.

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_api::Quantity;
use cleat_csi::v1::{GetCapacityRequest, Topology};
use cleat_runtime::{Cache, Caches};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::storage::v1::{CSINode, CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::api::resource;

use super::CapacityPublisher;
use super::decide::{self, CapacityKey, FreeCapacity, RegisteredNode};
use crate::SidecarError;

#[derive(Clone)]
pub(super) struct CapacityObserver {
    pub(super) classes: Cache<StorageClass>,
    pub(super) nodes: Cache<Node>,
    pub(super) csi_nodes: Cache<CSINode>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) capacities: Cache<CSIStorageCapacity>,
}

impl CapacityObserver {
    pub(super) fn new(caches: &Caches) -> Self {
        Self {
            classes: caches.classes(),
            nodes: caches.nodes(),
            csi_nodes: caches.csi_nodes(),
            volumes: caches.volumes(),
            capacities: caches.capacities(),
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(
            self.classes.synced(),
            self.nodes.synced(),
            self.csi_nodes.synced(),
            self.volumes.synced(),
            self.capacities.synced(),
        );
    }

    fn registered_nodes(&self, driver: &str) -> Vec<RegisteredNode> {
        let registered = |node: &Arc<CSINode>| {
            let registration = node.spec.drivers.iter().find(|d| d.name == driver)?;
            let labels = self.nodes.named(node.metadata.name.as_deref()?)?.metadata.labels.clone();
            Some(RegisteredNode {
                topology_keys: registration.topology_keys.clone().unwrap_or_default(),
                labels: labels.unwrap_or_default(),
            })
        };
        self.csi_nodes.all().iter().filter_map(registered).collect()
    }
}

impl CapacityPublisher {
    pub(super) fn wanted(&self) -> BTreeSet<CapacityKey> {
        let owner = &self.options.owner;
        let segments = match &self.own_segment {
            Some(segment) => [segment.clone()].into(),
            None => decide::segments(&self.observer.registered_nodes(&owner.driver)),
        };
        decide::wanted(&self.observer.classes.all(), &segments, owner, self.options.include_immediate)
    }

    /// Calls GetCapacity for one class and segment.
    pub(super) async fn free_capacity(&self, key: &CapacityKey) -> Result<FreeCapacity, SidecarError> {
        let class = self.observer.classes.named(&key.class);
        let parameters = class.and_then(|class| class.parameters.clone()).into_iter().flatten().collect();
        let segment = Some(key.segment.clone()).filter(|segment| !segment.is_empty());
        let request = GetCapacityRequest {
            volume_capabilities: Vec::new(),
            parameters,
            accessible_topology: segment.map(|segment| Topology { segments: segment.into_iter().collect() }),
        };
        let reply = self.driver.client.get_capacity(request).await?;
        let quantity = |bytes: i64| resource::Quantity(Quantity::from_bytes(bytes).to_string());
        Ok(FreeCapacity {
            capacity: Some(quantity(reply.available_capacity)),
            maximum_volume_size: reply.maximum_volume_size.map(quantity),
        })
    }
}
