//! The store of one machine: current state and recent history in memory, durability in a log and a redb database.
//!
//! Reads and watches never touch the disk. One thread (`writer`) makes all writes: it makes a batch durable with a
//! single sync (`commit`), then shows it to readers (`state`), then acknowledges it. Batches are appended to the log
//! (`log`); a second thread (`checkpoint`) stores them in the database (`database`) from time to time. A start reads
//! the database and replays the log (`recovery`).

mod checkpoint;
mod commit;
mod database;
mod directory;
mod encryption;
mod frame;
mod history;
mod log;
mod packer;
mod record;
mod recovery;
mod state;
mod statistics;
mod writer;

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::oneshot;

use crate::entry::{Entry, Revision};
use crate::error::{ListError, OpenError, ReadError, WatchError, WriteError};
use crate::store::{Range, Snapshot, Store, Watcher};
use commit::{Committer, LogLimits};
pub use encryption::{Encryptor, KeyFileError};
pub use history::HistoryLimits;
use packer::Packer;
use recovery::LoadedStore;
use state::SharedState;
pub use statistics::StoreStatistics;
use writer::{Operation, WriteRequest};

/// A store in one process. Dropping it completes the accepted writes, ends its watches and releases its files.
pub struct EmbeddedStore {
    shared: Arc<SharedState>,
    statistics: Arc<StoreStatistics>,
    /// `None` once the store is being closed.
    queue: Option<std::sync::mpsc::Sender<WriteRequest>>,
    writer: Option<JoinHandle<()>>,
}

impl EmbeddedStore {
    /// Opens the store at `path`, or creates it. Blocks: it reads every object into memory.
    pub fn open(path: &Path, limits: HistoryLimits) -> Result<Self, OpenError> {
        Self::open_encrypted(path, limits, None, &[])
    }

    /// Like `open`, and encrypts the values that `encryptor` covers before they are written to disk. Values under
    /// `private_prefixes` never become part of a compression dictionary, which would outlive them.
    pub fn open_encrypted(
        path: &Path,
        limits: HistoryLimits,
        encryptor: Option<Encryptor>,
        private_prefixes: &[&str],
    ) -> Result<Self, OpenError> {
        let encryptor = encryptor.map(Arc::new);
        let lock = lock(path)?;
        let loaded = recovery::open(path, encryptor.as_ref())?;
        let LoadedStore { revision, objects, dictionaries, next_dictionary_id, files } = loaded;
        let packer = Packer::resume(&dictionaries, next_dictionary_id, private_prefixes);
        let shared = Arc::new(SharedState::new(revision, objects, limits));
        let (queue, requests) = std::sync::mpsc::channel();
        let statistics = Arc::new(StoreStatistics::default());
        let (writer_shared, writer_statistics) = (shared.clone(), statistics.clone());
        let committer = Committer::new(LogLimits::default(), encryptor, packer, files, statistics.clone());
        let started = committer.and_then(|committer| {
            let write = move || {
                writer::run(committer, &writer_shared, &writer_statistics, &requests);
                drop(lock);
            };
            std::thread::Builder::new().name("cleat-store".to_owned()).spawn(write)
        });
        let failed = |e| OpenError::Io { step: "start the writer of", path: path.into(), source: Box::new(e) };
        let writer = started.map_err(failed)?;
        Ok(Self { shared, statistics, queue: Some(queue), writer: Some(writer) })
    }

    /// The counters since the store was opened.
    pub fn statistics(&self) -> Arc<StoreStatistics> {
        self.statistics.clone()
    }

    /// Discards the history up to `revision`. Later watches and lists from before it fail with `TooOld`.
    pub fn compact(&self, revision: Revision) {
        self.shared.compact(revision);
    }

    async fn write(&self, key: &str, operation: Operation) -> Result<Revision, WriteError> {
        let (reply, result) = oneshot::channel();
        let request = WriteRequest { key: key.into(), operation, reply };
        self.queue.as_ref().ok_or(WriteError::Closed)?.send(request).map_err(|_| WriteError::Closed)?;
        result.await.map_err(|_| WriteError::Closed)?
    }
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        // The writer completes the accepted writes after the queue is closed, and releases the lock before it ends.
        drop(self.queue.take());
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the store's writer panicked");
        }
        self.shared.close();
    }
}

/// Locks the store against other processes. The writer holds the lock until its last write. The lock file is never
/// removed: between removal and re-creation two processes could each lock a file of their own.
fn lock(path: &Path) -> Result<File, OpenError> {
    let lock_path = PathBuf::from(format!("{}.lock", path.display()));
    let failed = |source: std::io::Error| OpenError::Io { step: "lock", path: path.into(), source: Box::new(source) };
    let file =
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(lock_path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(OpenError::Locked { path: path.into() }),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

#[async_trait]
impl Store for EmbeddedStore {
    async fn create(&self, key: &str, value: Bytes) -> Result<Revision, WriteError> {
        self.write(key, Operation::Create(value)).await
    }

    async fn update(&self, key: &str, expected: Revision, value: Bytes) -> Result<Revision, WriteError> {
        self.write(key, Operation::Update(expected, value)).await
    }

    async fn delete(&self, key: &str, expected: Revision) -> Result<Revision, WriteError> {
        self.write(key, Operation::Delete(expected)).await
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, ReadError> {
        Ok(self.shared.get(key))
    }

    async fn list(&self, range: Range<'_>) -> Result<Snapshot, ListError> {
        self.shared.list(range)
    }

    async fn watch(&self, prefix: &str, after: Revision) -> Result<Box<dyn Watcher>, WatchError> {
        Ok(Box::new(SharedState::watch(&self.shared, prefix, after)?))
    }

    async fn revision(&self) -> Result<Revision, ReadError> {
        Ok(self.shared.revision())
    }
}
