//! StorageClasses and CSIStorageCapacity objects of the [`SchedulerState`], and the storage that pods with a reserved
//! node are going to use. Pure.
//!
//! A driver updates its CSIStorageCapacity objects some time after it has created volumes. Until a claim is bound, its
//! request is subtracted from the capacity here, so that pods decided one after another do not all count on the same
//! bytes.

use std::sync::Arc;

use cleat_api::key::Key;
use cleat_api::selector;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::SchedulerState;
use super::node_info::ParsedNode;
use super::requirements::is_bound;
use super::unschedulable::ClusterEvents;

/// A CSIStorageCapacity object.
#[derive(Debug)]
pub(super) struct CapacityInfo {
    object: Arc<CSIStorageCapacity>,
    /// What claims of pods with a reserved node are going to use.
    reserved_bytes: i64,
}

/// Storage that a claim is going to use.
#[derive(Debug)]
pub(super) struct StorageReservation {
    claim: Key,
    /// The key of the CSIStorageCapacity object.
    capacity: Key,
    bytes: i64,
}

impl CapacityInfo {
    /// Returns true if a volume of this size can be created. Without reservations only the largest possible volume
    /// counts, as in Kubernetes.
    pub(super) fn fits(&self, bytes: i64) -> bool {
        let is_small_enough = max_volume_bytes(&self.object).is_some_and(|limit| limit >= bytes);
        is_small_enough && self.available_bytes().is_none_or(|available| self.reserved_bytes == 0 || available >= bytes)
    }

    /// The capacity minus reservations; `None` if the object has no capacity.
    pub(super) fn available_bytes(&self) -> Option<i64> {
        Some(parse_bytes(self.object.capacity.as_ref())? - self.reserved_bytes)
    }

    /// Adds this object to the node's capacities if its topology includes the node.
    pub(super) fn link_to(&self, key: &Key, node: &mut ParsedNode) {
        let labels = node.object.metadata.labels.as_ref();
        if self.object.node_topology.as_ref().is_some_and(|topology| selector::labels_match(topology, labels)) {
            node.capacities.entry(self.object.storage_class_name.clone()).or_default().insert(key.clone());
        }
    }
}

fn parse_bytes(quantity: Option<&Quantity>) -> Option<i64> {
    quantity?.0.parse::<cleat_api::Quantity>().ok().map(cleat_api::Quantity::to_bytes)
}

/// The size of the largest volume that can be created.
fn max_volume_bytes(capacity: &CSIStorageCapacity) -> Option<i64> {
    parse_bytes(capacity.maximum_volume_size.as_ref()).or_else(|| parse_bytes(capacity.capacity.as_ref()))
}

impl SchedulerState {
    pub fn set_class(&mut self, name: &str, object: Option<Arc<StorageClass>>) {
        match object {
            Some(class) => {
                let before = self.classes.insert(name.to_owned(), class.clone());
                if before.is_none_or(|before| before.allowed_topologies != class.allowed_topologies) {
                    self.wake_pods(ClusterEvents::STORAGE);
                }
            }
            None => drop(self.classes.remove(name)),
        }
    }

    pub fn set_capacity(&mut self, key: &Key, object: Option<Arc<CSIStorageCapacity>>) {
        let before = self.capacities.remove(key);
        let reserved_bytes = before.as_ref().map_or(0, |before| before.reserved_bytes);
        let now = object.map(|object| CapacityInfo { object, reserved_bytes });
        for node in self.nodes.values_mut().filter_map(|info| info.node.as_mut()) {
            if let Some(before) = &before
                && let Some(keys) = node.capacities.get_mut(&before.object.storage_class_name)
            {
                keys.remove(key);
            }
            if let Some(now) = &now {
                now.link_to(key, node);
            }
        }
        let Some(now) = now else { return };
        let may_help = before.as_ref().is_none_or(|before| {
            max_volume_bytes(&now.object) > max_volume_bytes(&before.object)
                || now.object.node_topology != before.object.node_topology
        });
        self.capacities.insert(key.clone(), now);
        if may_help {
            self.wake_pods(ClusterEvents::STORAGE);
        }
    }

    /// Reserves storage of the class for a claim, in every capacity object that includes the pod's node.
    pub(super) fn reserve_storage(&mut self, pod: &Key, claim: &Key, class: &str, bytes: i64) {
        let Some(assigned) = self.assigned.get_mut(pod) else { return };
        let node = self.nodes.get(&assigned.node).and_then(|info| info.node.as_ref());
        for key in node.and_then(|node| node.capacities.get(class)).into_iter().flatten() {
            if let Some(capacity) = self.capacities.get_mut(key) {
                capacity.reserved_bytes += bytes;
                assigned.storage_reservations.push(StorageReservation {
                    claim: claim.clone(),
                    capacity: key.clone(),
                    bytes,
                });
            }
        }
    }

    pub(super) fn release_storage(&mut self, reservation: &StorageReservation) {
        if let Some(capacity) = self.capacities.get_mut(&reservation.capacity) {
            capacity.reserved_bytes -= reservation.bytes;
        }
    }

    /// Releases the storage that the pod has reserved for the claim, if the claim is bound or does not exist.
    pub(super) fn release_storage_of_bound_claim(&mut self, pod: &Key, claim: &Key) {
        if !self.claim(claim).is_none_or(|claim| is_bound(&claim)) {
            return;
        }
        let Some(assigned) = self.assigned.get_mut(pod) else { return };
        let reservations = std::mem::take(&mut assigned.storage_reservations);
        let (released, kept): (Vec<_>, Vec<_>) = reservations.into_iter().partition(|r| r.claim == *claim);
        assigned.storage_reservations = kept;
        released.iter().for_each(|reservation| self.release_storage(reservation));
    }
}
