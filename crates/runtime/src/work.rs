//! Takes keys from a queue and runs one reconcile per key, many keys at a time.

use std::fmt::Display;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info_span, warn};

use crate::metrics::{self, Meter};
use crate::queue::{Queue, QueueKey};
use crate::write::WriteError;

/// What one reconcile of one key came to.
#[derive(Debug)]
pub enum Outcome {
    /// Nothing left to do until something changes.
    Done,
    /// Look again after this long, though nothing failed.
    Again(Duration),
}

/// Runs `reconcile` for each key until `stop`; then waits for those under way.
///
/// An error puts the key back with backoff. A conflict is not worth a warning: someone else wrote first, and the
/// watch brings the newer state.
pub async fn work<K, E, F, Fut>(
    name: &'static str,
    queue: Queue<K>,
    at_once: usize,
    stop: CancellationToken,
    reconcile: F,
) where
    K: QueueKey,
    E: Display + Send + 'static,
    F: Fn(K) -> Fut,
    Fut: Future<Output = Result<Outcome, E>> + Send + 'static,
    for<'a> &'a E: Into<Severity>,
{
    let meter = Meter::of(name);
    let places = Arc::new(Semaphore::new(at_once));
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        let (key, waited) = tokio::select! {
            () = stop.cancelled() => break,
            next = queue.next_with_age() => next,
        };
        meter.taken(waited, queue.len());
        let place = tokio::select! {
            () = stop.cancelled() => break,
            place = places.clone().acquire_owned() => place,
        };
        let span = info_span!("reconcile", controller = name, key = ?key);
        let task = reconcile(key.clone());
        let turn = Turn { queue: queue.clone(), key, finished: false };
        let meter = meter.clone();
        running.spawn(
            async move {
                let begun = Instant::now();
                let result = settle(turn, task.await);
                meter.ended(result, begun.elapsed());
                drop(place);
            }
            .instrument(span),
        );
    }
    while running.join_next().await.is_some() {}
}

/// How loudly a failed reconcile is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    Expected,
    Warning,
}

impl From<&WriteError> for Severity {
    fn from(error: &WriteError) -> Self {
        if error.is_conflict() { Self::Expected } else { Self::Warning }
    }
}

fn settle<K: QueueKey, E: Display>(turn: Turn<K>, result: Result<Outcome, E>) -> metrics::Result
where
    for<'a> &'a E: Into<Severity>,
{
    match result {
        Ok(Outcome::Done) => {
            turn.done();
            metrics::Result::Done
        }
        Ok(Outcome::Again(delay)) => {
            turn.queue.add_after(turn.key.clone(), delay);
            turn.done();
            metrics::Result::Done
        }
        Err(error) => match (&error).into() {
            Severity::Expected => {
                let retry_in = turn.conflicted();
                debug!(%error, ?retry_in, "someone else wrote first");
                metrics::Result::Conflicted
            }
            Severity::Warning => {
                let retry_in = turn.failed();
                warn!(%error, ?retry_in, "reconcile failed");
                metrics::Result::Failed
            }
        },
    }
}

/// Holds a key while it is worked on. A reconcile that panics counts as failed: the key must not stay locked.
struct Turn<K: QueueKey> {
    queue: Queue<K>,
    key: K,
    finished: bool,
}

impl<K: QueueKey> Turn<K> {
    fn done(mut self) {
        self.finished = true;
        self.queue.done(&self.key);
    }

    fn conflicted(mut self) -> Duration {
        self.finished = true;
        self.queue.conflicted(&self.key)
    }

    fn failed(mut self) -> Duration {
        self.finished = true;
        self.queue.failed(&self.key)
    }
}

impl<K: QueueKey> Drop for Turn<K> {
    fn drop(&mut self) {
        if !self.finished {
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
    async fn a_panicking_reconcile_is_tried_again() {
        let queue = Queue::new(Backoff::default());
        let stop = CancellationToken::new();
        let tries = Arc::new(AtomicUsize::new(0));
        queue.add("a");
        let (count, end) = (tries.clone(), stop.clone());
        work("test", queue, 2, stop, move |_| {
            let (count, end) = (count.clone(), end.clone());
            async move {
                assert!(count.fetch_add(1, Ordering::SeqCst) > 0, "the first try panics");
                end.cancel();
                Ok::<_, WriteError>(Outcome::Done)
            }
        })
        .await;
        assert_eq!(tries.load(Ordering::SeqCst), 2);
    }
}
