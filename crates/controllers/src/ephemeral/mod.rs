//! Generic ephemeral volumes: a pod that brings a claim template gets a claim of its own.
//!
//! Guarantees: a claim is made under the one name that pod and volume give it, owned by the pod; one of that name that
//! belongs to somebody else is never adopted. Its end is the garbage collector's: it goes with its owner.

mod act;
pub mod decide;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;

use crate::Context;

const AT_ONCE: usize = 32;

#[derive(Clone)]
struct Maker {
    context: Context,
    recorder: Recorder,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue: Queue<Key> = Queue::new(Backoff::default());
    let (pods, claims) = (context.caches.pods(), context.caches.claims());
    let by_claim = pods.index(|p| ephemeral_claims(p).map(|claim| claim.to_string()).collect());
    tokio::select! {
        () = stop.cancelled() => return,
        ((), ()) = async { tokio::join!(pods.synced(), claims.synced()) } => {}
    }
    let q = queue.clone();
    pods.subscribe(move |change| {
        if ephemeral_claims(change.object()).next().is_some() {
            q.add(Key::of(&change.object().metadata));
        }
    });
    let q = queue.clone();
    claims.subscribe(move |change| {
        for pod in by_claim.get(&Key::of(&change.object().metadata).to_string()) {
            q.add(Key::of(&pod.metadata));
        }
    });
    let recorder = Recorder::new(context.client.clone(), "ephemeral_volume", context.clock.clone());
    let maker = Maker { context, recorder };
    work("ephemeral", queue, AT_ONCE, stop, move |key| maker.clone().reconcile(key)).await;
}

fn ephemeral_claims(pod: &Pod) -> impl Iterator<Item = Key> {
    pod::claim_volumes(pod).into_iter().filter(|v| v.ephemeral).map(|v| v.claim)
}

impl Maker {
    async fn reconcile(self, key: Key) -> Result<Outcome, WriteError> {
        let Some(pod) = self.context.caches.pods().get(&key) else { return Ok(Outcome::Done) };
        let claims = self.context.caches.claims();
        for decision in decide::decide(&pod, |claim| claims.get(claim)) {
            self.settle(&pod, decision).await?;
        }
        Ok(Outcome::Done)
    }
}
