//! Carries decisions out. Every write is conditional on the revision that was read. Its reply goes to the cache, so
//! that the next reconcile does not read a state older than this process's own last write.

use std::sync::Arc;

use cleat_api::condition;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;
use tracing::{debug, info};

use super::decide::{
    BindPlan, ClaimBindDecision, ClaimRefRemoval, ClaimWaitReason, Loss, ReclaimFailure, VolumeBindDecision,
};
use super::{Binder, edit};

impl Binder {
    pub(super) async fn apply_to_claim(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        decision: ClaimBindDecision,
    ) -> Result<(), WriteError> {
        match decision {
            ClaimBindDecision::Settled => Ok(()),
            ClaimBindDecision::UpdateMigration(migration) => {
                self.write_claim(Part::Whole, &edit::with_migration(claim.as_ref().clone(), migration)).await
            }
            ClaimBindDecision::Wait(reason) => self.wait(claim, reason).await,
            ClaimBindDecision::AssignClass(class) => self.assign_class(claim, class).await,
            ClaimBindDecision::RequestProvisioning { provisioner, annotate, hold } => {
                self.request_provisioning(claim, &provisioner, annotate, hold).await
            }
            ClaimBindDecision::Bind(plan) => self.bind(claim, *plan).await,
            ClaimBindDecision::Lose(loss) => self.lose(claim, loss).await,
        }
    }

    pub(super) async fn apply_to_volume(
        &self,
        volume: &PersistentVolume,
        decision: VolumeBindDecision,
    ) -> Result<(), WriteError> {
        match decision {
            VolumeBindDecision::Settled | VolumeBindDecision::LeaveToClaim => Ok(()),
            VolumeBindDecision::UpdateMigration(migration) => {
                self.write_volume(Part::Whole, &edit::with_migration(volume.clone(), migration)).await
            }
            VolumeBindDecision::SetPhase(phase) => self.set_volume_phase(volume, phase).await,
            VolumeBindDecision::Unbind(removal) => self.unbind(volume, removal).await,
            VolumeBindDecision::Fail(failure) => self.fail(volume, failure).await,
            VolumeBindDecision::WrongMode(claim) => {
                self.report_mode_mismatch(volume, &claim);
                Ok(())
            }
        }
    }

    async fn wait(&self, claim: &Arc<PersistentVolumeClaim>, reason: ClaimWaitReason) -> Result<(), WriteError> {
        debug!(?reason, "claim stays Pending");
        let claim = claim.as_ref();
        match reason {
            ClaimWaitReason::NoVolumeAndNoClass => self.recorder.normal(
                claim,
                "FailedBinding",
                "no persistent volumes available for this claim and no storage class is set",
            ),
            ClaimWaitReason::ForFirstConsumer => self.recorder.normal(
                claim,
                "WaitForFirstConsumer",
                "waiting for first consumer to be created before binding",
            ),
            ClaimWaitReason::ForPods(pods) => {
                let noun = if pods.len() == 1 { "pod" } else { "pods" };
                let message = format!("waiting for {noun} {} to be scheduled", pods.join(","));
                self.recorder.normal(claim, "WaitForPodScheduled", message);
            }
            ClaimWaitReason::ClassMissing(class) => self.recorder.warning(
                claim,
                "ProvisioningFailed",
                format!("storageclass.storage.k8s.io {class:?} not found"),
            ),
            ClaimWaitReason::NotDynamic(provisioner) => self.recorder.warning(
                claim,
                "ProvisioningFailed",
                format!("volumes of provisioner {provisioner:?} are made by an administrator; none is available"),
            ),
            ClaimWaitReason::NamedVolumeMissing => {}
            ClaimWaitReason::NamedVolumeUnfit { volume, why } => self.recorder.warning(
                claim,
                "VolumeMismatch",
                format!("Cannot bind to requested volume {volume:?}: {why}"),
            ),
            ClaimWaitReason::NamedVolumeTaken(volume) => self.recorder.warning(
                claim,
                "FailedBinding",
                format!("volume {volume:?} already bound to a different claim."),
            ),
        }
        if cleat_api::claim::claim_phase(claim) == "Pending" {
            return Ok(());
        }
        self.write_claim(Part::Status, &edit::with_pending_status(claim.clone())).await
    }

    async fn assign_class(&self, claim: &PersistentVolumeClaim, class: String) -> Result<(), WriteError> {
        info!(claim = %claim.name_any(), class, "default StorageClass assigned to claim");
        self.write_claim(Part::Whole, &edit::with_class(claim.clone(), class)).await
    }

