//! Reads nodes, their Leases and their pods from the caches, and nodes live. Changes nothing.

use std::sync::Arc;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::write::{self, WriteError};
use cleat_runtime::{Cache, Caches, Index};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};

use super::LifecycleController;

/// The namespace of the Leases that nodes renew.
pub(super) const NODE_LEASE_NAMESPACE: &str = "kube-node-lease";

#[derive(Clone)]
pub(super) struct LifecycleObserver {
    pub(super) nodes: Cache<Node>,
    pub(super) pods: Cache<Pod>,
    pub(super) leases: Cache<Lease>,
    pods_by_node: Index<Pod>,
}

impl LifecycleObserver {
    pub(super) fn new(caches: &Caches) -> Self {
        let pods = caches.pods();
        Self {
            nodes: caches.nodes(),
            pods_by_node: pods.index(|p| pod::node_name(p).map(ToOwned::to_owned).into_iter().collect()),
            pods,
            leases: caches.leases(),
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.nodes.synced(), self.pods.synced(), self.leases.synced());
    }

    /// Returns the time at which the node last renewed its Lease.
    pub(super) fn lease_renewed_at(&self, node: &str) -> Option<Timestamp> {
        let lease = self.leases.get(&Key::namespaced(NODE_LEASE_NAMESPACE, node))?;
        Some(lease.spec.as_ref()?.renew_time.as_ref()?.0)
    }

    pub(super) fn pods_on(&self, node: &str) -> Vec<Arc<Pod>> {
        self.pods_by_node.get(node)
    }
}

impl LifecycleController {
    /// Reads the Node live.
    pub(super) async fn node_exists(&self, name: &str) -> Result<bool, WriteError> {
        Ok(write::get_live::<Node>(&self.context.client, &Key::cluster(name)).await?.is_some())
    }
}
