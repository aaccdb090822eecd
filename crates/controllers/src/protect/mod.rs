//! Protection: a claim that a pod uses, a volume that is bound, and attributes that are in use do not vanish.
//!
//! Guarantees: the protection finalizer leaves a claim only after a live look at the pods of its namespace, and with the
//! revision the claim was read at; it leaves a volume only when it is not bound, and a class of attributes
//! only after a live look at claims and volumes.
//!
//! Besides, a bound claim's condition `Unused` says whether pods use it. The binder says so first, with the write that
//! makes the claim Bound.

mod act;
pub mod decide;
mod observe;

use cleat_api::key::Key;
use cleat_api::pod;
use cleat_runtime::write::WriteError;
use cleat_runtime::{Backoff, Change, Outcome, Queue, work};
use tokio_util::sync::CancellationToken;

use crate::Context;

const AT_ONCE: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Claim(Key),
    Volume(String),
    Attributes(String),
}

#[derive(Clone)]
struct Protector {
    context: Context,
    observed: observe::Observed,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let observed = observe::Observed::new(&context.caches);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    wake(&observed, &queue);
    let protector = Protector { context, observed };
    work("protect", queue, AT_ONCE, stop, move |subject| protector.clone().reconcile(subject)).await;
}

fn wake(observed: &observe::Observed, queue: &Queue<Subject>) {
    // Most changes of claims and volumes are nothing to protection, and whether they are is soon told. What is gone needs none.
    let (q, seen) = (queue.clone(), observed.clone());
    observed.claims.subscribe(move |change| {
        let Change::Applied { new: claim, .. } = change else { return };
        let key = Key::of(&claim.metadata);
        let users = seen.users(&key);
        if decide::claim(claim, &users).is_work() || decide::usage(claim, &users).is_some() {
            q.add(Subject::Claim(key));
        }
    });
    let q = queue.clone();
    observed.volumes.subscribe(move |change| {
        let Change::Applied { new: volume, .. } = change else { return };
        if decide::volume(volume).is_work() {
            q.add(Subject::Volume(volume.metadata.name.clone().unwrap_or_default()));
        }
    });
    let q = queue.clone();
    observed.attributes.subscribe(move |change| {
        q.add(Subject::Attributes(change.object().metadata.name.clone().unwrap_or_default()));
    });
    // Whoever stops using attributes does not say which; few classes are being deleted at any time.
    let (q, ending) = (queue.clone(), observed.clone());
    observed.claims.subscribe(move |_| ending.ending_attributes().for_each(|name| q.add(Subject::Attributes(name))));
    let (q, ending) = (queue.clone(), observed.clone());
    observed.volumes.subscribe(move |_| ending.ending_attributes().for_each(|name| q.add(Subject::Attributes(name))));
    let q = queue.clone();
    observed.pods.subscribe(move |change| {
        for volume in pod::claim_volumes(change.object()) {
            q.add(Subject::Claim(volume.claim));
        }
    });
}

impl Protector {
    async fn reconcile(self, subject: Subject) -> Result<Outcome, WriteError> {
        match subject {
            Subject::Claim(key) => {
                let Some(claim) = self.observed.claims.get(&key) else { return Ok(Outcome::Done) };
                let users = self.observed.users(&key);
                let decision = decide::claim(&claim, &users);
                let outcome = self.settle_claim(&claim, decision).await?;
                if let Some(in_use) = decide::usage(&claim, &users) {
                    self.tell(&claim, in_use).await?;
                }
                return Ok(outcome);
            }
            Subject::Volume(name) => {
                let Some(volume) = self.observed.volumes.named(&name) else { return Ok(Outcome::Done) };
                let decision = decide::volume(&volume);
                self.settle_volume(&volume, decision).await?;
            }
            Subject::Attributes(name) => self.attributes(&name).await?,
        }
        Ok(Outcome::Done)
    }

    async fn attributes(&self, name: &str) -> Result<(), WriteError> {
        let Some(class) = self.observed.attributes.named(name) else { return Ok(()) };
        let decision = decide::attributes(&class, &self.observed.claims.all(), &self.observed.volumes.all());
        self.settle_attributes(&class, decision).await
    }
}
