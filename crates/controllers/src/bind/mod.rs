//! The binder: claims and volumes find each other, once and both ways.
//!
//! Guarantees: a volume is never bound to two claims, and a claim never to two volumes. Both sides are written with
//! the revision they were read at; who loses a race sees a conflict, looks again and decides anew. A volume is released
//! only after a live look has shown that its claim is gone, and a claim is lost only after one at its volume.
//!
//! Assumes: the provisioner creates volumes already reserved for their claim, and deletes released ones.
//!
//! Crash points: a bind is up to four writes: the volume, its status, the claim, its status; the middle two at the same
//! time where the volume is held by its provisioner. Wherever it stops, the next look at the claim finds the volume reserved for it and goes on. `bind:volume-reserved`,
//! `bind:volume-bound` and `bind:claim-pointed` stand between the writes, `bind:provisioner-named` after the request
//! for provisioning.

mod act;
pub mod decide;
#[cfg(test)]
mod decide_table;
pub mod edit;
mod matching;
mod observe;
mod shelf;

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_api::key::Key;
use cleat_api::{claim, condition};
use cleat_runtime::write::{self, WriteError};
use cleat_runtime::{Backoff, Change, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use tokio_util::sync::CancellationToken;

use crate::Context;
use decide::{ClaimDecision, ClaimSeen};

const AT_ONCE: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Claim(Key),
    Volume(String),
    /// A volume of this class became free: every claim that waits for one looks again.
    Class(String),
}

/// What a binder is told about its surroundings.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Provisioners that hold a claim while a volume may be in the making for it: for these, the write that names them
    /// puts the hold on as well. Any other provisioner would not take it off.
    pub holding_provisioners: BTreeSet<String>,
}

#[derive(Clone)]
struct Binder {
    context: Context,
    observed: observe::Observed,
    recorder: Recorder,
    queue: Queue<Subject>,
}

/// Runs until `stop`.
pub async fn run(context: Context, options: Options, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let observed = observe::Observed::new(&context.caches, options);
    let recorder = Recorder::new(context.client.clone(), "persistentvolume-controller", context.clock.clone());
    // Nothing may be decided on half a picture: a volume not listed yet would look like no volume.
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    wake(&observed, &queue);
    let binder = Binder { context, observed, recorder, queue: queue.clone() };
    work("bind", queue, AT_ONCE, stop, move |subject| binder.clone().reconcile(subject)).await;
}

/// Who must look again when something changes. Most changes are the binder's own writes and leave nothing to do, and that
/// is soon told from the caches: who comes to rest is not woken. Whatever ends the rest is a change of its own.
fn wake(observed: &observe::Observed, queue: &Queue<Subject>) {
    let (q, seen) = (queue.clone(), observed.clone());
    observed.claims.subscribe(move |change: &Change<PersistentVolumeClaim>| {
        let claim = change.object();
        let key = Key::of(&claim.metadata);
        seen.volumes_of(change, &key).filter(|volume| !seen.volume_rests(volume)).for_each(|volume| {
            q.add(Subject::Volume(volume.metadata.name.clone().unwrap_or_default()));
        });
        if !seen.is_told(change) {
            q.add(Subject::Claim(key));
        }
    });
    let (q, seen) = (queue.clone(), observed.clone());
    observed.volumes.subscribe(move |change: &Change<PersistentVolume>| {
        let volume = change.object();
        let name = volume.metadata.name.clone().unwrap_or_default();
        for claim in seen.claims_of(volume).filter(|claim| !seen.claim_rests(claim)) {
            q.add(Subject::Claim(Key::of(&claim.metadata)));
        }
        if let Some(free) = seen.shelf.refresh(&name) {
            q.add(Subject::Class(claim::volume_class(&free).to_owned()));
        }
        if matches!(change, Change::Applied { .. }) && !seen.volume_rests(volume) {
            q.add(Subject::Volume(name));
        }
    });
    let q = queue.clone();
    observed.pods.subscribe(move |change: &Change<Pod>| {
        // A pod that fits nowhere is what its claims wait for; one that is about to be placed is not worth a word.
        let pod = change.object();
        if condition::pod_condition(pod, "PodScheduled").is_some_and(|c| c.status == "False") {
            observe::waiting_for(pod).for_each(|claim| q.add(Subject::Claim(claim)));
        }
    });
    let (q, claims) = (queue.clone(), observed.clone());
    observed.classes.subscribe(move |_| {
        for claim in claims.unbound() {
            q.add_low_priority(Subject::Claim(Key::of(&claim.metadata)));
        }
    });
}

impl Binder {
    async fn reconcile(self, subject: Subject) -> Result<Outcome, WriteError> {
        match subject {
            Subject::Claim(key) => {
                // It may have come to rest by what was done when it was last looked at.
                if self.observed.claims.get(&key).is_none_or(|claim| self.observed.claim_rests(&claim)) {
                    return Ok(Outcome::Done);
                }
                let Some((seen, _taken)) = self.observed.claim(&key, &self.queue) else { return Ok(Outcome::Done) };
                let mut decision = decide::claim(&seen);
                // The cache of volumes may be behind that of claims.
                if let (ClaimDecision::Lose(_), Some(name)) = (&decision, claim::volume_name(&seen.claim)) {
                    let named = write::get_live(&self.context.client, &Key::cluster(name)).await?.map(Arc::new);
                    decision = decide::claim(&ClaimSeen { named, ..seen.clone() });
                }
                self.settle_claim(&seen.claim, decision).await?;
            }
            Subject::Class(class) => {
                let waiting = self.observed.pending_of_class(&class);
                waiting.iter().for_each(|claim| self.queue.add_low_priority(Subject::Claim((**claim).clone())));
            }
            Subject::Volume(name) => {
                let Some(volume) = self.observed.volumes.named(&name) else { return Ok(Outcome::Done) };
                let mut decision = decide::volume(&volume, &self.observed.owner(&volume));
                // The cache of claims may be behind that of volumes: nothing is done on account of a claim it does not show.
                if !decision.is_rest() {
                    decision = decide::volume(&volume, &self.owner(&volume).await?);
                }
                self.settle_volume(&volume, decision).await?;
            }
        }
        Ok(Outcome::Done)
    }
}
