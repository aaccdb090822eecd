//! Decides on which node a pod runs, and what must be written before it is bound. Pure: the [`SchedulerState`] holds
//! all data, and the caller passes the time.
//!
//! A pod is scheduled in three steps. First it gets a node that can run it. If it has unbound claims, the node is
//! reserved: the existing volumes that match are written with the claim's reference, the other claims are written with
//! the selected node, and the pod waits. When the binder has bound all claims, the pod is bound to the node.

mod fit;
mod node_info;
mod nodes;
mod pods;
mod requirements;
mod resources;
mod score;
mod state;
mod storage;
#[cfg(test)]
mod summary;
mod unschedulable;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::claim::{claim_class, claim_ref, claim_ref_key, is_reserved_for, requested_storage, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::pod::claim_volumes;
use cleat_api::well_known::annotation;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod};
use kube::Resource as _;

pub(in crate::schedule) use requirements::is_bound;
pub use state::{SCHEDULER_NAME, SchedulerState};
pub use unschedulable::{ClaimProblem, ClusterEvents, NodeRejection, Unschedulable};

use fit::VolumePlan;
use node_info::NodeInfo;
use requirements::PodRequirements;
use score::Candidate;
use state::InFlightDecision;

/// How long a node stays reserved for a pod while its volumes are provisioned and bound.
pub const BIND_TIMEOUT: SignedDuration = SignedDuration::from_secs(600);

#[derive(Clone, Debug)]
pub enum ScheduleDecision {
    /// The node is reserved. Write these volumes with the claim's reference, then these claims with the selected node.
    Reserve { node: String, volumes: Vec<Arc<PersistentVolume>>, claims: Vec<Arc<PersistentVolumeClaim>> },
    /// The node is reserved, and the volumes are being provisioned or bound. Nothing to write.
    AwaitVolumes,
    /// All claims are bound: bind the pod.
    Bind { node: String },
    /// No node can run the pod: write the reason to its condition.
    MarkUnschedulable(Unschedulable),
    /// The reservation was given up: write the reason to the pod's condition. The caller queues the pod again.
    ReleaseNode { message: String },
}

/// Whether a decision was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionOutcome {
    Done,
    Failed,
}

impl SchedulerState {
    /// Decides about the next pod of the queue, and assumes that the decision will be written. The caller must report
    /// the outcome with [`SchedulerState::complete`], except for `AwaitVolumes`. The pod is not decided about again
    /// before that.
    pub fn next_decision(&mut self, now: Timestamp) -> Option<(Arc<Pod>, ScheduleDecision)> {
        loop {
            let (_, _, key) = self.queue.pop_first()?;
            let Some(pod) = self.pending.get(&key).map(|pending| pending.pod.clone()) else { continue };
            let is_reserved = self.assigned.get(&key).is_some_and(|assigned| assigned.reserved_at.is_some());
            let decision = match is_reserved {
                true => self.check_reservation(&key, &pod, now),
                false => self.select_node(&key, &pod, now),
            };
            let mut in_flight = InFlightDecision { uid: pod.metadata.uid().to_owned(), ..InFlightDecision::default() };
            match &decision {
                ScheduleDecision::AwaitVolumes => return Some((pod, decision)),
                // Needs no write, so that the pod may be decided about again at once. `complete` ignores it.
                ScheduleDecision::MarkUnschedulable(reason) if pods::is_already_reported(&pod, &reason.to_string()) => {
                    return Some((pod, decision));
                }
                ScheduleDecision::Reserve { volumes, claims, .. } => {
                    in_flight.volumes = volumes.iter().filter_map(|v| v.metadata.name.clone()).collect();
                    in_flight.claims = claims.iter().map(|c| Key::of(&c.metadata)).collect();
                }
                ScheduleDecision::Bind { .. }
                | ScheduleDecision::MarkUnschedulable(_)
                | ScheduleDecision::ReleaseNode { .. } => {}
            }
            self.in_flight.insert(key, in_flight);
            return Some((pod, decision));
        }
    }

