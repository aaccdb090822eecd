//! Takes keys from a queue and reconciles several keys concurrently, each key by one task at a time.

use std::fmt::Display;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info_span, warn};

use crate::metrics::{ControllerMetrics, ReconcileResult};
use crate::queue::{Queue, QueueKey};
use crate::write::WriteError;

/// The result of a successful reconcile.
#[derive(Debug)]
pub enum Outcome {
    /// Nothing is left to do until an object changes.
    Done,
    /// Reconcile the key again after this long, even if nothing changes.
    RequeueAfter(Duration),
}

/// Runs `reconcile` for each key until `stop` is cancelled, then waits for the running reconciles.
///
/// At most `max_concurrent` reconciles run at the same time, fewer while the server is overloaded. After an error the key is
/// queued again, with the delay and log level of the error's [`Severity`].
pub async fn work<K, E, F, Fut>(
    name: &'static str,
    queue: Queue<K>,
    max_concurrent: usize,
    stop: CancellationToken,
    reconcile: F,
) where
    K: QueueKey,
    E: Display + Send + 'static,
    F: Fn(K) -> Fut,
    Fut: Future<Output = Result<Outcome, E>> + Send + 'static,
    for<'a> &'a E: Into<Severity>,
{
    let metrics = ControllerMetrics::of(name);
    let limit = ConcurrencyLimit::new(max_concurrent);
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        while running.len() >= limit.current() {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = running.join_next() => {}
            }
        }
        let (key, waited) = tokio::select! {
            () = stop.cancelled() => break,
            next = queue.next_with_age() => next,
        };
        metrics.reconcile_started(waited, queue.len());
        let span = info_span!("reconcile", controller = name, key = ?key);
        // Boxed because a reconcile is a large future, which would be moved several times otherwise.
        let task = Box::pin(reconcile(key.clone()));
        let item = WorkItem { queue: queue.clone(), key, is_finished: false };
        let (metrics, limit) = (metrics.clone(), limit.clone());
        running.spawn(
            async move {
                let started = Instant::now();
                let result = finish(item, task.await);
                limit.record(result);
                metrics.reconcile_ended(result, started.elapsed());
            }
            .instrument(span),
        );
    }
    while running.join_next().await.is_some() {}
}

/// The number of reconciles that may run at the same time. It is halved whenever the server is overloaded, and grows by one,
/// up to the maximum, after as many successes as it allows reconciles.
#[derive(Clone)]
struct ConcurrencyLimit {
    max: usize,
    state: Arc<Mutex<LimitState>>,
}

struct LimitState {
    current: usize,
    /// Successful reconciles since `current` has changed.
    successes: usize,
}

impl ConcurrencyLimit {
    fn new(max: usize) -> Self {
        Self { max, state: Arc::new(Mutex::new(LimitState { current: max, successes: 0 })) }
    }

    fn current(&self) -> usize {
        self.state.lock().current
    }

    fn record(&self, result: ReconcileResult) {
        let mut state = self.state.lock();
        let LimitState { current, successes } = &mut *state;
        match result {
            ReconcileResult::Overloaded => (*current, *successes) = ((*current / 2).max(1), 0),
            ReconcileResult::Done if *current < self.max => {
                *successes += 1;
                if *successes >= *current {
                    (*current, *successes) = (*current + 1, 0);
                }
            }
            ReconcileResult::Done | ReconcileResult::Conflicted | ReconcileResult::Failed => {}
        }
    }
}

/// The kind of a reconcile error: it determines when the key is reconciled again and how the error is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Another component wrote first: retried as soon as the watch can have delivered the newer state.
    Conflict,
    /// The server is overloaded: retried after the backoff, and once more after the delay that the server asks for if that is
    /// longer. Fewer reconciles run at the same time.
    Overload(Option<Duration>),
    /// Retried with backoff, logged for debugging only.
    Expected,
    /// Retried with backoff, logged as a warning.
    Warning,
}

impl From<&WriteError> for Severity {
    fn from(error: &WriteError) -> Self {
        match error.overload() {
            Some(delay) => Self::Overload(delay),
            None if error.is_conflict() => Self::Conflict,
            None => Self::Warning,
        }
    }
}

