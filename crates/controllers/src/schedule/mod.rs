//! The scheduler: a pod without a node is given one where its volumes can be.
//!
//! Guarantees:
//! - A pod is bound once, and only when every claim of it is bound to a volume that its node reaches.
//! - What is chosen for a claim is on the objects before anybody acts on it: the claim on the volume that was set aside, or the
//!   node on the claim that is to be provisioned. After a restart the choice is found there.
//! - Pods are decided about one after another in one picture, so that none is given what another was given just before.
//! - A pod that fits nowhere says why, per reason with the number of nodes, and is looked at again when something of that kind
//!   changes.
//!
//! Assumes: the binder binds claims to volumes that are set aside for them, and names the provisioner on claims that
//! name a node; a provisioner that cannot serve the node takes its name off the claim.
//!
//! Leaves alone: pods with a node, with another `schedulerName` or with scheduling gates. Does not preempt, and knows no
//! affinity between pods and no topology spread.
//!
//! Crash points: `schedule:volume-reserved` after a volume was set aside, `schedule:node-selected` after the node was written
//! on a claim, `schedule:pod-bound` after the binding.

mod act;
pub mod decide;
mod observe;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::key::Key;
use cleat_runtime::{Backoff, Queue, Recorder};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::Semaphore;
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info_span, warn};

use crate::Context;
use decide::{Decision, Outcome, World};
use observe::{Observed, Subject};

const AT_ONCE: usize = 128;
/// How many changes are taken in before pods are decided about.
const TAKEN_IN: usize = 512;
/// How long a pod rests after a lost race, at first; doubling to the longest.
const REST: Duration = Duration::from_millis(10);
/// The same after a provisioner gave its node back, or its volumes did not come in time.
const LONG_REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(10);

#[derive(Clone)]
struct Scheduler {
    context: Context,
    observed: Observed,
    recorder: Recorder,
    places: Arc<Semaphore>,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let observed = Observed::new(&context.caches);
    // A node or a volume that is not listed yet would look like none.
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    let queue = Queue::new(Backoff::default());
    observed.follow(&queue);
    let recorder = Recorder::new(context.client.clone(), decide::SCHEDULER, context.clock.clone());
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let scheduler = Scheduler { context, observed, recorder, places };
    let desk = Desk {
        scheduler,
        queue,
        world: World::default(),
        acting: JoinSet::new(),
        decisions: HashMap::new(),
        failures: HashMap::new(),
    };
    desk.work(stop).await;
}

/// The one task that decides. Whatever waits for the server runs beside it.
struct Desk {
    scheduler: Scheduler,
    queue: Queue<Subject>,
    world: World,
    acting: JoinSet<Outcome>,
    /// Which decision each task carries out.
    decisions: HashMap<Id, (Key, Decision)>,
    /// How often in a row a pod's decision could not be carried out.
    failures: HashMap<Key, u32>,
}

impl Desk {
    async fn work(mut self, stop: CancellationToken) {
        // Everything that is there, before anybody is placed: a pod not taken in yet would take no room.
        while !self.queue.is_empty() {
            let subject = self.queue.next().await;
            self.note_change(&subject);
        }
        loop {
            let now = self.scheduler.context.clock.now();
            let next_end = self.world.expire(now);
            self.decide(now);
            let rest = next_end.and_then(|end| end.duration_since(now).try_into().ok());
            let rest: Duration = rest.unwrap_or(Duration::MAX);
            tokio::select! {
                () = stop.cancelled() => break,
                subject = self.queue.next() => self.take_in(subject).await,
                Some(ended) = self.acting.join_next_with_id() => self.note(ended),
                () = tokio::time::sleep(rest) => {}
            }
        }
        while self.acting.join_next().await.is_some() {}
    }

    /// Takes in what has changed, this and what else is there, so that a storm is one picture and not a thousand.
    async fn take_in(&mut self, first: Subject) {
        let mut next = Some(first);
        let mut taken = 0;
        while let Some(subject) = next.take() {
            self.note_change(&subject);
            taken += 1;
            if taken < TAKEN_IN && !self.queue.is_empty() {
                next = Some(self.queue.next().await);
            }
        }
    }

    fn note_change(&mut self, subject: &Subject) {
        self.scheduler.observed.take_in(&mut self.world, subject);
        self.queue.done(subject);
        if let Subject::Pod(key) = subject
            && self.scheduler.observed.pods.get(key).is_none()
        {
            self.failures.remove(key);
        }
    }

    fn decide(&mut self, now: Timestamp) {
        while let Some((pod, decision)) = self.world.next(now) {
            if !matches!(decision, Decision::Await) {
                self.act(pod, decision);
            }
        }
    }

    fn act(&mut self, pod: Arc<Pod>, decision: Decision) {
        let key = Key::of(&pod.metadata);
        let scheduler = self.scheduler.clone();
        let span = info_span!("reconcile", controller = "schedule", pod = %key);
        let carried_out = decision.clone();
        let work = async move {
            let _place = scheduler.places.acquire().await;
            match scheduler.settle(&pod, &carried_out).await {
                Ok(()) => Outcome::Done,
                Err(error) if error.is_conflict() => {
                    debug!(%error, "someone else wrote first");
                    Outcome::Failed
                }
                Err(error) => {
                    warn!(%error, "decision not carried out");
                    Outcome::Failed
                }
            }
        };
        let task = self.acting.spawn(work.instrument(span));
        self.decisions.insert(task.id(), (key, decision));
    }

    fn note(&mut self, ended: Result<(Id, Outcome), JoinError>) {
        // A task that panicked counts as failed: its pod must not stay locked.
        let (id, outcome) = ended.unwrap_or_else(|error| (error.id(), Outcome::Failed));
        let Some((pod, decision)) = self.decisions.remove(&id) else { return };
        self.world.finished(&pod, &decision, outcome);
        let first = match (&decision, outcome) {
            (Decision::GiveUp { .. }, _) => LONG_REST,
            (_, Outcome::Failed) => REST,
            (Decision::Bind { .. } | Decision::Wait(_), Outcome::Done) => {
                self.failures.remove(&pod);
                return;
            }
            (Decision::Reserve { .. } | Decision::Await, Outcome::Done) => return,
        };
        let times = self.failures.entry(pod.clone()).or_default();
        let rest = first.saturating_mul(1 << (*times).min(10)).min(LONGEST_REST);
        *times += 1;
        self.queue.add_after(Subject::Retry(pod), rest);
    }
}
