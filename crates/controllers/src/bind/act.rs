//! Carries decisions out. Every write is conditional on the revision that was read, and its reply goes back to the
//! cache, so that the next look is not older than our own last write.

use std::sync::Arc;

use cleat_api::keys::annotation;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use kube::{Resource as _, ResourceExt as _};
use tracing::{debug, info};

use super::Binder;
use super::decide::{Binding, ClaimDecision, Failure, Loss, Point, Reserve, Unbind, VolumeDecision, Wait};

impl Binder {
    pub(super) async fn settle_claim(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        decision: ClaimDecision,
    ) -> Result<(), WriteError> {
        match decision {
            ClaimDecision::Settled => Ok(()),
            ClaimDecision::Wait(wait) => self.wait(claim, wait).await,
            ClaimDecision::AssignClass(class) => self.assign_class(claim, class).await,
            ClaimDecision::RequestProvisioning { provisioner, annotate } => {
                self.request_provisioning(claim, &provisioner, annotate).await
            }
            ClaimDecision::Bind(binding) => self.bind(claim, *binding).await,
            ClaimDecision::Lose(loss) => self.lose(claim, loss).await,
        }
    }

    pub(super) async fn settle_volume(
        &self,
        volume: &PersistentVolume,
        decision: VolumeDecision,
    ) -> Result<(), WriteError> {
        match decision {
            VolumeDecision::Settled | VolumeDecision::LeaveToClaim => Ok(()),
            VolumeDecision::SetPhase(phase) => self.mark_volume(volume.clone(), phase).await.map(drop),
            VolumeDecision::Unbind(unbind) => self.unbind(volume, unbind).await,
            VolumeDecision::Fail(failure) => self.fail(volume, failure).await,
        }
    }

    async fn wait(&self, claim: &Arc<PersistentVolumeClaim>, wait: Wait) -> Result<(), WriteError> {
        debug!(?wait, "claim waits");
        let claim = claim.as_ref();
        match wait {
            Wait::NoVolumeAndNoClass => self.recorder.normal(
                claim,
                "FailedBinding",
                "no persistent volumes available for this claim and no storage class is set",
            ),
            Wait::ForFirstConsumer => self.recorder.normal(
                claim,
                "WaitForFirstConsumer",
                "waiting for first consumer to be created before binding",
            ),
            Wait::ForPods(pods) => {
                let noun = if pods.len() == 1 { "pod" } else { "pods" };
                let message = format!("waiting for {noun} {} to be scheduled", pods.join(","));
                self.recorder.normal(claim, "WaitForPodScheduled", message);
            }
            Wait::ClassMissing(class) => self.recorder.warning(
                claim,
                "ProvisioningFailed",
                format!("storageclass.storage.k8s.io {class:?} not found"),
            ),
            Wait::NotDynamic(provisioner) => self.recorder.warning(
                claim,
                "ProvisioningFailed",
                format!("volumes of provisioner {provisioner:?} are made by an administrator; none is available"),
            ),
            Wait::NamedVolumeMissing => {}
            Wait::NamedVolumeUnfit { volume, why } => self.recorder.warning(
                claim,
                "VolumeMismatch",
                format!("Cannot bind to requested volume {volume:?}: {why}"),
            ),
            Wait::NamedVolumeTaken(volume) => self.recorder.warning(
                claim,
                "FailedBinding",
                format!("volume {volume:?} already bound to a different claim."),
            ),
        }
        if cleat_api::claim::claim_phase(claim) == "Pending" {
            return Ok(());
        }
        let mut pending = claim.clone();
        pending.status.get_or_insert_default().phase = Some("Pending".to_owned());
        self.write_claim(Part::Status, &pending).await.map(drop)
    }

    async fn assign_class(&self, claim: &PersistentVolumeClaim, class: String) -> Result<(), WriteError> {
        let mut classed = claim.clone();
        info!(claim = %claim.name_any(), class, "default class assigned");
        classed.spec.get_or_insert_default().storage_class_name = Some(class);
        self.write_claim(Part::Whole, &classed).await.map(drop)
    }

    async fn request_provisioning(
        &self,
        claim: &PersistentVolumeClaim,
        provisioner: &str,
        annotate: bool,
    ) -> Result<(), WriteError> {
        if annotate {
            let mut named = claim.clone();
            for key in [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA] {
                named.annotations_mut().insert(key.to_owned(), provisioner.to_owned());
            }
            self.write_claim(Part::Whole, &named).await?;
            cleat_crash::point("bind:provisioner-named");
        }
        self.recorder.normal(
            claim,
            "ExternalProvisioning",
            format!(
                "Waiting for a volume to be created either by the external provisioner '{provisioner}' or manually by \
                 the system administrator. If volume creation is delayed, please verify that the provisioner is \
                 running and correctly registered."
            ),
        );
        Ok(())
    }

