//! What readers see: the current entries, the recent history and the running watches, all in memory.
//!
//! One lock covers the three, so that a list, a watch's start and a published batch never interleave. Nobody holds it
//! while waiting for anything; wakers run after it is released.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, RwLock};

use super::History;
use super::file::Loaded;
use crate::{Entry, Event, ListError, Range, Revision, Snapshot, WatchError, Watcher};

/// Events queued for one watch before it has to catch up from the history instead.
const QUEUE: usize = 1024;

pub(super) struct Shared {
    state: RwLock<State>,
    limits: History,
}

struct State {
    revision: Revision,
    objects: BTreeMap<Arc<str>, Entry>,
    /// Changes with consecutive revisions, ending at `revision`.
    history: VecDeque<Arc<Event>>,
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
    events: VecDeque<Arc<Event>>,
    /// Everything up to here is in `events` or was handed out; what follows is in the history.
    behind: Option<Revision>,
    waker: Option<Waker>,
    closed: bool,
}

pub(super) struct Cursor {
    shared: Arc<Shared>,
    watch: Arc<Watch>,
    delivered: Revision,
}

impl Shared {
    pub(super) fn new(loaded: Loaded, limits: History) -> Self {
        let Loaded { revision, objects, .. } = loaded;
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
        self.state.read().objects.get(key).cloned()
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
            .take_while(|(key, _)| key.starts_with(range.prefix))
            .map(|(_, entry)| entry);
        // What the keys that changed since then were; the oldest change of each, looked at last, tells.
        let mut undone: BTreeMap<&str, Option<&Entry>> = BTreeMap::new();
        for event in state.history.iter().rev().take_while(|e| e.revision > asked) {
            let key = event.key();
            if key >= start && key.starts_with(range.prefix) {
                undone.insert(key, event.old.as_ref());
            }
        }
        let mut entries = Vec::new();
        let mut more = 0;
        let mut take = |entry: &Entry| match range.limit {
            Some(limit) if entries.len() >= limit => more += 1,
            _ => entries.push(entry.clone()),
        };
        let mut undone = undone.into_iter().peekable();
        for entry in current {
            while let Some((_, old)) = undone.next_if(|(key, _)| **key < *entry.key) {
                old.into_iter().for_each(&mut take);
            }
            match undone.next_if(|(key, _)| **key == *entry.key) {
                Some((_, old)) => old.into_iter().for_each(&mut take),
                None => take(entry),
            }
        }
        undone.filter_map(|(_, old)| old).for_each(&mut take);
        Ok(Snapshot { revision: asked, entries, more })
    }

    pub(super) fn watch(shared: &Arc<Self>, prefix: &str, after: Revision) -> Result<Cursor, WatchError> {
        let mut state = shared.state.write();
        if after > state.revision {
            return Err(WatchError::Future { asked: after, current: state.revision });
        }
        let events = state.after(prefix, after)?;
        let queue = Queue { events, behind: None, waker: None, closed: state.closed };
        let watch = Arc::new(Watch { prefix: prefix.into(), queue: Mutex::new(queue) });
        state.watches.push(Arc::downgrade(&watch));
        drop(state);
        Ok(Cursor { shared: shared.clone(), watch, delivered: after })
    }

    /// Makes durable changes visible, in order. Only the writer calls this.
    pub(super) fn publish(&self, events: Vec<Event>) {
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
        for event in events {
            let event = Arc::new(event);
            state.apply(&event);
            for watch in live.iter().filter(|w| event.key().starts_with(&w.prefix)) {
                let mut queue = watch.queue.lock();
                if queue.behind.is_none() {
                    if queue.events.len() < QUEUE {
                        queue.events.push_back(event.clone());
                    } else {
                        queue.behind = queue.events.back().map(|last| last.revision);
                    }
                }
                wake.extend(queue.waker.take());
            }
        }
        let excess = state.excess(&self.limits);
        state.forget(excess);
        drop(state);
        wake.into_iter().for_each(Waker::wake);
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
    fn apply(&mut self, event: &Arc<Event>) {
        self.revision = event.revision;
        match (&event.new, &event.old) {
            (Some(new), _) => {
                self.objects.insert(new.key.clone(), new.clone());
            }
            (None, Some(old)) => {
                self.objects.remove(&old.key);
            }
            (None, None) => {}
        }
        self.history_bytes += weight(event);
        self.history.push_back(event.clone());
    }

    fn after(&self, prefix: &str, after: Revision) -> Result<VecDeque<Arc<Event>>, WatchError> {
        if after < self.compacted {
            return Err(WatchError::TooOld { asked: after, oldest: self.compacted });
        }
        let start = self.history.partition_point(|e| e.revision <= after);
        Ok(self.history.range(start..).filter(|e| e.key().starts_with(prefix)).cloned().collect())
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
        for event in self.history.drain(..count) {
            self.history_bytes -= weight(&event);
            self.compacted = event.revision;
        }
    }
}

/// The bytes that only the history keeps: the value the change replaced.
fn weight(event: &Arc<Event>) -> usize {
    event.old.as_ref().map_or(0, |old| old.value.len())
}

impl Watcher for Cursor {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Arc<Event>, WatchError>> {
        loop {
            let mut queue = self.watch.queue.lock();
            if let Some(event) = queue.events.pop_front() {
                self.delivered = event.revision;
                return Poll::Ready(Ok(event));
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
            let events = match state.after(&self.watch.prefix, behind) {
                Ok(events) => events,
                Err(error) => return Poll::Ready(Err(error)),
            };
            let mut queue = self.watch.queue.lock();
            queue.behind = None;
            queue.events = events;
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
