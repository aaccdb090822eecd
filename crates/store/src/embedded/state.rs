//! The state that readers observe: the current entries, the history and the running watches, all in memory.
//!
//! One lock covers the three, so that a list, the start of a watch and the publication of a batch never interleave. No
//! task holds the lock while it waits for anything; wakers run after it is released.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, RwLock};

use super::history::{History, HistoryEntry, HistoryLimits};
use crate::entry::{Entry, Event, Revision, StoredEntry};
use crate::error::{ListError, WatchError};
use crate::store::{Range, Snapshot, Watcher};

/// Number of events queued for one watch. A watch that falls further behind reads from the history instead.
const MAX_QUEUED_EVENTS: usize = 1024;

pub(super) struct SharedState {
    state: RwLock<State>,
    limits: HistoryLimits,
}

/// A change together with its new value as it is stored in memory.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) event: Event,
    pub(super) new: Option<StoredEntry>,
}

/// Orders entries by key and lets a set find them by key.
pub(super) struct EntryByKey(pub(super) StoredEntry);

impl Borrow<str> for EntryByKey {
    fn borrow(&self) -> &str {
        &self.0.key
    }
}

impl PartialEq for EntryByKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.key == other.0.key
    }
}

impl Eq for EntryByKey {}

impl PartialOrd for EntryByKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for EntryByKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.key.cmp(&other.0.key)
    }
}

struct State {
    revision: Revision,
    objects: BTreeSet<EntryByKey>,
    history: History,
    watches: Vec<Weak<Watch>>,
    closed: bool,
}

struct Watch {
    prefix: String,
    queue: Mutex<WatchQueue>,
}

struct WatchQueue {
    events: VecDeque<QueuedEvent>,
    /// Set if the queue overflowed: the events after this revision are in the history only.
    resume_after: Option<Revision>,
    waker: Option<Waker>,
    closed: bool,
}

/// All watches share a live event. An event from the history is decompressed for each watch.
enum QueuedEvent {
    Live(Arc<Event>),
    History(HistoryEntry),
}

impl QueuedEvent {
    fn revision(&self) -> Revision {
        match self {
            Self::Live(event) => event.revision,
            Self::History(entry) => entry.revision,
        }
    }

    fn into_event(self) -> Arc<Event> {
        match self {
            Self::Live(event) => event,
            Self::History(entry) => Arc::new(entry.event()),
        }
    }
}

/// The consumer's side of a watch. The watch ends when it is dropped.
pub(super) struct WatchCursor {
    shared: Arc<SharedState>,
    watch: Arc<Watch>,
    delivered: Revision,
}

impl SharedState {
    pub(super) fn new(revision: Revision, objects: BTreeSet<EntryByKey>, limits: HistoryLimits) -> Self {
        let history = History::new(revision);
        let state = State { revision, objects, history, watches: Vec::new(), closed: false };
        Self { state: RwLock::new(state), limits }
    }

    pub(super) fn revision(&self) -> Revision {
        self.state.read().revision
    }

    pub(super) fn get(&self, key: &str) -> Option<Entry> {
        let stored = self.state.read().objects.get(key).map(|found| found.0.clone());
        // Decompression happens outside the lock.
        stored.map(|stored| stored.entry())
    }

    pub(super) fn list(&self, range: Range<'_>) -> Result<Snapshot, ListError> {
        let state = self.state.read();
        let asked = range.at.unwrap_or(state.revision);
        if asked > state.revision {
            return Err(ListError::Future { asked, current: state.revision });
        }
        let oldest = state.history.compacted();
        if asked < oldest {
            return Err(ListError::TooOld { asked, oldest });
        }
        let start = range.from.filter(|from| *from > range.prefix).unwrap_or(range.prefix);
        let current = state
            .objects
            .range::<str, _>((Bound::Included(start), Bound::Unbounded))
            .map(|found| &found.0)
            .take_while(|entry| entry.key.starts_with(range.prefix));
        // For each key that changed after `asked`: its entry at that revision, which is the old value of its oldest
        // change. The newest changes come first, so that the oldest overwrites the others.
        let mut reverted: BTreeMap<&str, Option<&StoredEntry>> = BTreeMap::new();
        for change in state.history.after(asked).rev() {
            let key = change.key();
            if key >= start && key.starts_with(range.prefix) {
                reverted.insert(key, change.old.as_ref());
            }
        }
        let mut stored = Vec::new();
        let mut remaining = 0;
        let mut add = |entry: &StoredEntry| match range.limit {
            Some(limit) if stored.len() >= limit => remaining += 1,
            _ => stored.push(entry.clone()),
        };
        let mut reverted = reverted.into_iter().peekable();
        for entry in current {
            while let Some((_, old)) = reverted.next_if(|(key, _)| **key < *entry.key) {
                old.into_iter().for_each(&mut add);
            }
            match reverted.next_if(|(key, _)| **key == *entry.key) {
                Some((_, old)) => old.into_iter().for_each(&mut add),
                None => add(entry),
            }
        }
        reverted.filter_map(|(_, old)| old).for_each(&mut add);
        Ok(Snapshot { revision: asked, stored, remaining })
    }

