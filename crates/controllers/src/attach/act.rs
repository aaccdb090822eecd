//! Makes and deletes VolumeAttachments, and tells nodes what they have.

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

use super::Attacher;
use super::decide::{
    ANSWER_WITHIN, Check, Detach, NodeDecision, NodeSeen, Source, Told, VolumeDecision, VolumeSeen, Wait, holders,
};
use super::observe::{in_use, reported};

impl Attacher {
    /// Returns when to look again.
    pub(super) async fn settle_volume(
        &self,
        seen: &VolumeSeen,
        decision: VolumeDecision,
    ) -> Result<Option<Duration>, WriteError> {
        match decision {
            VolumeDecision::Attach { node, source } => {
                self.attach(seen, &node, source).await?;
                Ok(None)
            }
            VolumeDecision::Wait { node, why } => {
                self.wait(seen, &node, &why);
                Ok(match why {
                    Wait::ForDriver(time) => Some(time),
                    Wait::Unanswered => Some(ANSWER_WITHIN),
                    Wait::HeldElsewhere { .. } | Wait::Failing(_) | Wait::ForDetach => None,
                })
            }
        }
    }

    async fn attach(&self, seen: &VolumeSeen, node: &str, source: Source) -> Result<(), WriteError> {
        let Some((driver, handle)) = flex::attacher_and_handle(&seen.unique) else {
            warn!(volume = seen.unique, "a volume whose handle holds a caret cannot be attached");
            return Ok(());
        };
        let source = match source {
            Source::Volume(name) => {
                VolumeAttachmentSource { persistent_volume_name: Some(name), inline_volume_spec: None }
            }
            Source::Inline(spec) => {
                VolumeAttachmentSource { persistent_volume_name: None, inline_volume_spec: Some(*spec) }
            }
        };
        let attachment = VolumeAttachment {
            metadata: ObjectMeta { name: Some(names::attachment(handle, driver, node)), ..ObjectMeta::default() },
            spec: VolumeAttachmentSpec { attacher: driver.to_owned(), node_name: node.to_owned(), source },
            status: None,
        };
        self.request(&seen.unique, attachment).await?;
        info!(volume = seen.unique, node, "attachment requested");
        cleat_crash::point("attach:requested");
        Ok(())
    }

    /// Makes the attachment. Without an answer it may exist or not: the wish is kept, and repeated before anything else is
    /// decided about the volume.
    async fn request(&self, unique: &str, attachment: VolumeAttachment) -> Result<(), WriteError> {
        let key = Key::of(&attachment.metadata);
        self.observed.intend(unique, &attachment);
        let made = match write::create(&self.context.client, &attachment).await {
            Ok(made) => Some(made),
            Err(error) if error.already_exists() => write::get_live(&self.context.client, &key).await?.map(Arc::new),
            Err(error) => {
                if error.is_refused() {
                    self.observed.settle_intent(unique, &attachment);
                }
                return Err(error);
            }
        };
        made.into_iter().for_each(|made| self.observed.attachments.observe_write(made));
        self.observed.settle_intent(unique, &attachment);
        Ok(())
    }

    /// Repeats the wishes that got no answer.
    pub(super) async fn repeat_intents(&self, unique: &str) -> Result<(), WriteError> {
        for attachment in self.observed.intended(unique) {
            self.request(unique, attachment).await?;
        }
        Ok(())
    }

    fn wait(&self, seen: &VolumeSeen, node: &str, why: &Wait) {
        debug!(volume = seen.unique, node, ?why, "waiting");
        let volume = self.observed.shown(&seen.unique);
        let message = match why {
            Wait::ForDriver(_) | Wait::ForDetach => return,
            Wait::Unanswered => {
                format!("AttachVolume.Attach failed for volume \"{volume}\" : {}", unanswered(&seen.unique))
            }
            Wait::Failing(error) => format!("AttachVolume.Attach failed for volume \"{volume}\" : {error}"),
            Wait::HeldElsewhere { .. } => format!("Waiting for detach for volume \"{volume}\""),
        };
        for pod in self.observed.waiting(&seen.unique, node) {
            let message = match why {
                Wait::HeldElsewhere { pods, .. } => {
                    format!("{message} {}", holders(pods, pod.metadata.namespace.as_deref()))
                }
                _ => message.clone(),
            };
            self.recorder.warning(pod.as_ref(), "FailedAttachVolume", message);
        }
    }

