//! Brings the container up to date, behind the writer's back: what the log has grown by goes into it in one transaction,
//! each key once, and then the log can be written again.
//!
//! After an error the container refuses everything until it is opened anew; that also settles whether the doubtful
//! transaction reached the disk. Until it succeeds the log keeps what it has, and grows.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use redb::Database;

use super::file::{self, DICTIONARIES, LOG, META, OBJECTS, REVISION, SUM};
use super::pack::Named;
use super::record::{Sum, encode};
use super::seal::Seal;
use super::state::Change;
use super::statistics::Statistics;
use crate::{Kept, OpenError, Revision};

/// How long to wait before trying again.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    #[error(transparent)]
    Database(#[from] redb::Error),
    #[error("a value cannot be encrypted")]
    Seal,
    #[error("the file cannot be opened again")]
    Reopen(#[source] OpenError),
    #[error("the container panicked")]
    Panicked,
    #[error("the file is at revision {found}, which is neither before nor after the transaction that failed")]
    Astray { found: Revision },
}

/// What the log has and the container has not.
#[derive(Default)]
pub(super) struct Backlog {
    pub(super) revision: Revision,
    pub(super) objects: HashMap<Arc<str>, Option<Kept>>,
    pub(super) dictionaries: Vec<Named>,
    /// Dictionaries that nothing is packed with any more.
    pub(super) useless: Vec<Named>,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    pub(super) fn add(&mut self, dictionaries: &[Named], changes: &[Change]) {
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

/// The container, and whoever writes to it.
pub(super) struct Container {
    path: PathBuf,
    seal: Option<Arc<Seal>>,
    /// Nothing after an error.
    database: Option<Database>,
    revision: Revision,
    sum: Sum,
}

impl Container {
    pub(super) fn new(
        path: PathBuf,
        seal: Option<Arc<Seal>>,
        database: Database,
        revision: Revision,
        sum: Sum,
    ) -> Self {
        Self { path, seal, database: Some(database), revision, sum }
    }

    /// Once it succeeds, the container expects a log as well.
    fn store(&mut self, backlog: &Backlog) -> Result<(), StoreError> {
        // Some damage the container meets by panicking.
        catch_unwind(AssertUnwindSafe(|| self.try_store(backlog))).unwrap_or(Err(StoreError::Panicked))
    }

    fn try_store(&mut self, backlog: &Backlog) -> Result<(), StoreError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => {
                let (database, revision, sum) = file::reopen(&self.path).map_err(StoreError::Reopen)?;
                if revision != backlog.revision && revision != self.revision {
                    return Err(StoreError::Astray { found: revision });
                }
                (self.revision, self.sum) = (revision, sum);
                database
            }
        };
        // Also if it landed the last time, as far as can be read: not all that can be read is on disk.
        self.sum = write(&database, self.seal.as_deref(), self.sum, backlog)?;
        self.revision = backlog.revision;
        self.database = Some(database);
        Ok(())
    }

    /// As after an error.
    #[cfg(test)]
    pub(super) fn lose(&mut self) {
        self.database = None;
    }

    /// From here on the container is whole without a log.
    pub(super) fn stands_alone(&self) -> Result<(), redb::Error> {
        self.database.as_ref().map_or(Err(redb::Error::PreviousIo), file::expect_no_log)
    }
}

fn write(database: &Database, seal: Option<&Seal>, mut sum: Sum, backlog: &Backlog) -> Result<Sum, StoreError> {
    let mut records = Vec::with_capacity(backlog.objects.len());
    for (key, kept) in &backlog.objects {
        let record = kept.as_ref().map(|kept| encode(seal, kept).ok_or(StoreError::Seal)).transpose()?;
        records.push((&**key, record));
    }
    // Neighbours share pages.
    records.sort_unstable_by_key(|(key, _)| *key);
    let mut write = || -> Result<(), redb::Error> {
        let write = database.begin_write()?;
        {
            let mut dictionaries = write.open_table(DICTIONARIES)?;
            for (sort, dictionary) in &backlog.dictionaries {
                let old = dictionaries.insert((&**sort, dictionary.id()), dictionary.text())?;
                if let Some(old) = old {
                    sum.take(&Sum::of_dictionary(sort, dictionary.id(), old.value()));
                }
                sum.add(&Sum::of_dictionary(sort, dictionary.id(), dictionary.text()));
            }
            for (sort, dictionary) in &backlog.useless {
                if let Some(old) = dictionaries.remove((&**sort, dictionary.id()))? {
                    sum.take(&Sum::of_dictionary(sort, dictionary.id(), old.value()));
                }
            }
            let mut objects = write.open_table(OBJECTS)?;
            for (key, record) in &records {
                let old = match record {
                    Some(record) => {
                        sum.add(&Sum::of_record(key, record));
                        objects.insert(*key, record.as_slice())?
                    }
                    None => objects.remove(*key)?,
                };
                if let Some(old) = old {
                    sum.take(&Sum::of_record(key, old.value()));
                }
            }
            let mut meta = write.open_table(META)?;
            meta.insert(REVISION, backlog.revision)?;
            meta.insert(SUM, sum.0)?;
            meta.insert(LOG, 1)?;
        }
        write.commit()?;
        Ok(())
    };
    write()?;
    Ok(sum)
}

/// A thread that stores one backlog at a time.
pub(super) struct Checkpointer {
    work: Option<mpsc::Sender<Backlog>>,
    progress: Arc<Progress>,
    thread: Option<JoinHandle<Container>>,
}

#[derive(Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stored: Revision,
    busy: bool,
    /// Why the last try failed.
    failing: Option<Arc<StoreError>>,
    closing: bool,
}

