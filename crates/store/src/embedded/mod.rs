//! The store of one machine: current state and recent history in memory, durability in a log and a redb file.
//!
//! Reads and watches never touch the disk. All writes go through one thread (`writer`), which makes a batch durable
//! with a single sync and only then shows it to readers (`state`) and acknowledges it. Batches are appended to the log
//! (`log`); a second thread (`checkpoint`) brings the file up to date with it from time to time.

mod checkpoint;
mod disk;
mod file;
mod frame;
mod log;
mod pack;
mod record;
mod seal;
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

use crate::{
    Entry, ListError, OpenError, Range, ReadError, Revision, Snapshot, Store, WatchError, Watcher, WriteError,
};
use disk::{Disk, Limits};
use file::Loaded;
use pack::Packer;
pub use seal::{KeyFileError, Seal};
use state::Shared;
pub use statistics::Statistics;
use writer::{Operation, Request};

/// How much history the store keeps for watches and for lists at a past revision.
#[derive(Clone, Debug)]
pub struct History {
    pub events: usize,
    /// Bytes of replaced and deleted values kept alive by the history alone.
    pub bytes: usize,
}

impl Default for History {
    fn default() -> Self {
        Self { events: 100_000, bytes: 64 << 20 }
    }
}

pub struct EmbeddedStore {
    shared: Arc<Shared>,
    statistics: Arc<Statistics>,
    queue: Option<std::sync::mpsc::Sender<Request>>,
    writer: Option<JoinHandle<()>>,
}

impl EmbeddedStore {
    /// Opens the file, or makes it if it does not exist. Blocks: it reads every object into memory.
    pub fn open(path: &Path, history: History) -> Result<Self, OpenError> {
        Self::open_sealed(path, history, None, &[])
    }

    /// Like `open`, with encryption of what `seal` covers. No trace of values under `private` prefixes is kept beside
    /// the values themselves.
    pub fn open_sealed(path: &Path, history: History, seal: Option<Seal>, private: &[&str]) -> Result<Self, OpenError> {
        let seal = seal.map(Arc::new);
        let lock = lock(path)?;
        let Loaded { revision, objects, dictionaries, next_dictionary, disk } = file::open(path, seal.as_ref())?;
        let packer = Packer::resumed(&dictionaries, next_dictionary, private);
        let shared = Arc::new(Shared::new(revision, objects, history));
        let (queue, requests) = std::sync::mpsc::channel();
        let statistics = Arc::new(Statistics::default());
        let (for_writer, counted) = (shared.clone(), statistics.clone());
        let started = Disk::new(Limits::default(), seal, packer, disk, statistics.clone()).and_then(|disk| {
            let name = "cleat-store".to_owned();
            let write = move || {
                writer::run(disk, &for_writer, &counted, &requests);
                drop(lock);
            };
            std::thread::Builder::new().name(name).spawn(write)
        });
        let failed = |e| OpenError::Io { step: "start the writer of", path: path.into(), source: Box::new(e) };
        let writer = started.map_err(failed)?;
        Ok(Self { shared, statistics, queue: Some(queue), writer: Some(writer) })
    }

    /// What the store has counted since it was opened.
    pub fn statistics(&self) -> Arc<Statistics> {
        self.statistics.clone()
    }

    /// Forgets history up to `revision`; later watches and lists from before it answer `TooOld`.
    pub fn compact(&self, revision: Revision) {
        self.shared.compact(revision);
    }

    async fn write(&self, key: &str, operation: Operation) -> Result<Revision, WriteError> {
        let (reply, answer) = oneshot::channel();
        let request = Request { key: key.into(), operation, reply };
        self.queue.as_ref().ok_or(WriteError::Closed)?.send(request).map_err(|_| WriteError::Closed)?;
        answer.await.map_err(|_| WriteError::Closed)?
    }
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        // Closing the queue lets the writer finish what was accepted; joining makes sure the file is released.
        drop(self.queue.take());
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the store's writer panicked");
        }
        self.shared.close();
    }
}

/// Keeps others out, from before anything is read until nothing is written any more. The file stays: whoever removed it
/// would let two in.
fn lock(path: &Path) -> Result<File, OpenError> {
    let name = PathBuf::from(format!("{}.lock", path.display()));
    let failed = |source: std::io::Error| OpenError::Io { step: "lock", path: path.into(), source: Box::new(source) };
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(name).map_err(failed)?;
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
        Ok(Box::new(Shared::watch(&self.shared, prefix, after)?))
    }

    async fn revision(&self) -> Result<Revision, ReadError> {
        Ok(self.shared.revision())
    }
}