    pub(super) fn watch(shared: &Arc<Self>, prefix: &str, after: Revision) -> Result<WatchCursor, WatchError> {
        let mut state = shared.state.write();
        if after > state.revision {
            return Err(WatchError::Future { asked: after, current: state.revision });
        }
        let (events, resume_after) = state.events_after(prefix, after)?;
        let queue = WatchQueue { events, resume_after, waker: None, closed: state.closed };
        let watch = Arc::new(Watch { prefix: prefix.into(), queue: Mutex::new(queue) });
        state.watches.push(Arc::downgrade(&watch));
        drop(state);
        Ok(WatchCursor { shared: shared.clone(), watch, delivered: after })
    }

    /// Makes durable changes visible, in order. Returns the wakers of the watches that wait for them; the caller wakes
    /// them after it has answered the writes. Only the writer calls this.
    pub(super) fn publish(&self, changes: Vec<Change>) -> Vec<Waker> {
        let mut wakers = Vec::new();
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
                if queue.resume_after.is_none() {
                    if queue.events.len() < MAX_QUEUED_EVENTS {
                        queue.events.push_back(QueuedEvent::Live(event.clone()));
                    } else {
                        queue.resume_after = queue.events.back().map(QueuedEvent::revision);
                    }
                }
                wakers.extend(queue.waker.take());
            }
        }
        state.history.enforce(&self.limits);
        wakers
    }

    pub(super) fn compact(&self, revision: Revision) {
        let mut state = self.state.write();
        let revision = revision.min(state.revision);
        state.history.compact(revision);
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
    fn apply(&mut self, event: &Event, new: Option<StoredEntry>) {
        self.revision = event.revision;
        let old = match &new {
            Some(new) => self.objects.replace(EntryByKey(new.clone())),
            None => self.objects.take(event.key()),
        };
        self.history.push(HistoryEntry { revision: event.revision, new, old: old.map(|old| old.0) });
    }

    /// The next events after a revision, at most as many as a queue holds. If there may be more, also the revision
    /// after which to continue.
    fn events_after(
        &self,
        prefix: &str,
        after: Revision,
    ) -> Result<(VecDeque<QueuedEvent>, Option<Revision>), WatchError> {
        let oldest = self.history.compacted();
        if after < oldest {
            return Err(WatchError::TooOld { asked: after, oldest });
        }
        let matching = self.history.after(after).filter(|change| change.key().starts_with(prefix));
        let events: VecDeque<_> = matching.take(MAX_QUEUED_EVENTS).cloned().map(QueuedEvent::History).collect();
        let resume_after = events.back().filter(|_| events.len() == MAX_QUEUED_EVENTS).map(QueuedEvent::revision);
        Ok((events, resume_after))
    }
}

impl Watcher for WatchCursor {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Arc<Event>, WatchError>> {
        loop {
            let mut queue = self.watch.queue.lock();
            if let Some(queued) = queue.events.pop_front() {
                drop(queue);
                self.delivered = queued.revision();
                return Poll::Ready(Ok(queued.into_event()));
            }
            if queue.closed {
                return Poll::Ready(Err(WatchError::Closed));
            }
            let Some(resume_after) = queue.resume_after else {
                queue.waker = Some(cx.waker().clone());
                return Poll::Pending;
            };
            // Lock order: the state before a queue, as in `publish`.
            drop(queue);
            let state = self.shared.state.read();
            let (events, resume_after) = match state.events_after(&self.watch.prefix, resume_after) {
                Ok(found) => found,
                Err(error) => return Poll::Ready(Err(error)),
            };
            let mut queue = self.watch.queue.lock();
            (queue.events, queue.resume_after) = (events, resume_after);
        }
    }

    fn progress(&mut self) -> Revision {
        let state = self.shared.state.read();
        let queue = self.watch.queue.lock();
        if queue.events.is_empty() && queue.resume_after.is_none() {
            self.delivered = state.revision;
        }
        self.delivered
    }
}
