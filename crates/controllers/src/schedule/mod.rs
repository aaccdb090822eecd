//! The scheduler: binds pods without a node to one that can run them and that their volumes reach.
//!
//! Guarantees:
//! - A pod is bound once, and only when each of its claims is bound to a volume that the node reaches.
//! - A decision about claims is written to the API before another component acts on it: the claim's reference on an
//!   existing volume, or the selected node on a claim to be provisioned. After a restart the decision is read from
//!   there.
//! - One task decides about all pods, one after another, on one state. So no two pods get the same resources or volume.
//! - A pod that no node can run gets the reasons, each with the number of nodes, and is tried again after a change that
//!   can resolve one of them.
//!
//! Assumes: the binder binds claims to volumes that are reserved for them, and sets the provisioner on claims with a
//! selected node; a provisioner that cannot create a volume for the node removes the selected node from the claim.
//!
//! Ignores pods with a node, with another `schedulerName` or with scheduling gates. Does not implement preemption,
//! affinity between pods and topology spread constraints.
//!
//! Crash points: `schedule:volume-reserved` after a volume's claimRef was written, `schedule:node-selected` after the
//! node was written to a claim, `schedule:pod-bound` after the binding.

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
use act::DecisionWriter;
use decide::{DecisionOutcome, ScheduleDecision, SchedulerState};
use observe::{ScheduleObserver, SchedulerWorkItem};

/// How many decisions are written concurrently.
const MAX_CONCURRENT_WRITES: usize = 128;
/// How many changes are applied to the state before the next decisions.
const MAX_CHANGES_PER_BATCH: usize = 512;
/// The backoff of a pod whose decision could not be written. It doubles with each failure in a row, up to
/// [`MAX_BACKOFF`].
const WRITE_BACKOFF: Duration = Duration::from_millis(10);
/// The backoff after a reservation was given up, instead of [`WRITE_BACKOFF`].
const RELEASE_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let observer = ScheduleObserver::new(&context.caches);
    // With incomplete lists, pods would be reported as unschedulable.
    tokio::select! {
        () = stop.cancelled() => return,
        () = observer.synced() => {}
    }
    let queue = Queue::new(Backoff::default());
    observer.subscribe(&queue);
    let recorder = Recorder::new(context.client.clone(), decide::SCHEDULER_NAME, context.clock.clone());
    let permits = Arc::new(Semaphore::new(MAX_CONCURRENT_WRITES));
    let scheduler = Scheduler {
        writer: DecisionWriter { context, observer, recorder, permits },
        queue,
        state: SchedulerState::default(),
        writes: JoinSet::new(),
        decisions: HashMap::new(),
        failures: HashMap::new(),
    };
    scheduler.run(stop).await;
}

/// The one task that owns the state and decides. Requests to the server run in tasks of their own.
struct Scheduler {
    writer: DecisionWriter,
    queue: Queue<SchedulerWorkItem>,
    state: SchedulerState,
    writes: JoinSet<DecisionOutcome>,
    /// The decision that each task of `writes` writes.
    decisions: HashMap<Id, (Key, ScheduleDecision)>,
    /// The number of failures in a row, by pod.
    failures: HashMap<Key, u32>,
}

impl Scheduler {
    async fn run(mut self, stop: CancellationToken) {
        // All existing objects come first: resources of a pod that is not in the state yet would count as free.
        while !self.queue.is_empty() {
            let item = self.queue.next().await;
            self.apply_change(&item);
        }
        loop {
            let now = self.writer.context.clock.now();
            let next_expiry = self.state.expire_reservations(now);
            self.decide(now);
            let until_expiry = next_expiry.and_then(|expiry| expiry.duration_since(now).try_into().ok());
            let until_expiry: Duration = until_expiry.unwrap_or(Duration::MAX);
            tokio::select! {
                () = stop.cancelled() => break,
                item = self.queue.next() => self.apply_changes(item).await,
                Some(ended) = self.writes.join_next_with_id() => self.record_outcome(ended),
                () = tokio::time::sleep(until_expiry) => {}
            }
        }
        while self.writes.join_next().await.is_some() {}
    }

    /// Applies this change and those queued behind it, up to [`MAX_CHANGES_PER_BATCH`], so that many changes cost one
    /// round of decisions.
    async fn apply_changes(&mut self, first: SchedulerWorkItem) {
        let mut next = Some(first);
        let mut applied = 0;
        while let Some(item) = next.take() {
            self.apply_change(&item);
            applied += 1;
            if applied < MAX_CHANGES_PER_BATCH && !self.queue.is_empty() {
                next = Some(self.queue.next().await);
            }
        }
    }

    fn apply_change(&mut self, item: &SchedulerWorkItem) {
        self.writer.observer.update_state(&mut self.state, item);
        self.queue.done(item);
        if let SchedulerWorkItem::Pod(key) = item
            && self.writer.observer.pods.get(key).is_none()
        {
            self.failures.remove(key);
        }
    }

    fn decide(&mut self, now: Timestamp) {
        while let Some((pod, decision)) = self.state.next_decision(now) {
            if !matches!(decision, ScheduleDecision::AwaitVolumes) {
                self.start_write(pod, decision);
            }
        }
    }

    fn start_write(&mut self, pod: Arc<Pod>, decision: ScheduleDecision) {
        let key = Key::of(&pod.metadata);
        let writer = self.writer.clone();
        let span = info_span!("reconcile", controller = "schedule", pod = %key);
        let written = decision.clone();
        let work = async move {
            let _permit = writer.permits.acquire().await;
            match writer.write(&pod, &written).await {
                Ok(()) => DecisionOutcome::Done,
                Err(error) if error.is_conflict() => {
                    debug!(%error, "decision not written: an object has changed");
                    DecisionOutcome::Failed
                }
                Err(error) => {
                    warn!(%error, "decision not written");
                    DecisionOutcome::Failed
                }
            }
        };
        let task = self.writes.spawn(work.instrument(span));
        self.decisions.insert(task.id(), (key, decision));
    }

    fn record_outcome(&mut self, ended: Result<(Id, DecisionOutcome), JoinError>) {
        // A task that panicked counts as failed, so that its pod does not stay in flight for ever.
        let (id, outcome) = ended.unwrap_or_else(|error| (error.id(), DecisionOutcome::Failed));
        let Some((pod, decision)) = self.decisions.remove(&id) else { return };
        self.state.complete(&pod, &decision, outcome);
        let backoff = match (&decision, outcome) {
            (ScheduleDecision::ReleaseNode { .. }, _) => RELEASE_BACKOFF,
            (_, DecisionOutcome::Failed) => WRITE_BACKOFF,
            (ScheduleDecision::Bind { .. } | ScheduleDecision::MarkUnschedulable(_), DecisionOutcome::Done) => {
                self.failures.remove(&pod);
                return;
            }
            (ScheduleDecision::Reserve { .. } | ScheduleDecision::AwaitVolumes, DecisionOutcome::Done) => return,
        };
        let failures = self.failures.entry(pod.clone()).or_default();
        let delay = backoff.saturating_mul(1 << (*failures).min(10)).min(MAX_BACKOFF);
        *failures += 1;
        self.queue.add_after(SchedulerWorkItem::Retry(pod), delay);
    }
}
