//! The scheduler's state: the objects that decisions read, with indexes, and the queue of pods to decide about. Pure:
//! it is updated change by change with plain objects.
//!
//! A decision is assumed before it is written: the volume or claim with the change replaces the original, until the
//! original changes or the write fails. So pods that are decided one after another see each other's decisions.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use cleat_api::claim::{claim_phase, volume_name};
use cleat_api::key::Key;
use cleat_pack::{Compressor, MaybePacked, Packable};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::Resource;

use super::node_info::{NodeInfo, VolumeHandle};
use super::requirements::is_bound;
use super::resources::PodResources;
use super::storage::{CapacityInfo, StorageReservation};
use super::unschedulable::ClusterEvents;

/// The `schedulerName` of the pods that this scheduler handles.
pub const SCHEDULER_NAME: &str = "default-scheduler";

/// See the file's comment. The `set_` functions take an object as it is now, or `None` if it does not exist. They may
/// be called in any order, and repeatedly.
#[derive(Debug, Default)]
pub struct SchedulerState {
    pub(super) nodes: BTreeMap<String, NodeInfo>,
    pub(super) claims: HashMap<Key, Assumable<PersistentVolumeClaim>>,
    pub(super) volumes: HashMap<String, VolumeEntry>,
    /// Volumes without claimRef, by class and then by each hostname in their node affinity; `None` for volumes whose
    /// affinity names no hostnames.
    pub(super) free_by_class: HashMap<String, HashMap<Option<String>, VolumesBySize>>,
    /// Names of volumes by the claim in their claimRef, sorted.
    pub(super) volumes_by_claim: HashMap<Key, Vec<String>>,
    pub(super) classes: HashMap<String, Arc<StorageClass>>,
    pub(super) drivers: HashMap<String, Arc<CSIDriver>>,
    pub(super) capacities: HashMap<Key, CapacityInfo>,
    /// Node and PersistentVolume of each VolumeAttachment.
    pub(super) attachments: HashMap<String, (String, String)>,
    pub(super) attachments_by_volume: HashMap<String, BTreeSet<String>>,
    /// Claims by the volume in their `spec.volumeName`.
    pub(super) claims_by_volume: HashMap<String, BTreeSet<Key>>,
    pub(super) pending: HashMap<Key, PendingPod>,
    pub(super) assigned: HashMap<Key, AssignedPod>,
    pub(super) pods_by_claim: HashMap<Key, BTreeSet<Key>>,
    /// Pending pods to decide about, in this order.
    pub(super) queue: BTreeSet<QueueKey>,
    pub(super) in_flight: HashMap<Key, InFlightDecision>,
    /// Pods with a reserved node, by the time of the reservation.
    pub(super) reservations_by_time: BTreeSet<(Timestamp, Key)>,
    /// Bound claims and their volumes are kept packed: there are many of them, and decisions rarely read them.
    pub(super) claim_compressor: Compressor,
    pub(super) volume_compressor: Compressor,
}

#[derive(Debug)]
pub(super) struct VolumeEntry {
    pub(super) object: Assumable<PersistentVolume>,
    /// The CSI volume handle, available without unpacking the object.
    pub(super) handle: Option<Box<str>>,
}

/// Capacity in bytes and name of volumes.
pub(super) type VolumesBySize = BTreeSet<(i64, String)>;

/// Pods with a higher priority first, then older pods.
pub(super) type QueueKey = (Reverse<i32>, Option<Timestamp>, Key);

/// A pod without a node.
#[derive(Debug)]
pub(super) struct PendingPod {
    pub(super) pod: Arc<Pod>,
    /// The events that queue the pod again, if it was found to be unschedulable.
    pub(super) wake_events: ClusterEvents,
    /// Nodes for which a provisioner could not create a volume.
    pub(super) returned_nodes: BTreeSet<String>,
}

/// A pod that runs on a node, or for which a node is reserved.
#[derive(Debug)]
pub(super) struct AssignedPod {
    pub(super) uid: String,
    pub(super) node: String,
    pub(super) resources: PodResources,
    pub(super) volume_handles: Vec<VolumeHandle>,
    pub(super) pod: Arc<Pod>,
    /// When the node was reserved; `None` once the pod is bound to it.
    pub(super) reserved_at: Option<Timestamp>,
    /// Existing volumes that were matched with the pod's claims, by claim.
    pub(super) matched_volumes: BTreeMap<Key, String>,
    pub(super) storage_reservations: Vec<StorageReservation>,
}

/// A decision that is being written. The pod is not decided about again until the outcome is known.
#[derive(Debug, Default)]
pub(super) struct InFlightDecision {
    /// The pod's.
    pub(super) uid: String,
    /// The claims and volumes that are written.
    pub(super) claims: Vec<Key>,
    pub(super) volumes: Vec<String>,
    /// The pod must be queued when the write has ended.
    pub(super) must_requeue: bool,
    /// The pod is bound to its node, but the cache does not show it yet.
    pub(super) is_bound: bool,
}

/// An object, and the version that is expected if the write in progress succeeds.
#[derive(Debug)]
pub(super) struct Assumable<K> {
    original: MaybePacked<K>,
    pub(super) assumed: Option<Arc<K>>,
}

impl<K: Resource + Packable> Assumable<K> {
    pub(super) fn new(original: Arc<K>) -> Self {
        Self { original: MaybePacked::Unpacked(original), assumed: None }
    }

