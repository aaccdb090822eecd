//! Nodes, CSINodes, CSIDrivers and VolumeAttachments of the [`SchedulerState`]. Pure.

use std::sync::Arc;

use cleat_api::key::Key;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, VolumeAttachment};

use super::SchedulerState;
use super::node_info::{NodeInfo, ParsedNode, driver_limits, migrated_plugins};
use super::state::remove_from;
use super::unschedulable::ClusterEvents;

impl SchedulerState {
    pub fn set_node(&mut self, name: &str, object: Option<Arc<Node>>) {
        let mut node = object.map(ParsedNode::of);
        if let Some(node) = &mut node {
            for (key, capacity) in &self.capacities {
                capacity.link_to(key, node);
            }
        }
        let info = self.nodes.entry(name.to_owned()).or_default();
        let events = node.as_ref().map_or(ClusterEvents::NONE, |node| node.events_since(info.node.as_ref()));
        let is_deleted = node.is_none();
        info.node = node;
        if is_deleted || events.intersects(ClusterEvents::NODE_LABELS) {
            // The volumes of pods with a reservation may not reach the node any more.
            let reserved: Vec<Key> =
                info.usage.pods.iter().filter(|pod| self.pending.contains_key(*pod)).cloned().collect();
            reserved.iter().for_each(|pod| self.enqueue(pod));
        }
        self.remove_empty_node(name);
        self.wake_pods(events);
    }

    pub fn set_csi_node(&mut self, name: &str, object: Option<&CSINode>) {
        let driver_limits = object.map(driver_limits).unwrap_or_default();
        let migrated_plugins = object.map(migrated_plugins).unwrap_or_default();
        let info = self.nodes.entry(name.to_owned()).or_default();
        let events = ClusterEvents::NODE_DRIVERS.only_if(info.driver_limits != driver_limits)
            | ClusterEvents::STORAGE.only_if(info.migrated_plugins != migrated_plugins);
        info.driver_limits = driver_limits;
        info.migrated_plugins = migrated_plugins;
        self.wake_pods(events);
        self.remove_empty_node(name);
    }

    /// Removes the entry of a node to which nothing refers any more.
    pub(super) fn remove_empty_node(&mut self, name: &str) {
        let is_empty = |info: &NodeInfo| {
            info.node.is_none()
                && info.usage.pods.is_empty()
                && info.driver_limits.is_empty()
                && info.attachments.is_empty()
        };
        if self.nodes.get(name).is_some_and(is_empty) {
            self.nodes.remove(name);
        }
    }

    pub fn set_driver(&mut self, name: &str, object: Option<Arc<CSIDriver>>) {
        let tracks_capacity =
            |driver: Option<&Arc<CSIDriver>>| driver.is_some_and(|d| d.spec.storage_capacity == Some(true));
        let (before, now) = (tracks_capacity(self.drivers.get(name)), tracks_capacity(object.as_ref()));
        let is_deleted = object.is_none();
        match object {
            Some(driver) => drop(self.drivers.insert(name.to_owned(), driver)),
            None => drop(self.drivers.remove(name)),
        }
        if is_deleted || before && !now {
            self.wake_pods(ClusterEvents::STORAGE | ClusterEvents::NODE_DRIVERS);
        }
    }

    pub fn set_attachment(&mut self, name: &str, object: Option<&VolumeAttachment>) {
        if let Some((node, volume)) = self.attachments.remove(name) {
            remove_from(&mut self.attachments_by_volume, &volume, name);
            if let Some(info) = self.nodes.get_mut(&node) {
                info.attachments.remove(name);
                self.remove_empty_node(&node);
            }
        }
        match object.and_then(|a| Some((a, a.spec.source.persistent_volume_name.clone()?))) {
            Some((attachment, volume)) => {
                let spec = &attachment.spec;
                self.attachments.insert(name.to_owned(), (spec.node_name.clone(), volume.clone()));
                self.attachments_by_volume.entry(volume.clone()).or_default().insert(name.to_owned());
                let info = self.nodes.entry(spec.node_name.clone()).or_default();
                info.attachments.insert(name.to_owned(), (spec.attacher.clone(), volume));
            }
            None => self.wake_pods(ClusterEvents::NODE_DRIVERS),
        }
    }

    pub(in crate::schedule) fn volume_of_attachment(&self, attachment: &str) -> Option<String> {
        self.attachments.get(attachment).map(|(_, volume)| volume.clone())
    }
}