    async fn request_provisioning(
        &self,
        claim: &PersistentVolumeClaim,
        provisioner: &str,
        annotate: bool,
        hold: bool,
    ) -> Result<(), WriteError> {
        if annotate {
            self.write_claim(Part::Whole, &edit::with_provisioner(claim.clone(), provisioner, hold)).await?;
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

    async fn bind(&self, claim: &Arc<PersistentVolumeClaim>, plan: BindPlan) -> Result<(), WriteError> {
        let mut volume = plan.volume;
        if let Some(chosen_by) = plan.reserve_volume {
            let reserved = edit::with_claim_ref(volume.as_ref().clone(), claim, chosen_by);
            volume = write::replace(&self.context.client, Part::Whole, &reserved).await?;
            self.observer.volumes.observe_write(volume.clone());
            cleat_crash::point("bind:volume-reserved");
        }
        let mark_volume = async {
            if !plan.mark_volume {
                return Ok(());
            }
            let result = self.set_volume_phase(&volume, "Bound").await;
            cleat_crash::point("bind:volume-bound");
            result
        };
        let point_claim = async {
            let Some(chosen_by) = plan.point_claim else { return Ok(claim.clone()) };
            let pointed = edit::with_volume_name(claim.as_ref().clone(), &volume.name_any(), chosen_by);
            let pointed = write::replace(&self.context.client, Part::Whole, &pointed).await?;
            self.observer.claims.observe_write(pointed.clone());
            cleat_crash::point("bind:claim-pointed");
            Ok(pointed)
        };
        // Neither write needs the other's result. The store commits concurrent writes with one fsync.
        let claim = if plan.concurrent_writes {
            let (marked, pointed) = tokio::join!(mark_volume, point_claim);
            marked?;
            pointed?
        } else {
            mark_volume.await?;
            point_claim.await?
        };
        if plan.mark_claim {
            let bound = edit::with_bound_status(Arc::unwrap_or_clone(claim), &volume);
            let bound = condition::with_unused_condition(bound, plan.in_use, self.context.clock.time());
            self.write_claim(Part::Status, &bound).await?;
            info!(claim = %bound.name_any(), volume = %volume.name_any(), "claim bound");
        }
        Ok(())
    }

    async fn set_volume_phase(&self, volume: &PersistentVolume, phase: &str) -> Result<(), WriteError> {
        self.write_volume(Part::Status, &edit::with_phase(volume.clone(), phase, None)).await
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
        self.write_claim(Part::Status, &edit::with_lost_status(claim.clone())).await?;
        self.recorder.warning(claim, reason, message);
        Ok(())
    }

    async fn fail(&self, volume: &PersistentVolume, failure: ReclaimFailure) -> Result<(), WriteError> {
        let (reason, message) = match failure {
            ReclaimFailure::NoRecycler => ("VolumeFailedRecycle", "No recycler plugin found for the volume!"),
            ReclaimFailure::NoDeleter => ("VolumeFailedDelete", "no deleter is known for this kind of volume"),
            ReclaimFailure::UnknownPolicy => {
                ("VolumeUnknownReclaimPolicy", "Volume has unrecognized PersistentVolumeReclaimPolicy")
            }
        };
        let failed = edit::with_phase(volume.clone(), "Failed", Some(message));
        self.write_volume(Part::Status, &failed).await?;
        self.recorder.warning(volume, reason, message);
        Ok(())
    }

    fn report_mode_mismatch(&self, volume: &PersistentVolume, claim: &PersistentVolumeClaim) {
        let due = "due to incompatible volumeMode.";
        let (v, c) = (volume.name_any(), claim.name_any());
        let message = format!("Cannot bind PersistentVolume to requested PersistentVolumeClaim {c:?} {due}");
        self.recorder.warning(volume, "VolumeMismatch", message);
        let message = format!("Cannot bind PersistentVolume {v:?} to requested PersistentVolumeClaim {due}");
        self.recorder.warning(claim, "VolumeMismatch", message);
    }

    async fn unbind(&self, volume: &PersistentVolume, removal: ClaimRefRemoval) -> Result<(), WriteError> {
        let unbound = edit::without_claim_ref(volume.clone(), removal);
        let unbound = write::replace(&self.context.client, Part::Whole, &unbound).await?;
        self.observer.volumes.observe_write(unbound.clone());
        self.set_volume_phase(&unbound, "Available").await
    }

    async fn write_claim(&self, part: Part, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        self.observer.claims.observe_write(write::replace(&self.context.client, part, claim).await?);
        Ok(())
    }

    async fn write_volume(&self, part: Part, volume: &PersistentVolume) -> Result<(), WriteError> {
        self.observer.volumes.observe_write(write::replace(&self.context.client, part, volume).await?);
        Ok(())
    }
}
