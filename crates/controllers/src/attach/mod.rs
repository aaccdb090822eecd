//! The attach/detach controller: attaches each volume to the nodes whose pods need it, and detaches it from all others.
//!
//! One reconcile per volume creates its VolumeAttachments. One reconcile per node writes `status.volumesAttached` and
//! deletes VolumeAttachments, so that many changes of one node cost one status write. The desired state follows from
//! pods, the actual state from VolumeAttachments and Node status. What the controller remembers besides is in
//! [`memory`]; it may be lost.
//!
//! Guarantees:
//! - A volume whose access modes allow one node only has at most one VolumeAttachment. While one exists, in any state,
//!   no second one is created: the driver may have attached the volume without confirming it.
//! - A volume is removed from `volumesAttached` before its VolumeAttachment is deleted, and the attachment is deleted
//!   only after a live read showed that the node does not have the volume in use. The node agent works in the opposite
//!   order: it reports the volume in use before it reads `volumesAttached`. So one of the two sees the other's write.
//!   No other task adds the volume to `volumesAttached` meanwhile, because report and detach of one node are one
//!   reconcile.
//! - A deleted Node object does not prove that the machine is off: volumes that it last reported in use stay attached
//!   until the Node exists again, an administrator marks it out of service, or the [`DetachPolicy`]'s time is over. The
//!   same holds for a node that is not ready. A ready node keeps a volume that it has in use, unless it is marked out of
//!   service.
//! - A create request without an answer is repeated before another node gets the volume.
//! - A delete request without an answer counts as done until the server shows the object. No attachment is deleted
//!   while the live Node lists its volume in `volumesAttached`, whatever this controller has missed.
//! - Volumes of FlexVolume drivers have VolumeAttachments too. They record that the driver may have been called. The
//!   node gets the device path that the attachment names.
//! - Detaches have their own queue and their own concurrency limit, and never delay an attach.
//!
//! Crash points: `attach:requested` after a VolumeAttachment is created, `attach:reported` and `attach:unreported`
//! after `volumesAttached` is written, `attach:detach-requested` after a VolumeAttachment is deleted.

mod act;
pub mod decide;
mod memory;
mod observe;
mod volume_identity;

use std::time::{Duration, Instant};

use cleat_api::{claim, flex, pod};
use cleat_flex::Drivers;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Change, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::Context;
use memory::AttachMemory;
use observe::{AttachObserver, NodeFields};

/// How many volumes are reconciled concurrently.
const MAX_CONCURRENT_VOLUMES: usize = 128;
/// How many nodes are reconciled concurrently. Most of them pause.
const MAX_CONCURRENT_NODES: usize = 1024;
/// After a node's reconcile the node pauses for this many times the duration of its snapshot and decision. A snapshot
/// costs time in proportion to the node's volumes; changes that arrive during the pause are handled together.
const NODE_PAUSE_FACTOR: u32 = 16;
/// Shorter pauses are skipped: the timer is not precise enough for them.
const MIN_NODE_PAUSE: Duration = Duration::from_millis(2);

/// When a volume is detached although its node may still use it.
#[derive(Clone, Copy, Debug)]
pub struct DetachPolicy {
    /// How long a node that is not ready may keep a volume that no pod needs there and that it has not reported as
    /// unmounted. `None`: without limit, until an administrator marks the node out of service.
    pub force_after: Option<Duration>,
}

impl Default for DetachPolicy {
    fn default() -> Self {
        Self { force_after: Some(Duration::from_secs(360)) }
    }
}

/// Two queues, so that detaches never delay attaches.
#[derive(Clone)]
struct AttachQueues {
    /// By unique volume name.
    volumes: Queue<String>,
    /// By node name.
    nodes: Queue<String>,
}

#[derive(Clone)]
struct AttachController {
    context: Context,
    policy: DetachPolicy,
    observer: AttachObserver,
    memory: AttachMemory,
    recorder: Recorder,
}

/// Runs until `stop`. Volumes of `flex` drivers are attached like all others, if the driver has the capability to
/// attach.
pub async fn run(context: Context, policy: DetachPolicy, flex: Drivers, stop: CancellationToken) {
    let queues = AttachQueues { volumes: Queue::new(Backoff::default()), nodes: Queue::new(Backoff::default()) };
    let observer = AttachObserver::new(&context.caches, flex);
    // A volume without pods is detached: decisions need the complete list of pods.
    tokio::select! {
        () = stop.cancelled() => return,
        () = observer.synced() => {}
    }
    let memory = AttachMemory::default();
    memory.adopt(observer.attachment_names());
    subscribe(&observer, &memory, &queues);
    let flex_changes = follow_flex(observer.flex.changes(), observer.clone(), queues.clone(), stop.clone());
    let recorder = Recorder::new(context.client.clone(), "attachdetach-controller", context.clock.clone());
    let controller = AttachController { context, policy, observer, memory, recorder };
    let node_controller = controller.clone();
    let AttachQueues { volumes, nodes } = queues;
    tokio::join!(
        flex_changes,
        work("attach", volumes, MAX_CONCURRENT_VOLUMES, stop.clone(), move |unique_name| {
            controller.clone().reconcile_volume(unique_name)
        }),
        work("attach-node", nodes, MAX_CONCURRENT_NODES, stop, move |name| node_controller
            .clone()
            .reconcile_node(name)),
    );
}