    /// First the node is told, then what it was told of goes.
    pub(super) async fn settle_node(&self, seen: &NodeSeen, decision: NodeDecision) -> Result<(), WriteError> {
        if let Some(report) = decision.report {
            self.report(seen, &report).await?;
        }
        if !decision.detach.is_empty() {
            self.detach(seen, &decision.detach).await?;
        }
        Ok(())
    }

    async fn report(&self, seen: &NodeSeen, report: &[Told]) -> Result<(), WriteError> {
        let entry = |told: &Told| serde_json::json!({ "name": told.unique, "devicePath": told.device });
        let attached: Vec<_> = report.iter().map(entry).collect();
        let patch = serde_json::json!({ "status": { "volumesAttached": attached } });
        let key = Key::cluster(seen.name.clone());
        let written = write::merge::<Node>(&self.context.client, Part::Status, &key, &patch).await;
        written.map(|node| self.observed.nodes.observe_write(node)).or_else(WriteError::ignore_not_found)?;
        info!(node = seen.name, attached = report.len(), "node told what is attached");
        let before = seen.reported.as_deref().unwrap_or_default();
        let is_new = |told: &&Told| !before.iter().any(|before| before.unique == told.unique);
        let new: Vec<&Told> = report.iter().filter(is_new).collect();
        cleat_crash::point(if new.is_empty() { "attach:unreported" } else { "attach:reported" });
        for Told { unique, .. } in new {
            let volume = self.observed.shown(unique);
            for pod in self.observed.waiting(unique, &seen.name) {
                let message = format!("AttachVolume.Attach succeeded for volume \"{volume}\" ");
                self.recorder.normal(pod.as_ref(), "SuccessfulAttachVolume", message);
            }
        }
        Ok(())
    }

    async fn detach(&self, seen: &NodeSeen, leaving: &[Detach]) -> Result<(), WriteError> {
        let live = write::get_live::<Node>(&self.context.client, &Key::cluster(seen.name.clone())).await?;
        let used = live.as_ref().map(in_use).unwrap_or_default();
        let told = live.as_ref().map(reported).unwrap_or_default();
        try_join_all(leaving.iter().map(|detach| async {
            if told.iter().any(|told| told.unique == detach.unique) {
                debug!(volume = detach.unique, node = seen.name, "the node is still told of it; it stays for now");
                return Ok(());
            }
            if used.contains(&detach.unique) {
                match detach.check {
                    Check::NotInUse => {
                        debug!(volume = detach.unique, node = seen.name, "taken into use meanwhile; it stays attached");
                        return Ok(());
                    }
                    Check::Off | Check::Silent => {
                        warn!(volume = detach.unique, node = seen.name, why = ?detach.check, "detached by force");
                    }
                }
            }
            let key = Key::cluster(detach.attachment.clone());
            let Some(attachment) = self.observed.attachments.get(&key) else { return Ok(()) };
            let deleted = write::delete(&self.context.client, attachment.as_ref()).await;
            if let Some(held) = deleted.inspect_err(|_| self.observed.doubt(&detach.attachment))? {
                self.observed.attachments.observe_write(held);
            }
            info!(volume = detach.unique, node = seen.name, "detach requested");
            cleat_crash::point("attach:detach-requested");
            Ok(())
        }))
        .await?;
        // What was missed so far is known now, and brings the node here again.
        live.into_iter().for_each(|node| self.observed.nodes.observe_write(node));
        Ok(())
    }

    /// Asks the server about attachments of the node that may or may not be leaving.
    pub(super) async fn resolve_doubts(&self, node: &str) -> Result<(), WriteError> {
        for key in self.observed.doubted_on(node) {
            if let Some(live) = write::get_live::<VolumeAttachment>(&self.context.client, &key).await? {
                self.observed.resolve(live);
            }
        }
        Ok(())
    }
}

/// What the pods are told of a driver that does not answer.
fn unanswered(unique: &str) -> String {
    match flex::attacher_and_handle(unique) {
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
