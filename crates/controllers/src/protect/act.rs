//! Puts the protection finalizers on and takes them off.

use std::time::Duration;

use cleat_api::condition;
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::finalizer;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use tracing::{debug, info};

use super::Protector;
use super::decide::{self, Decision};

/// When a claim is looked at again that is used by a pod the cache does not show.
const UNHEARD: Duration = Duration::from_secs(10);

impl Protector {
    pub(super) async fn settle_claim(
        &self,
        claim: &PersistentVolumeClaim,
        decision: Decision,
    ) -> Result<Outcome, WriteError> {
        let finalizers = match decision {
            Decision::Settled => return Ok(Outcome::Done),
            Decision::Keep(pod) => {
                debug!(pod, "claim is in use and stays");
                return Ok(Outcome::Done);
            }
            Decision::Protect => claim.metadata.finalizers_with(finalizer::PVC_PROTECTION),
            Decision::LetGo => {
                // The cache may not know yet of a pod that was scheduled a moment ago.
                let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
                let pods: Vec<Pod> = write::list_live(&self.context.client, Some(namespace)).await?;
                if let Some(pod) = decide::user(claim, &pods) {
                    // Its end may never be heard of, if it comes and goes while the watch starts over.
                    debug!(pod, "claim is in use after all and stays");
                    return Ok(Outcome::RequeueAfter(UNHEARD));
                }
                info!(claim = %Key::of(&claim.metadata), "unused claim let go");
                claim.metadata.finalizers_without(finalizer::PVC_PROTECTION)
            }
        };
        let written = write::set_finalizers(&self.context.client, claim, &finalizers).await;
        written.map(drop).or_else(WriteError::ignore_not_found)?;
        Ok(Outcome::Done)
    }

    /// Says on the claim whether pods use it.
    pub(super) async fn tell(&self, claim: &PersistentVolumeClaim, in_use: bool) -> Result<(), WriteError> {
        let told = condition::with_unused_condition(claim.clone(), in_use, self.context.clock.time());
        match write::replace(&self.context.client, Part::Status, &told).await {
            Ok(written) => {
                self.observed.claims.observe_write(written);
                Ok(())
            }
            Err(error) => error.ignore_not_found(),
        }
    }

    pub(super) async fn settle_volume(&self, volume: &PersistentVolume, decision: Decision) -> Result<(), WriteError> {
        let finalizers = match decision {
            Decision::Settled => return Ok(()),
            Decision::Keep(claim) => {
                debug!(claim, "volume is bound and stays");
                return Ok(());
            }
            Decision::Protect => volume.metadata.finalizers_with(finalizer::PV_PROTECTION),
            Decision::LetGo => volume.metadata.finalizers_without(finalizer::PV_PROTECTION),
        };
        let written = write::set_finalizers(&self.context.client, volume, &finalizers).await;
        written.map(drop).or_else(WriteError::ignore_not_found)
    }

    pub(super) async fn settle_attributes(
        &self,
        class: &VolumeAttributesClass,
        decision: Decision,
    ) -> Result<(), WriteError> {
        let finalizers = match decision {
            Decision::Settled => return Ok(()),
            Decision::Keep(user) => {
                debug!(user, "class of attributes is in use and stays");
                return Ok(());
            }
            Decision::Protect => class.metadata.finalizers_with(finalizer::VAC_PROTECTION),
            Decision::LetGo => {
                let claims: Vec<PersistentVolumeClaim> = write::list_all_namespaces(&self.context.client).await?;
                let volumes: Vec<PersistentVolume> = write::list_live(&self.context.client, None).await?;
                let name = class.metadata.name.as_deref().unwrap_or_default();
                if let Some(user) = decide::attributes_user(name, &claims, &volumes) {
                    debug!(user, "class of attributes is in use after all and stays");
                    return Ok(());
                }
                info!(class = name, "unused class of attributes let go");
                class.metadata.finalizers_without(finalizer::VAC_PROTECTION)
            }
        };
        let written = write::set_finalizers(&self.context.client, class, &finalizers).await;
        written.map(drop).or_else(WriteError::ignore_not_found)
    }
}
