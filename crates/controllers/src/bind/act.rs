//! Carries decisions out. Every write is conditional on the revision that was read, and its reply goes back to the
//! cache, so that the next look is not older than our own last write.

use std::sync::Arc;

use cleat_api::condition;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;
use tracing::{debug, info};

use super::decide::{Binding, ClaimDecision, Failure, Loss, Unbind, VolumeDecision, Wait};
use super::{Binder, edit};

impl Binder {
    pub(super) async fn settle_claim(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        decision: ClaimDecision,
    ) -> Result<(), WriteError> {
        match decision {
            ClaimDecision::Settled => Ok(()),
            ClaimDecision::HandOver(to) => {
                self.write_claim(Part::Whole, &edit::handed_over(claim.as_ref().clone(), to)).await
            }
            ClaimDecision::Wait(wait) => self.wait(claim, wait).await,
            ClaimDecision::AssignClass(class) => self.assign_class(claim, class).await,
            ClaimDecision::RequestProvisioning { provisioner, annotate, hold } => {
                self.request_provisioning(claim, &provisioner, annotate, hold).await
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
            VolumeDecision::HandOver(to) => {
                self.write_volume(Part::Whole, &edit::handed_over(volume.clone(), to)).await
            }
            VolumeDecision::SetPhase(phase) => self.mark_volume(volume, phase).await,
            VolumeDecision::Unbind(unbind) => self.unbind(volume, unbind).await,
            VolumeDecision::Fail(failure) => self.fail(volume, failure).await,
            VolumeDecision::WrongMode(claim) => {
                self.wrong_mode(volume, &claim);
                Ok(())
            }
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
        self.write_claim(Part::Status, &edit::pending(claim.clone())).await
    }

    async fn assign_class(&self, claim: &PersistentVolumeClaim, class: String) -> Result<(), WriteError> {
        info!(claim = %claim.name_any(), class, "default class assigned");
        self.write_claim(Part::Whole, &edit::classed(claim.clone(), class)).await
    }

    async fn request_provisioning(
        &self,
        claim: &PersistentVolumeClaim,
        provisioner: &str,
        annotate: bool,
        hold: bool,
    ) -> Result<(), WriteError> {
        if annotate {
            self.write_claim(Part::Whole, &edit::asked(claim.clone(), provisioner, hold)).await?;
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
        let mut volume = binding.volume;
        if let Some(reserve) = binding.reserve {
            let reserved = edit::reserved(volume.as_ref().clone(), claim, reserve);
            volume = write::replace(&self.context.client, Part::Whole, &reserved).await?;
            self.observed.volumes.observe_write(volume.clone());
            cleat_crash::point("bind:volume-reserved");
        }
        let mark = async {
            if !binding.mark_volume {
                return Ok(());
            }
            let marked = self.mark_volume(&volume, "Bound").await;
            cleat_crash::point("bind:volume-bound");
            marked
        };
        let point = async {
            let Some(point) = binding.point_claim else { return Ok(claim.clone()) };
            let pointed = edit::pointed(claim.as_ref().clone(), &volume.name_any(), point);
            let pointed = write::replace(&self.context.client, Part::Whole, &pointed).await?;
            self.observed.claims.observe_write(pointed.clone());
            cleat_crash::point("bind:claim-pointed");
            Ok(pointed)
        };
        // Two objects, and neither needs the other's new state: together they cost one write to disk.
        let claim = if binding.together {
            let (marked, pointed) = tokio::join!(mark, point);
            marked?;
            pointed?
        } else {
            mark.await?;
            point.await?
        };
        if binding.mark_claim {
            let bound = edit::bound(Arc::unwrap_or_clone(claim), &volume);
            let bound = condition::with_unused_condition(bound, binding.in_use, self.context.clock.time());
            self.write_claim(Part::Status, &bound).await?;
            info!(claim = %bound.name_any(), volume = %volume.name_any(), "bound");
        }
        Ok(())
    }

    async fn mark_volume(&self, volume: &PersistentVolume, phase: &str) -> Result<(), WriteError> {
        self.write_volume(Part::Status, &edit::in_phase(volume.clone(), phase, None)).await
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
        self.write_claim(Part::Status, &edit::lost(claim.clone())).await?;
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
        let failed = edit::in_phase(volume.clone(), "Failed", Some(message));
        self.write_volume(Part::Status, &failed).await?;
        self.recorder.warning(volume, reason, message);
        Ok(())
    }

    fn wrong_mode(&self, volume: &PersistentVolume, claim: &PersistentVolumeClaim) {
        let due = "due to incompatible volumeMode.";
        let (v, c) = (volume.name_any(), claim.name_any());
        let message = format!("Cannot bind PersistentVolume to requested PersistentVolumeClaim {c:?} {due}");
        self.recorder.warning(volume, "VolumeMismatch", message);
        let message = format!("Cannot bind PersistentVolume {v:?} to requested PersistentVolumeClaim {due}");
        self.recorder.warning(claim, "VolumeMismatch", message);
    }

    async fn unbind(&self, volume: &PersistentVolume, unbind: Unbind) -> Result<(), WriteError> {
        let free = write::replace(&self.context.client, Part::Whole, &edit::freed(volume.clone(), unbind)).await?;
        self.observed.volumes.observe_write(free.clone());
        self.mark_volume(&free, "Available").await
    }

    async fn write_claim(&self, part: Part, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        self.observed.claims.observe_write(write::replace(&self.context.client, part, claim).await?);
        Ok(())
    }

    async fn write_volume(&self, part: Part, volume: &PersistentVolume) -> Result<(), WriteError> {
        self.observed.volumes.observe_write(write::replace(&self.context.client, part, volume).await?);
        Ok(())
    }
}
