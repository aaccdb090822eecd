//! Compares the driver's list of published volumes with the attachments.

use std::collections::{HashMap, HashSet};

use cleat_csi::CallError;
use cleat_csi::v1::{ListVolumesRequest, ListVolumesResponse};
use cleat_runtime::Queue;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::CsiAttacher;
use super::decide::{AttachmentSnapshot, listed_handle, node_id};
use crate::driver::Capability;

/// The ids of the nodes where a volume is published, by volume handle.
type PublishedNodes = HashMap<String, HashSet<String>>;

impl CsiAttacher {
    /// Runs until `stop` is cancelled. Returns at once if the driver does not list published nodes.
    pub(super) async fn verify_periodically(self, attachments: Queue<String>, stop: CancellationToken) {
        let required = [Capability::ListVolumes, Capability::ListVolumesPublishedNodes];
        if !required.into_iter().all(|capability| self.driver.has_capability(capability)) {
            return;
        }
        let mut ticks = tokio::time::interval(self.options.verify_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes immediately; every attachment is reconciled at the start anyway.
        ticks.tick().await;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            // Taken before the list: the list is never older than the state it is compared with.
            let snapshots = self.own_attachments();
            if snapshots.is_empty() {
                // The list may be long, and there is nothing to compare it with.
                continue;
            }
            match self.list_published().await {
                Ok(published) => {
                    for name in mismatched(&snapshots, &published) {
                        info!(attachment = name, "driver contradicts the attachment; its call is repeated");
                        self.mismatches.insert(&name);
                        attachments.add(name);
                    }
                }
                Err(error) => warn!(%error, "published volumes could not be listed"),
            }
        }
    }

    async fn list_published(&self) -> Result<PublishedNodes, CallError> {
        let mut published = PublishedNodes::new();
        let max_entries = self.options.list_page_size;
        let mut request = ListVolumesRequest { max_entries, starting_token: String::new() };
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

fn collect(page: ListVolumesResponse, published: &mut PublishedNodes) {
    for entry in page.entries {
        // An entry without a status says nothing about where the volume is published.
        if let (Some(volume), Some(status)) = (entry.volume, entry.status) {
            published.entry(volume.volume_id).or_default().extend(status.published_node_ids);
        }
    }
}

/// The names of the attachments whose `attached` differs from the driver's list. Attachments whose handle or node id is
/// unknown are left out.
fn mismatched(snapshots: &[AttachmentSnapshot], published: &PublishedNodes) -> Vec<String> {
    let differs = |snapshot: &&AttachmentSnapshot| {
        let (Some(handle), Some(node)) = (listed_handle(snapshot), node_id(snapshot)) else { return false };
        let attached = snapshot.attachment.status.as_ref().is_some_and(|status| status.attached);
        attached != published.get(&handle).is_some_and(|nodes| nodes.contains(node))
    };
    snapshots.iter().filter(differs).filter_map(|snapshot| snapshot.attachment.metadata.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::csi_attacher::decide::PublishCapabilities;
    use cleat_csi::v1::{Volume, list_volumes_response as list};
    use cleat_testing::build::{self, DRIVER};
    use k8s_openapi::api::storage::v1::VolumeAttachmentStatus;

    fn snapshot(name: &str, attached: bool) -> AttachmentSnapshot {
        let volume = build::volume(name, "", "1Gi");
        let mut attachment = build::attachment(&volume, "n1");
        attachment.metadata.name = Some(name.to_owned());
        attachment.status = Some(VolumeAttachmentStatus { attached, ..VolumeAttachmentStatus::default() });
        AttachmentSnapshot {
            attachment: Arc::new(attachment),
            volume: Some(Arc::new(volume)),
            node_id: Some("id-1".to_owned()),
            driver: DRIVER.to_owned(),
            capabilities: PublishCapabilities {
                publishes: true,
                publishes_read_only: false,
                single_node_multi_writer: false,
            },
            default_fs_type: String::new(),
            driver_disagrees: false,
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
    fn only_attachments_that_differ_from_the_list_are_mismatched() {
        let entries = vec![
            entry("a", Some(&["id-1", "id-2"])),
            entry("b", Some(&["id-2"])),
            entry("c", Some(&["id-1"])),
            entry("d", None),
        ];
        let mut published = PublishedNodes::new();
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
            assert_eq!(!mismatched(&[snapshot(name, attached)], &published).is_empty(), want, "{name} {attached}");
        }
        let without_node_id = AttachmentSnapshot { node_id: None, ..snapshot("b", true) };
        assert!(mismatched(&[without_node_id], &published).is_empty(), "a node without an id cannot be compared");
    }
}
