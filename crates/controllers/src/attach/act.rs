//! Makes and deletes VolumeAttachments, and tells nodes what they have.

use cleat_api::key::Key;
use cleat_api::names;
use cleat_runtime::write::{self, Part, WriteError};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tracing::{debug, info, warn};

use super::Attacher;
use super::decide::{Check, NodeSeen, VolumeDecision, VolumeSeen, Wait};

impl Attacher {
    pub(super) async fn settle_volume(&self, seen: &VolumeSeen, decision: VolumeDecision) -> Result<(), WriteError> {
        match decision {
            VolumeDecision::Attach { node } => self.attach(seen, &node).await,
            VolumeDecision::Detach { node, check } => self.detach(seen, &node, check).await,
            VolumeDecision::Wait { node, why } => {
                self.wait(seen, &node, &why);
                Ok(())
            }
        }
    }

    async fn attach(&self, seen: &VolumeSeen, node: &str) -> Result<(), WriteError> {
        let Some((driver, handle)) = names::split_unique_volume(&seen.unique) else {
            warn!(volume = seen.unique, "a volume whose handle holds a caret cannot be attached");
            return Ok(());
        };
        let attachment = VolumeAttachment {
            metadata: ObjectMeta { name: Some(names::attachment(handle, driver, node)), ..ObjectMeta::default() },
            spec: VolumeAttachmentSpec {
                attacher: driver.to_owned(),
                node_name: node.to_owned(),
                source: VolumeAttachmentSource {
                    persistent_volume_name: Some(seen.volume.clone()),
                    ..VolumeAttachmentSource::default()
                },
            },
            status: None,
        };
        match write::create(&self.context.client, &attachment).await {
            Ok(made) => {
                info!(volume = seen.volume, node, "attachment requested");
                self.observed.attachments.observe_write(made);
            }
            Err(error) if error.already_exists() => {}
            Err(error) => return Err(error),
        }
        cleat_crash::point("attach:requested");
        Ok(())
    }

    async fn detach(&self, seen: &VolumeSeen, node: &str, check: Check) -> Result<(), WriteError> {
        let Some((driver, handle)) = names::split_unique_volume(&seen.unique) else { return Ok(()) };
        let key = Key::cluster(names::attachment(handle, driver, node));
        let Some(attachment) = self.observed.attachments.get(&key) else { return Ok(()) };
        if check == Check::NotInUse && self.is_in_use_now(&seen.unique, node).await? {
            debug!(volume = seen.volume, node, "the node took it into use meanwhile; it stays attached");
            return Ok(());
        }
        write::delete(&self.context.client, attachment.as_ref()).await?;
        info!(volume = seen.volume, node, "detach requested");
        cleat_crash::point("attach:detach-requested");
        Ok(())
    }

    async fn is_in_use_now(&self, unique: &str, node: &str) -> Result<bool, WriteError> {
        let live = write::live::<Node>(&self.context.client, &Key::cluster(node)).await?;
        let status = live.and_then(|n| n.status);
        Ok(status.is_some_and(|s| s.volumes_in_use.iter().flatten().any(|v| v == unique)))
    }

    fn wait(&self, seen: &VolumeSeen, node: &str, why: &Wait) {
        debug!(volume = seen.volume, node, ?why, "waiting");
        let Wait::HeldElsewhere { pods, .. } = why else { return };
        let mut message = format!("Waiting for detach for volume \"{}\" Volume is already ", seen.volume);
        if pods.is_empty() {
            message.push_str(
                "exclusively attached to one node, waiting on detach before it can be attached to another node",
            );
        } else {
            message.push_str(&format!("used by pod(s) {}", pods.join(", ")));
        }
        for pod in self.observed.waiting(&seen.volume, node) {
            self.recorder.warning(pod.as_ref(), "FailedAttachVolume", message.clone());
        }
    }

    pub(super) async fn settle_node(&self, seen: &NodeSeen, report: Option<Vec<String>>) -> Result<(), WriteError> {
        let Some(report) = report else { return Ok(()) };
        let attached: Vec<_> =
            report.iter().map(|name| serde_json::json!({ "name": name, "devicePath": "" })).collect();
        let patch = serde_json::json!({ "status": { "volumesAttached": attached } });
        let key = Key::cluster(seen.name.clone());
        let written = write::merge::<Node>(&self.context.client, Part::Status, &key, &patch).await;
        written.map(|node| self.observed.nodes.observe_write(node)).or_else(WriteError::absent_is_fine)?;
        info!(node = seen.name, attached = report.len(), "node told what is attached");
        let grew = report.iter().any(|name| !seen.reported.contains(name));
        cleat_crash::point(if grew { "attach:reported" } else { "attach:unreported" });
        self.announce(seen, &report);
        Ok(())
    }

    fn announce(&self, seen: &NodeSeen, report: &[String]) {
        for name in report.iter().filter(|name| !seen.reported.contains(name)) {
            let volumes = seen.volumes.iter().filter(|v| v.unique == *name);
            for volume in volumes {
                for pod in self.observed.waiting(&volume.volume, &seen.name) {
                    let message = format!("AttachVolume.Attach succeeded for volume \"{}\" ", volume.volume);
                    self.recorder.normal(pod.as_ref(), "SuccessfulAttachVolume", message);
                }
            }
        }
    }
}