/// Returns the key to the queue according to the result.
fn finish<K: QueueKey, E: Display>(item: WorkItem<K>, result: Result<Outcome, E>) -> ReconcileResult
where
    for<'a> &'a E: Into<Severity>,
{
    match result {
        Ok(Outcome::Done) => {
            item.done();
            ReconcileResult::Done
        }
        Ok(Outcome::RequeueAfter(delay)) => {
            item.queue.add_after(item.key.clone(), delay);
            item.done();
            ReconcileResult::Done
        }
        Err(error) => match (&error).into() {
            Severity::Conflict => {
                let retry_in = item.conflicted();
                debug!(%error, ?retry_in, "conflict: another component wrote first");
                ReconcileResult::Conflicted
            }
            Severity::Overload(delay) => {
                let (queue, key) = (item.queue.clone(), item.key.clone());
                let retry_in = item.failed();
                // Two retries: if the one after the backoff succeeds, the later one finds nothing to do.
                if let Some(delay) = delay.filter(|delay| *delay > retry_in) {
                    queue.add_after(key, delay);
                }
                warn!(%error, ?retry_in, "the API server is overloaded");
                ReconcileResult::Overloaded
            }
            Severity::Expected => {
                let retry_in = item.failed();
                debug!(%error, ?retry_in, "reconcile failed as expected");
                ReconcileResult::Failed
            }
            Severity::Warning => {
                let retry_in = item.failed();
                warn!(%error, ?retry_in, "reconcile failed");
                ReconcileResult::Failed
            }
        },
    }
}

/// A key that is being reconciled. Dropped without a result, as by a panic, it counts as failed: the key must not stay marked as
/// running.
struct WorkItem<K: QueueKey> {
    queue: Queue<K>,
    key: K,
    is_finished: bool,
}

impl<K: QueueKey> WorkItem<K> {
    fn done(mut self) {
        self.is_finished = true;
        self.queue.done(&self.key);
    }

    fn conflicted(mut self) -> Duration {
        self.is_finished = true;
        self.queue.conflicted(&self.key)
    }

    fn failed(mut self) -> Duration {
        self.is_finished = true;
        self.queue.failed(&self.key)
    }
}

impl<K: QueueKey> Drop for WorkItem<K> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.queue.failed(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::Backoff;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test(start_paused = true)]
    async fn a_panicking_reconcile_is_retried() {
        let queue = Queue::new(Backoff::default());
        let stop = CancellationToken::new();
        let tries = Arc::new(AtomicUsize::new(0));
        queue.add("a");
        let (count, end) = (tries.clone(), stop.clone());
        work("test", queue, 2, stop, move |_| {
            let (count, end) = (count.clone(), end.clone());
            async move {
                assert!(count.fetch_add(1, Ordering::SeqCst) > 0, "the first run panics");
                end.cancel();
                Ok::<_, WriteError>(Outcome::Done)
            }
        })
        .await;
        assert_eq!(tries.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn an_overloaded_server_gets_fewer_concurrent_reconciles() {
        let limit = ConcurrencyLimit::new(8);
        limit.record(ReconcileResult::Overloaded);
        limit.record(ReconcileResult::Overloaded);
        assert_eq!(limit.current(), 2);
        for _ in 0..3 {
            limit.record(ReconcileResult::Overloaded);
        }
        assert_eq!(limit.current(), 1, "the limit is never below one");
        // From 1 to 2 after one success, to 3 after two more, to 4 after three more.
        for _ in 0..1 + 2 + 3 {
            limit.record(ReconcileResult::Done);
        }
        limit.record(ReconcileResult::Failed);
        assert_eq!(limit.current(), 4);
        for _ in 0..100 {
            limit.record(ReconcileResult::Done);
        }
        assert_eq!(limit.current(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn the_maximum_number_of_reconciles_run_concurrently() {
        let queue = Queue::new(Backoff::default());
        (0..20).for_each(|key| queue.add(key));
        let stop = CancellationToken::new();
        let (running, max_running, done) =
            (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (n, m, d, end) = (running.clone(), max_running.clone(), done.clone(), stop.clone());
        work("test", queue, 3, stop, move |_| {
            let (n, m, d, end) = (n.clone(), m.clone(), d.clone(), end.clone());
            async move {
                m.fetch_max(n.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_secs(1)).await;
                n.fetch_sub(1, Ordering::SeqCst);
                if d.fetch_add(1, Ordering::SeqCst) == 19 {
                    end.cancel();
                }
                Ok::<_, WriteError>(Outcome::Done)
            }
        })
        .await;
        assert_eq!((done.load(Ordering::SeqCst), max_running.load(Ordering::SeqCst)), (20, 3));
    }
}
