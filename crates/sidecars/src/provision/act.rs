//! Calls the driver and keeps the record of what it has made.

use std::collections::BTreeMap;

use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::{PROVISIONER_IDENTITY, annotation, finalizer};
use cleat_api::quantity::Quantity;
use cleat_csi::v1::{DeleteVolumeRequest, Volume};
use cleat_csi::{CallError, Class};
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, WriteError};
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource as _;
use tracing::{debug, info};

use super::decide::{ClaimDecision, ClaimSeen, HoldDecision, Plan, VolumeDecision, Wait, recorded_class};
use super::{Pending, Provisioner};
use crate::Failure;

/// How often a finalizer is taken off again after somebody else wrote the record in between.
const FINALIZER_TRIES: usize = 8;

impl Provisioner {
    pub(super) async fn settle_claim(&self, seen: &ClaimSeen, decision: ClaimDecision) -> Result<Outcome, Failure> {
        match decision {
            ClaimDecision::Nothing => {
                // Recorded, by this or an earlier call: its outcome is certain now.
                self.uncertain.lock().remove(seen.claim.metadata.uid());
                Ok(Outcome::Done)
            }
            ClaimDecision::Wait(why) => {
                debug!(?why, "claim waits");
                if why == Wait::ForPopulator {
                    let message = "Assuming an external populator will provision the volume";
                    self.recorder.normal(seen.claim.as_ref(), "Provisioning", message);
                }
                Ok(Outcome::Done)
            }
            ClaimDecision::TryLater(why) => {
                let message = format!("failed to provision volume: {why}");
                self.recorder.warning(seen.claim.as_ref(), "ProvisioningFailed", message);
                Err(Failure::Refused(why))
            }
            ClaimDecision::Refuse(why) => {
                self.recorder.warning(
                    seen.claim.as_ref(),
                    "ProvisioningFailed",
                    format!("failed to provision volume: {why}"),
                );
                Ok(Outcome::Done)
            }
            ClaimDecision::Provision(plan) => self.provision(seen, &plan).await,
        }
    }

    async fn provision(&self, seen: &ClaimSeen, plan: &Plan) -> Result<Outcome, Failure> {
        let claim = &seen.claim;
        let key = Key::of(&claim.metadata);
        let uid = claim.metadata.uid();
        self.recorder.normal(
            claim.as_ref(),
            "Provisioning",
            format!("External provisioner is provisioning volume for claim \"{key}\""),
        );
        if let Some(source) = plan.cloned.as_ref().and_then(|key| self.observed.claims.get(key)) {
            self.hold(&source).await?;
        }
        self.uncertain.lock().insert(uid.to_owned(), Pending { claim: claim.clone(), plan: plan.clone() });
        let volume = match self.create(plan).await {
            Ok(volume) => volume,
            Err(error) => {
                if error.class() == Class::Final {
                    self.uncertain.lock().remove(uid);
                }
                self.recorder.warning(
                    claim.as_ref(),
                    "ProvisioningFailed",
                    format!("failed to provision volume with StorageClass {:?}: {error}", recorded_class(claim)),
                );
                return Err(error.into());
            }
        };
        cleat_crash::point("provision:volume-created");
        let record = self.record(claim, plan, volume);
        match write::create(&self.context.client, &record).await {
            Ok(written) => self.observed.volumes.observe_write(written),
            Err(error) if error.already_exists() => {}
            // The volume stays, and is remembered: the next try gets the same one.
            Err(error) => return Err(error.into()),
        }
        cleat_crash::point("provision:volume-recorded");
        self.uncertain.lock().remove(uid);
        info!(claim = %key, volume = plan.request.name, "volume provisioned");
        self.recorder.normal(
            claim.as_ref(),
            "ProvisioningSucceeded",
            format!("Successfully provisioned volume {}", plan.request.name),
        );
        Ok(Outcome::Done)
    }

    /// The source stays until it is copied.
    async fn hold(&self, source: &PersistentVolumeClaim) -> Result<(), WriteError> {
        if source.metadata.has_finalizer(finalizer::CLONING) {
            return Ok(());
        }
        let finalizers = source.metadata.finalizers_with(finalizer::CLONING);
        let held = write::set_finalizers(&self.context.client, source, &finalizers).await?;
        self.observed.claims.observe_write(held);
        Ok(())
    }

    pub(super) async fn settle_hold(
        &self,
        source: &PersistentVolumeClaim,
        decision: HoldDecision,
    ) -> Result<(), WriteError> {
        match decision {
            HoldDecision::Nothing | HoldDecision::Keep => Ok(()),
            HoldDecision::LetGo => {
                let finalizers = source.metadata.finalizers_without(finalizer::CLONING);
                let freed = write::set_finalizers(&self.context.client, source, &finalizers).await;
                freed.map(drop).or_else(WriteError::absent_is_fine)
            }
        }
    }