/// Queues the volumes and nodes whose decisions a change can affect.
fn subscribe(observer: &AttachObserver, memory: &AttachMemory, queues: &AttachQueues) {
    let (q, o) = (queues.clone(), observer.clone());
    // Whether a node keeps an attachment depends on the volume's pods: its nodes are queued with it.
    let queue_volume = move |unique_name: String| {
        o.nodes_with_attachment(&unique_name).into_iter().for_each(|node| q.nodes.add(node));
        q.volumes.add(unique_name);
    };
    let (nodes, o, queue) = (queues.nodes.clone(), observer.clone(), queue_volume.clone());
    observer.pods.subscribe(move |change| {
        o.unique_names_of_pod(change.object()).into_iter().for_each(&queue);
        if let Some(node) = pod::node_name(change.object()) {
            nodes.add(node.to_owned());
        }
    });
    let (o, queue) = (observer.clone(), queue_volume.clone());
    observer.claims.subscribe(move |change| {
        if decide::is_noop(o.references_to_claim(change.object())) {
            return;
        }
        let volume = claim::volume_name(change.object());
        volume.and_then(|name| o.unique_name_of_volume(name)).into_iter().for_each(&queue);
    });
    let (nodes, o, queue) = (queues.nodes.clone(), observer.clone(), queue_volume.clone());
    observer.volumes.subscribe(move |change| {
        if decide::is_noop(o.references_to_volume(change)) {
            return;
        }
        let name = change.object().metadata.name.as_deref().unwrap_or_default();
        o.unique_name_of_volume(name).into_iter().for_each(&queue);
        o.nodes_of_persistent_volume(name).into_iter().for_each(|node| nodes.add(node));
    });
    let (nodes, o, m, queue) = (queues.nodes.clone(), observer.clone(), memory.clone(), queue_volume);
    observer.attachments.subscribe(move |change| {
        m.record_attachment_change(change);
        nodes.add(change.object().spec.node_name.clone());
        o.unique_name_of_attachment(change.object()).into_iter().for_each(&queue);
    });
    let (q, o, m) = (queues.clone(), observer.clone(), memory.clone());
    observer.nodes.subscribe(move |change| {
        m.record_node_change(change);
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let effect = NodeChange::of(change);
        if effect.changes_managed {
            o.volumes_of_node(&name).into_iter().for_each(|volume| q.volumes.add(volume));
        }
        if effect.changes_snapshot {
            q.nodes.add(name);
        }
    });
    let (q, o) = (queues.clone(), observer.clone());
    observer.drivers.subscribe(move |change| {
        let driver = change.object().metadata.name.clone().unwrap_or_default();
        o.volumes_of_driver(&driver).into_iter().for_each(|volume| q.volumes.add(volume));
        o.nodes.all().iter().filter_map(|n| n.metadata.name.clone()).for_each(|node| q.nodes.add(node));
    });
}

/// Queues all FlexVolumes whenever a FlexVolume driver changes: whether it attaches is known from the driver only.
async fn follow_flex(
    mut changes: watch::Receiver<()>,
    observer: AttachObserver,
    queues: AttachQueues,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
        for unique_name in observer.volumes_of_driver(flex::ATTACHER) {
            observer.nodes_with_attachment(&unique_name).into_iter().for_each(|node| queues.nodes.add(node));
            queues.volumes.add(unique_name);
        }
    }
}

/// What a change of a Node means for snapshots. Heartbeats change a Node every few seconds and mean nothing.
struct NodeChange {
    /// Snapshots of the node itself may differ.
    changes_snapshot: bool,
    /// Snapshots of its volumes may differ: they contain the pods of managed nodes only.
    changes_managed: bool,
}

impl NodeChange {
    fn of(change: &Change<Node>) -> Self {
        let Change::Applied { old: Some(old), new } = change else {
            return Self { changes_snapshot: true, changes_managed: true };
        };
        let (old, new) = (NodeFields::of(old), NodeFields::of(new));
        Self { changes_managed: old.is_managed != new.is_managed, changes_snapshot: old != new }
    }
}

impl AttachController {
    async fn reconcile_volume(self, unique_name: String) -> Result<Outcome, WriteError> {
        self.repeat_pending_creates(&unique_name).await?;
        let now = self.context.clock.now();
        let Some(snapshot) = self.observer.volume_snapshot(&self.memory, &unique_name, now) else {
            return Ok(Outcome::Done);
        };
        let mut retry_times = Vec::new();
        for decision in decide::volume(&snapshot) {
            retry_times.extend(self.act_on_volume(&unique_name, decision).await?);
        }
        Ok(retry_times.into_iter().min().map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    async fn reconcile_node(self, name: String) -> Result<Outcome, WriteError> {
        self.resolve_uncertain_deletes(&name).await?;
        let started = Instant::now();
        let snapshot = self.observer.node_snapshot(&self.memory, &name, self.context.clock.now());
        let plan = decide::node(&snapshot, self.policy.force_after);
        let (cost, retry_after) = (started.elapsed(), plan.retry_after);
        self.act_on_node(&snapshot, plan).await?;
        let pause = cost * NODE_PAUSE_FACTOR;
        if pause >= MIN_NODE_PAUSE {
            tokio::time::sleep(pause).await;
        }
        Ok(retry_after.map_or(Outcome::Done, Outcome::RequeueAfter))
    }
}
