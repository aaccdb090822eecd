//! Compares what the driver lists as published with what the attachments say.

use std::collections::{HashMap, HashSet};

use cleat_csi::CallError;
use cleat_csi::v1::{ListVolumesRequest, ListVolumesResponse};
use cleat_runtime::Queue;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Publisher;
use super::decide::{AttachmentSeen, handle, node_id};
use crate::driver::Capability;

/// Node ids by volume handle.
type Published = HashMap<String, HashSet<String>>;

impl Publisher {
    /// Runs until `stop`, if the driver can say what is published where.
    pub(super) async fn verify(self, attachments: Queue<String>, stop: CancellationToken) {
        let lists = self.driver.can(Capability::ListVolumes) && self.driver.can(Capability::ListVolumesPublishedNodes);
        if !lists {
            return;
        }
        let mut ticks = tokio::time::interval(self.options.verify_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes at once, when every attachment is looked at anyway.
        ticks.tick().await;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            // Before the list: an attachment that changes meanwhile is compared with what came after it.
            let seen = self.observed.attachments_of(&self.driver, &self.options);
            if seen.is_empty() {
                // A list of thousands of volumes would be compared with nothing.
                continue;
            }
            match self.published().await {
                Ok(published) => {
                    for name in disputed(&seen, &published) {
                        info!(attachment = name, "the driver shows another state; its call is repeated");
                        self.observed.dispute(&name);
                        attachments.add(name);
                    }
                }
                Err(error) => warn!(%error, "the driver's volumes cannot be listed"),
            }
        }
    }

    async fn published(&self) -> Result<Published, CallError> {
        let mut published = Published::new();
        let mut request = ListVolumesRequest { max_entries: self.options.page, starting_token: String::new() };
        loop {
            let page = self.driver.client.list_volumes(request.clone()).await?;
            let next = page.next_token.clone();
            collect(page, &mut published);
            if next.is_empty() {
                return Ok(published);
            }
            request.starting_token = next;
        }
    }
}

fn collect(page: ListVolumesResponse, published: &mut Published) {
    for entry in page.entries {
        // A volume without a status says nothing about where it is.
        if let (Some(volume), Some(status)) = (entry.volume, entry.status) {
            published.entry(volume.volume_id).or_default().extend(status.published_node_ids);
        }
    }
}

/// The attachments that say something else than the driver.
fn disputed(seen: &[AttachmentSeen], published: &Published) -> Vec<String> {
    let differs = |seen: &&AttachmentSeen| {
        let (Some(handle), Some(node)) = (handle(seen), node_id(seen)) else { return false };
        let attached = seen.attachment.status.as_ref().is_some_and(|status| status.attached);
        attached != published.get(&handle).is_some_and(|nodes| nodes.contains(node))
    };
    seen.iter().filter(differs).filter_map(|seen| seen.attachment.metadata.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::publish::Abilities;
    use cleat_csi::v1::{Volume, list_volumes_response as list};
    use cleat_testing::build::{self, DRIVER};
    use k8s_openapi::api::storage::v1::VolumeAttachmentStatus;

    fn seen(name: &str, attached: bool) -> AttachmentSeen {
        let volume = build::volume(name, "", "1Gi");
        let mut attachment = build::attachment(&volume, "n1");
        attachment.metadata.name = Some(name.to_owned());
        attachment.status = Some(VolumeAttachmentStatus { attached, ..VolumeAttachmentStatus::default() });
        AttachmentSeen {
            attachment: Arc::new(attachment),
            volume: Some(Arc::new(volume)),
            node_id: Some("id-1".to_owned()),
            driver: DRIVER.to_owned(),
            abilities: Abilities { publishes: true, publishes_read_only: false, tells_writers_apart: false },
            default_fs_type: String::new(),
            disputed: false,
        }
    }

    fn entry(volume: &str, nodes: Option<&[&str]>) -> list::Entry {
        let status = nodes.map(|nodes| list::VolumeStatus {
            published_node_ids: nodes.iter().map(ToString::to_string).collect(),
            ..list::VolumeStatus::default()
        });
        let volume = Volume { volume_id: format!("handle-{volume}"), ..Volume::default() };
        list::Entry { volume: Some(volume), status }
    }

    #[test]
    fn only_what_differs_is_called_again() {
        let entries = vec![
            entry("a", Some(&["id-1", "id-2"])),
            entry("b", Some(&["id-2"])),
            entry("c", Some(&["id-1"])),
            entry("d", None),
        ];
        let mut published = Published::new();
        collect(ListVolumesResponse { entries, ..ListVolumesResponse::default() }, &mut published);
        for (name, attached, want) in [
            ("a", true, false),
            ("b", true, true),
            ("b", false, false),
            ("c", false, true),
            ("d", true, true),
            ("unknown", true, true),
            ("unknown", false, false),
        ] {
            assert_eq!(!disputed(&[seen(name, attached)], &published).is_empty(), want, "{name} {attached}");
        }
        let nowhere = AttachmentSeen { node_id: None, ..seen("b", true) };
        assert!(disputed(&[nowhere], &published).is_empty(), "a node without an id cannot be compared");
    }
}
