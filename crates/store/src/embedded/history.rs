//! The recent changes, for watches that catch up and for lists at a past revision. In memory only.

use std::collections::VecDeque;

use crate::entry::{Event, Revision, StoredEntry};

/// How much history the store keeps for watches and for lists at a past revision.
#[derive(Clone, Debug)]
pub struct HistoryLimits {
    /// Maximum number of changes.
    pub events: usize,
    /// Maximum bytes of replaced and deleted values, as stored in memory.
    pub bytes: usize,
}

impl Default for HistoryLimits {
    fn default() -> Self {
        Self { events: 100_000, bytes: 64 << 20 }
    }
}

/// A change with its values as they are stored in memory.
#[derive(Clone)]
pub(super) struct HistoryEntry {
    pub(super) revision: Revision,
    pub(super) new: Option<StoredEntry>,
    pub(super) old: Option<StoredEntry>,
}

impl HistoryEntry {
    pub(super) fn key(&self) -> &str {
        self.new.as_ref().or(self.old.as_ref()).map_or("", |entry| &entry.key)
    }

    /// Decompresses the values.
    pub(super) fn event(&self) -> Event {
        let entry = |stored: &Option<StoredEntry>| stored.as_ref().map(StoredEntry::entry);
        Event { revision: self.revision, new: entry(&self.new), old: entry(&self.old) }
    }

    /// The bytes that only the history keeps in memory: those of the value that the change replaced.
    fn retained_bytes(&self) -> usize {
        self.old.as_ref().map_or(0, |old| old.value.stored_bytes().len())
    }
}

/// Changes with consecutive revisions; the last one is the store's newest revision.
pub(super) struct History {
    entries: VecDeque<HistoryEntry>,
    retained_bytes: usize,
    /// The history is complete for every revision greater than this one.
    compacted: Revision,
}

impl History {
    pub(super) fn new(compacted: Revision) -> Self {
        Self { entries: VecDeque::new(), retained_bytes: 0, compacted }
    }

    pub(super) fn compacted(&self) -> Revision {
        self.compacted
    }

    pub(super) fn push(&mut self, entry: HistoryEntry) {
        self.retained_bytes += entry.retained_bytes();
        self.entries.push_back(entry);
    }

    /// The changes with a revision greater than `after`, oldest first.
    pub(super) fn after(&self, after: Revision) -> impl DoubleEndedIterator<Item = &HistoryEntry> {
        let start = self.entries.partition_point(|entry| entry.revision <= after);
        self.entries.range(start..)
    }

    /// Discards the oldest changes until the limits hold.
    pub(super) fn enforce(&mut self, limits: &HistoryLimits) {
        while self.entries.len() > limits.events || self.retained_bytes > limits.bytes {
            if !self.discard_oldest() {
                return;
            }
        }
    }

    /// Discards the changes up to `revision`, which is not greater than the newest revision.
    pub(super) fn compact(&mut self, revision: Revision) {
        while self.entries.front().is_some_and(|oldest| oldest.revision <= revision) {
            self.discard_oldest();
        }
        self.compacted = self.compacted.max(revision);
    }

    fn discard_oldest(&mut self) -> bool {
        let Some(oldest) = self.entries.pop_front() else { return false };
        self.retained_bytes -= oldest.retained_bytes();
        self.compacted = oldest.revision;
        true
    }
}
