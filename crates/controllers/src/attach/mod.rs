//! The attach/detach controller: a volume is attached where its pods are, and nowhere else.
//!
//! There is no private state to rebuild: what is wanted follows from pods, what is attached from VolumeAttachments and
//! node status. One reconcile per volume decides about its attachments; one per node keeps `status.volumesAttached`
//! true, so that a storm of attachments becomes one write per node.
//!
//! Guarantees:
//! - A volume whose access modes allow one node only has at most one VolumeAttachment at any time. While one exists,
//!   in whatever state, no second is made: an attachment that was never confirmed may still be one.
//! - A volume leaves `volumesAttached` before its VolumeAttachment is deleted, and the attachment is deleted only after
//!   a live look showed that the node does not have the volume in use. The node agent does the opposite: it reports
//!   the volume in use before it looks at `volumesAttached`. One of the two sees the other.
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
    /// A PersistentVolume, by name.
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
    observed.synced().await;
    wake(&observed, &queue);
    let recorder = Recorder::new(context.client.clone(), "attachdetach-controller", context.clock.clone());
    let attacher = Attacher { context, observed, recorder };
    work("attach", queue, AT_ONCE, stop, move |subject| attacher.clone().reconcile(subject)).await;
}

/// Who must look again when something changes.
fn wake(observed: &observe::Observed, queue: &Queue<Subject>) {
    let (q, seen) = (queue.clone(), observed.clone());
    observed.pods.subscribe(move |change| {
        let claims = pod::claim_volumes(change.object()).into_iter();
        claims.filter_map(|v| seen.volume_of_claim(&v.claim)).for_each(|name| q.add(Subject::Volume(name)));
        // What the node is told depends on its pods as well.
        if let Some(node) = pod::node_name(change.object()) {
            q.add(Subject::Node(node.to_owned()));
        }
    });
    let q = queue.clone();
    observed.claims.subscribe(move |change| {
        if let Some(name) = claim::volume_name(change.object()) {
            q.add(Subject::Volume(name.to_owned()));
        }
    });
    let q = queue.clone();
    observed.volumes.subscribe(move |change| {
        q.add(Subject::Volume(change.object().metadata.name.clone().unwrap_or_default()));
    });
    let q = queue.clone();
    observed.attachments.subscribe(move |change| {
        let spec = &change.object().spec;
        q.add(Subject::Node(spec.node_name.clone()));
        if let Some(name) = &spec.source.persistent_volume_name {
            q.add(Subject::Volume(name.clone()));
        }
    });
    let (q, seen) = (queue.clone(), observed.clone());
    observed.nodes.subscribe(move |change| {
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
            Subject::Volume(name) => {
                let Some(seen) = self.observed.volume(&name) else { return Ok(Outcome::Done) };
                for decision in decide::volume(&seen) {
                    self.settle_volume(&seen, decision).await?;
                }
            }
            Subject::Node(name) => {
                let Some(seen) = self.observed.node(&name) else { return Ok(Outcome::Done) };
                let report = decide::report(&seen);
                self.settle_node(&seen, report).await?;
            }
        }
        Ok(Outcome::Done)
    }
}
