//! What one pod needs wherever it goes: its claims sorted by what is to be done about them. Pure.

use std::sync::Arc;

use cleat_api::access::READ_WRITE_ONCE_POD;
use cleat_api::claim::{claim_class, claim_phase, is_reserved_for, requested, volume_name, waits_for_consumer};
use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::annotation;
use cleat_api::migrate;
use cleat_api::pod::{ClaimVolume, claim_volumes};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;

use super::World;
use super::demand::Demand;
use super::host::Handle;
use super::why::Unready;

pub(super) struct Needs {
    pub(super) pod: Arc<Pod>,
    pub(super) demand: Demand,
    /// The volumes of claims that are bound.
    pub(super) bound: Vec<Arc<PersistentVolume>>,
    /// A claim is bound to a volume that does not exist.
    pub(super) is_volume_gone: bool,
    /// Claims that wait for this pod, the smallest first.
    pub(super) delayed: Vec<Delayed>,
    /// The bound volumes as their drivers know them.
    pub(super) volumes: Vec<Handle>,
    /// Drivers that must be on the node besides.
    pub(super) drivers: Vec<String>,
    /// A claim for one pod only is another pod's.
    pub(super) is_exclusive_taken: bool,
}

pub(super) struct Delayed {
    pub(super) claim: Arc<PersistentVolumeClaim>,
    pub(super) class: Arc<StorageClass>,
    pub(super) selected: Option<String>,
    pub(super) bytes: i64,
    /// Volumes that were set aside for it.
    pub(super) reserved: Vec<Arc<PersistentVolume>>,
}

/// The claim points at its volume, and the binder has said that this is final.
pub(super) fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    volume_name(claim).is_some() && claim.metadata.annotation(annotation::BIND_COMPLETED).is_some()
}

impl World {
    pub(super) fn needs(&self, key: &Key, pod: &Arc<Pod>) -> Result<Needs, Unready> {
        let mut needs = Needs {
            pod: pod.clone(),
            demand: Demand::of(pod),
            bound: Vec::new(),
            is_volume_gone: false,
            delayed: Vec::new(),
            volumes: Vec::new(),
            drivers: inline_drivers(pod),
            is_exclusive_taken: false,
        };
        let mut is_unbound = false;
        for used in claim_volumes(pod) {
            let claim = self.claim_for(pod, &used)?;
            needs.is_exclusive_taken |= is_exclusive(&claim) && self.is_placed_elsewhere(&used.claim, key);
            if is_bound(&claim) {
                match volume_name(&claim).and_then(|name| self.volume(name)) {
                    Some(volume) => needs.bound.push(volume),
                    None => needs.is_volume_gone = true,
                }
                continue;
            }
            match self.class_of(&claim).filter(|class| waits_for_consumer(class)) {
                Some(class) if volume_name(&claim).is_none() => needs.delayed.push(Delayed {
                    selected: claim.metadata.annotation(annotation::SELECTED_NODE).map(ToOwned::to_owned),
                    bytes: requested(&claim).map_or(0, |q| q.to_bytes()),
                    reserved: self.reserved_for(&used.claim).filter(|v| is_reserved_for(v, &claim)).collect(),
                    class: class.clone(),
                    claim,
                }),
                // A claim that names a volume is the binder's to bind, whatever its class says.
                _ => is_unbound = true,
            }
        }
        if is_unbound {
            return Err(Unready::Unbound);
        }
        needs.volumes = needs.bound.iter().filter_map(|volume| Handle::of(volume)).chain(inline(pod)).collect();
        needs.delayed.sort_by_key(|d| d.bytes);
        Ok(needs)
    }

    fn claim_for(&self, pod: &Pod, used: &ClaimVolume) -> Result<Arc<PersistentVolumeClaim>, Unready> {
        let name = used.claim.name.clone();
        let Some(claim) = self.claim(&used.claim) else {
            return Err(if used.ephemeral { Unready::Ephemeral(name) } else { Unready::Missing(name) });
        };
        if claim_phase(&claim) == "Lost" {
            let volume = volume_name(&claim).unwrap_or_default().to_owned();
            return Err(Unready::Lost { claim: name, volume });
        }
        if claim.metadata.is_deleting() {
            return Err(Unready::Deleting(name));
        }
        if used.ephemeral && !is_owned(&claim, pod) {
            return Err(Unready::Foreign { claim: used.claim.to_string(), pod: Key::of(&pod.metadata).to_string() });
        }
        Ok(claim)
    }

    pub(super) fn class_of(&self, claim: &PersistentVolumeClaim) -> Option<&Arc<StorageClass>> {
        claim_class(claim).and_then(|name| self.classes.get(name))
    }

    /// The volumes that count against the limits of drivers.
    pub(super) fn handles(&self, pod: &Pod) -> Vec<Handle> {
        let handle = |used: ClaimVolume| {
            let claim = self.claim(&used.claim)?;
            let set_aside = || self.reserved_for(&used.claim).find(|v| is_reserved_for(v, &claim));
            match volume_name(&claim).map_or_else(set_aside, |name| self.volume(name)) {
                Some(volume) => Handle::of(&volume),
                None => Handle::to_be_made(&claim, self.class_of(&claim)?),
            }
        };
        claim_volumes(pod).into_iter().filter_map(handle).chain(inline(pod)).collect()
    }

    fn is_placed_elsewhere(&self, claim: &Key, pod: &Key) -> bool {
        self.users.get(claim).is_some_and(|users| users.iter().any(|u| u != pod && self.placed.contains_key(u)))
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

/// Volumes that a driver makes with the pod need the driver too.
fn inline_drivers(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    volumes.filter_map(|v| v.csi.as_ref().map(|csi| csi.driver.clone())).collect()
}

/// Disks of old plugins that the pod names itself, as their drivers' volumes.
fn inline(pod: &Pod) -> Vec<Handle> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    let disks = volumes.filter_map(|volume| migrate::inline(volume, namespace).ok().flatten());
    disks.filter_map(|disk| Handle::of(&disk)).collect()
}
