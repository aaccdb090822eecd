//! Calls the driver and writes the results to attachments and volumes.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_api::key::{Key, Meta as _};
use cleat_api::names;
use cleat_api::well_known::annotation;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::{PersistentVolume, Secret, SecretReference};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use serde_json::{Value, json};
use tracing::{debug, info};

use super::CsiAttacher;
use super::decide::{AttachmentDecision, PublishPlan, UnpublishPlan, VolumeFinalizerDecision};
use crate::SidecarError;
use crate::attachment::error_message;

impl CsiAttacher {
    pub(super) async fn apply_attachment(
        &self,
        attachment: &VolumeAttachment,
        decision: AttachmentDecision,
    ) -> Result<Outcome, SidecarError> {
        let (attaching, result) = match decision {
            AttachmentDecision::Nothing => return Ok(Outcome::Done),
            AttachmentDecision::Confirm => {
                (true, self.confirm(attachment, &HashMap::new()).await.map_err(SidecarError::from))
            }
            AttachmentDecision::Publish(plan) => (true, self.publish(attachment, *plan).await),
            AttachmentDecision::Unpublish(plan) => (false, self.unpublish(attachment, *plan).await),
            AttachmentDecision::Refuse { attaching, why } => (attaching, Err(SidecarError::Refused(why))),
        };
        if let Err(error @ (SidecarError::Call(_) | SidecarError::Refused(_))) = &result {
            self.report_error(attachment, attaching, error).await?;
        }
        result.map(|()| Outcome::Done)
    }

    async fn publish(&self, attachment: &VolumeAttachment, mut plan: PublishPlan) -> Result<(), SidecarError> {
        if let Some(reference) = &plan.secret {
            plan.request.secrets = self.secrets(reference).await?;
        }
        // The two writes are independent; both must be stored before the call.
        tokio::try_join!(
            self.add_volume_finalizer(plan.add_volume_finalizer.as_deref()),
            self.add_attachment_finalizer(attachment, plan.add_attachment_finalizer.then_some(&plan.request.node_id)),
        )?;
        let permit = self.publish_permits.acquire().await;
        let context = self.driver.client.controller_publish_volume(plan.request).await?.publish_context;
        drop(permit);
        cleat_crash::point("publish:published");
        self.confirm(attachment, &context).await?;
        cleat_crash::point("publish:confirmed");
        info!(attachment = attachment.metadata.name, node = attachment.spec.node_name, "volume published");
        Ok(())
    }

    async fn add_volume_finalizer(&self, volume: Option<&PersistentVolume>) -> Result<(), WriteError> {
        let Some(volume) = volume else { return Ok(()) };
        let finalizers = volume.metadata.finalizers_with(&names::attacher_finalizer(&self.driver.name));
        let updated = write::set_finalizers(&self.context.client, volume, &finalizers).await?;
        self.observer.volumes.observe_write(updated);
        cleat_crash::point("publish:volume-held");
        Ok(())
    }

    async fn add_attachment_finalizer(
        &self,
        attachment: &VolumeAttachment,
        node_id: Option<&String>,
    ) -> Result<(), WriteError> {
        let Some(node_id) = node_id else { return Ok(()) };
        let patch = json!({ "metadata": {
            "resourceVersion": attachment.metadata.resource_version,
            "finalizers": attachment.metadata.finalizers_with(&names::attacher_finalizer(&self.driver.name)),
            "annotations": { annotation::CSI_NODE_ID: node_id },
        }});
        let updated = self.patch(attachment, Part::Whole, &patch).await?;
        self.observer.attachments.observe_write(updated);
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
        self.observer.attachments.observe_write(confirmed);
        Ok(())
    }

    async fn unpublish(&self, attachment: &VolumeAttachment, mut plan: UnpublishPlan) -> Result<(), SidecarError> {
        if let Some(reference) = &plan.secret {
            plan.request.secrets = self.secrets(reference).await?;
        }
        let permit = self.unpublish_permits.acquire().await;
        self.driver.client.controller_unpublish_volume(plan.request).await?;
        drop(permit);
        cleat_crash::point("publish:unpublished");
        let finalizers = attachment.metadata.finalizers_without(&names::attacher_finalizer(&self.driver.name));
        let updated = write::set_finalizers(&self.context.client, attachment, &finalizers).await;
        updated.map(drop).or_else(WriteError::ignore_not_found)?;
        cleat_crash::point("publish:let-go");
        info!(attachment = attachment.metadata.name, node = attachment.spec.node_name, "volume unpublished");
        if !finalizers.is_empty() {
            // Other finalizers keep the attachment: its readers must see that the volume is detached.
            let patch = json!({ "status": { "attached": false, "attachmentMetadata": null, "detachError": null } });
            let status = self.patch(attachment, Part::Status, &patch).await;
            status.map(drop).or_else(WriteError::ignore_not_found)?;
        }
        Ok(())
    }

    async fn report_error(
        &self,
        attachment: &VolumeAttachment,
        attaching: bool,
        error: &SidecarError,
    ) -> Result<(), WriteError> {
        let mut details = json!({ "time": self.context.clock.time(), "message": error_message(error) });
        if let (true, SidecarError::Call(call)) = (attaching, error) {
            details["errorCode"] = json!(call.code() as i32);
        }
        let field = if attaching { "attachError" } else { "detachError" };
        let attached = attachment.status.as_ref().is_some_and(|s| s.attached);
        let patch = json!({ "status": { "attached": attached, field: details } });
        let written = self.patch(attachment, Part::Status, &patch).await;
        written.map(drop).or_else(WriteError::ignore_not_found)
    }

    async fn patch(
        &self,
        attachment: &VolumeAttachment,
        part: Part,
        patch: &Value,
    ) -> Result<Arc<VolumeAttachment>, WriteError> {
        write::merge(&self.context.client, part, &Key::of(&attachment.metadata), patch).await
    }

    async fn secrets(&self, reference: &SecretReference) -> Result<HashMap<String, String>, SidecarError> {
        let namespace = reference.namespace.clone().unwrap_or_default();
        let key = Key::namespaced(namespace, reference.name.clone().unwrap_or_default());
        let secret = write::get_live::<Secret>(&self.context.client, &key).await?;
        let secret = secret.ok_or_else(|| SidecarError::Refused(format!("secret {key} not found")))?;
        let data = secret.data.into_iter().flatten();
        Ok(data.map(|(key, value)| (key, String::from_utf8_lossy(&value.0).into_owned())).collect())
    }

    pub(super) async fn apply_volume(
        &self,
        volume: &PersistentVolume,
        decision: VolumeFinalizerDecision,
    ) -> Result<Outcome, SidecarError> {
        match decision {
            VolumeFinalizerDecision::Nothing => {}
            VolumeFinalizerDecision::WaitForDetach => debug!("volume keeps its finalizer until it is detached"),
            VolumeFinalizerDecision::Remove => {
                let finalizers = volume.metadata.finalizers_without(&names::attacher_finalizer(&self.driver.name));
                let updated = write::set_finalizers(&self.context.client, volume, &finalizers).await;
                updated.map(drop).or_else(WriteError::ignore_not_found)?;
                cleat_crash::point("publish:volume-let-go");
            }
        }
        Ok(Outcome::Done)
    }
}
