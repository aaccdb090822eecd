//! Creates and deletes VolumeAttachments, writes `status.volumesAttached`, and records events. Makes no decisions; the
//! only condition that it checks is the live Node before a deletion.

use std::sync::Arc;
use std::time::Duration;

use cleat_api::key::Key;
use cleat_api::{flex, names};
use cleat_runtime::write::{self, Part, WriteError};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tracing::{debug, info, warn};

use super::AttachController;
use super::decide::{
    ATTACH_TIMEOUT, AttachDecision, AttachNodeSnapshot, AttachWait, AttachmentSource, Detach, DetachCondition,
    DetachPlan, ReportedVolume, describe_users,
};
use super::observe::{reported_volumes, volumes_in_use};

impl AttachController {
    /// Returns after which time the volume must be reconciled again, if nothing changes until then.
    pub(super) async fn act_on_volume(
        &self,
        unique_name: &str,
        decision: AttachDecision,
    ) -> Result<Option<Duration>, WriteError> {
        match decision {
            AttachDecision::Attach { node, source } => {
                self.attach(unique_name, &node, source).await?;
                Ok(None)
            }
            AttachDecision::Wait { node, reason } => {
                self.record_wait(unique_name, &node, &reason);
                Ok(match reason {
                    AttachWait::ForDriver(time) => Some(time),
                    AttachWait::DriverTimedOut => Some(ATTACH_TIMEOUT),
                    AttachWait::AttachedElsewhere { .. } | AttachWait::DriverFailed(_) | AttachWait::ForDetach => None,
                })
            }
        }
    }

    async fn attach(&self, unique_name: &str, node: &str, source: AttachmentSource) -> Result<(), WriteError> {
        let Some((driver, handle)) = flex::attacher_and_handle(unique_name) else {
            warn!(volume = unique_name, "volume cannot be attached: its handle contains a caret");
            return Ok(());
        };
        let source = match source {
            AttachmentSource::PersistentVolume(name) => {
                VolumeAttachmentSource { persistent_volume_name: Some(name), inline_volume_spec: None }
            }
            AttachmentSource::Inline(spec) => {
                VolumeAttachmentSource { persistent_volume_name: None, inline_volume_spec: Some(*spec) }
            }
        };
        let attachment = VolumeAttachment {
            metadata: ObjectMeta { name: Some(names::attachment(handle, driver, node)), ..ObjectMeta::default() },
            spec: VolumeAttachmentSpec { attacher: driver.to_owned(), node_name: node.to_owned(), source },
            status: None,
        };
        self.create(unique_name, attachment).await?;
        info!(volume = unique_name, node, "attach requested");
        cleat_crash::point("attach:requested");
        Ok(())
    }

    /// Creates the attachment. Without an answer it may exist or not: it stays in memory as a pending create, which is
    /// repeated before the next decision about the volume.
    async fn create(&self, unique_name: &str, attachment: VolumeAttachment) -> Result<(), WriteError> {
        let key = Key::of(&attachment.metadata);
        self.memory.add_pending_create(unique_name, &attachment);
        let created = match write::create(&self.context.client, &attachment).await {
            Ok(created) => Some(created),
            Err(error) if error.already_exists() => write::get_live(&self.context.client, &key).await?.map(Arc::new),
            Err(error) => {
                if error.is_refused() {
                    self.memory.remove_pending_create(unique_name, &attachment);
                }
                return Err(error);
            }
        };
        created.into_iter().for_each(|created| self.observer.attachments.observe_write(created));
        self.memory.remove_pending_create(unique_name, &attachment);
        Ok(())
    }

    /// Repeats the create requests that got no answer.
    pub(super) async fn repeat_pending_creates(&self, unique_name: &str) -> Result<(), WriteError> {
        for attachment in self.memory.pending_creates(unique_name) {
            self.create(unique_name, attachment).await?;
        }
        Ok(())
    }

    fn record_wait(&self, unique_name: &str, node: &str, reason: &AttachWait) {
        debug!(volume = unique_name, node, ?reason, "volume not attached yet");
        let volume = self.observer.display_name(unique_name);
        let message = match reason {
            AttachWait::ForDriver(_) | AttachWait::ForDetach => return,
            AttachWait::DriverTimedOut => {
                format!("AttachVolume.Attach failed for volume \"{volume}\" : {}", timeout_message(unique_name))
            }
            AttachWait::DriverFailed(error) => format!("AttachVolume.Attach failed for volume \"{volume}\" : {error}"),
            AttachWait::AttachedElsewhere { .. } => format!("Waiting for detach for volume \"{volume}\""),
        };
        for pod in self.observer.pods_on_node(unique_name, node) {
            let message = match reason {
                AttachWait::AttachedElsewhere { pods, .. } => {
                    format!("{message} {}", describe_users(pods, pod.metadata.namespace.as_deref()))
                }
                _ => message.clone(),
            };
            self.recorder.warning(pod.as_ref(), "FailedAttachVolume", message);
        }
    }

