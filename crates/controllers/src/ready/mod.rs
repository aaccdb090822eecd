//! Readiness: a node is created with a taint that keeps pods away, and loses it once it says that it is ready.
//!
//! Guarantees: nothing else in the node's list of taints changes, whoever writes it meanwhile. The taint does not come
//! back by this controller: whether a node that was ready takes pods is told by its condition.

mod act;
pub mod decide;

use cleat_api::key::Key;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Outcome, Queue, work};
use tokio_util::sync::CancellationToken;

use crate::Context;

const AT_ONCE: usize = 8;

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue: Queue<Key> = Queue::new(Backoff::default());
    let nodes = context.caches.nodes();
    tokio::select! {
        () = stop.cancelled() => return,
        () = nodes.synced() => {}
    }
    let q = queue.clone();
    nodes.subscribe(move |change| {
        if decide::decide(change.object()).is_some() {
            q.add(Key::of(&change.object().metadata));
        }
    });
    work("ready", queue, AT_ONCE, stop, move |key| reconcile(context.clone(), key)).await;
}

async fn reconcile(context: Context, key: Key) -> Result<Outcome, WriteError> {
    let Some(node) = context.caches.nodes().get(&key) else { return Ok(Outcome::Done) };
    if let Some(taints) = decide::decide(&node) {
        act::write(&context, &node, &taints).await?;
    }
    Ok(Outcome::Done)
}