    /// A volume smaller than asked for, or empty where a copy was, is given back, and counts as a call to repeat.
    async fn create(&self, plan: &Plan) -> Result<Volume, CallError> {
        let reply = self.driver.client.create_volume(plan.request.clone()).await?;
        let wrong = |message: String| CallError { method: "CreateVolume", code: cleat_csi::Code::Aborted, message };
        let mut volume = reply.volume.ok_or_else(|| wrong("driver answered without a volume".to_owned()))?;
        let wanted = plan.request.capacity_range.map_or(0, |range| range.required_bytes);
        if volume.capacity_bytes == 0 {
            volume.capacity_bytes = wanted;
        }
        if volume.capacity_bytes < wanted {
            self.delete(&volume.volume_id).await?;
            let got = volume.capacity_bytes;
            return Err(wrong(format!("created volume capacity {got} less than requested capacity {wanted}")));
        }
        if plan.request.volume_content_source.is_some() && volume.content_source.is_none() {
            self.delete(&volume.volume_id).await?;
            return Err(wrong("volume content source missing".to_owned()));
        }
        Ok(volume)
    }

    fn record(&self, claim: &PersistentVolumeClaim, plan: &Plan, volume: Volume) -> PersistentVolume {
        let mut attributes = BTreeMap::from([(PROVISIONER_IDENTITY.to_owned(), self.identity.clone())]);
        attributes.extend(volume.volume_context);
        let capacity = resource::Quantity(Quantity::from_bytes(volume.capacity_bytes).to_string());
        let annotations = [
            (annotation::PROVISIONED_BY, plan.provisioner.as_str()),
            (annotation::DELETION_SECRET_NAME, ""),
            (annotation::DELETION_SECRET_NAMESPACE, ""),
        ];
        let spec = claim.spec.as_ref();
        PersistentVolume {
            metadata: ObjectMeta {
                name: Some(plan.request.name.clone()),
                annotations: Some(annotations.map(|(k, v)| (k.to_owned(), v.to_owned())).into()),
                finalizers: Some(vec![finalizer::PROVISIONER.to_owned()]),
                ..ObjectMeta::default()
            },
            spec: Some(PersistentVolumeSpec {
                access_modes: spec.and_then(|s| s.access_modes.clone()),
                capacity: Some(BTreeMap::from([("storage".to_owned(), capacity)])),
                claim_ref: Some(ObjectReference {
                    resource_version: claim.metadata.resource_version.clone(),
                    ..claim.object_ref(&())
                }),
                csi: Some(CSIPersistentVolumeSource {
                    driver: self.driver.name.clone(),
                    volume_handle: volume.volume_id,
                    volume_attributes: Some(attributes),
                    fs_type: plan.fs_type.clone(),
                    ..CSIPersistentVolumeSource::default()
                }),
                mount_options: plan.mount_options.clone(),
                persistent_volume_reclaim_policy: Some(plan.reclaim_policy.clone()),
                storage_class_name: recorded_class(claim),
                volume_mode: spec.and_then(|s| s.volume_mode.clone()),
                ..PersistentVolumeSpec::default()
            }),
            status: None,
        }
    }

    pub(super) async fn settle_volume(
        &self,
        volume: &PersistentVolume,
        decision: VolumeDecision,
    ) -> Result<Outcome, Failure> {
        match decision {
            VolumeDecision::Nothing => {}
            VolumeDecision::Hold => {
                let finalizers = volume.metadata.finalizers_with(finalizer::PROVISIONER);
                write::set_finalizers(&self.context.client, volume, &finalizers).await?;
            }
            VolumeDecision::Release => self.let_go(volume).await?,
            VolumeDecision::WaitForDetach(node) => debug!(node, "released volume is still attached"),
            VolumeDecision::Delete { handle } => {
                if let Err(error) = self.delete(&handle).await {
                    self.recorder.warning(volume, "VolumeFailedDelete", error.to_string());
                    return Err(error.into());
                }
                cleat_crash::point("provision:volume-deleted");
                write::delete(&self.context.client, volume).await?;
                self.let_go(volume).await?;
                info!(volume = volume.metadata.name, "volume deleted");
            }
        }
        Ok(Outcome::Done)
    }

    async fn delete(&self, handle: &str) -> Result<(), CallError> {
        let request = DeleteVolumeRequest { volume_id: handle.to_owned(), ..DeleteVolumeRequest::default() };
        self.driver.client.delete_volume(request).await.map(drop)
    }

    /// Takes the provisioner's finalizer off the newest form of the record; others take theirs off at the same time.
    async fn let_go(&self, volume: &PersistentVolume) -> Result<(), WriteError> {
        let key = Key::of(&volume.metadata);
        let mut tries = 0;
        loop {
            let Some(now) = write::live::<PersistentVolume>(&self.context.client, &key).await? else { return Ok(()) };
            if now.metadata.uid() != volume.metadata.uid() || !now.metadata.has_finalizer(finalizer::PROVISIONER) {
                return Ok(());
            }
            tries += 1;
            let finalizers = now.metadata.finalizers_without(finalizer::PROVISIONER);
            match write::set_finalizers(&self.context.client, &now, &finalizers).await {
                Err(error) if error.is_conflict() && tries < FINALIZER_TRIES => {}
                result => return result.map(drop).or_else(WriteError::absent_is_fine),
            }
        }
    }
}