    /// Records whether the decision about a pod was written. If the write of a `Reserve` or `Bind` failed, the pod's
    /// reservation is released; the caller queues the pod again with [`SchedulerState::enqueue`], after a delay.
    pub fn complete(&mut self, key: &Key, decision: &ScheduleDecision, outcome: DecisionOutcome) {
        let Some(in_flight) = self.in_flight.remove(key) else { return };
        match (decision, outcome) {
            (ScheduleDecision::Reserve { .. } | ScheduleDecision::Bind { .. }, DecisionOutcome::Failed) => {
                self.revert(key, &in_flight);
            }
            (ScheduleDecision::Reserve { .. }, DecisionOutcome::Done) => self.enqueue(key),
            (ScheduleDecision::Bind { .. }, DecisionOutcome::Done) => {
                if self.pending.get(key).is_some_and(|pending| pending.pod.metadata.uid() == in_flight.uid) {
                    // Stays in flight until the cache shows the pod with its node.
                    self.in_flight.insert(key.clone(), InFlightDecision { is_bound: true, ..in_flight });
                    return;
                }
            }
            (
                ScheduleDecision::AwaitVolumes
                | ScheduleDecision::MarkUnschedulable(_)
                | ScheduleDecision::ReleaseNode { .. },
                _,
            ) => {}
        }
        let is_other_pod = self.pending.get(key).is_some_and(|pending| pending.pod.metadata.uid() != in_flight.uid);
        if in_flight.must_requeue || is_other_pod {
            self.enqueue(key);
        }
    }

    fn revert(&mut self, key: &Key, in_flight: &InFlightDecision) {
        let of_volumes = in_flight.volumes.iter().filter_map(|v| Some(claim_ref_key(claim_ref(&*self.volume(v)?)?)));
        let claims: BTreeSet<Key> = of_volumes.chain(in_flight.claims.iter().cloned()).collect();
        in_flight.claims.iter().for_each(|claim| self.revert_claim(claim));
        in_flight.volumes.iter().for_each(|volume| self.assume_volume(volume, None));
        // Other pods of these claims may wait for what was assumed here, without a write of their own.
        claims.iter().for_each(|claim| self.enqueue_other_users(claim, key));
        let assigned = self.assigned.get(key);
        if assigned.is_some_and(|assigned| assigned.reserved_at.is_some() && assigned.uid == in_flight.uid) {
            self.unassign(key);
        }
    }

    /// Queues the pods whose reservation is older than [`BIND_TIMEOUT`]. Returns when the next reservation expires.
    pub fn expire_reservations(&mut self, now: Timestamp) -> Option<Timestamp> {
        let expiry = |reserved_at: Timestamp| reserved_at.checked_add(BIND_TIMEOUT).unwrap_or(Timestamp::MAX);
        let expired = self.reservations_by_time.iter().take_while(|(reserved_at, _)| expiry(*reserved_at) <= now);
        let expired: Vec<Key> = expired.map(|(_, key)| key.clone()).collect();
        expired.iter().for_each(|key| self.enqueue(key));
        self.reservations_by_time.iter().map(|(reserved_at, _)| expiry(*reserved_at)).find(|expiry| *expiry > now)
    }

    fn select_node(&mut self, key: &Key, pod: &Arc<Pod>, now: Timestamp) -> ScheduleDecision {
        let nodes = self.nodes.values().filter(|info| info.node.is_some()).count();
        let found = match self.requirements(key, pod) {
            _ if nodes == 0 => Err(Unschedulable::NoNodes),
            Err(problem) => Err(Unschedulable::Claims { nodes, problem }),
            Ok(requirements) => self.find_node(key, &requirements, nodes),
        };
        let (node, plan) = match found {
            Ok(found) => found,
            Err(reason) => {
                if let Some(pending) = self.pending.get_mut(key) {
                    pending.wake_events = reason.resolving_events();
                }
                return ScheduleDecision::MarkUnschedulable(reason);
            }
        };
        if let Some(pending) = self.pending.get_mut(key) {
            pending.wake_events = ClusterEvents::NONE;
            // Returned nodes are selected last: all possible nodes were returned, and a new round begins.
            if pending.returned_nodes.contains(&node) {
                pending.returned_nodes.clear();
            }
        }
        self.assign(key, pod, &node, Some(now));
        if plan.matched.is_empty() && plan.provisioned.is_empty() {
            return ScheduleDecision::Bind { node };
        }
        self.reserve(key, node, plan)
    }

