//! The model of the API server: objects with revisions, and an event log for each kind.

use std::collections::{BTreeMap, BTreeSet};

use cleat_api::claim;
use cleat_api::claim::volume_phase;
use cleat_api::key::Meta as _;
use cleat_testing::build;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Claim(PersistentVolumeClaim),
    ClaimGone(PersistentVolumeClaim),
    Volume(PersistentVolume),
    VolumeGone(PersistentVolume),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    Status,
}

/// The write was refused: the revision has changed, the object is gone, or the change is not allowed.
#[derive(Debug)]
pub(crate) struct Refused;

#[derive(Default)]
pub(crate) struct Server {
    pub(crate) claims: BTreeMap<String, PersistentVolumeClaim>,
    pub(crate) volumes: BTreeMap<String, PersistentVolume>,
    /// Claims and volumes have separate logs, because their watches have different delays.
    pub(crate) claim_log: Vec<Event>,
    pub(crate) volume_log: Vec<Event>,
    /// The names of the volumes that the driver has created.
    pub(crate) backend: BTreeSet<String>,
    revision: u64,
    uids: u64,
}

impl Server {
    fn next_revision(&mut self) -> Option<String> {
        self.revision += 1;
        Some(self.revision.to_string())
    }

    pub(crate) fn create_claim(&mut self, mut claim: PersistentVolumeClaim) {
        let name = claim.metadata.name.clone().unwrap();
        if self.claims.contains_key(&name) {
            return;
        }
        self.uids += 1;
        claim.metadata.uid = Some(format!("uid-{name}-{}", self.uids));
        claim.metadata.resource_version = self.next_revision();
        self.claim_log.push(Event::Claim(claim.clone()));
        self.claims.insert(name, claim);
    }

    /// Returns the new volume; `None` if a volume of this name exists.
    pub(crate) fn create_volume(&mut self, mut volume: PersistentVolume) -> Option<PersistentVolume> {
        let name = volume.metadata.name.clone().unwrap();
        if self.volumes.contains_key(&name) {
            return None;
        }
        self.uids += 1;
        volume.metadata.uid = Some(format!("uid-{name}-{}", self.uids));
        volume.metadata.resource_version = self.next_revision();
        volume.status.get_or_insert_default().phase = Some("Pending".to_owned());
        self.volume_log.push(Event::Volume(volume.clone()));
        self.volumes.insert(name, volume.clone());
        Some(volume)
    }

    pub(crate) fn delete_claim(&mut self, name: &str) {
        let Some(mut claim) = self.claims.get(name).cloned().filter(|c| !c.metadata.is_deleting()) else { return };
        claim.metadata.deletion_timestamp = Some(build::time(1));
        let _ = self.store_claim(claim);
    }

    pub(crate) fn delete_volume(&mut self, name: &str) {
        let Some(mut volume) = self.volumes.get(name).cloned().filter(|v| !v.metadata.is_deleting()) else { return };
        volume.metadata.deletion_timestamp = Some(build::time(1));
        let _ = self.store_volume(volume);
    }

    pub(crate) fn write_claim(
        &mut self,
        part: Part,
        new: &PersistentVolumeClaim,
    ) -> Result<PersistentVolumeClaim, Refused> {
        let old = self.claims.get(new.metadata.name.as_ref().unwrap()).ok_or(Refused)?;
        if old.metadata.resource_version != new.metadata.resource_version || old.metadata.uid != new.metadata.uid {
            return Err(Refused);
        }
        let adds_finalizer = new.metadata.finalizers.iter().flatten().any(|f| !old.metadata.has_finalizer(f));
        if part == Part::Whole && old.metadata.is_deleting() && adds_finalizer {
            return Err(Refused);
        }
        let mut stored = old.clone();
        match part {
            Part::Status => stored.status = new.status.clone(),
            Part::Whole => {
                stored.metadata = new.metadata.clone();
                stored.metadata.deletion_timestamp = old.metadata.deletion_timestamp.clone();
                stored.spec = new.spec.clone();
                // As in the real server, `volumeName` cannot be changed once it is set.
                if claim::volume_name(old).is_some() && claim::volume_name(old) != claim::volume_name(&stored) {
                    return Err(Refused);
                }
            }
        }
        Ok(self.store_claim(stored))
    }

    pub(crate) fn write_volume(&mut self, part: Part, new: &PersistentVolume) -> Result<PersistentVolume, Refused> {
        let old = self.volumes.get(new.metadata.name.as_ref().unwrap()).ok_or(Refused)?;
        if old.metadata.resource_version != new.metadata.resource_version || old.metadata.uid != new.metadata.uid {
            return Err(Refused);
        }
        let mut stored = old.clone();
        match part {
            Part::Status => stored.status = new.status.clone(),
            Part::Whole => {
                stored.metadata = new.metadata.clone();
                stored.metadata.deletion_timestamp = old.metadata.deletion_timestamp.clone();
                stored.spec = new.spec.clone();
            }
        }
        Ok(self.store_volume(stored))
    }

    fn store_claim(&mut self, mut claim: PersistentVolumeClaim) -> PersistentVolumeClaim {
        claim.metadata.resource_version = self.next_revision();
        let name = claim.metadata.name.clone().unwrap();
        let is_held = claim.metadata.finalizers.iter().flatten().next().is_some();
        if claim.metadata.is_deleting() && !is_held {
            self.claims.remove(&name);
            self.claim_log.push(Event::ClaimGone(claim.clone()));
        } else {
            self.claims.insert(name, claim.clone());
            self.claim_log.push(Event::Claim(claim.clone()));
        }
        claim
    }

    /// A Bound volume is not removed. This stands for the protection finalizer, whose writes are not modelled.
    fn store_volume(&mut self, mut volume: PersistentVolume) -> PersistentVolume {
        volume.metadata.resource_version = self.next_revision();
        let name = volume.metadata.name.clone().unwrap();
        let is_held = volume.metadata.finalizers.iter().flatten().next().is_some() || volume_phase(&volume) == "Bound";
        if volume.metadata.is_deleting() && !is_held {
            self.volumes.remove(&name);
            self.volume_log.push(Event::VolumeGone(volume.clone()));
        } else {
            self.volumes.insert(name, volume.clone());
            self.volume_log.push(Event::Volume(volume.clone()));
        }
        volume
    }
}
