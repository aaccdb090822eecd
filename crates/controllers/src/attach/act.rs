//! Makes and deletes VolumeAttachments, and tells nodes what they have.

use cleat_api::key::Key;
use cleat_api::names;
use cleat_runtime::write::{self, Part, WriteError};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tracing::{debug, info, warn};

use super::Attacher;
use super::decide::{Check, Detach, NodeDecision, NodeSeen, VolumeDecision, VolumeSeen, Wait};
use super::observe::in_use;

impl Attacher {
    pub(super) async fn settle_volume(&self, seen: &VolumeSeen, decision: VolumeDecision) -> Result<(), WriteError> {
        match decision {
            VolumeDecision::Attach { node, volume } => self.attach(seen, &node, volume).await,
            VolumeDecision::Wait { node, why } => {
                self.wait(seen, &node, &why);
                Ok(())
            }
        }
    }

    async fn attach(&self, seen: &VolumeSeen, node: &str, volume: String) -> Result<(), WriteError> {
        let Some((driver, handle)) = names::split_unique_volume(&seen.unique) else {
            warn!(volume, "a volume whose handle holds a caret cannot be attached");
            return Ok(());
        };
        let attachment = VolumeAttachment {
            metadata: ObjectMeta { name: Some(names::attachment(handle, driver, node)), ..ObjectMeta::default() },
            spec: VolumeAttachmentSpec {
                attacher: driver.to_owned(),
                node_name: node.to_owned(),
                source: VolumeAttachmentSource {
                    persistent_volume_name: Some(volume.clone()),
                    ..VolumeAttachmentSource::default()
                },
            },
            status: None,
        };
        self.observed.asked_for(attachment.metadata.name.as_deref().unwrap_or_default());
        match write::create(&self.context.client, &attachment).await {
            Ok(made) => {
                info!(volume, node, "attachment requested");
                self.observed.attachments.observe_write(made);
            }
            Err(error) if error.already_exists() => {}
            Err(error) => return Err(error),
        }
        cleat_crash::point("attach:requested");
        Ok(())
    }

    fn wait(&self, seen: &VolumeSeen, node: &str, why: &Wait) {
        debug!(volume = seen.unique, node, ?why, "waiting");
        let volume = self.observed.shown(&seen.unique);
        let message = match why {
            Wait::ForDriver | Wait::ForDetach => return,
            Wait::Failing(error) => format!("AttachVolume.Attach failed for volume \"{volume}\" : {error}"),
            Wait::HeldElsewhere { pods, .. } if pods.is_empty() => format!(
                "Waiting for detach for volume \"{volume}\" Volume is already exclusively attached to one node, waiting on \
                 detach before it can be attached to another node"
            ),
            Wait::HeldElsewhere { pods, .. } => format!(
                "Waiting for detach for volume \"{volume}\" Volume is already used by pod(s) {}",
                pods.join(", ")
            ),
        };
        for pod in self.observed.waiting(&seen.unique, node) {
            self.recorder.warning(pod.as_ref(), "FailedAttachVolume", message.clone());
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

    async fn report(&self, seen: &NodeSeen, report: &[String]) -> Result<(), WriteError> {
        let attached: Vec<_> =
            report.iter().map(|name| serde_json::json!({ "name": name, "devicePath": "" })).collect();
        let patch = serde_json::json!({ "status": { "volumesAttached": attached } });
        let key = Key::cluster(seen.name.clone());
        let written = write::merge::<Node>(&self.context.client, Part::Status, &key, &patch).await;
        written.map(|node| self.observed.nodes.observe_write(node)).or_else(WriteError::absent_is_fine)?;
        info!(node = seen.name, attached = report.len(), "node told what is attached");
        let before = seen.reported.as_deref().unwrap_or_default();
        let new: Vec<&String> = report.iter().filter(|name| !before.contains(name)).collect();
        cleat_crash::point(if new.is_empty() { "attach:unreported" } else { "attach:reported" });
        for unique in new {
            let volume = self.observed.shown(unique);
            for pod in self.observed.waiting(unique, &seen.name) {
                let message = format!("AttachVolume.Attach succeeded for volume \"{volume}\" ");
                self.recorder.normal(pod.as_ref(), "SuccessfulAttachVolume", message);
            }
        }
        Ok(())
    }

    async fn detach(&self, seen: &NodeSeen, leaving: &[Detach]) -> Result<(), WriteError> {
        let live = write::live::<Node>(&self.context.client, &Key::cluster(seen.name.clone())).await?;
        let used = live.as_ref().map(in_use).unwrap_or_default();
        try_join_all(leaving.iter().map(|detach| async {
            if detach.check == Check::NotInUse && used.contains(&detach.unique) {
                debug!(volume = detach.unique, node = seen.name, "taken into use meanwhile; it stays attached");
                return Ok(());
            }
            let key = Key::cluster(detach.attachment.clone());
            let Some(attachment) = self.observed.attachments.get(&key) else { return Ok(()) };
            if let Some(held) = write::delete(&self.context.client, attachment.as_ref()).await? {
                self.observed.attachments.observe_write(held);
            }
            info!(volume = detach.unique, node = seen.name, "detach requested");
            cleat_crash::point("attach:detach-requested");
            Ok(())
        }))
        .await
        .map(drop)
    }
}
