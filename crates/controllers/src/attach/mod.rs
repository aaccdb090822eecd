//! The attach/detach controller: a volume is attached where its pods are, and nowhere else.
//!
//! There is no private state to rebuild: what is wanted follows from pods, what is attached from VolumeAttachments and
//! node status. One reconcile per volume makes its attachments; one per node keeps `status.volumesAttached` true and takes
//! attachments away, so that a storm of either becomes one status write per node.
//!
//! Guarantees:
//! - A volume whose access modes allow one node only has at most one VolumeAttachment at any time. While one exists,
//!   in whatever state, no second is made: an attachment that was never confirmed may still be one.
//! - A volume leaves `volumesAttached` before its VolumeAttachment is deleted, and the attachment is deleted only after
//!   a live look showed that the node does not have the volume in use. The node agent does the opposite: it reports
//!   the volume in use before it looks at `volumesAttached`. One of the two sees the other, because nobody else reports the
//!   volume attached meanwhile: report and detach of one node are one piece of work.
//! - A Node object that is gone proves nothing about its machine: what it last had in use stays attached until the Node
//!   is back, an administrator marks it out of service, or the [`Policy`]'s time is over. The same holds for a node that is
//!   not ready; one that is ready is never forced.
//! - A creation whose answer got lost is repeated before another node gets the volume.
//! - A deletion whose answer got lost counts as done until the server says otherwise, and nothing is deleted that the live
//!   Node still lists as attached: what the node is told holds whatever this controller has missed.
//! - Volumes of FlexVolume drivers have VolumeAttachments like all others: the record that the driver may have been called. The
//!   node is told the device that the attachment names.
//! - Detaches have a queue and places of their own, and never delay an attachment.
//!
//! Crash points: `attach:requested` after a VolumeAttachment is made, `attach:reported` and `attach:unreported` after
//! `volumesAttached` is written, `attach:detach-requested` after a VolumeAttachment is deleted.

mod act;
pub mod decide;
#[cfg(test)]
mod decide_table;
#[cfg(test)]
mod machine;
mod observe;

use std::time::{Duration, Instant};

use cleat_api::{claim, flex, pod};
use cleat_flex::Drivers;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Change, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::Context;

/// Volumes in hand at once.
const VOLUMES: usize = 128;
/// Nodes in hand at once; most of them pause.
const NODES: usize = 1024;
/// A node with many volumes costs more to look at: it is looked at for one part in so many of the time, and meanwhile its
/// news gather.
const PAUSE: u32 = 16;
/// A shorter pause would take longer than it says.
const SHORTEST_PAUSE: Duration = Duration::from_millis(2);

/// How the controller is to behave where there is a choice.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// How long a node that is not ready may keep a volume that nobody needs there and that it does not say it has
    /// unmounted. `None`: for ever, until somebody marks it out of service.
    pub force_after: Option<Duration>,
}

impl Default for Policy {
    fn default() -> Self {
        Self { force_after: Some(Duration::from_secs(360)) }
    }
}

/// Two queues, so that nodes with much to lose never delay what others are to gain.
#[derive(Clone)]
struct Queues {
    /// By name in node status.
    volumes: Queue<String>,
    nodes: Queue<String>,
}

#[derive(Clone)]
struct Attacher {
    context: Context,
    policy: Policy,
    observed: observe::Observed,
    recorder: Recorder,
}

/// Runs until `stop`. Volumes of the `flex` drivers are attached like all others, where the driver says that it attaches.
pub async fn run(context: Context, policy: Policy, flex: Drivers, stop: CancellationToken) {
    let queues = Queues { volumes: Queue::new(Backoff::default()), nodes: Queue::new(Backoff::default()) };
    let observed = observe::Observed::new(&context.caches, flex);
    // What is not wanted is detached: every pod must be known before anything is decided.
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    observed.take_charge();
    wake(&observed, &queues);
    let drivers = follow_flex(observed.flex.changes(), observed.clone(), queues.clone(), stop.clone());
    let recorder = Recorder::new(context.client.clone(), "attachdetach-controller", context.clock.clone());
    let attacher = Attacher { context, policy, observed, recorder };
    let other = attacher.clone();
    let Queues { volumes, nodes } = queues;
    tokio::join!(
        drivers,
        work("attach", volumes, VOLUMES, stop.clone(), move |unique| attacher.clone().reconcile_volume(unique)),
        work("attach-node", nodes, NODES, stop, move |name| other.clone().reconcile_node(name)),
    );
}

