//! From caches to one attachment's snapshot.

use std::collections::HashSet;
use std::sync::Arc;

use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use parking_lot::Mutex;

use super::decide::AttachmentSeen;
use super::{Abilities, Options};
use crate::Driver;

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) attachments: Cache<VolumeAttachment>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) csi_nodes: Cache<CSINode>,
    by_volume: Index<VolumeAttachment>,
    by_node: Index<VolumeAttachment>,
    disputed: Arc<Mutex<HashSet<String>>>,
}

impl Observed {
    pub(super) fn new(caches: &Caches) -> Self {
        let attachments = caches.attachments();
        Self {
            volumes: caches.volumes(),
            csi_nodes: caches.csi_nodes(),
            by_volume: attachments.index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            by_node: attachments.index(|a| vec![a.spec.node_name.clone()]),
            disputed: Arc::default(),
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

    pub(super) fn attachment(&self, name: &str, driver: &Driver, options: &Options) -> Option<AttachmentSeen> {
        let attachment = self.attachments.named(name)?;
        let disputed = self.disputed.lock().contains(name);
        let volume = attachment.spec.source.persistent_volume_name.as_deref().and_then(|n| self.volumes.named(n));
        let node_id = self.csi_nodes.named(&attachment.spec.node_name).and_then(|node| {
            let driver = node.spec.drivers.iter().find(|d| d.name == driver.name)?;
            Some(driver.node_id.clone())
        });
        Some(AttachmentSeen {
            attachment,
            volume,
            node_id,
            driver: driver.name.clone(),
            abilities: Abilities::of(driver),
            default_fs_type: options.default_fs_type.clone(),
            disputed,
        })
    }

    /// The driver and the attachment disagree, until a call of the driver has settled it.
    pub(super) fn dispute(&self, name: &str) {
        self.disputed.lock().insert(name.to_owned());
    }

    pub(super) fn settled(&self, name: &str) {
        self.disputed.lock().remove(name);
    }

    /// Every attachment of this driver.
    pub(super) fn attachments_of(&self, driver: &Driver, options: &Options) -> Vec<AttachmentSeen> {
        let names = self.attachments.each().filter(|a| a.spec.attacher == driver.name);
        let names = names.filter_map(|a| a.metadata.name.clone());
        names.filter_map(|name| self.attachment(&name, driver, options)).collect()
    }
}