    /// The assumed version if there is one, else the original.
    pub(super) fn current(&self) -> Arc<K> {
        self.assumed.clone().unwrap_or_else(|| self.original.object())
    }

    /// Replaces the original. The assumed version stays only if `original` has the same uid and resourceVersion as
    /// before.
    pub(super) fn update(self, original: Arc<K>) -> Self {
        let is_unchanged = |_: &Arc<K>| {
            let before = self.original.object();
            before.meta().resource_version == original.meta().resource_version
                && before.meta().uid == original.meta().uid
        };
        Self { assumed: self.assumed.filter(is_unchanged), original: MaybePacked::Unpacked(original) }
    }

    pub(super) fn packed(self, compressor: &mut Compressor) -> Self {
        Self { original: self.original.into_packed(compressor), ..self }
    }
}

impl SchedulerState {
    pub(super) fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.get(key).map(Assumable::current)
    }

    pub(super) fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.volumes.get(name).map(|entry| entry.object.current())
    }

    pub(in crate::schedule) fn has_claim(&self, key: &Key) -> bool {
        self.claims.contains_key(key)
    }

    pub(in crate::schedule) fn has_volume(&self, name: &str) -> bool {
        self.volumes.contains_key(name)
    }

    /// Returns true if a pending or assigned pod uses the claim.
    pub(in crate::schedule) fn is_claim_used(&self, key: &Key) -> bool {
        self.pods_by_claim.contains_key(key)
    }

    /// Returns true if a claim of this state or a VolumeAttachment names the volume.
    pub(in crate::schedule) fn is_volume_named(&self, name: &str) -> bool {
        self.claims_by_volume.contains_key(name) || self.attachments_by_volume.contains_key(name)
    }

    pub(in crate::schedule) fn volume_of_claim(&self, key: &Key) -> Option<String> {
        self.claim(key).as_deref().and_then(volume_name).map(ToOwned::to_owned)
    }

    pub fn set_claim(&mut self, key: &Key, object: Option<Arc<PersistentVolumeClaim>>) {
        let old = self.claims.remove(key);
        let before = old.as_ref().map(|old| old.original.object());
        if let Some(volume) = before.as_deref().and_then(volume_name) {
            remove_from(&mut self.claims_by_volume, volume, key);
        }
        if let Some(object) = object {
            if let Some(volume) = volume_name(&object) {
                self.claims_by_volume.entry(volume.to_owned()).or_default().insert(key.clone());
            }
            let is_settled = is_bound(&object) && claim_phase(&object) == "Bound";
            let next = match old {
                Some(old) => old.update(object),
                None => Assumable::new(object),
            };
            let next = if is_settled { next.packed(&mut self.claim_compressor) } else { next };
            self.claims.insert(key.clone(), next);
        }
        self.on_claim_change(key);
    }

    /// Sets the claim's assumed version, which is valid until the claim changes or [`SchedulerState::revert_claim`] is
    /// called.
    pub(super) fn assume_claim(&mut self, key: &Key, claim: Arc<PersistentVolumeClaim>) {
        if let Some(entry) = self.claims.get_mut(key) {
            entry.assumed = Some(claim);
        }
    }

    pub(super) fn revert_claim(&mut self, key: &Key) {
        if let Some(entry) = self.claims.get_mut(key) {
            entry.assumed = None;
        }
    }

    /// Updates and queues the claim's pods. Call it after a change of the claim or of a volume whose claimRef names it.
    pub(super) fn on_claim_change(&mut self, key: &Key) {
        for user in self.pods_by_claim.get(key).cloned().unwrap_or_default() {
            self.update_volume_handles(&user);
            self.release_storage_of_bound_claim(&user, key);
            self.enqueue(&user);
        }
    }

    /// Queues the pods that use the claim, except `pod`.
    pub(super) fn enqueue_other_users(&mut self, claim: &Key, pod: &Key) {
        let users = self.pods_by_claim.get(claim).cloned().unwrap_or_default();
        users.iter().filter(|user| *user != pod).for_each(|user| self.enqueue(user));
    }

    /// Queues the pending pods that one of the events may help.
    pub(super) fn wake_pods(&mut self, events: ClusterEvents) {
        if events == ClusterEvents::NONE {
            return;
        }
        let woken = self.pending.iter().filter(|(_, pending)| pending.wake_events.intersects(events));
        let woken: Vec<Key> = woken.map(|(key, _)| key.clone()).collect();
        woken.iter().for_each(|key| self.enqueue(key));
    }

    /// Queues the pod, if it is pending. A pod whose decision is being written is queued after that.
    pub fn enqueue(&mut self, key: &Key) {
        let Some(pending) = self.pending.get(key) else { return };
        match self.in_flight.get_mut(key) {
            Some(in_flight) => in_flight.must_requeue = true,
            None => drop(self.queue.insert(queue_key(key, &pending.pod))),
        }
    }
}

/// Removes an item from one of the sets, and the set if it is empty then.
pub(super) fn remove_from<T: Ord + Borrow<Q>, Q: Ord + ?Sized>(
    sets: &mut HashMap<String, BTreeSet<T>>,
    key: &str,
    item: &Q,
) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(item);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}

pub(super) fn queue_key(key: &Key, pod: &Pod) -> QueueKey {
    let priority = pod.spec.as_ref().and_then(|s| s.priority).unwrap_or(0);
    (Reverse(priority), pod.metadata.creation_timestamp.as_ref().map(|t| t.0), key.clone())
}
