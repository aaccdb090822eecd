//! What one pod requires of any node: its resources, and its claims sorted by what must be done about them. Pure.

use std::sync::Arc;

use cleat_api::access::READ_WRITE_ONCE_POD;
use cleat_api::claim::{claim_class, claim_phase, is_reserved_for, requested_storage, volume_name, waits_for_consumer};
use cleat_api::key::{Key, Meta as _};
use cleat_api::migrate;
use cleat_api::pod::{ClaimVolume, claim_volumes};
use cleat_api::well_known::annotation;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;

use super::SchedulerState;
use super::node_info::VolumeHandle;
use super::resources::PodResources;
use super::unschedulable::ClaimProblem;

pub(super) struct PodRequirements {
    pub(super) pod: Arc<Pod>,
    pub(super) resources: PodResources,
    /// The volumes of claims that are bound.
    pub(super) bound_volumes: Vec<Arc<PersistentVolume>>,
    /// A claim is bound to a volume that does not exist.
    pub(super) has_missing_volume: bool,
    /// Unbound claims that wait for their first consumer, the smallest first.
    pub(super) delayed_claims: Vec<DelayedClaim>,
    /// The handles of bound and inline volumes.
    pub(super) volume_handles: Vec<VolumeHandle>,
    /// Drivers of inline CSI volumes. They must be installed on the node.
    pub(super) inline_drivers: Vec<String>,
    /// Another pod uses a ReadWriteOncePod claim of this pod.
    pub(super) is_claim_in_use: bool,
}

/// An unbound claim whose class binds when the first pod uses it.
pub(super) struct DelayedClaim {
    pub(super) claim: Arc<PersistentVolumeClaim>,
    pub(super) class: Arc<StorageClass>,
    /// The node for which a provisioner was asked to create the volume.
    pub(super) selected_node: Option<String>,
    pub(super) requested_bytes: i64,
    /// Volumes whose claimRef names the claim.
    pub(super) reserved_volumes: Vec<Arc<PersistentVolume>>,
}

/// Returns true if the claim names its volume and the binder has completed the binding.
pub(in crate::schedule) fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    volume_name(claim).is_some() && claim.metadata.annotation(annotation::BIND_COMPLETED).is_some()
}

impl SchedulerState {
    pub(super) fn requirements(&self, key: &Key, pod: &Arc<Pod>) -> Result<PodRequirements, ClaimProblem> {
        let mut requirements = PodRequirements {
            pod: pod.clone(),
            resources: PodResources::of(pod),
            bound_volumes: Vec::new(),
            has_missing_volume: false,
            delayed_claims: Vec::new(),
            volume_handles: Vec::new(),
            inline_drivers: inline_drivers(pod),
            is_claim_in_use: false,
        };
        let mut has_unbound_claim = false;
        for used in claim_volumes(pod) {
            let claim = self.usable_claim(pod, &used)?;
            requirements.is_claim_in_use |= is_exclusive(&claim) && self.is_used_by_other_pod(&used.claim, key);
            if is_bound(&claim) {
                match volume_name(&claim).and_then(|name| self.volume(name)) {
                    Some(volume) => requirements.bound_volumes.push(volume),
                    None => requirements.has_missing_volume = true,
                }
                continue;
            }
            match self.class_of(&claim).filter(|class| waits_for_consumer(class)) {
                Some(class) if volume_name(&claim).is_none() => requirements.delayed_claims.push(DelayedClaim {
                    selected_node: claim.metadata.annotation(annotation::SELECTED_NODE).map(ToOwned::to_owned),
                    requested_bytes: requested_storage(&claim).map_or(0, |q| q.to_bytes()),
                    reserved_volumes: self
                        .volumes_reserved_for(&used.claim)
                        .filter(|v| is_reserved_for(v, &claim))
                        .collect(),
                    class: class.clone(),
                    claim,
                }),
                // A claim that names a volume is bound by the binder, whatever its class says.
                _ => has_unbound_claim = true,
            }
        }
        if has_unbound_claim {
            return Err(ClaimProblem::Unbound);
        }
        let bound_handles = requirements.bound_volumes.iter().filter_map(|volume| VolumeHandle::of(volume));
        requirements.volume_handles = bound_handles.chain(inline_volume_handles(pod)).collect();
        requirements.delayed_claims.sort_by_key(|delayed| delayed.requested_bytes);
        Ok(requirements)
    }

    fn usable_claim(&self, pod: &Pod, used: &ClaimVolume) -> Result<Arc<PersistentVolumeClaim>, ClaimProblem> {
        let name = used.claim.name.clone();
        let Some(claim) = self.claim(&used.claim) else {
            return Err(if used.ephemeral {
                ClaimProblem::EphemeralNotCreated(name)
            } else {
                ClaimProblem::NotFound(name)
            });
        };
        if claim_phase(&claim) == "Lost" {
            let volume = volume_name(&claim).unwrap_or_default().to_owned();
            return Err(ClaimProblem::Lost { claim: name, volume });
        }
        if claim.metadata.is_deleting() {
            return Err(ClaimProblem::Deleting(name));
        }
        if used.ephemeral && !is_owned(&claim, pod) {
            return Err(ClaimProblem::NotOwned {
                claim: used.claim.to_string(),
                pod: Key::of(&pod.metadata).to_string(),
            });
        }
        Ok(claim)
    }

    pub(super) fn class_of(&self, claim: &PersistentVolumeClaim) -> Option<&Arc<StorageClass>> {
        claim_class(claim).and_then(|name| self.classes.get(name))
    }

    /// The pod's volumes that count against the limits of drivers.
    pub(super) fn volume_handles(&self, pod: &Pod) -> Vec<VolumeHandle> {
        let handle = |used: ClaimVolume| {
            let claim = self.claim(&used.claim)?;
            let reserved = || self.volumes_reserved_for(&used.claim).find(|v| is_reserved_for(v, &claim));
            match volume_name(&claim).map_or_else(reserved, |name| self.volume(name)) {
                Some(volume) => VolumeHandle::of(&volume),
                None => VolumeHandle::to_be_provisioned(&claim, self.class_of(&claim)?),
            }
        };
        claim_volumes(pod).into_iter().filter_map(handle).chain(inline_volume_handles(pod)).collect()
    }

    fn is_used_by_other_pod(&self, claim: &Key, pod: &Key) -> bool {
        let users = self.pods_by_claim.get(claim);
        users.is_some_and(|users| users.iter().any(|user| user != pod && self.assigned.contains_key(user)))
    }
}

fn is_exclusive(claim: &PersistentVolumeClaim) -> bool {
    let mut modes = claim.spec.iter().flat_map(|s| s.access_modes.iter().flatten());
    modes.any(|mode| mode == READ_WRITE_ONCE_POD)
}

fn is_owned(claim: &PersistentVolumeClaim, pod: &Pod) -> bool {
    let mut owners = claim.metadata.owner_references.iter().flatten();
    owners.any(|o| o.controller == Some(true) && o.uid == pod.metadata.uid())
}

fn inline_drivers(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    volumes.filter_map(|v| v.csi.as_ref().map(|csi| csi.driver.clone())).collect()
}

/// The inline disks of migrated in-tree plugins, as volumes of their CSI drivers.
fn inline_volume_handles(pod: &Pod) -> Vec<VolumeHandle> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    let disks = volumes.filter_map(|volume| migrate::translate_inline_volume(volume, namespace).ok().flatten());
    disks.filter_map(|disk| VolumeHandle::of(&disk)).collect()
}
