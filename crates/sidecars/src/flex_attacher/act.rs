//! Calls the driver and writes the result to the attachment.

use cleat_api::flex::{DEVICE_PATH_KEY, FlexVolume};
use cleat_api::key::{Key, Meta as _};
use cleat_flex::VolumeOptions;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use serde_json::{Value, json};
use tracing::{debug, info, warn};

use super::FlexAttacher;
use super::decide::{FlexDecision, Refusal, finalizer};
use crate::SidecarError;
use crate::attachment::error_message;

impl FlexAttacher {
    pub(super) async fn apply(
        &self,
        attachment: &VolumeAttachment,
        decision: FlexDecision,
    ) -> Result<(), SidecarError> {
        let (attaching, result) = match decision {
            FlexDecision::Nothing => return Ok(()),
            FlexDecision::AwaitDriver => {
                debug!(attachment = attachment.metadata.name, "waiting for the driver to report its capabilities");
                return Ok(());
            }
            FlexDecision::Verify(volume) => return self.verify(attachment, &volume).await,
            FlexDecision::Attach { volume, add_finalizer } => {
                (true, self.attach(attachment, &volume, add_finalizer).await)
            }
            FlexDecision::Detach(volume) => (false, self.detach(attachment, &volume).await),
            FlexDecision::Refuse { attaching, why } => (attaching, Err(self.refusal_error(why))),
        };
        if let Err(error @ (SidecarError::Flex(_) | SidecarError::Refused(_))) = &result {
            self.report_error(attachment, attaching, error).await?;
        }
        result
    }

    async fn attach(
        &self,
        attachment: &VolumeAttachment,
        volume: &FlexVolume,
        add_finalizer: bool,
    ) -> Result<(), SidecarError> {
        if add_finalizer {
            let finalizers = attachment.metadata.finalizers_with(&finalizer());
            let updated = write::set_finalizers(&self.context.client, attachment, &finalizers).await?;
            self.observer.attachments.observe_write(updated);
            cleat_crash::point("callout:held");
        }
        let node = &attachment.spec.node_name;
        let device = self.observer.drivers.attach(&volume.driver, &call_options(volume), node).await?;
        cleat_crash::point("callout:attached");
        let metadata = json!({ DEVICE_PATH_KEY: device });
        let status = json!({ "attached": true, "attachmentMetadata": metadata, "attachError": null });
        self.write_status(attachment, status).await?;
        info!(volume = volume.unique_volume_name(), node, device, "volume attached");
        Ok(())
    }

    async fn detach(&self, attachment: &VolumeAttachment, volume: &FlexVolume) -> Result<(), SidecarError> {
        let node = &attachment.spec.node_name;
        self.observer.drivers.detach(&volume.driver, &volume.volume, node).await?;
        cleat_crash::point("callout:detached");
        let finalizers = attachment.metadata.finalizers_without(&finalizer());
        let updated = write::set_finalizers(&self.context.client, attachment, &finalizers).await;
        updated.map(drop).or_else(WriteError::ignore_not_found)?;
        info!(volume = volume.unique_volume_name(), node, "volume detached");
        if !finalizers.is_empty() {
            // Other finalizers keep the attachment: its readers must see that the volume is detached.
            let status = json!({ "attached": false, "attachmentMetadata": null, "detachError": null });
            self.write_status(attachment, status).await.or_else(WriteError::ignore_not_found)?;
        }
        Ok(())
    }

    /// Leaves the status unchanged if the driver fails or does not implement `isattached`.
    async fn verify(&self, attachment: &VolumeAttachment, volume: &FlexVolume) -> Result<(), SidecarError> {
        let node = &attachment.spec.node_name;
        match self.observer.drivers.is_attached(&volume.driver, &call_options(volume), node).await {
            Ok(None | Some(true)) => {}
            Ok(Some(false)) => {
                warn!(
                    volume = volume.unique_volume_name(),
                    node, "driver reports the volume as detached; it will be attached again"
                );
                self.write_status(attachment, json!({ "attached": false, "attachmentMetadata": null })).await?;
            }
            Err(error) => {
                debug!(volume = volume.unique_volume_name(), node, %error, "attachment could not be verified")
            }
        }
        Ok(())
    }

    fn refusal_error(&self, why: Refusal) -> SidecarError {
        match why {
            Refusal::DriverUnavailable(driver) => match self.observer.drivers.check(&driver) {
                Err(error) => error.into(),
                // The driver became ready after the snapshot was taken; that change queues the attachment again.
                Ok(()) => SidecarError::Refused(format!("FlexVolume driver {driver} was not ready")),
            },
            Refusal::AttachNotSupported(driver) => {
                SidecarError::Refused(format!("FlexVolume driver {driver} says that it attaches nothing"))
            }
            Refusal::InvalidSpec => SidecarError::Refused("the attachment describes no FlexVolume".to_owned()),
        }
    }

    async fn report_error(
        &self,
        attachment: &VolumeAttachment,
        attaching: bool,
        error: &SidecarError,
    ) -> Result<(), WriteError> {
        let details = json!({ "time": self.context.clock.time(), "message": error_message(error) });
        let field = if attaching { "attachError" } else { "detachError" };
        let attached = attachment.status.as_ref().is_some_and(|s| s.attached);
        let written = self.write_status(attachment, json!({ "attached": attached, field: details })).await;
        written.or_else(WriteError::ignore_not_found)
    }

    async fn write_status(&self, attachment: &VolumeAttachment, status: Value) -> Result<(), WriteError> {
        let key = Key::of(&attachment.metadata);
        let written = write::merge(&self.context.client, Part::Status, &key, &json!({ "status": status })).await?;
        self.observer.attachments.observe_write(written);
        Ok(())
    }
}

fn call_options(volume: &FlexVolume) -> VolumeOptions {
    VolumeOptions {
        volume: volume.volume.clone(),
        fs_type: volume.fs_type.clone(),
        read_only: volume.read_only,
        user_options: volume.options.clone(),
    }
}
