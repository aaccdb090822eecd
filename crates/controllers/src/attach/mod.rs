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
//!   is back, or an administrator marks it out of service.
//!
//! Crash points: `attach:requested` after a VolumeAttachment is made, `attach:reported` and `attach:unreported` after
//! `volumesAttached` is written, `attach:detach-requested` after a VolumeAttachment is deleted.

mod act;
pub mod decide;
mod observe;

use cleat_api::claim;
use cleat_api::pod;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Change, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::Node;
use tokio_util::sync::CancellationToken;

use crate::Context;

const AT_ONCE: usize = 128;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    /// A volume, by its name in node status.
    Volume(String),
    Node(String),
}

#[derive(Clone)]
struct Attacher {
    context: Context,
    observed: observe::Observed,
    recorder: Recorder,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let observed = observe::Observed::new(&context.caches);
    // What is not wanted is detached: every pod must be known before anything is decided.
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    observed.take_charge();
    wake(&observed, &queue);
    let recorder = Recorder::new(context.client.clone(), "attachdetach-controller", context.clock.clone());
    let attacher = Attacher { context, observed, recorder };
    work("attach", queue, AT_ONCE, stop, move |subject| attacher.clone().reconcile(subject)).await;
}

/// Who must look again when something changes.
fn wake(observed: &observe::Observed, queue: &Queue<Subject>) {
    let (q, seen) = (queue.clone(), observed.clone());
    // A volume, and the nodes that have it: what they are told depends on who wants it.
    let touch = move |unique: String| {
        seen.nodes_with(&unique).into_iter().for_each(|node| q.add(Subject::Node(node)));
        q.add(Subject::Volume(unique));
    };
    let (q, seen, add) = (queue.clone(), observed.clone(), touch.clone());
    observed.pods.subscribe(move |change| {
        let claims = pod::claim_volumes(change.object()).into_iter();
        claims.filter_map(|v| seen.unique_of_claim(&v.claim)).for_each(&add);
        if let Some(node) = pod::node_name(change.object()) {
            q.add(Subject::Node(node.to_owned()));
        }
    });
    let (seen, add) = (observed.clone(), touch.clone());
    observed.claims.subscribe(move |change| {
        let volume = claim::volume_name(change.object());
        volume.and_then(|name| seen.unique_of_volume(name)).into_iter().for_each(&add);
    });
    let (q, add) = (queue.clone(), touch.clone());
    let seen = observed.clone();
    observed.volumes.subscribe(move |change| {
        let name = change.object().metadata.name.as_deref().unwrap_or_default();
        seen.unique_of_volume(name).into_iter().for_each(&add);
        seen.nodes_of_attachments(name).into_iter().for_each(|node| q.add(Subject::Node(node)));
    });
    let (q, seen, add) = (queue.clone(), observed.clone(), touch);
    observed.attachments.subscribe(move |change| {
        seen.note_attachment(change);
        let spec = &change.object().spec;
        q.add(Subject::Node(spec.node_name.clone()));
        let volume = spec.source.persistent_volume_name.as_deref();
        volume.and_then(|name| seen.unique_of_volume(name)).into_iter().for_each(&add);
    });
    let (q, seen) = (queue.clone(), observed.clone());
    observed.nodes.subscribe(move |change| {
        seen.note(change);
        if touches_volumes(change) {
            let name = change.object().metadata.name.clone().unwrap_or_default();
            seen.volumes_near(&name).into_iter().for_each(|volume| q.add(Subject::Volume(volume)));
            q.add(Subject::Node(name));
        }
    });
    let (q, seen) = (queue.clone(), observed.clone());
    observed.drivers.subscribe(move |change| {
        let driver = change.object().metadata.name.clone().unwrap_or_default();
        seen.volumes_of_driver(&driver).into_iter().for_each(|volume| q.add(Subject::Volume(volume)));
        seen.nodes.all().iter().filter_map(|n| n.metadata.name.clone()).for_each(|node| q.add(Subject::Node(node)));
    });
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
    async fn reconcile(self, subject: Subject) -> Result<Outcome, WriteError> {
        match subject {
            Subject::Volume(unique) => {
                let Some(seen) = self.observed.volume(&unique) else { return Ok(Outcome::Done) };
                for decision in decide::volume(&seen) {
                    self.settle_volume(&seen, decision).await?;
                }
            }
            Subject::Node(name) => {
                let seen = self.observed.node(&name);
                let decision = decide::node(&seen);
                self.settle_node(&seen, decision).await?;
            }
        }
        Ok(Outcome::Done)
    }
}
