//! A work queue of keys with backoff: a key is never returned to two workers at the same time, different keys are independent.
//!
//! A key that is added while it is running is returned again after it is done, so that no wake-up is lost. A key that is added
//! several times before it is returned is returned once.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Debug;
use std::hash::{BuildHasher as _, Hash};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

pub trait QueueKey: Clone + Eq + Hash + Debug + Send + Sync + 'static {}
impl<T: Clone + Eq + Hash + Debug + Send + Sync + 'static> QueueKey for T {}

/// The delay before a failed key is returned again: doubles from `initial` to `max`, plus a jitter of up to a tenth.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    pub initial: Duration,
    pub max: Duration,
}

impl Backoff {
    pub const fn new(initial: Duration, max: Duration) -> Self {
        Self { initial, max }
    }

    fn delay(self, failures: u32) -> Duration {
        let doubled = self.initial.saturating_mul(1_u32 << failures.min(30)).min(self.max);
        // A new RandomState has random keys; that is random enough to spread retries.
        let random = std::hash::RandomState::new().hash_one(failures) % 100;
        doubled + doubled / 1000 * u32::try_from(random).unwrap_or(0)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new(Duration::from_millis(5), Duration::from_secs(60))
    }
}

/// A key of low priority that has waited for this long comes before keys of high priority.
const MAX_LOW_PRIORITY_WAIT: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Priority {
    High,
    Low,
}

/// The capacity, in keys, that an empty queue keeps.
const RETAINED_CAPACITY: usize = 512;

/// Replaces a delay that is too long to be added to the current time.
const MAX_DELAY: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// The watch delivers the write of another component within about this time.
const CONFLICT_RETRY_DELAY: Duration = Duration::from_millis(10);

pub struct Queue<K>(Arc<QueueInner<K>>);

impl<K> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct QueueInner<K> {
    state: Mutex<QueueState<K>>,
    ready: Notify,
    backoff: Backoff,
}

struct QueueState<K> {
    /// Keys and the time since which they wait.
    high_priority: VecDeque<(K, Instant)>,
    low_priority: VecDeque<(K, Instant)>,
    /// The current priority of each waiting key. An element of a queue with another priority is void.
    waiting: HashMap<K, Priority>,
    running: HashSet<K>,
    /// Keys that were added while they were running: they wait again when they are done.
    dirty: HashSet<K>,
    failures: HashMap<K, FailureRecord>,
    /// Keys to be added at a later time.
    delayed: HashMap<K, DelayedAdd>,
    /// The number of the last timer. A timer whose number was replaced has no effect.
    last_timer: u64,
}

impl<K: QueueKey> QueueState<K> {
    /// Frees the memory of a large backlog after it was processed.
    fn shrink(&mut self) {
        if self.waiting.is_empty() && self.waiting.capacity() > 2 * RETAINED_CAPACITY {
            self.waiting.shrink_to(RETAINED_CAPACITY);
            self.high_priority.shrink_to(RETAINED_CAPACITY);
            self.low_priority.shrink_to(RETAINED_CAPACITY);
        }
    }
}

struct DelayedAdd {
    due: Instant,
    timer: u64,
}

struct FailureRecord {
    count: u32,
    timer: u64,
}

impl<K: QueueKey> Queue<K> {
    pub fn new(backoff: Backoff) -> Self {
        let state = QueueState {
            high_priority: VecDeque::new(),
            low_priority: VecDeque::new(),
            waiting: HashMap::new(),
            running: HashSet::new(),
            dirty: HashSet::new(),
            failures: HashMap::new(),
            delayed: HashMap::new(),
            last_timer: 0,
        };
        Self(Arc::new(QueueInner { state: Mutex::new(state), ready: Notify::new(), backoff }))
    }

    pub fn add(&self, key: K) {
        self.insert(key, Priority::High);
    }

    /// For keys that a change may affect but probably does not: they come after all others, but wait at most half a second for
    /// them.
    pub fn add_low_priority(&self, key: K) {
        self.insert(key, Priority::Low);
    }

