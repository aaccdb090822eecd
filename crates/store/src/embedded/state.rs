//! What readers see: the current entries, the recent history and the running watches, all in memory.
//!
//! One lock covers the three, so that a list, a watch's start and a published batch never interleave. Nobody holds it
//! while waiting for anything; wakers run after it is released.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, RwLock};

use super::History;
use crate::{Entry, Event, Kept, ListError, Range, Revision, Snapshot, WatchError, Watcher};

/// Events queued for one watch before it has to catch up from the history instead.
const QUEUE: usize = 1024;

pub(super) struct Shared {
    state: RwLock<State>,
    limits: History,
}

/// A change, with its new value as it is kept.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) event: Event,
    pub(super) new: Option<Kept>,
}

/// What is kept of a change.
#[derive(Clone)]
struct Past {
    revision: Revision,
    new: Option<Kept>,
    old: Option<Kept>,
}

impl Past {
    fn key(&self) -> &str {
        self.new.as_ref().or(self.old.as_ref()).map_or("", |kept| &kept.key)
    }

    fn event(&self) -> Event {
        let entry = |kept: &Option<Kept>| kept.as_ref().map(Kept::entry);
        Event { revision: self.revision, new: entry(&self.new), old: entry(&self.old) }
    }
}

/// In a set, an object is found by its key.
pub(super) struct ByKey(pub(super) Kept);

impl Borrow<str> for ByKey {
    fn borrow(&self) -> &str {
        &self.0.key
    }
}

impl PartialEq for ByKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.key == other.0.key
    }
}

impl Eq for ByKey {}

impl PartialOrd for ByKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.key.cmp(&other.0.key)
    }
}

struct State {
    revision: Revision,
    objects: BTreeSet<ByKey>,
    /// Changes with consecutive revisions, ending at `revision`.
    history: VecDeque<Past>,
    history_bytes: usize,
    /// History is complete for every revision greater than this one.
    compacted: Revision,
    watches: Vec<Weak<Watch>>,
    closed: bool,
}

struct Watch {
    prefix: String,
    queue: Mutex<Queue>,
}

struct Queue {
    events: VecDeque<Queued>,
    /// Everything up to here is in `events` or was handed out; what follows is in the history.
    behind: Option<Revision>,
    waker: Option<Waker>,
    closed: bool,
}

/// A change as it happened, or one from the history, which each watch unpacks for itself.
enum Queued {
    Fresh(Arc<Event>),
    Past(Past),
}

impl Queued {
    fn revision(&self) -> Revision {
        match self {
            Self::Fresh(event) => event.revision,
            Self::Past(past) => past.revision,
        }
    }

    fn event(self) -> Arc<Event> {
        match self {
            Self::Fresh(event) => event,
            Self::Past(past) => Arc::new(past.event()),
        }
    }
}

pub(super) struct Cursor {
    shared: Arc<Shared>,
    watch: Arc<Watch>,
    delivered: Revision,
}

impl Shared {
    pub(super) fn new(revision: Revision, objects: BTreeSet<ByKey>, limits: History) -> Self {
        let state = State {
            revision,
            objects,
            history: VecDeque::new(),
            history_bytes: 0,
            compacted: revision,
            watches: Vec::new(),
            closed: false,
        };
        Self { state: RwLock::new(state), limits }
    }

    pub(super) fn revision(&self) -> Revision {
        self.state.read().revision
    }

    pub(super) fn get(&self, key: &str) -> Option<Entry> {
        let kept = self.state.read().objects.get(key).map(|found| found.0.clone());
        kept.map(|kept| kept.entry())
    }

    pub(super) fn list(&self, range: Range<'_>) -> Result<Snapshot, ListError> {
        let state = self.state.read();
        let asked = range.at.unwrap_or(state.revision);
        if asked > state.revision {
            return Err(ListError::Future { asked, current: state.revision });
        }
        if asked < state.compacted {
            return Err(ListError::TooOld { asked, oldest: state.compacted });
        }
        let start = range.from.filter(|from| *from > range.prefix).unwrap_or(range.prefix);
        let current = state
            .objects
            .range::<str, _>((Bound::Included(start), Bound::Unbounded))
            .map(|found| &found.0)
            .take_while(|kept| kept.key.starts_with(range.prefix));
        // What the keys that changed since then were; the oldest change of each, looked at last, tells.
        let mut undone: BTreeMap<&str, Option<&Kept>> = BTreeMap::new();
        for past in state.history.iter().rev().take_while(|past| past.revision > asked) {
            let key = past.key();
            if key >= start && key.starts_with(range.prefix) {
                undone.insert(key, past.old.as_ref());
            }
        }
        let mut kept = Vec::new();
        let mut more = 0;
        let mut take = |found: &Kept| match range.limit {
            Some(limit) if kept.len() >= limit => more += 1,
            _ => kept.push(found.clone()),
        };
        let mut undone = undone.into_iter().peekable();
        for found in current {
            while let Some((_, old)) = undone.next_if(|(key, _)| **key < *found.key) {
                old.into_iter().for_each(&mut take);
            }
            match undone.next_if(|(key, _)| **key == *found.key) {
                Some((_, old)) => old.into_iter().for_each(&mut take),
                None => take(found),
            }
        }
        undone.filter_map(|(_, old)| old).for_each(&mut take);
        Ok(Snapshot { revision: asked, kept, more })
    }