/// Who must look again when something changes.
fn wake(observed: &observe::Observed, queues: &Queues) {
    let (q, seen) = (queues.clone(), observed.clone());
    // A volume, and the nodes that have it: what they are told depends on who wants it.
    let touch = move |unique: String| {
        seen.nodes_with(&unique).into_iter().for_each(|node| q.nodes.add(node));
        q.volumes.add(unique);
    };
    let (q, seen, add) = (queues.nodes.clone(), observed.clone(), touch.clone());
    observed.pods.subscribe(move |change| {
        seen.uniques_of_pod(change.object()).into_iter().for_each(&add);
        if let Some(node) = pod::node_name(change.object()) {
            q.add(node.to_owned());
        }
    });
    let (seen, add) = (observed.clone(), touch.clone());
    observed.claims.subscribe(move |change| {
        if seen.is_claim_at_rest(change.object()) {
            return;
        }
        let volume = claim::volume_name(change.object());
        volume.and_then(|name| seen.unique_of_volume(name)).into_iter().for_each(&add);
    });
    let (q, seen, add) = (queues.nodes.clone(), observed.clone(), touch.clone());
    observed.volumes.subscribe(move |change| {
        if seen.is_volume_at_rest(change) {
            return;
        }
        let name = change.object().metadata.name.as_deref().unwrap_or_default();
        seen.unique_of_volume(name).into_iter().for_each(&add);
        seen.nodes_of_attachments(name).into_iter().for_each(|node| q.add(node));
    });
    let (q, seen, add) = (queues.nodes.clone(), observed.clone(), touch);
    observed.attachments.subscribe(move |change| {
        seen.note_attachment(change);
        q.add(change.object().spec.node_name.clone());
        seen.unique_of_attachment(change.object()).into_iter().for_each(&add);
    });
    let (q, seen) = (queues.clone(), observed.clone());
    observed.nodes.subscribe(move |change| {
        seen.note(change);
        let name = change.object().metadata.name.clone().unwrap_or_default();
        if changes_hands(change) {
            seen.volumes_near(&name).into_iter().for_each(|volume| q.volumes.add(volume));
        }
        if touches_volumes(change) {
            q.nodes.add(name);
        }
    });
    let (q, seen) = (queues.clone(), observed.clone());
    observed.drivers.subscribe(move |change| {
        let driver = change.object().metadata.name.clone().unwrap_or_default();
        seen.volumes_of_driver(&driver).into_iter().for_each(|volume| q.volumes.add(volume));
        seen.nodes.all().iter().filter_map(|n| n.metadata.name.clone()).for_each(|node| q.nodes.add(node));
    });
}

/// Looks again at FlexVolumes whenever their drivers change: only a driver says whether it attaches.
async fn follow_flex(
    mut changes: watch::Receiver<()>,
    observed: observe::Observed,
    queues: Queues,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
        for unique in observed.volumes_of_driver(flex::ATTACHER) {
            observed.nodes_with(&unique).into_iter().for_each(|node| queues.nodes.add(node));
            queues.volumes.add(unique);
        }
    }
}

/// Whether the node comes or goes, or another attaches for it from now on.
fn changes_hands(change: &Change<Node>) -> bool {
    let Change::Applied { old: Some(old), new } = change else { return true };
    observe::is_managed(old) != observe::is_managed(new)
}

/// Heartbeats change a node every few seconds and mean nothing here.
fn touches_volumes(change: &Change<Node>) -> bool {
    let Change::Applied { old: Some(old), new } = change else { return true };
    let facts = |node: &Node| {
        let status = node.status.as_ref();
        (
            status.and_then(|s| s.volumes_attached.clone()),
            status.and_then(|s| s.volumes_in_use.clone()),
            cleat_api::condition::node_is_ready(node),
            node.metadata.annotations.clone(),
            node.spec.as_ref().and_then(|s| s.taints.clone()),
        )
    };
    facts(old) != facts(new)
}

impl Attacher {
    async fn reconcile_volume(self, unique: String) -> Result<Outcome, WriteError> {
        self.repeat_intents(&unique).await?;
        let now = self.context.clock.now();
        let Some(seen) = self.observed.volume(&unique, now) else { return Ok(Outcome::Done) };
        let mut times = Vec::new();
        for decision in decide::volume(&seen) {
            times.extend(self.settle_volume(&seen, decision).await?);
        }
        Ok(times.into_iter().min().map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    async fn reconcile_node(self, name: String) -> Result<Outcome, WriteError> {
        self.resolve_doubts(&name).await?;
        let begun = Instant::now();
        let seen = self.observed.node(&name, self.context.clock.now());
        let decision = decide::node(&seen, self.policy.force_after);
        let (cost, again) = (begun.elapsed(), decision.again);
        self.settle_node(&seen, decision).await?;
        let pause = cost * PAUSE;
        if pause >= SHORTEST_PAUSE {
            tokio::time::sleep(pause).await;
        }
        Ok(again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }
}
