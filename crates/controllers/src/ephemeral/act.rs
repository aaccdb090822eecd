//! Creates the claim, or reports on the pod why it cannot be used.

use cleat_api::key::Key;
use cleat_runtime::write::{self, WriteError};
use k8s_openapi::api::core::v1::Pod;
use tracing::info;

use super::EphemeralClaimCreator;
use super::decide::EphemeralClaimDecision;

impl EphemeralClaimCreator {
    pub(super) async fn apply(&self, pod: &Pod, decision: EphemeralClaimDecision) -> Result<(), WriteError> {
        match decision {
            EphemeralClaimDecision::Create { volume, claim } => {
                match write::create(&self.context.client, claim.as_ref()).await {
                    Ok(created) => {
                        info!(claim = %Key::of(&created.metadata), "claim created for an ephemeral volume");
                        self.observer.claims.observe_write(created);
                        Ok(())
                    }
                    // The watch delivers the existing claim and queues the pod again.
                    Err(error) if error.already_exists() => Ok(()),
                    Err(error) => {
                        self.recorder.warning(pod, "FailedBinding", format!("ephemeral volume {volume}: {error}"));
                        Err(error)
                    }
                }
            }
            EphemeralClaimDecision::Refuse { volume, claim } => {
                let name = Key::of(&pod.metadata);
                let message =
                    format!("ephemeral volume {volume}: PVC {claim} was not created for pod {name} (pod is not owner)");
                self.recorder.warning(pod, "FailedBinding", message);
                Ok(())
            }
        }
    }
}