    /// Assumes the plan, and returns what must be written for it.
    fn reserve(&mut self, key: &Key, node: String, plan: VolumePlan) -> ScheduleDecision {
        let (mut volumes, mut claims) = (Vec::new(), Vec::new());
        let mut matched_volumes = BTreeMap::new();
        for (volume, claim) in plan.matched {
            let name = volume.metadata.name.clone().unwrap_or_default();
            matched_volumes.insert(Key::of(&claim.metadata), name.clone());
            if let Some(reserved) = with_claim_ref(&volume, &claim) {
                let reserved = Arc::new(reserved);
                self.assume_volume(&name, Some(reserved.clone()));
                volumes.push(reserved);
            }
        }
        for claim in plan.provisioned {
            if claim.metadata.annotation(annotation::SELECTED_NODE) == Some(&node) {
                continue;
            }
            let claim_key = Key::of(&claim.metadata);
            let bytes = requested_storage(&claim).map_or(0, |q| q.to_bytes());
            self.reserve_storage(key, &claim_key, claim_class(&claim).unwrap_or_default(), bytes);
            let mut selected = claim.as_ref().clone();
            let annotations = selected.metadata.annotations.get_or_insert_default();
            annotations.insert(annotation::SELECTED_NODE.to_owned(), node.clone());
            let selected = Arc::new(selected);
            self.assume_claim(&claim_key, selected.clone());
            claims.push(selected);
        }
        if let Some(assigned) = self.assigned.get_mut(key) {
            assigned.matched_volumes = matched_volumes;
        }
        // The matched volumes count with their real handles from now on.
        self.update_volume_handles(key);
        if volumes.is_empty() && claims.is_empty() {
            return ScheduleDecision::AwaitVolumes;
        }
        ScheduleDecision::Reserve { node, volumes, claims }
    }

    fn find_node(
        &self,
        key: &Key,
        requirements: &PodRequirements,
        nodes: usize,
    ) -> Result<(String, VolumePlan), Unschedulable> {
        let returned_nodes = self.pending.get(key).map(|pending| &pending.returned_nodes);
        let mut candidates = Vec::new();
        let mut rejections = BTreeMap::new();
        for (name, info) in &self.nodes {
            let Some(node) = &info.node else { continue };
            match self.check_node(info, node, requirements) {
                Ok(plan) => {
                    let was_returned = returned_nodes.is_some_and(|returned| returned.contains(name));
                    candidates.push(Candidate { name, info, node, plan, was_returned });
                }
                Err(of_node) => {
                    of_node.into_iter().for_each(|rejection| *rejections.entry(rejection).or_default() += 1)
                }
            }
        }
        let best = self.best_candidate(requirements, candidates);
        best.map(|best| (best.name.to_owned(), best.plan)).ok_or(Unschedulable::Nodes { nodes, rejections })
    }

