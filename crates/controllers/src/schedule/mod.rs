//! The scheduler: a pod without a node is given one.
//!
//! In this slice it knows one rule: where there is exactly one ready node, pods go there. With several nodes a pod
//! names its own. Pods that ask for another scheduler are left alone.
//!
//! Guarantees: a pod is bound once; the server refuses a second binding.

mod act;
pub mod decide;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Outcome, Queue, Recorder, work};
use tokio_util::sync::CancellationToken;

use crate::Context;

const AT_ONCE: usize = 32;

#[derive(Clone)]
struct Scheduler {
    context: Context,
    recorder: Recorder,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue: Queue<Key> = Queue::new(Backoff::default());
    let (pods, nodes) = (context.caches.pods(), context.caches.nodes());
    tokio::select! {
        () = stop.cancelled() => return,
        ((), ()) = async { tokio::join!(pods.synced(), nodes.synced()) } => {}
    }
    let q = queue.clone();
    pods.subscribe(move |change| q.add(Key::of(&change.object().metadata)));
    let (q, waiting) = (queue.clone(), pods.clone());
    nodes.subscribe(move |_| {
        for pod in waiting.all().iter().filter(|p| pod::node_name(p).is_none()) {
            q.add(Key::of(&pod.metadata));
        }
    });
    let recorder = Recorder::new(context.client.clone(), "default-scheduler", context.clock.clone());
    let scheduler = Scheduler { context, recorder };
    work("schedule", queue, AT_ONCE, stop, move |key| scheduler.clone().reconcile(key)).await;
}

impl Scheduler {
    async fn reconcile(self, key: Key) -> Result<Outcome, WriteError> {
        let Some(pod) = self.context.caches.pods().get(&key) else { return Ok(Outcome::Done) };
        if pod::node_name(&pod).is_some() {
            return Ok(Outcome::Done);
        }
        let nodes = self.context.caches.nodes().all();
        let decision = decide::decide(&pod, &nodes);
        self.settle(&pod, decision).await?;
        Ok(Outcome::Done)
    }
}
