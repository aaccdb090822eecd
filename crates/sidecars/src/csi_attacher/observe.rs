//! From the caches to the snapshot of one attachment.

use std::sync::Arc;

use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};

use super::CsiAttacher;
use super::decide::{AttachmentSnapshot, PublishCapabilities};
use crate::Driver;
use crate::driver::Capability;

#[derive(Clone)]
pub(super) struct AttachmentObserver {
    pub(super) attachments: Cache<VolumeAttachment>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) csi_nodes: Cache<CSINode>,
    by_volume: Index<VolumeAttachment>,
    by_node: Index<VolumeAttachment>,
}

impl AttachmentObserver {
    pub(super) fn new(caches: &Caches) -> Self {
        let attachments = caches.attachments();
        Self {
            volumes: caches.volumes(),
            csi_nodes: caches.csi_nodes(),
            by_volume: attachments.index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            by_node: attachments.index(|a| vec![a.spec.node_name.clone()]),
            attachments,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(self.attachments.synced(), self.volumes.synced(), self.csi_nodes.synced());
    }

    pub(super) fn attachments_of_volume(&self, volume: &str) -> Vec<Arc<VolumeAttachment>> {
        self.by_volume.get(volume)
    }

    pub(super) fn attachments_of_node(&self, node: &str) -> Vec<Arc<VolumeAttachment>> {
        self.by_node.get(node)
    }
}

impl CsiAttacher {
    /// Returns `None` if the attachment does not exist. Attachments of other drivers are returned too; `decide` ignores
    /// them.
    pub(super) fn attachment(&self, name: &str) -> Option<AttachmentSnapshot> {
        let attachment = self.observer.attachments.named(name)?;
        let volume = attachment.spec.source.persistent_volume_name.as_deref();
        let volume = volume.and_then(|name| self.observer.volumes.named(name));
        let node_id = self.observer.csi_nodes.named(&attachment.spec.node_name).and_then(|node| {
            let registration = node.spec.drivers.iter().find(|d| d.name == self.driver.name)?;
            Some(registration.node_id.clone())
        });
        Some(AttachmentSnapshot {
            attachment,
            volume,
            node_id,
            driver: self.driver.name.clone(),
            capabilities: publish_capabilities(&self.driver),
            default_fs_type: self.options.default_fs_type.clone(),
            driver_disagrees: self.mismatches.contains(name),
        })
    }

    /// The snapshots of all attachments of this driver.
    pub(super) fn own_attachments(&self) -> Vec<AttachmentSnapshot> {
        let own = self.observer.attachments.each().filter(|a| a.spec.attacher == self.driver.name);
        let names = own.filter_map(|a| a.metadata.name.clone());
        names.filter_map(|name| self.attachment(&name)).collect()
    }
}

fn publish_capabilities(driver: &Driver) -> PublishCapabilities {
    PublishCapabilities {
        publishes: driver.has_capability(Capability::PublishUnpublishVolume),
        publishes_read_only: driver.has_capability(Capability::PublishReadonly),
        single_node_multi_writer: driver.has_capability(Capability::SingleNodeMultiWriter),
    }
}
