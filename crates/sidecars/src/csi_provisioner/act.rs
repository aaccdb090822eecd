//! Calls the driver for claims and writes the results. One function per decision.

mod finalizers;
mod reclaim;

use std::sync::Arc;

use cleat_api::claim::claim_class;
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{annotation, finalizer};
use cleat_csi::CallError;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use tracing::{debug, info};

use super::Provisioner;
use super::decide::failure::{self, FailureOutcome};
use super::decide::persistent_volume::{CreateReply, check_reply};
use super::decide::{self, ClaimSnapshot, FinalizerAction, PlanDecision, ProvisionPlan, WaitReason};
use super::memory::PendingCall;
use crate::SidecarError;

impl Provisioner {
    pub(super) fn wait(&self, snapshot: &ClaimSnapshot, reason: &WaitReason) -> Outcome {
        debug!(?reason, "claim waits");
        let claim = snapshot.claim.as_ref();
        match reason {
            WaitReason::ClassMissing | WaitReason::ForFirstConsumer => Outcome::Done,
            WaitReason::ForPopulator => {
                let message = "Assuming an external populator will provision the volume";
                self.recorder.normal(claim, "Provisioning", message);
                Outcome::Done
            }
            WaitReason::OutcomeUnknown => {
                let class = claim_class(claim).unwrap_or_default();
                let message = format!(
                    "a volume may have been made for this claim, and without StorageClass {class:?} it cannot be found: \
                     the claim stays until the class is there again"
                );
                self.recorder.warning(claim, "ProvisioningFailed", message);
                Outcome::Done
            }
            WaitReason::Infeasible(left) | WaitReason::ForOtherNodes(Some(left)) => Outcome::RequeueAfter(*left),
            WaitReason::ForOtherNodes(None) => self.retry_competition(snapshot),
        }
    }

    /// No call for the claim is pending, and none will be made.
    pub(super) async fn finish(&self, claim: &PersistentVolumeClaim) -> Result<Outcome, SidecarError> {
        self.remove_claim_finalizer(claim).await?;
        self.calls.forget(claim.metadata.uid());
        Ok(Outcome::Done)
    }

    pub(super) async fn refuse(&self, snapshot: &ClaimSnapshot, why: &str) -> Result<Outcome, SidecarError> {
        self.report_failure(&snapshot.claim, &format!("failed to provision volume: {why}"));
        self.apply_finalizer(snapshot, decide::finalizer_without_call(snapshot)).await?;
        Ok(Outcome::Done)
    }

    pub(super) async fn apply_plan(
        &self,
        snapshot: &ClaimSnapshot,
        decision: PlanDecision,
    ) -> Result<Outcome, SidecarError> {
        match decision {
            PlanDecision::Create(plan) => self.create(snapshot, plan).await,
            PlanDecision::RemoveFinalizer => self.finish(&snapshot.claim).await,
            PlanDecision::Refuse(why) => self.refuse(snapshot, &why).await,
            PlanDecision::RetryLater(why) => {
                self.refuse(snapshot, &why).await?;
                Err(SidecarError::Refused(why))
            }
            PlanDecision::Reschedule(why) => {
                self.report_failure(&snapshot.claim, &format!("failed to provision volume: {why}"));
                self.reschedule(&snapshot.claim).await?;
                Ok(Outcome::Done)
            }
        }
    }

    pub(super) async fn create(
        &self,
        snapshot: &ClaimSnapshot,
        plan: Arc<ProvisionPlan>,
    ) -> Result<Outcome, SidecarError> {
        let claim = &snapshot.claim;
        let uid = claim.metadata.uid();
        self.add_claim_finalizer(claim).await?;
        cleat_crash::point("provision:claim-held");
        if let Some(source) = plan.clone_source.as_ref().and_then(|key| self.observer.claims.get(key)) {
            self.add_source_finalizer(&source).await?;
        }
        if let Some(key) = &plan.restore_source {
            self.add_snapshot_finalizer(key).await?;
        }
        if plan.clone_source.is_some() || plan.restore_source.is_some() {
            cleat_crash::point("provision:source-held");
        }
        self.calls.record_call(uid, PendingCall { claim: claim.clone(), plan: plan.clone() });
        let volume = match self.call(claim, &plan).await {
            Ok(volume) => volume,
            Err(error) => return self.create_failed(snapshot, &plan, error).await,
        };
        cleat_crash::point("provision:volume-created");
        match write::create(&self.context.client, &volume).await {
            Ok(written) => self.observer.volumes.observe_write(written),
            Err(error) if error.already_exists() => {}
            // The call stays pending: repeated, it returns the same volume.
            Err(error) => return Err(error.into()),
        }
        cleat_crash::point("provision:volume-recorded");
        self.calls.forget(uid);
        info!(claim = %Key::of(&claim.metadata), volume = plan.request.name, "volume provisioned");
        let message = format!("Successfully provisioned volume {}", plan.request.name);
        self.recorder.normal(claim.as_ref(), "ProvisioningSucceeded", message);
        // The claim may have been deleted or bound to another volume during the call.
        if let Some(current) = self.current(claim).filter(|current| decide::needs_finalizer_removal(current)) {
            self.remove_claim_finalizer(&current).await?;
        }
        Ok(Outcome::Done)
    }

