//! Adds and removes the protection finalizers, and writes the claim condition `Unused`.

use cleat_api::condition;
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::finalizer;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tracing::{debug, info};

use super::Protector;
use super::decide::ProtectionDecision;

impl Protector {
    pub(super) async fn apply_to_claim(
        &self,
        claim: &PersistentVolumeClaim,
        decision: ProtectionDecision,
    ) -> Result<(), WriteError> {
        let Some(finalizers) = new_finalizers(&claim.metadata, finalizer::PVC_PROTECTION, decision) else {
            return Ok(());
        };
        let written = write::set_finalizers(&self.context.client, claim, &finalizers).await;
        written.map(drop).or_else(WriteError::ignore_not_found)
    }

    pub(super) async fn apply_to_volume(
        &self,
        volume: &PersistentVolume,
        decision: ProtectionDecision,
    ) -> Result<(), WriteError> {
        let Some(finalizers) = new_finalizers(&volume.metadata, finalizer::PV_PROTECTION, decision) else {
            return Ok(());
        };
        let written = write::set_finalizers(&self.context.client, volume, &finalizers).await;
        written.map(drop).or_else(WriteError::ignore_not_found)
    }

    pub(super) async fn apply_to_attributes_class(
        &self,
        class: &VolumeAttributesClass,
        decision: ProtectionDecision,
    ) -> Result<(), WriteError> {
        let Some(finalizers) = new_finalizers(&class.metadata, finalizer::VAC_PROTECTION, decision) else {
            return Ok(());
        };
        let written = write::set_finalizers(&self.context.client, class, &finalizers).await;
        written.map(drop).or_else(WriteError::ignore_not_found)
    }

    /// Writes the claim's condition `Unused`.
    pub(super) async fn report_usage(&self, claim: &PersistentVolumeClaim, in_use: bool) -> Result<(), WriteError> {
        let reported = condition::with_unused_condition(claim.clone(), in_use, self.context.clock.time());
        match write::replace(&self.context.client, Part::Status, &reported).await {
            Ok(written) => {
                self.observer.claims.observe_write(written);
                Ok(())
            }
            Err(error) => error.ignore_not_found(),
        }
    }
}

/// Returns the finalizers to write; `None` if the decision needs no write.
fn new_finalizers(meta: &ObjectMeta, finalizer: &str, decision: ProtectionDecision) -> Option<Vec<String>> {
    match decision {
        ProtectionDecision::Settled => None,
        ProtectionDecision::Keep(user) => {
            debug!(object = %Key::of(meta), finalizer, user, "object is in use, its deletion waits");
            None
        }
        ProtectionDecision::AddFinalizer => Some(meta.finalizers_with(finalizer)),
        ProtectionDecision::RemoveFinalizer => {
            info!(object = %Key::of(meta), finalizer, "object is unused, protection ends");
            Some(meta.finalizers_without(finalizer))
        }
    }
}
