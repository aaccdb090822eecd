//! The pods of the [`SchedulerState`]: which are pending, and which use a node's resources. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::condition::pod_condition;
use cleat_api::key::{Key, Meta as _};
use cleat_api::pod;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::SchedulerState;
use super::resources::PodResources;
use super::state::{AssignedPod, PendingPod, SCHEDULER_NAME, queue_key};
use super::unschedulable::ClusterEvents;

impl SchedulerState {
    pub fn set_pod(&mut self, key: &Key, object: Option<Arc<Pod>>) {
        let uid = object.as_ref().map(|p| p.metadata.uid().to_owned());
        let old = self.pod(key).cloned();
        if self.assigned.get(key).is_some_and(|assigned| Some(&assigned.uid) != uid.as_ref()) {
            self.unassign(key);
        }
        if let Some(old) = old.filter(|old| Some(old.metadata.uid()) != uid.as_deref()) {
            self.remove_claim_user(key, &old);
            self.remove_pending(key);
        }
        let Some(pod) = object else { return };
        for used in pod::claim_volumes(&pod) {
            self.pods_by_claim.entry(used.claim).or_default().insert(key.clone());
        }
        match pod::node_name(&pod) {
            Some(node) if !is_finished(&pod) => {
                self.remove_pending(key);
                if self.assigned.get(key).is_some_and(|assigned| assigned.node == node) {
                    self.end_reservation(key);
                } else {
                    self.unassign(key);
                    self.assign(key, &pod, node, None);
                }
            }
            None if needs_scheduling(&pod) => {
                let Some(pending) = self.pending.get_mut(key) else {
                    let (wake_events, returned_nodes) = (ClusterEvents::NONE, BTreeSet::new());
                    self.pending.insert(key.clone(), PendingPod { pod, wake_events, returned_nodes });
                    return self.enqueue(key);
                };
                let is_spec_changed = pending.pod.spec != pod.spec;
                pending.pod = pod;
                if is_spec_changed {
                    self.enqueue(key);
                }
            }
            // Finished pods use nothing, and neither do pods that this scheduler does not handle and that have no node.
            Some(_) | None => {
                self.remove_pending(key);
                self.unassign(key);
                self.remove_claim_user(key, &pod);
            }
        }
    }

    fn pod(&self, key: &Key) -> Option<&Arc<Pod>> {
        let pending = self.pending.get(key).map(|pending| &pending.pod);
        pending.or_else(|| self.assigned.get(key).map(|assigned| &assigned.pod))
    }

    /// The claims of a pending or assigned pod.
    pub(in crate::schedule) fn claims_of_pod(&self, key: &Key) -> BTreeSet<Key> {
        let claims = self.pod(key).into_iter().flat_map(|pod| pod::claim_volumes(pod));
        claims.map(|used| used.claim).collect()
    }

    fn remove_pending(&mut self, key: &Key) {
        if let Some(pending) = self.pending.remove(key) {
            self.queue.remove(&queue_key(key, &pending.pod));
        }
        if self.in_flight.get(key).is_some_and(|in_flight| in_flight.is_bound) {
            self.in_flight.remove(key);
        }
    }

    /// Turns the reservation of a node into a permanent assignment.
    fn end_reservation(&mut self, key: &Key) {
        let Some(assigned) = self.assigned.get_mut(key) else { return };
        if let Some(reserved_at) = assigned.reserved_at.take() {
            self.reservations_by_time.remove(&(reserved_at, key.clone()));
        }
        for reservation in std::mem::take(&mut assigned.storage_reservations) {
            self.release_storage(&reservation);
        }
    }

    fn remove_claim_user(&mut self, key: &Key, pod: &Pod) {
        for used in pod::claim_volumes(pod) {
            if let Some(users) = self.pods_by_claim.get_mut(&used.claim) {
                users.remove(key);
                if users.is_empty() {
                    self.pods_by_claim.remove(&used.claim);
                }
            }
        }
    }

    /// Counts the pod's resources and volumes on the node. `reserved_at` is `None` for a pod that is bound to the node.
    pub(super) fn assign(&mut self, key: &Key, pod: &Arc<Pod>, node: &str, reserved_at: Option<Timestamp>) {
        let assigned = AssignedPod {
            uid: pod.metadata.uid().to_owned(),
            node: node.to_owned(),
            resources: PodResources::of(pod),
            volume_handles: self.volume_handles(pod),
            pod: pod.clone(),
            reserved_at,
            matched_volumes: BTreeMap::new(),
            storage_reservations: Vec::new(),
        };
        let usage = &mut self.nodes.entry(node.to_owned()).or_default().usage;
        usage.add_pod(key, &assigned.resources);
        usage.add_volumes(&assigned.volume_handles);
        self.reservations_by_time.extend(reserved_at.map(|reserved_at| (reserved_at, key.clone())));
        self.assigned.insert(key.clone(), assigned);
    }

    /// Releases everything that the pod uses or has reserved on its node.
    pub(super) fn unassign(&mut self, key: &Key) {
        self.end_reservation(key);
        let Some(assigned) = self.assigned.remove(key) else { return };
        if let Some(info) = self.nodes.get_mut(&assigned.node) {
            info.usage.remove_pod(key, &assigned.resources);
            info.usage.remove_volumes(&assigned.volume_handles);
        }
        self.remove_empty_node(&assigned.node);
        self.wake_pods(ClusterEvents::NODE_RESOURCES | ClusterEvents::CLAIM_RELEASED);
    }

    /// Counts the pod's volumes again: their handles change when claims are bound.
    pub(super) fn update_volume_handles(&mut self, pod: &Key) {
        let Some(assigned) = self.assigned.get(pod) else { return };
        let handles = self.volume_handles(&assigned.pod);
        let Some(assigned) = self.assigned.get_mut(pod) else { return };
        if let Some(info) = self.nodes.get_mut(&assigned.node).filter(|_| handles != assigned.volume_handles) {
            info.usage.remove_volumes(&assigned.volume_handles);
            info.usage.add_volumes(&handles);
            assigned.volume_handles = handles;
        }
    }
}

fn is_finished(pod: &Pod) -> bool {
    matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"))
}

/// For pods without a node.
fn needs_scheduling(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let scheduler = spec.and_then(|s| s.scheduler_name.as_deref()).unwrap_or(SCHEDULER_NAME);
    let is_gated = spec.and_then(|s| s.scheduling_gates.as_ref()).is_some_and(|gates| !gates.is_empty());
    scheduler == SCHEDULER_NAME && !is_gated && !pod.metadata.is_deleting() && !is_finished(pod)
}

/// Returns true if the pod's `PodScheduled` condition is already false with this message.
pub(super) fn is_already_reported(pod: &Pod, message: &str) -> bool {
    pod_condition(pod, "PodScheduled").is_some_and(|c| c.status == "False" && c.message.as_deref() == Some(message))
}
