//! Where batches go. After an error the container refuses everything until it is opened anew; that happens before the
//! next batch, and settles whether the doubtful one reached the disk.

use std::path::PathBuf;

use redb::Database;

use super::file::{self, META, OBJECTS, REVISION, SUM, Sum, encode};
use super::seal::Seal;
use crate::{Event, OpenError, Revision};

#[derive(Debug, thiserror::Error)]
pub(super) enum CommitError {
    #[error(transparent)]
    Database(#[from] redb::Error),
    #[error("a value cannot be encrypted")]
    Seal,
    #[error("the file cannot be opened again")]
    Reopen(#[source] OpenError),
    #[error("the file is at revision {found}, which is neither before nor after the batch that failed")]
    Astray { found: Revision },
}

pub(super) struct Disk {
    path: PathBuf,
    seal: Option<Seal>,
    /// Of what is on disk, unless the last batch failed.
    sum: Sum,
    state: State,
}

enum State {
    Well(Database),
    /// The events of the batch that failed.
    Failed(Vec<Event>),
}

impl Disk {
    pub(super) fn new(path: PathBuf, seal: Option<Seal>, database: Database, sum: Sum) -> Self {
        Self { path, seal, sum, state: State::Well(database) }
    }

    /// Makes the disk usable if it was not. The events of a batch that failed and is on disk all the same come back, to
    /// be shown to readers; `revision` is the newest they can see.
    pub(super) fn recover(&mut self, revision: Revision) -> Result<Vec<Event>, CommitError> {
        let State::Failed(doubtful) = &mut self.state else { return Ok(Vec::new()) };
        let (database, found) = file::reopen(&self.path).map_err(CommitError::Reopen)?;
        let landed = doubtful.last().is_some_and(|last| last.revision == found);
        if !landed && found != revision {
            return Err(CommitError::Astray { found });
        }
        let doubtful = std::mem::take(doubtful);
        if landed {
            self.sum = doubtful.iter().fold(self.sum, Sum::after);
        }
        self.state = State::Well(database);
        tracing::info!(path = %self.path.display(), "the store can be written again");
        Ok(if landed { doubtful } else { Vec::new() })
    }

    /// Makes the events durable, all or none. After an error it is open which.
    pub(super) fn commit(&mut self, events: &[Event]) -> Result<(), CommitError> {
        let State::Well(database) = &self.state else { return Err(CommitError::Database(redb::Error::PreviousIo)) };
        let sum = events.iter().fold(self.sum, Sum::after);
        let outcome = write(database, self.seal.as_ref(), events, sum);
        match outcome {
            Ok(()) => self.sum = sum,
            Err(_) => self.state = State::Failed(events.to_vec()),
        }
        outcome
    }
}

fn write(database: &Database, seal: Option<&Seal>, events: &[Event], sum: Sum) -> Result<(), CommitError> {
    let write = database.begin_write().map_err(redb::Error::from)?;
    {
        let mut objects = write.open_table(OBJECTS).map_err(redb::Error::from)?;
        for event in events {
            match &event.new {
                Some(new) => {
                    let record = encode(seal, new).ok_or(CommitError::Seal)?;
                    objects.insert(&*new.key, record.as_slice()).map_err(redb::Error::from)?
                }
                None => objects.remove(event.key()).map_err(redb::Error::from)?,
            };
        }
        let mut meta = write.open_table(META).map_err(redb::Error::from)?;
        if let Some(last) = events.last() {
            meta.insert(REVISION, last.revision).map_err(redb::Error::from)?;
            meta.insert(SUM, sum.0).map_err(redb::Error::from)?;
        }
    }
    write.commit().map_err(redb::Error::from)?;
    Ok(())
}
