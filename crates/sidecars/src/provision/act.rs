//! Calls the driver for a claim, and keeps the record of what it has made.

use std::sync::Arc;

use cleat_api::claim::{claim_class, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{annotation, finalizer};
use cleat_csi::CallError;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use tracing::{debug, info};

use super::Provisioner;
use super::decide::aftermath::{Aftermath, aftermath};
use super::decide::record::{fault, record};
use super::decide::{ClaimDecision, ClaimSeen, HoldDecision, Obstacle, Outline, Plan, Wait};
use super::ledger::Pending;
use super::snapshots::VolumeSnapshot;
use crate::Failure;

impl Provisioner {
    pub(super) async fn settle_claim(&self, seen: &ClaimSeen, decision: ClaimDecision) -> Result<Outcome, Failure> {
        match decision {
            ClaimDecision::Nothing => {
                // Recorded, by this or an earlier call: its outcome is certain now.
                self.ledger.settled(seen.claim.metadata.uid());
                Ok(Outcome::Done)
            }
            ClaimDecision::Wait(why) => {
                self.wait(seen, &why);
                Ok(Outcome::Done)
            }
            ClaimDecision::Refuse(why) => self.refuse(seen, &why).await,
            ClaimDecision::LetGo => self.end(seen).await,
            ClaimDecision::Repeat(plan) => self.create(seen, plan).await,
            ClaimDecision::Provision(outline) => self.provision(seen, *outline).await,
            ClaimDecision::Compete => self.compete(seen).await,
        }
    }

    fn wait(&self, seen: &ClaimSeen, why: &Wait) {
        debug!(?why, "claim waits");
        let claim = seen.claim.as_ref();
        match why {
            Wait::ForPopulator => {
                let message = "Assuming an external populator will provision the volume";
                self.recorder.normal(claim, "Provisioning", message);
            }
            Wait::InDoubt => {
                let class = claim_class(claim).unwrap_or_default();
                let message = format!(
                    "a volume may have been made for this claim, and without StorageClass {class:?} it cannot be found: \
                     the claim stays until the class is there again"
                );
                self.recorder.warning(claim, "ProvisioningFailed", message);
            }
            Wait::ClassMissing | Wait::ForFirstConsumer => {}
        }
    }

    async fn end(&self, seen: &ClaimSeen) -> Result<Outcome, Failure> {
        self.let_go(&seen.claim).await?;
        self.ledger.settled(seen.claim.metadata.uid());
        Ok(Outcome::Done)
    }

    async fn refuse(&self, seen: &ClaimSeen, why: &str) -> Result<Outcome, Failure> {
        self.failed(&seen.claim, &format!("failed to provision volume: {why}"));
        self.let_go_unless_inherited(seen).await?;
        Ok(Outcome::Done)
    }

    async fn provision(&self, seen: &ClaimSeen, outline: Outline) -> Result<Outcome, Failure> {
        let Some(class) = &seen.class else { return Ok(Outcome::Done) };
        if let Some(left) = self.ledger.held_off(seen.claim.metadata.uid(), class.metadata.uid()) {
            return Ok(Outcome::RequeueAfter(left));
        }
        let message =
            format!("External provisioner is provisioning volume for claim \"{}\"", Key::of(&seen.claim.metadata));
        self.recorder.normal(seen.claim.as_ref(), "Provisioning", message);
        let fetched = match self.fetch(seen, &outline).await {
            Ok(fetched) => fetched,
            Err(error) => {
                self.failed(&seen.claim, &error.to_string());
                return Err(error.into());
            }
        };
        match outline.complete(seen, fetched, &self.can, &self.options.choices) {
            Ok(plan) => self.create(seen, Arc::new(plan)).await,
            // Whether an earlier provisioner was in the way of a claim that goes, nobody can tell any more; it was
            // refused then as now.
            Err(Obstacle::Final(_)) if seen.claim.metadata.is_deleting() => self.end(seen).await,
            Err(Obstacle::Final(why)) => self.refuse(seen, &why).await,
            Err(Obstacle::Later(why)) => {
                self.failed(&seen.claim, &format!("failed to provision volume: {why}"));
                self.let_go_unless_inherited(seen).await?;
                Err(Failure::Refused(why))
            }
            Err(Obstacle::Reschedule(why)) => {
                self.failed(&seen.claim, &format!("failed to provision volume: {why}"));
                self.reschedule(&seen.claim).await?;
                Ok(Outcome::Done)
            }
        }
    }

    async fn create(&self, seen: &ClaimSeen, plan: Arc<Plan>) -> Result<Outcome, Failure> {
        let claim = &seen.claim;
        let uid = claim.metadata.uid();
        self.hold(claim).await?;
        cleat_crash::point("provision:claim-held");
        if let Some(source) = plan.cloned.as_ref().and_then(|key| self.observed.claims.get(key)) {
            self.hold_source(&source).await?;
        }
        if let Some(snapshot) = &plan.restored {
            self.hold_snapshot(snapshot).await?;
        }
        if plan.cloned.is_some() || plan.restored.is_some() {
            cleat_crash::point("provision:source-held");
        }
        self.ledger.calling(uid, Pending { claim: claim.clone(), plan: plan.clone() });
        let record = match self.call(claim, &plan).await {
            Ok(record) => record,
            Err(error) => return self.create_failed(seen, &plan, error).await,
        };
        cleat_crash::point("provision:volume-created");
        match write::create(&self.context.client, &record).await {
            Ok(written) => self.observed.volumes.observe_write(written),
            Err(error) if error.already_exists() => {}
            // The volume stays, and is remembered: the next try gets the same one.
            Err(error) => return Err(error.into()),
        }
        cleat_crash::point("provision:volume-recorded");
        self.ledger.settled(uid);
        info!(claim = %Key::of(&claim.metadata), volume = plan.request.name, "volume provisioned");
        let message = format!("Successfully provisioned volume {}", plan.request.name);
        self.recorder.normal(claim.as_ref(), "ProvisioningSucceeded", message);
        // One that goes meanwhile, or has another volume, is not let go by being bound to this one.
        match self.current(claim) {
            Some(now) if now.metadata.is_deleting() || volume_name(&now).is_some() => self.let_go(&now).await?,
            Some(_) | None => {}
        }
        Ok(Outcome::Done)
    }

    /// A volume smaller than asked for, or empty where a copy was, or of which no record can be made, is given back. That
    /// counts as a call to repeat, whether it could be given back or not: then it is found again.
    async fn call(&self, claim: &PersistentVolumeClaim, plan: &Plan) -> Result<PersistentVolume, CallError> {
        let reply = self.driver.client.create_volume(plan.request.clone()).await?;
        let wrong = |message: String| CallError { method: "CreateVolume", code: cleat_csi::Code::Aborted, message };
        let volume = reply.volume.ok_or_else(|| wrong("driver answered without a volume".to_owned()))?;
        let handle = volume.volume_id.clone();
        let made = match fault(plan, &volume) {
            None => record(claim, plan, &self.driver.name, &self.identity, volume).map_err(|error| error.to_string()),
            Some(why) => Err(why),
        };
        match made {
            Ok(record) => Ok(record),
            Err(why) => match self.delete(&handle, plan.request.secrets.clone()).await {
                Ok(()) => Err(wrong(why)),
                Err(error) => Err(wrong(format!("{why}; and it cannot be given back: {error}"))),
            },
        }
    }

    async fn create_failed(&self, seen: &ClaimSeen, plan: &Plan, error: CallError) -> Result<Outcome, Failure> {
        let claim = &seen.claim;
        let uid = claim.metadata.uid();
        let message = format!("failed to provision volume with StorageClass {:?}: {error}", class_of(claim));
        let after = aftermath(&error, plan.can_reschedule);
        if after == Aftermath::Infeasible {
            let delayed = "Volume provisioning failed with infeasible error. Retries will be delayed.";
            self.failed(claim, &format!("{delayed} {message}"));
        } else {
            self.failed(claim, &message);
        }
        if after == Aftermath::InDoubt {
            return Err(error.into());
        }
        self.ledger.settled(uid);
        if after == Aftermath::Reschedule {
            self.reschedule(claim).await?;
            return Ok(Outcome::Done);
        }
        if let Some(now) = self.current(claim) {
            self.let_go(&now).await?;
        }
        if after == Aftermath::Infeasible {
            let class = seen.class.as_ref().map(|c| c.metadata.uid()).unwrap_or_default();
            return Ok(Outcome::RequeueAfter(self.ledger.hold_off(uid, class)));
        }
        Err(error.into())
    }

    fn failed(&self, claim: &PersistentVolumeClaim, message: &str) {
        self.recorder.warning(claim, "ProvisioningFailed", message);
    }

    /// The claim as it is now, if it is still there.
    pub(super) fn current(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolumeClaim>> {
        self.observed.claims.get(&Key::of(&claim.metadata)).filter(|now| now.metadata.uid() == claim.metadata.uid())
    }

    /// From now on the claim stays until we know what became of the call. One that is gone has nothing to hold: its call
    /// is a repeated one.
    async fn hold(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        let Some(now) = self.current(claim) else { return Ok(()) };
        if now.metadata.has_finalizer(finalizer::PROVISIONING) {
            return Ok(());
        }
        let finalizers = now.metadata.finalizers_with(finalizer::PROVISIONING);
        let held = write::set_finalizers(&self.context.client, now.as_ref(), &finalizers).await?;
        self.observed.claims.observe_write(held);
        Ok(())
    }

    async fn let_go(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        if !claim.metadata.has_finalizer(finalizer::PROVISIONING) {
            return Ok(());
        }
        let finalizers = claim.metadata.finalizers_without(finalizer::PROVISIONING);
        match write::set_finalizers(&self.context.client, claim, &finalizers).await {
            Ok(freed) => {
                self.observed.claims.observe_write(freed);
                Ok(())
            }
            Err(error) => error.ignore_not_found(),
        }
    }

    async fn let_go_unless_inherited(&self, seen: &ClaimSeen) -> Result<(), WriteError> {
        if seen.inherited { Ok(()) } else { self.let_go(&seen.claim).await }
    }

    /// Takes the choice of node back, so that the scheduler chooses again; the hold goes with the same write.
    async fn reschedule(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        let Some(now) = self.current(claim) else { return Ok(()) };
        let patch = serde_json::json!({ "metadata": {
            "resourceVersion": now.metadata.resource_version,
            "annotations": { annotation::SELECTED_NODE: null, annotation::SELECTED_NODE_ALPHA: null },
            "finalizers": now.metadata.finalizers_without(finalizer::PROVISIONING),
        }});
        let key = Key::of(&now.metadata);
        let freed = write::merge::<PersistentVolumeClaim>(&self.context.client, Part::Whole, &key, &patch).await?;
        self.observed.claims.observe_write(freed);
        Ok(())
    }

    /// The source stays until it is copied.
    async fn hold_source(&self, source: &PersistentVolumeClaim) -> Result<(), WriteError> {
        if source.metadata.has_finalizer(finalizer::CLONING_PROTECTION) {
            return Ok(());
        }
        let finalizers = source.metadata.finalizers_with(finalizer::CLONING_PROTECTION);
        let held = write::set_finalizers(&self.context.client, source, &finalizers).await?;
        self.observed.claims.observe_write(held);
        Ok(())
    }

    pub(super) async fn settle_source(
        &self,
        source: &PersistentVolumeClaim,
        decision: HoldDecision,
    ) -> Result<(), WriteError> {
        match decision {
            HoldDecision::Nothing | HoldDecision::Keep => Ok(()),
            HoldDecision::LetGo => {
                let finalizers = source.metadata.finalizers_without(finalizer::CLONING_PROTECTION);
                let freed = write::set_finalizers(&self.context.client, source, &finalizers).await;
                freed.map(drop).or_else(WriteError::ignore_not_found)
            }
        }
    }

    /// The snapshot stays until it is restored.
    async fn hold_snapshot(&self, key: &Key) -> Result<(), WriteError> {
        let snapshot: Option<VolumeSnapshot> = write::get_live(&self.context.client, key).await?;
        match snapshot.filter(|s| !s.metadata.has_finalizer(finalizer::SNAPSHOT_SOURCE_PROTECTION)) {
            Some(snapshot) => {
                let finalizers = snapshot.metadata.finalizers_with(finalizer::SNAPSHOT_SOURCE_PROTECTION);
                write::set_finalizers(&self.context.client, &snapshot, &finalizers).await.map(drop)
            }
            None => Ok(()),
        }
    }

    pub(super) async fn let_go_of_snapshot(&self, key: &Key) -> Result<(), WriteError> {
        let snapshot: Option<VolumeSnapshot> = write::get_live(&self.context.client, key).await?;
        let Some(snapshot) = snapshot.filter(|s| s.metadata.has_finalizer(finalizer::SNAPSHOT_SOURCE_PROTECTION)) else { return Ok(()) };
        let finalizers = snapshot.metadata.finalizers_without(finalizer::SNAPSHOT_SOURCE_PROTECTION);
        let freed = write::set_finalizers(&self.context.client, &snapshot, &finalizers).await;
        freed.map(drop).or_else(WriteError::ignore_not_found)
    }
}

fn class_of(claim: &PersistentVolumeClaim) -> &str {
    claim_class(claim).unwrap_or_default()
}
