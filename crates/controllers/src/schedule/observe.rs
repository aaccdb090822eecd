//! Brings changes from the caches into the [`SchedulerState`].
//!
//! A change only queues the object's key. The state gets the object that the cache has when the key is handled, so that
//! the order of notifications about one object does not matter. Decides nothing.

mod relevance;

use std::sync::Arc;

use cleat_api::key::Key;
use cleat_runtime::{Cache, Cached, Caches, Change, Queue};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};

use super::decide::SchedulerState;
use relevance::{CacheLookup, StateUpdate};

/// The key of an object that may have changed, or of a pod to retry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum SchedulerWorkItem {
    Pod(Key),
    Node(String),
    Claim(Key),
    Volume(String),
    Class(String),
    Driver(String),
    CsiNode(String),
    Capacity(Key),
    Attachment(String),
    /// A pod whose backoff after a failed decision has ended.
    Retry(Key),
}

#[derive(Clone)]
pub(super) struct ScheduleObserver {
    pub(super) pods: Cache<Pod>,
    pub(super) nodes: Cache<Node>,
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    classes: Cache<StorageClass>,
    drivers: Cache<CSIDriver>,
    csi_nodes: Cache<CSINode>,
    capacities: Cache<CSIStorageCapacity>,
    attachments: Cache<VolumeAttachment>,
}

impl ScheduleObserver {
    pub(super) fn new(caches: &Caches) -> Self {
        Self {
            pods: caches.pods(),
            nodes: caches.nodes(),
            claims: caches.claims(),
            volumes: caches.volumes(),
            classes: caches.classes(),
            drivers: caches.csi_drivers(),
            csi_nodes: caches.csi_nodes(),
            capacities: caches.capacities(),
            attachments: caches.attachments(),
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(
            self.pods.synced(),
            self.nodes.synced(),
            self.claims.synced(),
            self.volumes.synced(),
            self.classes.synced(),
            self.drivers.synced(),
            self.csi_nodes.synced(),
            self.capacities.synced(),
            self.attachments.synced(),
        );
    }

    /// Queues all existing objects, then every change.
    pub(super) fn subscribe(&self, queue: &Queue<SchedulerWorkItem>) {
        subscribe(&self.nodes, queue, |key| SchedulerWorkItem::Node(key.name));
        subscribe(&self.csi_nodes, queue, |key| SchedulerWorkItem::CsiNode(key.name));
        subscribe(&self.classes, queue, |key| SchedulerWorkItem::Class(key.name));
        subscribe(&self.drivers, queue, |key| SchedulerWorkItem::Driver(key.name));
        subscribe(&self.capacities, queue, SchedulerWorkItem::Capacity);
        subscribe(&self.volumes, queue, |key| SchedulerWorkItem::Volume(key.name));
        subscribe(&self.claims, queue, SchedulerWorkItem::Claim);
        subscribe(&self.attachments, queue, |key| SchedulerWorkItem::Attachment(key.name));
        subscribe(&self.pods, queue, SchedulerWorkItem::Pod);
    }

    pub(super) fn update_state(&self, state: &mut SchedulerState, item: &SchedulerWorkItem) {
        let mut update = StateUpdate { state, lookup: self };
        match item {
            SchedulerWorkItem::Pod(key) => update.apply_pod(key, self.pods.get(key)),
            SchedulerWorkItem::Claim(key) => update.apply_claim(key),
            SchedulerWorkItem::Volume(name) => update.apply_volume(name),
            SchedulerWorkItem::Attachment(name) => {
                update.apply_attachment(name, self.attachments.named(name).as_deref());
            }
            SchedulerWorkItem::Node(name) => state.set_node(name, self.nodes.named(name)),
            SchedulerWorkItem::Class(name) => state.set_class(name, self.classes.named(name)),
            SchedulerWorkItem::Driver(name) => state.set_driver(name, self.drivers.named(name)),
            SchedulerWorkItem::CsiNode(name) => state.set_csi_node(name, self.csi_nodes.named(name).as_deref()),
            SchedulerWorkItem::Capacity(key) => state.set_capacity(key, self.capacities.get(key)),
            SchedulerWorkItem::Retry(key) => state.enqueue(key),
        }
    }
}

impl CacheLookup for ScheduleObserver {
    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.get(key)
    }

    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.volumes.named(name)
    }
}

fn subscribe<K>(cache: &Cache<K>, queue: &Queue<SchedulerWorkItem>, item: fn(Key) -> SchedulerWorkItem)
where
    K: Cached,
{
    let queue = queue.clone();
    cache.subscribe(move |change: &Change<K>| queue.add(item(Key::of(change.object().meta()))));
}