    fn insert(&self, key: K, priority: Priority) {
        let mut state = self.0.state.lock();
        if state.running.contains(&key) {
            state.dirty.insert(key);
            return;
        }
        match (state.waiting.get(&key), priority) {
            (Some(Priority::High), _) | (Some(Priority::Low), Priority::Low) => return,
            // The element in `low_priority` becomes void.
            (Some(Priority::Low), Priority::High) | (None, _) => {}
        }
        state.waiting.insert(key.clone(), priority);
        let queue = if priority == Priority::High { &mut state.high_priority } else { &mut state.low_priority };
        queue.push_back((key, Instant::now()));
        drop(state);
        self.0.ready.notify_one();
    }

    /// Adds the key after a delay. A key has one such timer at most; of several requests the earliest counts.
    pub fn add_after(&self, key: K, delay: Duration) {
        let now = Instant::now();
        let due = now.checked_add(delay).unwrap_or(now + MAX_DELAY);
        let timer = {
            let mut state = self.0.state.lock();
            if state.delayed.get(&key).is_some_and(|delayed| delayed.due <= due) {
                return;
            }
            state.last_timer += 1;
            let timer = state.last_timer;
            state.delayed.insert(key.clone(), DelayedAdd { due, timer });
            timer
        };
        let queue = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(due).await;
            if queue.expire_timer(&key, timer) {
                queue.add(key);
            }
        });
    }

    /// Removes the key's timer and returns true, unless the timer was replaced.
    fn expire_timer(&self, key: &K, timer: u64) -> bool {
        let mut state = self.0.state.lock();
        let is_current = state.delayed.get(key).is_some_and(|delayed| delayed.timer == timer);
        if is_current {
            state.delayed.remove(key);
        }
        is_current
    }

    /// The next key. It counts as running until [`Queue::done`], [`Queue::failed`] or [`Queue::conflicted`] is called for it.
    pub async fn next(&self) -> K {
        self.next_with_age().await.0
    }

    /// The next key, and how long it has waited.
    pub async fn next_with_age(&self) -> (K, Duration) {
        loop {
            if let Some(next) = self.take() {
                return next;
            }
            self.0.ready.notified().await;
        }
    }

    fn take(&self) -> Option<(K, Duration)> {
        let mut state = self.0.state.lock();
        loop {
            let is_overdue =
                state.low_priority.front().is_some_and(|(_, since)| since.elapsed() > MAX_LOW_PRIORITY_WAIT);
            let (queue, priority) = match (state.high_priority.is_empty(), is_overdue) {
                (false, false) => (&mut state.high_priority, Priority::High),
                (true, _) | (false, true) => (&mut state.low_priority, Priority::Low),
            };
            let (key, since) = queue.pop_front()?;
            if state.waiting.get(&key) != Some(&priority) {
                continue;
            }
            state.waiting.remove(&key);
            state.shrink();
            state.running.insert(key.clone());
            if !state.waiting.is_empty() {
                self.0.ready.notify_one();
            }
            return Some((key, since.elapsed()));
        }
    }

    /// The reconcile succeeded: the backoff of the key is reset.
    pub fn done(&self, key: &K) {
        self.0.state.lock().failures.remove(key);
        self.release(key);
    }

    /// The reconcile failed: the key is added again after its backoff, or immediately if it was added meanwhile. Returns the
    /// backoff. A key has one backoff timer at most, however often it is added and fails before the timer ends.
    pub fn failed(&self, key: &K) -> Duration {
        let (delay, timer) = {
            let mut state = self.0.state.lock();
            state.last_timer += 1;
            let timer = state.last_timer;
            let record = state.failures.entry(key.clone()).or_insert(FailureRecord { count: 0, timer });
            let delay = self.0.backoff.delay(record.count);
            record.count += 1;
            record.timer = timer;
            (delay, timer)
        };
        self.release(key);
        let (queue, key) = (self.clone(), key.clone());
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            let is_latest = queue.0.state.lock().failures.get(&key).is_some_and(|f| f.timer == timer);
            if is_latest {
                queue.add(key);
            }
        });
        delay
    }

    /// The reconcile failed because another component wrote first: the key is added again as soon as the watch can have
    /// delivered the newer state. The backoff does not change. Returns the delay.
    pub fn conflicted(&self, key: &K) -> Duration {
        self.release(key);
        self.add_after(key.clone(), CONFLICT_RETRY_DELAY);
        CONFLICT_RETRY_DELAY
    }

    fn release(&self, key: &K) {
        let is_dirty = {
            let mut state = self.0.state.lock();
            state.running.remove(key);
            state.dirty.remove(key)
        };
        if is_dirty {
            self.add(key.clone());
        }
    }

    /// The number of waiting keys, without those that are running or delayed.
    pub fn len(&self) -> usize {
        self.0.state.lock().waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    #[tokio::test]
    async fn a_key_added_several_times_is_returned_once() {
        let queue = Queue::new(Backoff::default());
        queue.add("a");
        queue.add("a");
        assert_eq!(queue.next().await, "a");
        queue.done(&"a");
        assert!(queue.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_key_added_while_running_is_returned_after_it_is_done() {
        let queue = Queue::new(Backoff::default());
        queue.add("a");
        assert_eq!(queue.next().await, "a");
        queue.add("a");
        assert!(queue.next().now_or_never().is_none(), "still running");
        queue.done(&"a");
        assert_eq!(queue.next().await, "a");
    }

    #[tokio::test(start_paused = true)]
    async fn low_priority_keys_come_last_but_not_after_a_long_wait() {
        let queue = Queue::new(Backoff::default());
        ["x", "y", "z"].into_iter().for_each(|key| queue.add_low_priority(key));
        queue.add("a");
        queue.add("y");
        assert_eq!(queue.len(), 4);
        assert_eq!([queue.next().await, queue.next().await, queue.next().await], ["a", "y", "x"]);
        queue.add("b");
        tokio::time::advance(MAX_LOW_PRIORITY_WAIT * 2).await;
        queue.add("c");
        assert_eq!([queue.next().await, queue.next().await, queue.next().await], ["z", "b", "c"]);
        assert!(queue.next().now_or_never().is_none(), "y was returned once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_conflict_is_retried_quickly_and_without_backoff() {
        let queue = Queue::new(Backoff::new(Duration::from_secs(100), Duration::from_secs(100)));
        queue.add("a");
        let started = Instant::now();
        for _ in 0..3 {
            let key = queue.next().await;
            queue.conflicted(&key);
        }
        queue.next().await;
        assert!(started.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_back_off_until_a_success() {
        let queue = Queue::new(Backoff::new(Duration::from_secs(1), Duration::from_secs(4)));
        let mut delays = Vec::new();
        queue.add("a");
        for _ in 0..4 {
            let key = queue.next().await;
            delays.push(queue.failed(&key).as_secs());
        }
        assert_eq!(delays, [1, 2, 4, 4]);
        let key = queue.next().await;
        queue.done(&key);
        queue.add("a");
        let key = queue.next().await;
        assert_eq!(queue.failed(&key).as_secs(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_delayed_key_is_added_once_at_the_earliest_time() {
        let queue = Queue::new(Backoff::default());
        let seconds = Duration::from_secs;
        for delay in [60, 5, 30, 60] {
            queue.add_after("a", seconds(delay));
        }
        let started = Instant::now();
        assert_eq!(queue.next().await, "a");
        assert_eq!(started.elapsed().as_secs(), 5);
        queue.done(&"a");
        assert!(tokio::time::timeout(seconds(100), queue.next()).await.is_err(), "the later timers have no effect");
        queue.add_after("a", Duration::MAX);
        queue.add_after("a", seconds(60));
        assert_eq!(queue.next().await, "a");
    }

    #[tokio::test]
    async fn a_processed_backlog_frees_its_memory() {
        let queue = Queue::new(Backoff::default());
        for round in 0..2 {
            (0..20_000).for_each(|key| queue.add(key));
            for key in 0..20_000 {
                assert_eq!(queue.next().await, key, "round {round}");
                queue.done(&key);
            }
            let state = queue.0.state.lock();
            assert!(
                state.waiting.capacity() < 4 * RETAINED_CAPACITY
                    && state.high_priority.capacity() < 4 * RETAINED_CAPACITY
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_added_during_its_backoff_has_one_timer() {
        let queue = Queue::new(Backoff::new(Duration::from_secs(10), Duration::from_secs(10)));
        for _ in 0..5 {
            queue.add("a");
            let key = queue.next().await;
            queue.failed(&key);
        }
        let started = tokio::time::Instant::now();
        let mut times = 0;
        while tokio::time::timeout(Duration::from_secs(11), queue.next()).await.is_ok() {
            times += 1;
            queue.done(&"a");
        }
        assert_eq!(times, 1);
        assert!(started.elapsed() >= Duration::from_secs(10));
    }
}