    pub(super) fn watch(shared: &Arc<Self>, prefix: &str, after: Revision) -> Result<Cursor, WatchError> {
        let mut state = shared.state.write();
        if after > state.revision {
            return Err(WatchError::Future { asked: after, current: state.revision });
        }
        let (events, behind) = state.after(prefix, after)?;
        let queue = Queue { events, behind, waker: None, closed: state.closed };
        let watch = Arc::new(Watch { prefix: prefix.into(), queue: Mutex::new(queue) });
        state.watches.push(Arc::downgrade(&watch));
        drop(state);
        Ok(Cursor { shared: shared.clone(), watch, delivered: after })
    }

    /// Makes durable changes visible, in order, and returns who waits for them. Only the writer calls this.
    pub(super) fn publish(&self, changes: Vec<Change>) -> Vec<Waker> {
        let mut wake = Vec::new();
        let mut state = self.state.write();
        let mut live = Vec::with_capacity(state.watches.len());
        state.watches.retain(|weak| match weak.upgrade() {
            Some(watch) => {
                live.push(watch);
                true
            }
            None => false,
        });
        for Change { event, new } in changes {
            state.apply(&event, new);
            let event = Arc::new(event);
            for watch in live.iter().filter(|w| event.key().starts_with(&w.prefix)) {
                let mut queue = watch.queue.lock();
                if queue.behind.is_none() {
                    if queue.events.len() < QUEUE {
                        queue.events.push_back(Queued::Fresh(event.clone()));
                    } else {
                        queue.behind = queue.events.back().map(Queued::revision);
                    }
                }
                wake.extend(queue.waker.take());
            }
        }
        let excess = state.excess(&self.limits);
        state.forget(excess);
        wake
    }

    pub(super) fn compact(&self, revision: Revision) {
        let mut state = self.state.write();
        let count = state.history.iter().take_while(|e| e.revision <= revision).count();
        state.forget(count);
        state.compacted = state.compacted.max(revision.min(state.revision));
    }

    pub(super) fn close(&self) {
        let mut state = self.state.write();
        state.closed = true;
        let watches: Vec<_> = state.watches.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        for watch in watches {
            let mut queue = watch.queue.lock();
            queue.closed = true;
            let waker = queue.waker.take();
            drop(queue);
            waker.into_iter().for_each(Waker::wake);
        }
    }
}

impl State {
    fn apply(&mut self, event: &Event, new: Option<Kept>) {
        self.revision = event.revision;
        let old = match &new {
            Some(new) => self.objects.replace(ByKey(new.clone())),
            None => self.objects.take(event.key()),
        };
        let past = Past { revision: event.revision, new, old: old.map(|old| old.0) };
        self.history_bytes += weight(&past);
        self.history.push_back(past);
    }

    /// The next events after a revision, and from where to go on if there are more than fit in a queue.
    fn after(&self, prefix: &str, after: Revision) -> Result<(VecDeque<Queued>, Option<Revision>), WatchError> {
        if after < self.compacted {
            return Err(WatchError::TooOld { asked: after, oldest: self.compacted });
        }
        let start = self.history.partition_point(|e| e.revision <= after);
        let found = self.history.range(start..).filter(|past| past.key().starts_with(prefix));
        let events: VecDeque<_> = found.take(QUEUE).cloned().map(Queued::Past).collect();
        let behind = events.back().filter(|_| events.len() == QUEUE).map(Queued::revision);
        Ok((events, behind))
    }

    fn excess(&self, limits: &History) -> usize {
        let mut count = self.history.len().saturating_sub(limits.events);
        let mut bytes: usize = self.history_bytes - self.history.range(..count).map(weight).sum::<usize>();
        while bytes > limits.bytes && count < self.history.len() {
            bytes -= weight(&self.history[count]);
            count += 1;
        }
        count
    }

    fn forget(&mut self, count: usize) {
        for past in self.history.drain(..count) {
            self.history_bytes -= weight(&past);
            self.compacted = past.revision;
        }
    }
}

/// The bytes that only the history keeps: the value the change replaced.
fn weight(past: &Past) -> usize {
    past.old.as_ref().map_or(0, |old| old.value.bytes().len())
}

impl Watcher for Cursor {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Arc<Event>, WatchError>> {
        loop {
            let mut queue = self.watch.queue.lock();
            if let Some(queued) = queue.events.pop_front() {
                drop(queue);
                self.delivered = queued.revision();
                return Poll::Ready(Ok(queued.event()));
            }
            if queue.closed {
                return Poll::Ready(Err(WatchError::Closed));
            }
            let Some(behind) = queue.behind else {
                queue.waker = Some(cx.waker().clone());
                return Poll::Pending;
            };
            // Lock order: the state before a queue, as in `publish`.
            drop(queue);
            let state = self.shared.state.read();
            let (events, behind) = match state.after(&self.watch.prefix, behind) {
                Ok(found) => found,
                Err(error) => return Poll::Ready(Err(error)),
            };
            let mut queue = self.watch.queue.lock();
            (queue.events, queue.behind) = (events, behind);
        }
    }

    fn progress(&mut self) -> Revision {
        let state = self.shared.state.read();
        let queue = self.watch.queue.lock();
        if queue.events.is_empty() && queue.behind.is_none() {
            self.delivered = state.revision;
        }
        self.delivered
    }
}
