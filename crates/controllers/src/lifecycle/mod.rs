//! The node lifecycle: nodes that fall silent, and pods that nobody looks after any more.
//!
//! - A node that neither renews its Lease nor reports its status becomes Unknown. Not being ready, being unreachable and
//!   being cordoned are taints on the node.
//! - Pods that were ready when their node ceased to be are not any more.
//! - Pods leave nodes whose `NoExecute` taints they do not tolerate, or not any longer: they are deleted as by a user, and their
//!   node winds them down if it can.
//! - Pods of nodes that do not exist are removed, and so are pods that are being deleted on a machine that an administrator
//!   has declared out of service: nobody else could ever say that they have ended.
//!
//! Guarantees: nothing is removed at once on the strength of a cache; a Node is missing only if a live look shows it. A silence
//! from before we watched does not count.
//!
//! What is attached to such nodes is the attach/detach controller's business.

mod act;
pub mod decide;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Cache, Change, Index, Outcome, Queue, Recorder, work};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::Context;
use decide::{NodeSeen, PodDecision, PodSeen};

const AT_ONCE: usize = 32;
const LEASES: &str = "kube-node-lease";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Node(String),
    Pod(Key),
}

#[derive(Clone)]
struct Lifecycle {
    context: Context,
    nodes: Cache<Node>,
    pods: Cache<Pod>,
    leases: Cache<Lease>,
    recorder: Recorder,
    /// Since when we watch.
    since: Timestamp,
    /// Since when a node is missing, or its taints are as they are.
    changed: Arc<Mutex<HashMap<String, Timestamp>>>,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let caches = &context.caches;
    let lifecycle = Lifecycle {
        nodes: caches.nodes(),
        pods: caches.pods(),
        leases: caches.leases(),
        recorder: Recorder::new(context.client.clone(), "node-controller", context.clock.clone()),
        since: context.clock.now(),
        changed: Arc::default(),
        context,
    };
    let by_node = lifecycle.pods.index(|p| pod::node_name(p).map(ToOwned::to_owned).into_iter().collect());
    tokio::select! {
        () = stop.cancelled() => return,
        ((), (), ()) = async {
            tokio::join!(lifecycle.nodes.synced(), lifecycle.pods.synced(), lifecycle.leases.synced())
        } => {}
    }
    lifecycle.wake(&queue, &by_node);
    work("lifecycle", queue, AT_ONCE, stop, move |subject| lifecycle.clone().reconcile(subject)).await;
}

impl Lifecycle {
    fn wake(&self, queue: &Queue<Subject>, by_node: &Index<Pod>) {
        let q = queue.clone();
        self.pods.subscribe(move |change| q.add(Subject::Pod(Key::of(&change.object().metadata))));
        let (q, pods, changed, clock) =
            (queue.clone(), by_node.clone(), self.changed.clone(), self.context.clock.clone());
        self.nodes.subscribe(move |change| {
            let name = change.object().metadata.name.clone().unwrap_or_default();
            let taints = |node: &Node| node.spec.as_ref().and_then(|s| s.taints.clone());
            let is_news = match change {
                Change::Applied { old, new } => old.as_ref().is_none_or(|old| taints(old) != taints(new)),
                Change::Deleted(_) => true,
            };
            if is_news {
                changed.lock().insert(name.clone(), clock.now());
            }
            pods.get(&name).iter().for_each(|pod| q.add(Subject::Pod(Key::of(&pod.metadata))));
            q.add(Subject::Node(name));
        });
        let q = queue.clone();
        self.leases.subscribe(move |change| {
            let meta = &change.object().metadata;
            if meta.namespace.as_deref() == Some(LEASES) {
                q.add(Subject::Node(meta.name.clone().unwrap_or_default()));
            }
        });
    }

    async fn reconcile(self, subject: Subject) -> Result<Outcome, WriteError> {
        match subject {
            Subject::Node(name) => self.node(&name).await,
            Subject::Pod(key) => self.pod(&key).await,
        }
    }

    async fn node(&self, name: &str) -> Result<Outcome, WriteError> {
        let Some(node) = self.nodes.named(name) else { return Ok(Outcome::Done) };
        let lease = self.leases.get(&Key::namespaced(LEASES, name));
        let renewed = lease.and_then(|lease| Some(lease.spec.as_ref()?.renew_time.as_ref()?.0));
        let now = self.context.clock.now();
        let plan = decide::node(&NodeSeen { node: node.clone(), renewed, since: self.since, now });
        let look_at = plan.look_at;
        self.settle_node(&node, plan).await?;
        Ok(look_at.map_or(Outcome::Done, |at| again(now, at)))
    }

    async fn pod(&self, key: &Key) -> Result<Outcome, WriteError> {
        let Some(pod) = self.pods.get(key) else { return Ok(Outcome::Done) };
        let Some(name) = pod::node_name(&pod).map(ToOwned::to_owned) else { return Ok(Outcome::Done) };
        let node = self.nodes.named(&name);
        let now = self.context.clock.now();
        // Of a node that was never there, the pod is the first to tell.
        let since = *self.changed.lock().entry(name.clone()).or_insert(now);
        match decide::pod(&PodSeen { pod: pod.clone(), node, since, now }) {
            PodDecision::LookAt(at) => return Ok(again(now, at)),
            decision => self.settle_pod(&pod, &name, decision).await?,
        }
        Ok(Outcome::Done)
    }
}

fn again(now: Timestamp, at: Timestamp) -> Outcome {
    Outcome::RequeueAfter(Duration::try_from(at.duration_since(now)).unwrap_or_default())
}