    /// Calls CreateVolume. A volume that is rejected is deleted, and the call counts as uncertain even if the deletion
    /// succeeded: the repeated call then creates a new volume, or finds the rejected one again.
    async fn call(&self, claim: &PersistentVolumeClaim, plan: &ProvisionPlan) -> Result<PersistentVolume, CallError> {
        let reply = self.driver.client.create_volume(plan.request.clone()).await?;
        let aborted = |message: String| CallError { method: "CreateVolume", code: cleat_csi::Code::Aborted, message };
        match check_reply(claim, plan, &self.driver.name, &self.identity, reply.volume) {
            CreateReply::Accepted(volume) => Ok(*volume),
            CreateReply::Rejected { volume_id: None, why } => Err(aborted(why)),
            CreateReply::Rejected { volume_id: Some(volume_id), why } => {
                match self.call_delete(&volume_id, plan.request.secrets.clone()).await {
                    Ok(()) => Err(aborted(why)),
                    Err(error) => Err(aborted(format!("{why}; and it cannot be given back: {error}"))),
                }
            }
        }
    }

    async fn create_failed(
        &self,
        snapshot: &ClaimSnapshot,
        plan: &ProvisionPlan,
        error: CallError,
    ) -> Result<Outcome, SidecarError> {
        let claim = &snapshot.claim;
        let uid = claim.metadata.uid();
        let outcome = failure::classify(&error, plan.can_reschedule);
        self.report_failure(claim, &failure::event_message(outcome, claim_class(claim).unwrap_or_default(), &error));
        match outcome {
            FailureOutcome::Uncertain => Err(error.into()),
            FailureOutcome::Reschedule => {
                self.calls.forget(uid);
                self.reschedule(claim).await?;
                Ok(Outcome::Done)
            }
            FailureOutcome::Final => {
                self.calls.forget(uid);
                self.remove_current_claim_finalizer(claim).await?;
                Err(error.into())
            }
            FailureOutcome::Infeasible => {
                self.calls.forget(uid);
                self.remove_current_claim_finalizer(claim).await?;
                let class = snapshot.class.as_ref().map(|class| class.metadata.uid()).unwrap_or_default();
                Ok(Outcome::RequeueAfter(self.calls.delay_infeasible(uid, class)))
            }
        }
    }

    /// Selects this provisioner's node for the claim. The resource version makes sure that only one provisioner succeeds.
    pub(super) async fn take_claim(&self, snapshot: &ClaimSnapshot) -> Result<Outcome, SidecarError> {
        let Some(local) = &self.options.policy.local else { return Ok(Outcome::Done) };
        let patch = serde_json::json!({ "metadata": {
            "resourceVersion": snapshot.claim.metadata.resource_version,
            "annotations": { annotation::SELECTED_NODE: local.name },
        }});
        let key = Key::of(&snapshot.claim.metadata);
        match write::merge::<PersistentVolumeClaim>(&self.context.client, Part::Whole, &key, &patch).await {
            Ok(taken) => {
                info!(claim = %key, node = local.name, "claim taken for this node");
                self.calls.forget(snapshot.claim.metadata.uid());
                self.observer.claims.observe_write(taken);
                Ok(Outcome::Done)
            }
            // Another provisioner took the claim, or it changed in another way: the watch brings the new version.
            Err(error) if error.is_conflict() => Ok(self.retry_competition(snapshot)),
            Err(error) => Ok(error.ignore_not_found().map(|()| Outcome::Done)?),
        }
    }

    /// Schedules the next attempt to take the claim.
    pub(super) fn retry_competition(&self, snapshot: &ClaimSnapshot) -> Outcome {
        match &self.options.node_deployment {
            Some(options) => Outcome::RequeueAfter(self.calls.schedule_attempt(snapshot.claim.metadata.uid(), options)),
            None => Outcome::Done,
        }
    }

    /// Removes the selected node, so that the scheduler selects another one, and the finalizer with the same write.
    async fn reschedule(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        let Some(current) = self.current(claim) else { return Ok(()) };
        let patch = serde_json::json!({ "metadata": {
            "resourceVersion": current.metadata.resource_version,
            "annotations": { annotation::SELECTED_NODE: null, annotation::SELECTED_NODE_ALPHA: null },
            "finalizers": current.metadata.finalizers_without(finalizer::PROVISIONING),
        }});
        let key = Key::of(&current.metadata);
        let updated = write::merge::<PersistentVolumeClaim>(&self.context.client, Part::Whole, &key, &patch).await?;
        self.observer.claims.observe_write(updated);
        Ok(())
    }

    async fn apply_finalizer(&self, snapshot: &ClaimSnapshot, action: FinalizerAction) -> Result<(), WriteError> {
        match action {
            FinalizerAction::Keep => Ok(()),
            FinalizerAction::Remove => self.remove_claim_finalizer(&snapshot.claim).await,
        }
    }

    pub(super) fn report_start(&self, snapshot: &ClaimSnapshot) {
        let claim = snapshot.claim.as_ref();
        let message = format!("External provisioner is provisioning volume for claim \"{}\"", Key::of(&claim.metadata));
        self.recorder.normal(claim, "Provisioning", message);
    }

    pub(super) fn report_failure(&self, claim: &PersistentVolumeClaim, message: &str) {
        self.recorder.warning(claim, "ProvisioningFailed", message);
    }
}