    /// Writes the report before it detaches: the node must not mount a volume that is about to be detached.
    pub(super) async fn act_on_node(&self, snapshot: &AttachNodeSnapshot, plan: DetachPlan) -> Result<(), WriteError> {
        if let Some(report) = plan.report {
            self.report(snapshot, &report).await?;
        }
        if !plan.detach.is_empty() {
            self.detach(&snapshot.name, &plan.detach).await?;
        }
        Ok(())
    }

    async fn report(&self, snapshot: &AttachNodeSnapshot, report: &[ReportedVolume]) -> Result<(), WriteError> {
        let entry = |volume: &ReportedVolume| serde_json::json!({ "name": volume.unique_name, "devicePath": volume.device_path });
        let attached: Vec<_> = report.iter().map(entry).collect();
        let patch = serde_json::json!({ "status": { "volumesAttached": attached } });
        let key = Key::cluster(snapshot.name.clone());
        let written = write::merge::<Node>(&self.context.client, Part::Status, &key, &patch).await;
        written.map(|node| self.observer.nodes.observe_write(node)).or_else(WriteError::ignore_not_found)?;
        info!(node = snapshot.name, attached = report.len(), "attached volumes reported");
        let before = snapshot.reported.as_deref().unwrap_or_default();
        let is_new = |volume: &&ReportedVolume| !before.iter().any(|before| before.unique_name == volume.unique_name);
        let new: Vec<&ReportedVolume> = report.iter().filter(is_new).collect();
        cleat_crash::point(if new.is_empty() { "attach:unreported" } else { "attach:reported" });
        for ReportedVolume { unique_name, .. } in new {
            let volume = self.observer.display_name(unique_name);
            for pod in self.observer.pods_on_node(unique_name, &snapshot.name) {
                let message = format!("AttachVolume.Attach succeeded for volume \"{volume}\" ");
                self.recorder.normal(pod.as_ref(), "SuccessfulAttachVolume", message);
            }
        }
        Ok(())
    }

    async fn detach(&self, node: &str, detaches: &[Detach]) -> Result<(), WriteError> {
        let live = write::get_live::<Node>(&self.context.client, &Key::cluster(node)).await?;
        let in_use = live.as_ref().map(volumes_in_use).unwrap_or_default();
        let reported = live.as_ref().map(reported_volumes).unwrap_or_default();
        try_join_all(detaches.iter().map(|detach| async {
            let volume = &detach.unique_name;
            if reported.iter().any(|reported| reported.unique_name == *volume) {
                debug!(volume, node, "volume kept: the live Node still lists it as attached");
                return Ok(());
            }
            if in_use.contains(volume) {
                match detach.condition {
                    DetachCondition::IfNotInUse => {
                        debug!(volume, node, "volume kept: the live Node lists it as in use");
                        return Ok(());
                    }
                    DetachCondition::NodeOutOfService | DetachCondition::NodeTimedOut => {
                        warn!(volume, node, condition = ?detach.condition, "volume in use is detached by force");
                    }
                }
            }
            let key = Key::cluster(detach.attachment.clone());
            let Some(attachment) = self.observer.attachments.get(&key) else { return Ok(()) };
            let deleted = write::delete(&self.context.client, attachment.as_ref()).await;
            let remaining = deleted.inspect_err(|_| self.memory.add_uncertain_delete(&detach.attachment))?;
            if let Some(remaining) = remaining {
                self.observer.attachments.observe_write(remaining);
            }
            info!(volume, node, "detach requested");
            cleat_crash::point("attach:detach-requested");
            Ok(())
        }))
        .await?;
        // If the live Node differs from the cached one in a way that matters, this queues the node again.
        live.into_iter().for_each(|node| self.observer.nodes.observe_write(node));
        Ok(())
    }

    /// Reads the node's attachments live whose delete request has an unknown result.
    pub(super) async fn resolve_uncertain_deletes(&self, node: &str) -> Result<(), WriteError> {
        if !self.memory.has_uncertain_deletes() {
            return Ok(());
        }
        let names = self.observer.attachment_names_on(node);
        for name in names.iter().filter(|name| self.memory.is_delete_uncertain(name)) {
            if let Some(live) = write::get_live::<VolumeAttachment>(&self.context.client, &Key::cluster(name)).await? {
                self.memory.remove_uncertain_delete(name);
                self.observer.attachments.observe_write(live);
            }
        }
        Ok(())
    }
}

fn timeout_message(unique_name: &str) -> String {
    match flex::attacher_and_handle(unique_name) {
        Some((flex::ATTACHER, handle)) => {
            let (driver, volume) = flex::split_handle(handle).unwrap_or_default();
            format!("timed out waiting for FlexVolume driver {driver} to attach volume {volume}")
        }
        other => {
            let (driver, handle) = other.unwrap_or_default();
            format!("timed out waiting for external-attacher of {driver} CSI driver to attach volume {handle}")
        }
    }
}
