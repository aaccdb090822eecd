//! A work queue by key: one key is never worked on twice at the same time, different keys run in parallel.
//!
//! A key added while it is being worked on is handed out again afterwards, so no wake-up is lost; a key added several
//! times before it is handed out is handed out once.

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

/// How long a key that failed waits: doubling from `first` to `most`, with up to a tenth of jitter.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    pub first: Duration,
    pub most: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, most: Duration) -> Self {
        Self { first, most }
    }

    fn delay(self, failures: u32) -> Duration {
        let doubled = self.first.saturating_mul(1_u32 << failures.min(30)).min(self.most);
        // A fresh RandomState is seeded by the operating system; that is random enough to spread retries.
        let random = std::hash::RandomState::new().hash_one(failures) % 100;
        doubled + doubled / 1000 * u32::try_from(random).unwrap_or(0)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new(Duration::from_millis(5), Duration::from_secs(60))
    }
}

/// A key that can wait is handed out after this long, whatever else there is.
const LATEST: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Urgency {
    Now,
    Later,
}

/// For how many waiting keys there is room at any time.
const ROOM: usize = 512;

/// As good as never, and still a time.
const NEVER: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// The watch brings what somebody else wrote within about this time.
const AFTER_CONFLICT: Duration = Duration::from_millis(10);

pub struct Queue<K>(Arc<Shared<K>>);

impl<K> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Shared<K> {
    state: Mutex<State<K>>,
    ready: Notify,
    backoff: Backoff,
}

struct State<K> {
    order: VecDeque<(K, Instant)>,
    /// Keys that can wait for those in `order`.
    later: VecDeque<(K, Instant)>,
    waiting: HashMap<K, Urgency>,
    running: HashSet<K>,
    /// Added while running: due again when done.
    dirty: HashSet<K>,
    failures: HashMap<K, Failing>,
    /// When a key is due that was to come later.
    alarms: HashMap<K, Alarm>,
    /// Numbers the timers: only those that were not replaced may wake a key.
    timers: u64,
}

impl<K: QueueKey> State<K> {
    /// A storm that is over leaves no room behind.
    fn trim(&mut self) {
        if self.waiting.is_empty() && self.waiting.capacity() > 2 * ROOM {
            self.waiting.shrink_to(ROOM);
            self.order.shrink_to(ROOM);
            self.later.shrink_to(ROOM);
        }
    }
}

struct Alarm {
    due: Instant,
    timer: u64,
}

struct Failing {
    times: u32,
    timer: u64,
}

impl<K: QueueKey> Queue<K> {
    pub fn new(backoff: Backoff) -> Self {
        let state = State {
            order: VecDeque::new(),
            later: VecDeque::new(),
            waiting: HashMap::new(),
            running: HashSet::new(),
            dirty: HashSet::new(),
            failures: HashMap::new(),
            alarms: HashMap::new(),
            timers: 0,
        };
        Self(Arc::new(Shared { state: Mutex::new(state), ready: Notify::new(), backoff }))
    }

    pub fn add(&self, key: K) {
        self.insert(key, Urgency::Now);
    }

    /// For keys that are looked at because something changed that may concern them: they come after those that surely
    /// are concerned, but not after they have waited for long.
    pub fn add_later(&self, key: K) {
        self.insert(key, Urgency::Later);
    }

    fn insert(&self, key: K, urgency: Urgency) {
        let mut state = self.0.state.lock();
        if state.running.contains(&key) {
            state.dirty.insert(key);
            return;
        }
        match (state.waiting.get(&key), urgency) {
            (Some(Urgency::Now), _) | (Some(Urgency::Later), Urgency::Later) => return,
            // Its place among the later ones is passed over when its turn comes there.
            (Some(Urgency::Later), Urgency::Now) | (None, _) => {}
        }
        state.waiting.insert(key.clone(), urgency);
        let line = if urgency == Urgency::Now { &mut state.order } else { &mut state.later };
        line.push_back((key, Instant::now()));
        drop(state);
        self.0.ready.notify_one();
    }