/// How far the thread is.
pub(super) enum Pace {
    /// Everything it was given is in the container, up to this revision.
    Idle(Revision),
    Busy,
    Failing(Arc<StoreError>),
}

impl Checkpointer {
    pub(super) fn start(mut container: Container, statistics: Arc<Statistics>) -> std::io::Result<Self> {
        let (work, given) = mpsc::channel::<Backlog>();
        let state = State { stored: container.revision, ..State::default() };
        let progress = Arc::new(Progress { state: Mutex::new(state), changed: Condvar::new() });
        let told = progress.clone();
        let thread = std::thread::Builder::new().name("cleat-checkpoint".into()).spawn(move || {
            while let Ok(backlog) = given.recv() {
                while let Err(error) = container.store(&backlog) {
                    statistics.checkpointed(false);
                    let mut state = told.state.lock();
                    if state.failing.is_none() {
                        tracing::error!(%error, path = %container.path.display(), "the store's log cannot be emptied");
                    }
                    state.failing = Some(Arc::new(error));
                    told.changed.notify_all();
                    if state.closing {
                        return container;
                    }
                    told.changed.wait_for(&mut state, PAUSE);
                }
                cleat_crash::point("store:checkpointed");
                statistics.checkpointed(true);
                let mut state = told.state.lock();
                if state.failing.take().is_some() {
                    tracing::info!(path = %container.path.display(), "the store's log can be emptied again");
                }
                (state.stored, state.busy) = (backlog.revision, false);
                told.changed.notify_all();
            }
            container
        })?;
        Ok(Self { work: Some(work), progress, thread: Some(thread) })
    }

    /// Only when it is idle.
    pub(super) fn give(&self, backlog: Backlog) {
        self.progress.state.lock().busy = true;
        if let Some(work) = &self.work {
            // The thread ends after this end of the channel only.
            let _ = work.send(backlog);
        }
    }

    pub(super) fn pace(&self) -> Pace {
        self.progress.state.lock().pace()
    }

    /// Waits while it is busy.
    pub(super) fn settle(&self) -> Pace {
        let mut state = self.progress.state.lock();
        self.progress.changed.wait_while(&mut state, |state| state.busy && state.failing.is_none());
        state.pace()
    }

    /// Waits until a try succeeds.
    #[cfg(test)]
    pub(super) fn recovered(&self) {
        self.progress.changed.wait_while(&mut self.progress.state.lock(), |state| state.busy);
    }

    /// Ends the thread, after one more try if it is failing.
    pub(super) fn close(mut self) -> Option<Container> {
        self.end();
        self.thread.take().and_then(|thread| thread.join().ok())
    }

    fn end(&mut self) {
        self.progress.state.lock().closing = true;
        self.progress.changed.notify_all();
        drop(self.work.take());
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        self.end();
    }
}

impl State {
    fn pace(&self) -> Pace {
        match &self.failing {
            Some(error) => Pace::Failing(error.clone()),
            None if self.busy => Pace::Busy,
            None => Pace::Idle(self.stored),
        }
    }
}
