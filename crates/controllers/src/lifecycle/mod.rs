//! The node lifecycle controller: marks nodes that stop reporting, evicts pods from them, and removes pods of missing
//! nodes.
//!
//! - A node that neither renews its Lease nor updates its status becomes Unknown. A node that is not ready, unreachable
//!   or cordoned gets the corresponding taints.
//! - A pod that was ready when its node stopped being ready is marked not ready.
//! - A pod that does not tolerate, or no longer tolerates, a `NoExecute` taint of its node is deleted with its grace
//!   period. The node terminates it if it can.
//! - Pods whose node does not exist are deleted without a grace period. So are pods that are being deleted on a node
//!   that an administrator has tainted out-of-service: no node agent would ever confirm that they have terminated.
//!
//! Guarantees: a pod is deleted without a grace period because of a missing node only after a live read has shown that
//! the Node does not exist. Silence of a node before this process started does not count.
//!
//! Volumes attached to such nodes are detached by the attach/detach controller.
//!
//! There is no crash point: each write is complete in itself and is repeated if it is lost.

mod act;
pub mod decide;
mod memory;
mod observe;

use std::time::Duration;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Change, Outcome, Queue, Recorder, work};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use tokio_util::sync::CancellationToken;

use crate::Context;
use decide::{LifecycleNodeSnapshot, LifecyclePodDecision, LifecyclePodSnapshot};
use memory::NodeTimes;
use observe::{LifecycleObserver, NODE_LEASE_NAMESPACE};

const MAX_CONCURRENT_RECONCILES: usize = 32;

/// The key of one unit of work.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LifecycleKey {
    Node(String),
    Pod(Key),
}

#[derive(Clone)]
struct LifecycleController {
    context: Context,
    observer: LifecycleObserver,
    node_times: NodeTimes,
    recorder: Recorder,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let controller = LifecycleController {
        observer: LifecycleObserver::new(&context.caches),
        node_times: NodeTimes::new(context.clock.now()),
        recorder: Recorder::new(context.client.clone(), "node-controller", context.clock.clone()),
        context,
    };
    tokio::select! {
        () = stop.cancelled() => return,
        () = controller.observer.synced() => {}
    }
    controller.subscribe(&queue);
    work("lifecycle", queue, MAX_CONCURRENT_RECONCILES, stop, move |key| controller.clone().reconcile(key)).await;
}

impl LifecycleController {
    /// Queues a pod for its own changes and those of its node, and a node for its own changes and those of its Lease.
    fn subscribe(&self, queue: &Queue<LifecycleKey>) {
        let q = queue.clone();
        self.observer.pods.subscribe(move |change| q.add(LifecycleKey::Pod(Key::of(&change.object().metadata))));
        let (q, observed) = (queue.clone(), self.observer.clone());
        let (node_times, clock) = (self.node_times.clone(), self.context.clock.clone());
        self.observer.nodes.subscribe(move |change| {
            let name = change.object().metadata.name.clone().unwrap_or_default();
            if changes_existence_or_taints(change) {
                node_times.record_change(&name, clock.now());
            }
            for pod in observed.pods_on(&name) {
                q.add(LifecycleKey::Pod(Key::of(&pod.metadata)));
            }
            q.add(LifecycleKey::Node(name));
        });
        let q = queue.clone();
        self.observer.leases.subscribe(move |change| {
            let meta = &change.object().metadata;
            if meta.namespace.as_deref() == Some(NODE_LEASE_NAMESPACE) {
                q.add(LifecycleKey::Node(meta.name.clone().unwrap_or_default()));
            }
        });
    }

    async fn reconcile(self, key: LifecycleKey) -> Result<Outcome, WriteError> {
        match key {
            LifecycleKey::Node(name) => self.reconcile_node(&name).await,
            LifecycleKey::Pod(key) => self.reconcile_pod(&key).await,
        }
    }

    async fn reconcile_node(&self, name: &str) -> Result<Outcome, WriteError> {
        let Some(node) = self.observer.nodes.named(name) else { return Ok(Outcome::Done) };
        let now = self.context.clock.now();
        let plan = decide::node(&LifecycleNodeSnapshot {
            node: node.clone(),
            lease_renewed_at: self.observer.lease_renewed_at(name),
            watched_since: self.node_times.started_at(),
            now,
        });
        let recheck_at = plan.recheck_at;
        self.apply_to_node(&node, plan).await?;
        Ok(recheck_at.map_or(Outcome::Done, |at| recheck(now, at)))
    }

    async fn reconcile_pod(&self, key: &Key) -> Result<Outcome, WriteError> {
        let Some(pod) = self.observer.pods.get(key) else { return Ok(Outcome::Done) };
        let Some(node_name) = pod::node_name(&pod).map(ToOwned::to_owned) else { return Ok(Outcome::Done) };
        let node = self.observer.nodes.named(&node_name);
        let now = self.context.clock.now();
        let node_changed_at = self.node_times.changed_at(&node_name, now);
        let decision = decide::pod(&LifecyclePodSnapshot { pod: pod.clone(), node, node_changed_at, now });
        if let LifecyclePodDecision::RecheckAt(at) = decision {
            return Ok(recheck(now, at));
        }
        // The cache may not show a Node that was created a moment ago. Its event will queue the pod again.
        if decision == LifecyclePodDecision::DeleteOrphaned && self.node_exists(&node_name).await? {
            return Ok(Outcome::Done);
        }
        self.apply_to_pod(&pod, &node_name, decision).await?;
        Ok(Outcome::Done)
    }
}

fn changes_existence_or_taints(change: &Change<Node>) -> bool {
    let taints = |node: &Node| node.spec.as_ref().and_then(|s| s.taints.clone());
    match change {
        Change::Applied { old, new } => old.as_ref().is_none_or(|old| taints(old) != taints(new)),
        Change::Deleted(_) => true,
    }
}

fn recheck(now: Timestamp, at: Timestamp) -> Outcome {
    Outcome::RequeueAfter(Duration::try_from(at.duration_since(now)).unwrap_or_default())
}
