//! Takes keys from a queue and runs one reconcile per key, many keys at a time.

use std::fmt::Display;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
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
    let limit = Limit::new(at_once);
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        while running.len() >= limit.now() {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = running.join_next() => {}
            }
        }
        let (key, waited) = tokio::select! {
            () = stop.cancelled() => break,
            next = queue.next_with_age() => next,
        };
        meter.taken(waited, queue.len());
        let span = info_span!("reconcile", controller = name, key = ?key);
        // A reconcile is a large future: it is moved once, to where it stays.
        let task = Box::pin(reconcile(key.clone()));
        let turn = Turn { queue: queue.clone(), key, finished: false };
        let (meter, limit) = (meter.clone(), limit.clone());
        running.spawn(
            async move {
                let begun = Instant::now();
                let result = settle(turn, task.await);
                limit.learn(result);
                meter.ended(result, begun.elapsed());
            }
            .instrument(span),
        );
    }
    while running.join_next().await.is_some() {}
}

/// How many reconciles run at the same time: as many as allowed, and half as many each time the server says that it
/// is too much; with every round that goes well, one more again.
#[derive(Clone)]
struct Limit {
    most: usize,
    /// The limit now, and how many have gone well since it last changed.
    state: Arc<Mutex<(usize, usize)>>,
}

impl Limit {
    fn new(most: usize) -> Self {
        Self { most, state: Arc::new(Mutex::new((most, 0))) }
    }

    fn now(&self) -> usize {
        self.state.lock().0
    }

    fn learn(&self, result: metrics::Result) {
        let mut state = self.state.lock();
        let (limit, well) = &mut *state;
        match result {
            metrics::Result::Overloaded => (*limit, *well) = ((*limit / 2).max(1), 0),
            metrics::Result::Done if *limit < self.most => {
                *well += 1;
                if *well >= *limit {
                    (*limit, *well) = (*limit + 1, 0);
                }
            }
            metrics::Result::Done | metrics::Result::Conflicted | metrics::Result::Failed => {}
        }
    }
}

/// What a failed reconcile means for the next try, and how loudly it is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Somebody else wrote first: again as soon as the newer state can be here.
    Conflict,
    /// The server has too much to do: again when it says so, and fewer at the same time.
    Overload(Option<Duration>),
    Expected,
    Warning,
}

impl From<&WriteError> for Severity {
    fn from(error: &WriteError) -> Self {
        match error.overload() {
            Some(pause) => Self::Overload(pause),
            None if error.is_conflict() => Self::Conflict,
            None => Self::Warning,
        }
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
            Severity::Conflict => {
                let retry_in = turn.conflicted();
                debug!(%error, ?retry_in, "someone else wrote first");
                metrics::Result::Conflicted
            }
            Severity::Overload(pause) => {
                let (queue, key) = (turn.queue.clone(), turn.key.clone());
                let retry_in = turn.failed();
                // The later of the two counts: the key is then handed out once more, and finds nothing to do.
                if let Some(pause) = pause.filter(|pause| *pause > retry_in) {
                    queue.add_after(key, pause);
                }
                warn!(%error, ?retry_in, "the server has too much to do");
                metrics::Result::Overloaded
            }
            Severity::Expected => {
                let retry_in = turn.failed();
                debug!(%error, ?retry_in, "not yet");
                metrics::Result::Failed
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

    #[test]
    fn a_server_with_too_much_to_do_gets_less_at_a_time() {
        let limit = Limit::new(8);
        limit.learn(metrics::Result::Overloaded);
        limit.learn(metrics::Result::Overloaded);
        assert_eq!(limit.now(), 2);
        for _ in 0..3 {
            limit.learn(metrics::Result::Overloaded);
        }
        assert_eq!(limit.now(), 1, "one always runs");
        // One more after one that went well, one more after two, and so on.
        for _ in 0..1 + 2 + 3 {
            limit.learn(metrics::Result::Done);
        }
        limit.learn(metrics::Result::Failed);
        assert_eq!(limit.now(), 4);
        for _ in 0..100 {
            limit.learn(metrics::Result::Done);
        }
        assert_eq!(limit.now(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn as_many_run_at_a_time_as_are_allowed() {
        let queue = Queue::new(Backoff::default());
        (0..20).for_each(|key| queue.add(key));
        let stop = CancellationToken::new();
        let (now, most, done) =
            (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (n, m, d, end) = (now.clone(), most.clone(), done.clone(), stop.clone());
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
        assert_eq!((done.load(Ordering::SeqCst), most.load(Ordering::SeqCst)), (20, 3));
    }
}
