//! Makes the claim, or says on the pod why it cannot be this one.

use cleat_api::key::Key;
use cleat_runtime::write::{self, WriteError};
use k8s_openapi::api::core::v1::Pod;
use tracing::info;

use super::Maker;
use super::decide::Decision;

impl Maker {
    pub(super) async fn settle(&self, pod: &Pod, decision: Decision) -> Result<(), WriteError> {
        match decision {
            Decision::Create { volume, claim } => match write::create(&self.context.client, claim.as_ref()).await {
                Ok(made) => {
                    info!(claim = %Key::of(&made.metadata), "claim made for an ephemeral volume");
                    self.context.caches.claims().observe_write(made);
                    Ok(())
                }
                // The watch brings it, and wakes the pod again.
                Err(error) if error.already_exists() => Ok(()),
                Err(error) => {
                    self.recorder.warning(pod, "FailedBinding", format!("ephemeral volume {volume}: {error}"));
                    Err(error)
                }
            },
            Decision::Refuse { volume, claim } => {
                let name = Key::of(&pod.metadata);
                let message =
                    format!("ephemeral volume {volume}: PVC {claim} was not created for pod {name} (pod is not owner)");
                self.recorder.warning(pod, "FailedBinding", message);
                Ok(())
            }
        }
    }
}
