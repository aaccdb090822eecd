//! The revisioned store under the API server: one global revision, compare-and-swap writes, lists at a snapshot and
//! watches without gap or duplicate.
//!
//! [`Store`] is the contract; [`embedded::EmbeddedStore`] keeps it on one machine. Values are opaque bytes: this crate
//! knows nothing of Kubernetes objects.
//!
//! Guarantees every implementation gives:
//! - every write that succeeds has its own revision, greater than every earlier one, never reused, also not after a
//!   restart; the first revision a reader can see is at least 1;
//! - a write is acknowledged only when it is durable, and an accepted write completes even if the caller stops waiting;
//! - a list reports the revision of the snapshot it shows, and a watch from that revision delivers every later change
//!   under the prefix once, in order;
//! - a revision whose history is gone is answered by `TooOld`, never by silence.

pub mod embedded;
mod error;

use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use bytes::Bytes;
use cleat_pack::Packed;

pub use embedded::EmbeddedStore;
pub use error::{ListError, OpenError, ReadError, WatchError, WriteError};

/// A point in the store's single history.
pub type Revision = u64;

/// One key as it is, or was, at some revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: Arc<str>,
    pub value: Bytes,
    /// Revision of the write that created this incarnation of the key.
    pub created: Revision,
    /// Revision of the last write to the key.
    pub modified: Revision,
}

/// An entry as it is kept: small, until somebody reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    pub key: Arc<str>,
    pub(crate) value: Packed,
    pub created: Revision,
    pub modified: Revision,
}

impl Kept {
    pub(crate) fn new(entry: &Entry, value: Packed) -> Self {
        Self { key: entry.key.clone(), value, created: entry.created, modified: entry.modified }
    }

    /// The length of its value.
    pub fn length(&self) -> usize {
        self.value.length() as usize
    }

    pub fn entry(&self) -> Entry {
        let Self { key, value, created, modified } = self;
        let value = value.whole().map_or_else(|| value.text().into(), Bytes::from_owner);
        Entry { key: key.clone(), value, created: *created, modified: *modified }
    }
}

impl From<&Entry> for Kept {
    fn from(entry: &Entry) -> Self {
        Self::new(entry, Packed::plain(&entry.value))
    }
}

/// One change. `new` is absent for a deletion, `old` for a creation; never both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub revision: Revision,
    pub new: Option<Entry>,
    pub old: Option<Entry>,
}

impl Event {
    pub fn key(&self) -> &str {
        match (&self.new, &self.old) {
            (Some(entry), _) | (None, Some(entry)) => &entry.key,
            (None, None) => "",
        }
    }
}

/// What to list: keys under a prefix, in key order.
#[derive(Clone, Debug, Default)]
pub struct Range<'a> {
    pub prefix: &'a str,
    /// Only keys greater than or equal to this one.
    pub from: Option<&'a str>,
    /// The state at this revision; the latest if absent.
    pub at: Option<Revision>,
    /// At most so many; all if absent.
    pub limit: Option<usize>,
}

/// The entries of a [`Range`] at one revision.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub revision: Revision,
    pub kept: Vec<Kept>,
    /// How many follow these in the range and are not among them.
    pub more: usize,
}

impl Snapshot {
    /// The entries, each made when it is asked for.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        self.kept.iter().map(Kept::entry)
    }
}

#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Adds a key that must not exist.
    async fn create(&self, key: &str, value: Bytes) -> Result<Revision, WriteError>;

    /// Replaces the value of a key last modified at `expected`.
    async fn update(&self, key: &str, expected: Revision, value: Bytes) -> Result<Revision, WriteError>;

    /// Removes a key last modified at `expected`.
    async fn delete(&self, key: &str, expected: Revision) -> Result<Revision, WriteError>;

    async fn get(&self, key: &str) -> Result<Option<Entry>, ReadError>;

    async fn list(&self, range: Range<'_>) -> Result<Snapshot, ListError>;

    /// Every change under `prefix` with a revision greater than `after`.
    async fn watch(&self, prefix: &str, after: Revision) -> Result<Box<dyn Watcher>, WatchError>;

    /// The newest revision that reads can see.
    async fn revision(&self) -> Result<Revision, ReadError>;
}

/// A running watch. A consumer that is too slow costs nobody else anything: it catches up from the history, and gets
/// `TooOld` once the history it needs is gone.
pub trait Watcher: Send + Unpin {
    /// The next change. After an error the watch is over.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Arc<Event>, WatchError>>;

    /// A revision up to which everything was already handed out by `poll_next`.
    fn progress(&mut self) -> Revision;
}

impl dyn Watcher {
    pub async fn next(&mut self) -> Result<Arc<Event>, WatchError> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }
}
