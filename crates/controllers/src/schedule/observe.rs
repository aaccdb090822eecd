//! From caches to the picture that pods are placed in.
//!
//! A change is only noted; the picture takes in whatever the cache shows when its turn comes. So the order in which changes of one
//! object are told does not matter.

use cleat_api::key::Key;
use cleat_runtime::{Cache, Cached, Caches, Change, Queue};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};

use super::decide::{Stock, World};

/// Something to look at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Subject {
    Pod(Key),
    Node(String),
    Claim(Key),
    Volume(String),
    Class(String),
    Driver(String),
    CsiNode(String),
    Capacity(Key),
    Attachment(String),
    /// A pod whose pause after a failure is over.
    Retry(Key),
}

#[derive(Clone)]
pub(super) struct Observed {
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

impl Observed {
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

    pub(super) fn follow(&self, queue: &Queue<Subject>) {
        follow(&self.nodes, queue, |key| Subject::Node(key.name));
        follow(&self.csi_nodes, queue, |key| Subject::CsiNode(key.name));
        follow(&self.classes, queue, |key| Subject::Class(key.name));
        follow(&self.drivers, queue, |key| Subject::Driver(key.name));
        follow(&self.capacities, queue, Subject::Capacity);
        follow(&self.volumes, queue, |key| Subject::Volume(key.name));
        follow(&self.claims, queue, Subject::Claim);
        follow(&self.attachments, queue, |key| Subject::Attachment(key.name));
        follow(&self.pods, queue, Subject::Pod);
    }

    pub(super) fn take_in(&self, world: &mut World, subject: &Subject) {
        let stock = Stock { claim: &|key| self.claims.get(key), volume: &|name| self.volumes.named(name) };
        match subject {
            Subject::Pod(key) => world.take_pod(key, self.pods.get(key), &stock),
            Subject::Node(name) => world.set_node(name, self.nodes.named(name)),
            Subject::Claim(key) => world.take_claim(key, &stock),
            Subject::Volume(name) => world.take_volume(name, &stock),
            Subject::Class(name) => world.set_class(name, self.classes.named(name)),
            Subject::Driver(name) => world.set_driver(name, self.drivers.named(name)),
            Subject::CsiNode(name) => world.set_csi_node(name, self.csi_nodes.named(name).as_deref()),
            Subject::Capacity(key) => world.set_capacity(key, self.capacities.get(key)),
            Subject::Attachment(name) => world.take_attachment(name, self.attachments.named(name).as_deref(), &stock),
            Subject::Retry(key) => world.retry(key),
        }
    }
}

fn follow<K>(cache: &Cache<K>, queue: &Queue<Subject>, subject: fn(Key) -> Subject)
where
    K: Cached,
{
    let queue = queue.clone();
    cache.subscribe(move |change: &Change<K>| queue.add(subject(Key::of(change.object().meta()))));
}