    /// Adds the key after a while; asked for several times, at the earliest of these.
    pub fn add_after(&self, key: K, delay: Duration) {
        let now = Instant::now();
        let due = now.checked_add(delay).unwrap_or(now + NEVER);
        let timer = {
            let mut state = self.0.state.lock();
            if state.alarms.get(&key).is_some_and(|alarm| alarm.due <= due) {
                return;
            }
            state.timers += 1;
            let timer = state.timers;
            state.alarms.insert(key.clone(), Alarm { due, timer });
            timer
        };
        let queue = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(due).await;
            if queue.ring(&key, timer) {
                queue.add(key);
            }
        });
    }

    /// Is this still the alarm of the key? Then it is over.
    fn ring(&self, key: &K, timer: u64) -> bool {
        let mut state = self.0.state.lock();
        let is_set = state.alarms.get(key).is_some_and(|alarm| alarm.timer == timer);
        if is_set {
            state.alarms.remove(key);
        }
        is_set
    }

    /// The next key, marked as running until [`Queue::done`] or [`Queue::failed`] is called for it.
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
            let overdue = state.later.front().is_some_and(|(_, since)| since.elapsed() > LATEST);
            let (line, urgency) = match (state.order.is_empty(), overdue) {
                (false, false) => (&mut state.order, Urgency::Now),
                (true, _) | (false, true) => (&mut state.later, Urgency::Later),
            };
            let (key, since) = line.pop_front()?;
            if state.waiting.get(&key) != Some(&urgency) {
                continue;
            }
            state.waiting.remove(&key);
            state.trim();
            state.running.insert(key.clone());
            if !state.waiting.is_empty() {
                self.0.ready.notify_one();
            }
            return Some((key, since.elapsed()));
        }
    }

    /// The key's work succeeded: its failures are forgotten.
    pub fn done(&self, key: &K) {
        self.0.state.lock().failures.remove(key);
        self.release(key);
    }

    /// The key's work failed: it comes again after its backoff, or at once if it was added meanwhile. A key has one
    /// such timer at most, however often it is woken and fails in between.
    pub fn failed(&self, key: &K) -> Duration {
        let (delay, timer) = {
            let mut state = self.0.state.lock();
            state.timers += 1;
            let timer = state.timers;
            let failing = state.failures.entry(key.clone()).or_insert(Failing { times: 0, timer });
            let delay = self.0.backoff.delay(failing.times);
            failing.times += 1;
            failing.timer = timer;
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

    /// Somebody else wrote the object first: it comes again as soon as the newer state can be here, however long the
    /// backoff of failures is.
    pub fn conflicted(&self, key: &K) -> Duration {
        self.release(key);
        self.add_after(key.clone(), AFTER_CONFLICT);
        AFTER_CONFLICT
    }

    fn release(&self, key: &K) {
        let again = {
            let mut state = self.0.state.lock();
            state.running.remove(key);
            state.dirty.remove(key)
        };
        if again {
            self.add(key.clone());
        }
    }

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
    async fn a_key_added_many_times_is_handed_out_once() {
        let queue = Queue::new(Backoff::default());
        queue.add("a");
        queue.add("a");
        assert_eq!(queue.next().await, "a");
        queue.done(&"a");
        assert!(queue.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_key_added_while_running_comes_again_but_not_at_the_same_time() {
        let queue = Queue::new(Backoff::default());
        queue.add("a");
        assert_eq!(queue.next().await, "a");
        queue.add("a");
        assert!(queue.next().now_or_never().is_none(), "still running");
        queue.done(&"a");
        assert_eq!(queue.next().await, "a");
    }

    #[tokio::test(start_paused = true)]
    async fn what_can_wait_comes_after_what_cannot_but_not_much_later() {
        let queue = Queue::new(Backoff::default());
        ["x", "y", "z"].into_iter().for_each(|key| queue.add_later(key));
        queue.add("a");
        queue.add("y");
        assert_eq!(queue.len(), 4);
        assert_eq!([queue.next().await, queue.next().await, queue.next().await], ["a", "y", "x"]);
        queue.add("b");
        tokio::time::advance(LATEST * 2).await;
        queue.add("c");
        assert_eq!([queue.next().await, queue.next().await, queue.next().await], ["z", "b", "c"]);
        assert!(queue.next().now_or_never().is_none(), "y came once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_conflict_comes_again_at_once_and_counts_as_no_failure() {
        let queue = Queue::new(Backoff::new(Duration::from_secs(100), Duration::from_secs(100)));
        queue.add("a");
        let begun = Instant::now();
        for _ in 0..3 {
            let key = queue.next().await;
            queue.conflicted(&key);
        }
        queue.next().await;
        assert!(begun.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_back_off_and_success_forgets_them() {
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
    async fn a_key_has_one_alarm_and_it_is_the_earliest() {
        let queue = Queue::new(Backoff::default());
        let seconds = Duration::from_secs;
        for delay in [60, 5, 30, 60] {
            queue.add_after("a", seconds(delay));
        }
        let begun = Instant::now();
        assert_eq!(queue.next().await, "a");
        assert_eq!(begun.elapsed().as_secs(), 5);
        queue.done(&"a");
        assert!(tokio::time::timeout(seconds(100), queue.next()).await.is_err(), "the others are void");
        queue.add_after("a", Duration::MAX);
        queue.add_after("a", seconds(60));
        assert_eq!(queue.next().await, "a");
    }

    #[tokio::test]
    async fn a_storm_leaves_no_room_behind() {
        let queue = Queue::new(Backoff::default());
        for round in 0..2 {
            (0..20_000).for_each(|key| queue.add(key));
            for key in 0..20_000 {
                assert_eq!(queue.next().await, key, "round {round}");
                queue.done(&key);
            }
            let state = queue.0.state.lock();
            assert!(state.waiting.capacity() < 4 * ROOM && state.order.capacity() < 4 * ROOM);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_woken_while_it_backs_off_has_one_timer_only() {
        let queue = Queue::new(Backoff::new(Duration::from_secs(10), Duration::from_secs(10)));
        for _ in 0..5 {
            queue.add("a");
            let key = queue.next().await;
            queue.failed(&key);
        }
        let begun = tokio::time::Instant::now();
        let mut times = 0;
        while tokio::time::timeout(Duration::from_secs(11), queue.next()).await.is_ok() {
            times += 1;
            queue.done(&"a");
        }
        assert_eq!(times, 1);
        assert!(begun.elapsed() >= Duration::from_secs(10));
    }
}