    async fn bind(&self, claim: &Arc<PersistentVolumeClaim>, binding: Binding) -> Result<(), WriteError> {
        let mut volume = binding.volume.as_ref().clone();
        if let Some(reserve) = binding.reserve {
            volume = self.reserve(volume, claim, reserve).await?;
            cleat_crash::point("bind:volume-reserved");
        }
        if binding.mark_volume {
            volume = self.mark_volume(volume, "Bound").await?;
            cleat_crash::point("bind:volume-bound");
        }
        let mut claim = claim.as_ref().clone();
        if let Some(point) = binding.point_claim {
            claim = self.point(claim, &volume, point).await?;
            cleat_crash::point("bind:claim-pointed");
        }
        if binding.mark_claim {
            let status = claim.status.get_or_insert_default();
            status.phase = Some("Bound".to_owned());
            let spec = volume.spec.as_ref();
            status.access_modes = spec.and_then(|s| s.access_modes.clone());
            status.capacity = spec.and_then(|s| s.capacity.clone());
            status.current_volume_attributes_class_name = spec.and_then(|s| s.volume_attributes_class_name.clone());
            self.write_claim(Part::Status, &claim).await?;
            info!(claim = %claim.name_any(), volume = %volume.name_any(), "bound");
        }
        Ok(())
    }

    async fn reserve(
        &self,
        mut volume: PersistentVolume,
        claim: &PersistentVolumeClaim,
        reserve: Reserve,
    ) -> Result<PersistentVolume, WriteError> {
        let reference = ObjectReference { resource_version: claim.resource_version(), ..claim.object_ref(&()) };
        volume.spec.get_or_insert_default().claim_ref = Some(reference);
        if reserve == Reserve::AsController {
            let yes = annotation::YES.to_owned();
            volume.annotations_mut().insert(annotation::BOUND_BY_CONTROLLER.to_owned(), yes);
        }
        self.write_volume(Part::Whole, &volume).await
    }

    async fn mark_volume(&self, mut volume: PersistentVolume, phase: &str) -> Result<PersistentVolume, WriteError> {
        let status = volume.status.get_or_insert_default();
        status.phase = Some(phase.to_owned());
        status.message = None;
        // The server stamps the moment of a phase change that carries no time of its own.
        status.last_phase_transition_time = None;
        self.write_volume(Part::Status, &volume).await
    }

    async fn point(
        &self,
        mut claim: PersistentVolumeClaim,
        volume: &PersistentVolume,
        point: Point,
    ) -> Result<PersistentVolumeClaim, WriteError> {
        claim.spec.get_or_insert_default().volume_name = volume.metadata.name.clone();
        let yes = annotation::YES.to_owned();
        if point == Point::AsController {
            claim.annotations_mut().insert(annotation::BOUND_BY_CONTROLLER.to_owned(), yes.clone());
        }
        claim.annotations_mut().insert(annotation::BIND_COMPLETED.to_owned(), yes);
        self.write_claim(Part::Whole, &claim).await
    }

    async fn lose(&self, claim: &PersistentVolumeClaim, loss: Loss) -> Result<(), WriteError> {
        let (reason, message) = match loss {
            Loss::NoVolumeNamed => {
                ("ClaimLost", "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!")
            }
            Loss::VolumeGone => ("ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!"),
            Loss::VolumeOfAnother => {
                ("ClaimMisbound", "Two claims are bound to the same volume, this one is bound incorrectly")
            }
        };
        let mut lost = claim.clone();
        let status = lost.status.get_or_insert_default();
        status.phase = Some("Lost".to_owned());
        status.access_modes = None;
        status.capacity = None;
        status.current_volume_attributes_class_name = None;
        self.write_claim(Part::Status, &lost).await?;
        self.recorder.warning(claim, reason, message);
        Ok(())
    }

    async fn fail(&self, volume: &PersistentVolume, failure: Failure) -> Result<(), WriteError> {
        let (reason, message) = match failure {
            Failure::Recycle => ("VolumeFailedRecycle", "No recycler plugin found for the volume!"),
            Failure::Delete => ("VolumeFailedDelete", "no deleter is known for this kind of volume"),
            Failure::UnknownPolicy => {
                ("VolumeUnknownReclaimPolicy", "Volume has unrecognized PersistentVolumeReclaimPolicy")
            }
        };
        let mut failed = volume.clone();
        let status = failed.status.get_or_insert_default();
        status.phase = Some("Failed".to_owned());
        status.message = Some(message.to_owned());
        status.last_phase_transition_time = None;
        self.write_volume(Part::Status, &failed).await?;
        self.recorder.warning(volume, reason, message);
        Ok(())
    }

    async fn unbind(&self, volume: &PersistentVolume, unbind: Unbind) -> Result<(), WriteError> {
        let mut free = volume.clone();
        let spec = free.spec.get_or_insert_default();
        match unbind {
            Unbind::Clear => {
                spec.claim_ref = None;
                free.annotations_mut().remove(annotation::BOUND_BY_CONTROLLER);
            }
            Unbind::KeepName => {
                if let Some(reference) = &mut spec.claim_ref {
                    reference.uid = None;
                    reference.resource_version = None;
                }
            }
        }
        let free = self.write_volume(Part::Whole, &free).await?;
        self.mark_volume(free, "Available").await.map(drop)
    }

    async fn write_claim(
        &self,
        part: Part,
        claim: &PersistentVolumeClaim,
    ) -> Result<PersistentVolumeClaim, WriteError> {
        let written = write::replace(&self.context.client, part, claim).await?;
        self.observed.claims.observe_write(written.clone());
        Ok(written)
    }

    async fn write_volume(&self, part: Part, volume: &PersistentVolume) -> Result<PersistentVolume, WriteError> {
        let written = write::replace(&self.context.client, part, volume).await?;
        self.observed.volumes.observe_write(written.clone());
        Ok(written)
    }
}
