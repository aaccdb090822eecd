//! What all parts of one node agent share: its name and paths, caches, state, registered drivers and queues. It imports none
//! of the modules that reconcile, so that each of them can use it.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cleat_api::key::Meta as _;
use cleat_api::pod as api_pod;
use cleat_runtime::Client;
use cleat_runtime::{Backoff, Cache, Caches, Clock, Queue, Recorder};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::drivers::RegisteredDrivers;
use crate::layout::{Layout, PodUid, VolumeId};
use crate::state::NodeState;

/// A work item of the object queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ObjectKey {
    /// The Node of this agent.
    Node,
    Pod(PodUid),
}

pub(crate) struct AgentContext {
    /// The name of the Node.
    pub(crate) name: String,
    pub(crate) layout: Layout,
    pub(crate) client: Client,
    pub(crate) pods: Cache<Pod>,
    pub(crate) nodes: Cache<Node>,
    pub(crate) claims: Cache<PersistentVolumeClaim>,
    pub(crate) volumes: Cache<PersistentVolume>,
    pub(crate) csi_drivers: Cache<CSIDriver>,
    pub(crate) attachments: Cache<VolumeAttachment>,
    /// This lock must not be held during [`Cache::observe_write`] or [`Cache::subscribe`]: they call the agent's
    /// subscribers on the same thread, and the subscribers take this lock. Reading a cache takes the cache's lock only,
    /// and a cache holds no lock while it calls its subscribers.
    pub(crate) state: Mutex<NodeState>,
    pub(crate) drivers: RegisteredDrivers,
    /// The uid of the Node that has the labels, the status and the drivers of this agent.
    pub(crate) registered_node_uid: Mutex<Option<String>>,
    /// Held while the CSINode and the Node are changed for a driver.
    pub(crate) csi_node_lock: tokio::sync::Mutex<()>,
    /// Set if a mounted volume has an unreadable record: the `volumesInUse` that an earlier run reported. They stay in
    /// use for the life of this process, because the unknown volume may be any of them.
    pub(crate) retained_in_use: OnceLock<BTreeSet<String>>,
    pub(crate) object_queue: Queue<ObjectKey>,
    pub(crate) volume_queue: Queue<VolumeId>,
    pub(crate) recorder: Recorder,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) stop: CancellationToken,
}

impl AgentContext {
    pub(crate) fn new(
        name: String,
        layout: Layout,
        client: Client,
        caches: &Caches,
        clock: Arc<dyn Clock>,
        stop: CancellationToken,
    ) -> AgentContext {
        AgentContext {
            name,
            layout,
            pods: caches.pods(),
            nodes: caches.nodes(),
            claims: caches.claims(),
            volumes: caches.volumes(),
            csi_drivers: caches.csi_drivers(),
            attachments: caches.attachments(),
            state: Mutex::default(),
            drivers: RegisteredDrivers::default(),
            registered_node_uid: Mutex::default(),
            csi_node_lock: tokio::sync::Mutex::default(),
            retained_in_use: OnceLock::new(),
            object_queue: Queue::new(Backoff::new(Duration::from_millis(5), Duration::from_secs(30))),
            volume_queue: Queue::new(Backoff::new(Duration::from_millis(200), Duration::from_secs(120))),
            recorder: Recorder::new(client.clone(), "kubelet", clock.clone()),
            client,
            clock,
            stop,
        }
    }

    pub(crate) async fn wait_for_caches(&self) {
        tokio::join!(
            self.pods.synced(),
            self.nodes.synced(),
            self.claims.synced(),
            self.volumes.synced(),
            self.csi_drivers.synced(),
            self.attachments.synced()
        );
    }

    pub(crate) fn is_on_this_node(&self, pod: &Pod) -> bool {
        api_pod::node_name(pod) == Some(self.name.as_str())
    }

    pub(crate) fn wake_pod(&self, uid: PodUid) {
        self.object_queue.add(ObjectKey::Pod(uid));
    }

    pub(crate) fn wake_volume(&self, id: VolumeId) {
        self.volume_queue.add(id);
    }

    pub(crate) fn wake_node(&self) {
        self.object_queue.add(ObjectKey::Node);
    }

    /// A driver without a CSIDriver object requires attachment, as in Kubernetes.
    pub(crate) fn attach_required(&self, driver: &str) -> bool {
        self.csi_drivers.named(driver).is_none_or(|d| d.spec.attach_required != Some(false))
    }

    /// Records a warning event for the pod, if the pod is still in the cache.
    pub(crate) fn warn_pod(&self, uid: &str, reason: &str, message: &str) {
        let key = self.state.lock().pod_keys.get(uid).cloned();
        if let Some(pod) = key.and_then(|key| self.pods.get(&key)).filter(|p| p.metadata.uid() == uid) {
            self.recorder.warning(&*pod, reason, message);
        }
    }
}
