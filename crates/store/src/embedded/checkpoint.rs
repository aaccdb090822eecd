//! Checkpoints: a thread beside the writer stores the changes since the last checkpoint in the database, in one
//! transaction and each key once. The log files that hold these changes can then be reused.
//!
//! After an error redb refuses everything until the file is opened again. Opening it also shows whether the failed
//! transaction reached the disk. Until a checkpoint succeeds, the log keeps its batches and grows.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use redb::Database;

use super::database::{self, CHECKSUM, DICTIONARIES, LOG, META, OBJECTS, REVISION};
use super::encryption::Encryptor;
use super::packer::GroupDictionary;
use super::record::{Checksum, encode};
use super::state::Change;
use super::statistics::StoreStatistics;
use crate::entry::{Revision, StoredEntry};
use crate::error::OpenError;

const RETRY_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub(super) enum CheckpointError {
    #[error(transparent)]
    Database(#[from] redb::Error),
    #[error("a value cannot be encrypted")]
    Encrypt,
    #[error("the database cannot be opened again")]
    Reopen(#[source] OpenError),
    #[error("the database panicked")]
    Panicked,
    #[error("the database is at revision {found}, which is neither before nor after the transaction that failed")]
    UnexpectedRevision { found: Revision },
}

/// The changes that are in the log and not in the database.
#[derive(Default)]
pub(super) struct Backlog {
    /// The revision of the newest change.
    pub(super) revision: Revision,
    /// The newest entry of each changed key; `None` if the key was deleted.
    pub(super) objects: HashMap<Arc<str>, Option<StoredEntry>>,
    pub(super) dictionaries: Vec<GroupDictionary>,
    /// Dictionaries that no value uses any more. The checkpoint removes them.
    pub(super) unused_dictionaries: Vec<GroupDictionary>,
}

impl Backlog {
    /// A backlog without changes for a database at this revision.
    pub(super) fn at(revision: Revision) -> Self {
        Self { revision, ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    pub(super) fn add(&mut self, dictionaries: &[GroupDictionary], changes: &[Change]) {
        self.dictionaries.extend_from_slice(dictionaries);
        for change in changes {
            self.revision = change.event.revision;
            match &change.new {
                Some(new) => self.objects.insert(new.key.clone(), Some(new.clone())),
                None => self.objects.insert(change.event.key().into(), None),
            };
        }
    }
}

/// Writes to the database; opens it again after an error.
pub(super) struct DatabaseWriter {
    path: PathBuf,
    encryptor: Option<Arc<Encryptor>>,
    /// `None` after an error.
    database: Option<Database>,
    revision: Revision,
    checksum: Checksum,
}

impl DatabaseWriter {
    pub(super) fn new(
        path: PathBuf,
        encryptor: Option<Arc<Encryptor>>,
        database: Database,
        revision: Revision,
        checksum: Checksum,
    ) -> Self {
        Self { path, encryptor, database: Some(database), revision, checksum }
    }

    /// Stores the backlog. The same transaction records that a log may exist.
    fn store(&mut self, backlog: &Backlog) -> Result<(), CheckpointError> {
        // redb panics on some kinds of damage.
        catch_unwind(AssertUnwindSafe(|| self.try_store(backlog))).unwrap_or(Err(CheckpointError::Panicked))
    }

    fn try_store(&mut self, backlog: &Backlog) -> Result<(), CheckpointError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => {
                let (database, revision, checksum) = database::reopen(&self.path).map_err(CheckpointError::Reopen)?;
                if revision != backlog.revision && revision != self.revision {
                    return Err(CheckpointError::UnexpectedRevision { found: revision });
                }
                (self.revision, self.checksum) = (revision, checksum);
                database
            }
        };
        // After a reopen the backlog is written again even if the file shows it: it may be in the page cache only.
        self.checksum = write(&database, self.encryptor.as_deref(), self.checksum, backlog)?;
        self.revision = backlog.revision;
        self.database = Some(database);
        Ok(())
    }

    /// Produces the state after an error.
    #[cfg(test)]
    pub(super) fn close_database(&mut self) {
        self.database = None;
    }

    /// Records that the database is complete without a log.
    pub(super) fn expect_no_log(&self) -> Result<(), redb::Error> {
        self.database.as_ref().map_or(Err(redb::Error::PreviousIo), database::expect_no_log)
    }
}

/// Stores the backlog in one transaction and returns the new checksum.
fn write(
    database: &Database,
    encryptor: Option<&Encryptor>,
    mut checksum: Checksum,
    backlog: &Backlog,
) -> Result<Checksum, CheckpointError> {
    let mut records = Vec::with_capacity(backlog.objects.len());
    for (key, entry) in &backlog.objects {
        let record =
            entry.as_ref().map(|entry| encode(encryptor, entry).ok_or(CheckpointError::Encrypt)).transpose()?;
        records.push((&**key, record));
    }
    // In key order, because neighbours share pages.
    records.sort_unstable_by_key(|(key, _)| *key);
    let mut write = || -> Result<(), redb::Error> {
        let write = database.begin_write()?;
        {
            let mut dictionaries = write.open_table(DICTIONARIES)?;
            for GroupDictionary { group, dictionary } in &backlog.dictionaries {
                let old = dictionaries.insert((&**group, dictionary.id()), dictionary.bytes())?;
                if let Some(old) = old {
                    checksum.subtract(&Checksum::of_dictionary(group, dictionary.id(), old.value()));
                }
                checksum.add(&Checksum::of_dictionary(group, dictionary.id(), dictionary.bytes()));
            }
            for GroupDictionary { group, dictionary } in &backlog.unused_dictionaries {
                if let Some(old) = dictionaries.remove((&**group, dictionary.id()))? {
                    checksum.subtract(&Checksum::of_dictionary(group, dictionary.id(), old.value()));
                }
            }
            let mut objects = write.open_table(OBJECTS)?;
            for (key, record) in &records {
                let old = match record {
                    Some(record) => {
                        checksum.add(&Checksum::of_record(key, record));
                        objects.insert(*key, record.as_slice())?
                    }
                    None => objects.remove(*key)?,
                };
                if let Some(old) = old {
                    checksum.subtract(&Checksum::of_record(key, old.value()));
                }
            }
            let mut meta = write.open_table(META)?;
            meta.insert(REVISION, backlog.revision)?;
            meta.insert(CHECKSUM, checksum.0)?;
            meta.insert(LOG, 1)?;
        }
        write.commit()?;
        Ok(())
    };
    write()?;
    Ok(checksum)
}

/// The thread that stores one backlog at a time. It retries a backlog until that succeeds.
pub(super) struct Checkpointer {
    backlogs: Option<mpsc::Sender<Backlog>>,
    progress: Arc<CheckpointProgress>,
    thread: Option<JoinHandle<DatabaseWriter>>,
}

#[derive(Default)]
struct CheckpointProgress {
    state: Mutex<CheckpointState>,
    changed: Condvar,
}

#[derive(Default)]
struct CheckpointState {
    /// The revision of the last backlog that was stored.
    stored: Revision,
    busy: bool,
    /// Why the last attempt failed.
    failing: Option<Arc<CheckpointError>>,
    closing: bool,
}

pub(super) enum CheckpointStatus {
    /// Every submitted backlog is in the database, which is at this revision.
    Idle(Revision),
    Busy,
    /// The last attempt failed; the thread tries again after `RETRY_INTERVAL`.
    Failing(Arc<CheckpointError>),
}

impl Checkpointer {
    pub(super) fn start(mut database: DatabaseWriter, statistics: Arc<StoreStatistics>) -> std::io::Result<Self> {
        let (backlogs, submitted) = mpsc::channel::<Backlog>();
        let state = CheckpointState { stored: database.revision, ..CheckpointState::default() };
        let progress = Arc::new(CheckpointProgress { state: Mutex::new(state), changed: Condvar::new() });
        let reported = progress.clone();
        let thread = std::thread::Builder::new().name("cleat-checkpoint".into()).spawn(move || {
            while let Ok(backlog) = submitted.recv() {
                while let Err(error) = database.store(&backlog) {
                    statistics.count_checkpoint(false);
                    let mut state = reported.state.lock();
                    if state.failing.is_none() {
                        tracing::error!(%error, path = %database.path.display(), "store checkpoint failed");
                    }
                    state.failing = Some(Arc::new(error));
                    reported.changed.notify_all();
                    if state.closing {
                        return database;
                    }
                    reported.changed.wait_for(&mut state, RETRY_INTERVAL);
                }
                cleat_crash::point("store:checkpointed");
                statistics.count_checkpoint(true);
                let mut state = reported.state.lock();
                if state.failing.take().is_some() {
                    tracing::info!(path = %database.path.display(), "store checkpoint succeeded after failures");
                }
                (state.stored, state.busy) = (backlog.revision, false);
                reported.changed.notify_all();
            }
            database
        })?;
        Ok(Self { backlogs: Some(backlogs), progress, thread: Some(thread) })
    }

    /// Starts a checkpoint. The caller makes sure that the status is `Idle`.
    pub(super) fn submit(&self, backlog: Backlog) {
        self.progress.state.lock().busy = true;
        if let Some(backlogs) = &self.backlogs {
            // Cannot fail: the thread receives until `stop` has dropped the sender.
            let _ = backlogs.send(backlog);
        }
    }

    pub(super) fn status(&self) -> CheckpointStatus {
        self.progress.state.lock().status()
    }

    /// Waits until the current checkpoint has succeeded or failed at least once.
    pub(super) fn wait(&self) -> CheckpointStatus {
        let mut state = self.progress.state.lock();
        self.progress.changed.wait_while(&mut state, |state| state.busy && state.failing.is_none());
        state.status()
    }

    /// Waits until the current checkpoint has succeeded.
    #[cfg(test)]
    pub(super) fn wait_for_success(&self) {
        self.progress.changed.wait_while(&mut self.progress.state.lock(), |state| state.busy);
    }

    /// Ends the thread and returns its database. A failing checkpoint is tried once more.
    pub(super) fn close(mut self) -> Option<DatabaseWriter> {
        self.stop();
        self.thread.take().and_then(|thread| thread.join().ok())
    }

    fn stop(&mut self) {
        self.progress.state.lock().closing = true;
        self.progress.changed.notify_all();
        drop(self.backlogs.take());
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl CheckpointState {
    fn status(&self) -> CheckpointStatus {
        match &self.failing {
            Some(error) => CheckpointStatus::Failing(error.clone()),
            None if self.busy => CheckpointStatus::Busy,
            None => CheckpointStatus::Idle(self.stored),
        }
    }
}
