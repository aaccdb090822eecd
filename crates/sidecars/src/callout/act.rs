//! Calls the driver, and writes what came of it on the attachment.

use cleat_api::flex::{DEVICE_PATH_KEY, FlexVolume};
use cleat_api::key::{Key, Meta as _};
use cleat_flex::VolumeOptions;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use serde_json::{Value, json};
use tracing::{debug, info, warn};

use super::Caller;
use super::decide::{Decision, Refusal, finalizer};
use crate::Failure;
use crate::attachment::error_message;

impl Caller {
    pub(super) async fn settle(&self, attachment: &VolumeAttachment, decision: Decision) -> Result<(), Failure> {
        let (attaching, result) = match decision {
            Decision::Nothing => return Ok(()),
            Decision::AwaitDriver => {
                debug!(attachment = attachment.metadata.name, "the driver is asked what it can do");
                return Ok(());
            }
            Decision::Verify(volume) => return self.verify_one(attachment, &volume).await,
            Decision::Attach { volume, hold } => (true, self.attach(attachment, &volume, hold).await),
            Decision::Detach(volume) => (false, self.detach(attachment, &volume).await),
            Decision::Refuse { attaching, why } => (attaching, Err(self.refuse(why))),
        };
        if let Err(failure @ (Failure::Flex(_) | Failure::Refused(_))) = &result {
            self.note_failure(attachment, attaching, failure).await?;
        }
        result
    }

    async fn attach(&self, attachment: &VolumeAttachment, volume: &FlexVolume, hold: bool) -> Result<(), Failure> {
        if hold {
            let finalizers = attachment.metadata.finalizers_with(&finalizer());
            let held = write::set_finalizers(&self.context.client, attachment, &finalizers).await?;
            self.attachments.observe_write(held);
            cleat_crash::point("callout:held");
        }
        let node = &attachment.spec.node_name;
        let device = self.drivers.attach(&volume.driver, &options(volume), node).await?;
        cleat_crash::point("callout:attached");
        let metadata = json!({ DEVICE_PATH_KEY: device });
        let status = json!({ "attached": true, "attachmentMetadata": metadata, "attachError": null });
        self.write_status(attachment, status).await?;
        info!(volume = volume.unique_volume_name(), node, device, "volume attached");
        Ok(())
    }

    async fn detach(&self, attachment: &VolumeAttachment, volume: &FlexVolume) -> Result<(), Failure> {
        let node = &attachment.spec.node_name;
        self.drivers.detach(&volume.driver, &volume.volume, node).await?;
        cleat_crash::point("callout:detached");
        let finalizers = attachment.metadata.finalizers_without(&finalizer());
        let freed = write::set_finalizers(&self.context.client, attachment, &finalizers).await;
        freed.map(drop).or_else(WriteError::ignore_not_found)?;
        info!(volume = volume.unique_volume_name(), node, "volume detached");
        if !finalizers.is_empty() {
            // Others hold the attachment still; whoever reads it must see that the volume is off.
            let status = json!({ "attached": false, "attachmentMetadata": null, "detachError": null });
            self.write_status(attachment, status).await.or_else(WriteError::ignore_not_found)?;
        }
        Ok(())
    }

    /// A driver that cannot be asked, or cannot tell, changes nothing.
    async fn verify_one(&self, attachment: &VolumeAttachment, volume: &FlexVolume) -> Result<(), Failure> {
        let node = &attachment.spec.node_name;
        match self.drivers.is_attached(&volume.driver, &options(volume), node).await {
            Ok(None | Some(true)) => {}
            Ok(Some(false)) => {
                warn!(volume = volume.unique_volume_name(), node, "the driver says that the volume is off; it is attached anew");
                self.write_status(attachment, json!({ "attached": false, "attachmentMetadata": null })).await?;
            }
            Err(error) => debug!(volume = volume.unique_volume_name(), node, %error, "cannot be verified"),
        }
        Ok(())
    }

    fn refuse(&self, why: Refusal) -> Failure {
        match why {
            Refusal::Driver(driver) => match self.drivers.check(&driver) {
                Err(error) => error.into(),
                // It has come meanwhile, and wakes us.
                Ok(()) => Failure::Refused(format!("FlexVolume driver {driver} was not ready")),
            },
            Refusal::AttachesNothing(driver) => {
                Failure::Refused(format!("FlexVolume driver {driver} says that it attaches nothing"))
            }
            Refusal::Unintelligible => Failure::Refused("the attachment describes no FlexVolume".to_owned()),
        }
    }

    async fn note_failure(
        &self,
        attachment: &VolumeAttachment,
        attaching: bool,
        failure: &Failure,
    ) -> Result<(), WriteError> {
        let error = json!({ "time": self.context.clock.time(), "message": error_message(failure) });
        let field = if attaching { "attachError" } else { "detachError" };
        let attached = attachment.status.as_ref().is_some_and(|s| s.attached);
        let noted = self.write_status(attachment, json!({ "attached": attached, field: error })).await;
        noted.or_else(WriteError::ignore_not_found)
    }

    async fn write_status(&self, attachment: &VolumeAttachment, status: Value) -> Result<(), WriteError> {
        let key = Key::of(&attachment.metadata);
        let written = write::merge(&self.context.client, Part::Status, &key, &json!({ "status": status })).await?;
        self.attachments.observe_write(written);
        Ok(())
    }
}

fn options(volume: &FlexVolume) -> VolumeOptions {
    VolumeOptions {
        volume: volume.volume.clone(),
        fs_type: volume.fs_type.clone(),
        read_only: volume.read_only,
        user_options: volume.options.clone(),
    }
}
