//! The contract of a store. The guarantees that every implementation gives are listed in the crate's documentation.

use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use bytes::Bytes;

use crate::entry::{Entry, Event, Revision, StoredEntry};
use crate::error::{ListError, ReadError, WatchError, WriteError};

/// Which keys to list. Lists are in key order.
#[derive(Clone, Debug, Default)]
pub struct Range<'a> {
    pub prefix: &'a str,
    /// Only keys greater than or equal to this one.
    pub from: Option<&'a str>,
    /// Lists the state at this revision; the latest state if absent.
    pub at: Option<Revision>,
    /// Maximum number of entries; unlimited if absent.
    pub limit: Option<usize>,
}

/// The entries of a [`Range`] at one revision.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub revision: Revision,
    pub stored: Vec<StoredEntry>,
    /// Number of entries of the range that the limit cut off.
    pub remaining: usize,
}

impl Snapshot {
    /// Returns the entries; decompresses each when the iterator reaches it.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        self.stored.iter().map(StoredEntry::entry)
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

    /// Delivers every change under `prefix` with a revision greater than `after`.
    async fn watch(&self, prefix: &str, after: Revision) -> Result<Box<dyn Watcher>, WatchError>;

    /// The newest revision that reads can observe.
    async fn revision(&self) -> Result<Revision, ReadError>;
}

/// A running watch. A slow consumer delays neither writers nor other watches: it catches up from the history, and gets
/// `TooOld` once the history that it needs has been discarded.
pub trait Watcher: Send + Unpin {
    /// The next change. After an error the watch has ended.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Arc<Event>, WatchError>>;

    /// A revision up to which `poll_next` has delivered every change under the prefix.
    fn progress(&mut self) -> Revision;
}

impl dyn Watcher {
    pub async fn next(&mut self) -> Result<Arc<Event>, WatchError> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }
}