    /// For a pod with a reserved node: binds it, waits for its volumes, or gives the reservation up.
    fn check_reservation(&mut self, key: &Key, pod: &Arc<Pod>, now: Timestamp) -> ScheduleDecision {
        let Some(assigned) = self.assigned.get(key) else { return ScheduleDecision::AwaitVolumes };
        let node = assigned.node.clone();
        let is_expired =
            assigned.reserved_at.is_some_and(|reserved_at| now.duration_since(reserved_at) >= BIND_TIMEOUT);
        let info = self.nodes.get(&node).and_then(|info| Some((info, &info.node.as_ref()?.object)));
        let progress = match info {
            None => Err(ReservationLoss::Other(format!("node {node:?} not found"))),
            Some((info, node)) => self.volume_progress(pod, info, node, &assigned.matched_volumes),
        };
        match progress {
            Ok(VolumeProgress::Bound) => return ScheduleDecision::Bind { node },
            Ok(VolumeProgress::Pending) if !is_expired => return ScheduleDecision::AwaitVolumes,
            Ok(VolumeProgress::Pending) | Err(_) => {}
        }
        self.unassign(key);
        let message = match progress {
            Err(ReservationLoss::NodeReturned(message)) => {
                if let Some(pending) = self.pending.get_mut(key) {
                    pending.returned_nodes.insert(node);
                }
                message
            }
            Err(ReservationLoss::Other(message)) => message,
            Ok(_) => "context deadline exceeded".to_owned(),
        };
        ScheduleDecision::ReleaseNode { message: format!("binding volumes: {message}") }
    }

    fn volume_progress(
        &self,
        pod: &Pod,
        info: &NodeInfo,
        node: &Node,
        matched_volumes: &BTreeMap<Key, String>,
    ) -> Result<VolumeProgress, ReservationLoss> {
        let mut progress = VolumeProgress::Bound;
        for used in claim_volumes(pod) {
            let name = &used.claim.name;
            let Some(claim) = self.claim(&used.claim) else {
                return Err(ReservationLoss::Other(ClaimProblem::NotFound(name.clone()).to_string()));
            };
            let named_volume = volume_name(&claim).and_then(|name| self.volume(name));
            let reserved_volume = || self.volumes_reserved_for(&used.claim).find(|v| is_reserved_for(v, &claim));
            let volume = named_volume.clone().or_else(reserved_volume);
            if volume.as_ref().is_some_and(|volume| !info.can_reach(node, volume)) {
                return Err(ReservationLoss::Other(format!("volume of PVC {name:?} does not reach the node")));
            }
            match (claim.metadata.annotation(annotation::SELECTED_NODE), matched_volumes.get(&used.claim)) {
                _ if is_bound(&claim) && named_volume.is_some() => continue,
                // The binder completes the binding.
                _ if volume_name(&claim).is_some() || volume.is_some() => {}
                (_, Some(volume)) => {
                    return Err(ReservationLoss::Other(format!("ClaimRef got reset for pv {volume:?}")));
                }
                (selected, None) if selected == node.metadata.name.as_deref() => {}
                (_, None) => {
                    return Err(ReservationLoss::NodeReturned(format!("provisioning failed for PVC {name:?}")));
                }
            }
            progress = VolumeProgress::Pending;
        }
        Ok(progress)
    }
}

#[derive(Clone, Copy)]
enum VolumeProgress {
    Bound,
    Pending,
}

/// Why a reservation must be given up, with the message for the pod.
enum ReservationLoss {
    /// The provisioner has removed the selected node from the claim: it cannot create the volume for this node.
    NodeReturned(String),
    Other(String),
}

/// The volume with a claimRef to the claim; `None` if the volume has it already.
fn with_claim_ref(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<PersistentVolume> {
    let was_reserved = is_reserved_for(volume, claim);
    let spec = volume.spec.as_ref();
    let uid = spec.and_then(|s| s.claim_ref.as_ref()?.uid.as_deref()).unwrap_or_default();
    if was_reserved && uid == claim.metadata.uid() {
        return None;
    }
    let mut reserved = volume.clone();
    let reference =
        ObjectReference { resource_version: claim.metadata.resource_version.clone(), ..claim.object_ref(&()) };
    reserved.spec.get_or_insert_default().claim_ref = Some(reference);
    // Without the annotation the binder treats the claimRef as one that an administrator has set.
    if !was_reserved {
        let annotations = reserved.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation::BOUND_BY_CONTROLLER.to_owned(), annotation::YES.to_owned());
    }
    Some(reserved)
}

#[cfg(test)]
mod tests;
