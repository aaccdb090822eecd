//! Generic ephemeral volumes: creates the claim for each volume of a pod that has a claim template.
//!
//! Guarantees: the claim has the one name that follows from pod and volume, and the pod is its controlling owner. A
//! claim of that name that the pod does not own is never used. The garbage collector deletes the claim with the pod.
//!
//! There is no state between reconciles and no crash point: a repeated create finds the claim that the first one
//! created.

mod act;
pub mod decide;
mod observe;

use cleat_api::key::Key;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Outcome, Queue, Recorder, work};
use tokio_util::sync::CancellationToken;

use crate::Context;
use observe::EphemeralObserver;

const MAX_CONCURRENT_PODS: usize = 32;

#[derive(Clone)]
struct EphemeralClaimCreator {
    context: Context,
    observer: EphemeralObserver,
    recorder: Recorder,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue: Queue<Key> = Queue::new(Backoff::default());
    let observer = EphemeralObserver::new(&context.caches);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observer.synced() => {}
    }
    subscribe(&observer, &queue);
    let recorder = Recorder::new(context.client.clone(), "ephemeral_volume", context.clock.clone());
    let creator = EphemeralClaimCreator { context, observer, recorder };
    work("ephemeral", queue, MAX_CONCURRENT_PODS, stop, move |key| creator.clone().reconcile(key)).await;
}

/// Queues a pod with ephemeral volumes when the pod or one of their claims changes.
fn subscribe(observer: &EphemeralObserver, queue: &Queue<Key>) {
    let q = queue.clone();
    observer.pods.subscribe(move |change| {
        if observe::ephemeral_claims(change.object()).next().is_some() {
            q.add(Key::of(&change.object().metadata));
        }
    });
    let (q, observed) = (queue.clone(), observer.clone());
    observer.claims.subscribe(move |change| {
        for pod in observed.pods_of(&Key::of(&change.object().metadata)) {
            q.add(Key::of(&pod.metadata));
        }
    });
}

impl EphemeralClaimCreator {
    async fn reconcile(self, key: Key) -> Result<Outcome, WriteError> {
        let Some(snapshot) = self.observer.pod(&key) else { return Ok(Outcome::Done) };
        for decision in decide::pod(&snapshot) {
            self.apply(&snapshot.pod, decision).await?;
        }
        Ok(Outcome::Done)
    }
}
