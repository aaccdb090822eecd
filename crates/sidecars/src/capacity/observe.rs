//! Classes, places and what is published about them.

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_runtime::{Cache, Caches};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::storage::v1::{CSINode, CSIStorageCapacity, StorageClass};

use super::Publisher;
use super::decide::{self, Item, NodeSeen};

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) classes: Cache<StorageClass>,
    pub(super) nodes: Cache<Node>,
    pub(super) csi_nodes: Cache<CSINode>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) capacities: Cache<CSIStorageCapacity>,
}

impl Observed {
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

    fn nodes(&self, driver: &str) -> Vec<NodeSeen> {
        let registered = |node: &Arc<CSINode>| {
            let known = node.spec.drivers.iter().find(|d| d.name == driver)?;
            let labels = self.nodes.named(node.metadata.name.as_deref()?)?.metadata.labels.clone();
            Some(NodeSeen { keys: known.topology_keys.clone().unwrap_or_default(), labels: labels.unwrap_or_default() })
        };
        self.csi_nodes.all().iter().filter_map(registered).collect()
    }
}

impl Publisher {
    pub(super) fn wanted(&self) -> BTreeSet<Item> {
        let manager = &self.options.manager;
        let segments = match &self.here {
            Some(here) => [here.clone()].into(),
            None => decide::segments(&self.observed.nodes(&manager.driver)),
        };
        decide::wanted(&self.observed.classes.all(), &segments, manager, self.options.immediate)
    }
}
