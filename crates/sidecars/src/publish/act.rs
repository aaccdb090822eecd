//! Calls the driver, and writes what came of it on the attachment.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::annotation;
use cleat_api::names;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, Secret, SecretReference};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use serde_json::{Value, json};
use tracing::{debug, info};

use super::Publisher;
use super::decide::{AttachmentSeen, Decision, Publish, Unpublish, VolumeDecision};
use crate::Failure;
use crate::attachment::error_message;

impl Publisher {
    pub(super) async fn settle_attachment(
        &self,
        seen: &AttachmentSeen,
        decision: Decision,
    ) -> Result<Outcome, Failure> {
        let attachment = &seen.attachment;
        let (attaching, result) = match decision {
            Decision::Nothing => return Ok(Outcome::Done),
            Decision::Confirm => (true, self.confirm(attachment, &HashMap::new()).await.map_err(Failure::from)),
            Decision::Publish(publish) => (true, self.publish(attachment, *publish).await),
            Decision::Unpublish(unpublish) => (false, self.unpublish(attachment, *unpublish).await),
            Decision::Refuse { attaching, why } => (attaching, Err(Failure::Refused(why))),
        };
        if let Err(failure @ (Failure::Call(_) | Failure::Refused(_))) = &result {
            self.note_failure(attachment, attaching, failure).await?;
        }
        result.map(|()| Outcome::Done)
    }

    async fn publish(&self, attachment: &VolumeAttachment, mut publish: Publish) -> Result<(), Failure> {
        if let Some(reference) = &publish.secret {
            publish.request.secrets = self.secrets(reference).await?;
        }
        // Neither needs the other, and the call needs both.
        tokio::try_join!(
            self.hold_volume(publish.hold_volume.as_deref()),
            self.hold_attachment(attachment, publish.hold_attachment.then_some(&publish.request.node_id)),
        )?;
        let place = self.publishing.acquire().await;
        let context = self.driver.client.controller_publish_volume(publish.request).await?.publish_context;
        drop(place);
        cleat_crash::point("publish:published");
        self.confirm(attachment, &context).await?;
        cleat_crash::point("publish:confirmed");
        info!(attachment = attachment.metadata.name, node = attachment.spec.node_name, "volume published");
        Ok(())
    }

    async fn hold_volume(&self, volume: Option<&PersistentVolume>) -> Result<(), WriteError> {
        let Some(volume) = volume else { return Ok(()) };
        let finalizers = volume.metadata.finalizers_with(&names::attacher_finalizer(&self.driver.name));
        let held = write::set_finalizers(&self.context.client, volume, &finalizers).await?;
        self.observed.volumes.observe_write(held);
        cleat_crash::point("publish:volume-held");
        Ok(())
    }

    async fn hold_attachment(&self, attachment: &VolumeAttachment, node_id: Option<&String>) -> Result<(), WriteError> {
        let Some(node_id) = node_id else { return Ok(()) };
        let patch = json!({ "metadata": {
            "resourceVersion": attachment.metadata.resource_version,
            "finalizers": attachment.metadata.finalizers_with(&names::attacher_finalizer(&self.driver.name)),
            "annotations": { annotation::CSI_NODE_ID: node_id },
        }});
        let held = self.patch(attachment, Part::Whole, &patch).await?;
        self.observed.attachments.observe_write(held);
        cleat_crash::point("publish:attachment-held");
        Ok(())
    }

    async fn confirm(
        &self,
        attachment: &VolumeAttachment,
        context: &HashMap<String, String>,
    ) -> Result<(), WriteError> {
        let patch = json!({ "status": { "attached": true, "attachmentMetadata": context, "attachError": null } });
        let confirmed = self.patch(attachment, Part::Status, &patch).await?;
        self.observed.attachments.observe_write(confirmed);
        Ok(())
    }

    async fn unpublish(&self, attachment: &VolumeAttachment, mut unpublish: Unpublish) -> Result<(), Failure> {
        if let Some(reference) = &unpublish.secret {
            unpublish.request.secrets = self.secrets(reference).await?;
        }
        let place = self.unpublishing.acquire().await;
        self.driver.client.controller_unpublish_volume(unpublish.request).await?;
        drop(place);
        cleat_crash::point("publish:unpublished");
        let finalizers = attachment.metadata.finalizers_without(&names::attacher_finalizer(&self.driver.name));
        let freed = write::set_finalizers(&self.context.client, attachment, &finalizers).await;
        freed.map(drop).or_else(WriteError::ignore_not_found)?;
        cleat_crash::point("publish:let-go");
        info!(attachment = attachment.metadata.name, node = attachment.spec.node_name, "volume unpublished");
        if !finalizers.is_empty() {
            // Others hold the attachment still; whoever reads it must see that the volume is off.
            let patch = json!({ "status": { "attached": false, "attachmentMetadata": null, "detachError": null } });
            let status = self.patch(attachment, Part::Status, &patch).await;
            status.map(drop).or_else(WriteError::ignore_not_found)?;
        }
        Ok(())
    }

    async fn note_failure(
        &self,
        attachment: &VolumeAttachment,
        attaching: bool,
        failure: &Failure,
    ) -> Result<(), WriteError> {
        let mut error = json!({ "time": self.context.clock.time(), "message": error_message(failure) });
        if let (true, Failure::Call(call)) = (attaching, failure) {
            error["errorCode"] = json!(call.code() as i32);
        }
        let field = if attaching { "attachError" } else { "detachError" };
        let attached = attachment.status.as_ref().is_some_and(|s| s.attached);
        let patch = json!({ "status": { "attached": attached, field: error } });
        let noted = self.patch(attachment, Part::Status, &patch).await;
        noted.map(drop).or_else(WriteError::ignore_not_found)
    }

    async fn patch(
        &self,
        attachment: &VolumeAttachment,
        part: Part,
        patch: &Value,
    ) -> Result<Arc<VolumeAttachment>, WriteError> {
        write::merge(&self.context.client, part, &Key::of(&attachment.metadata), patch).await
    }

    async fn secrets(&self, reference: &SecretReference) -> Result<HashMap<String, String>, Failure> {
        let namespace = reference.namespace.clone().unwrap_or_default();
        let key = Key::namespaced(namespace, reference.name.clone().unwrap_or_default());
        let secret = write::get_live::<Secret>(&self.context.client, &key).await?;
        let secret = secret.ok_or_else(|| Failure::Refused(format!("secret {key} not found")))?;
        let data = secret.data.into_iter().flatten();
        Ok(data.map(|(key, value)| (key, String::from_utf8_lossy(&value.0).into_owned())).collect())
    }

    pub(super) async fn settle_volume(
        &self,
        volume: &PersistentVolume,
        decision: VolumeDecision,
    ) -> Result<Outcome, Failure> {
        match decision {
            VolumeDecision::Nothing => {}
            VolumeDecision::WaitForDetach => debug!("deleted volume is still attached"),
            VolumeDecision::LetGo => {
                let finalizers = volume.metadata.finalizers_without(&names::attacher_finalizer(&self.driver.name));
                let freed = write::set_finalizers(&self.context.client, volume, &finalizers).await;
                freed.map(drop).or_else(WriteError::ignore_not_found)?;
                cleat_crash::point("publish:volume-let-go");
            }
        }
        Ok(Outcome::Done)
    }
}
