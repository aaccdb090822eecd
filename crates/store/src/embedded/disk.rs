//! Where batches go. After an error the container refuses everything until it is opened anew; that happens before the
//! next batch, and settles whether the doubtful one reached the disk.

use std::path::PathBuf;

use redb::Database;

use super::file::{self, META, OBJECTS, REVISION, SAMPLES, SUM, Sum, encode};
use super::pack::{Named, Packer};
use super::seal::Seal;
use super::state::Change;
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
    packer: Packer,
    state: State,
}

enum State {
    Well(Database),
    /// The changes of the batch that failed.
    Failed(Vec<Change>),
}

impl Disk {
    pub(super) fn new(path: PathBuf, seal: Option<Seal>, database: Database, sum: Sum, packer: Packer) -> Self {
        Self { path, seal, sum, packer, state: State::Well(database) }
    }

    /// Makes the disk usable if it was not. The changes of a batch that failed and is on disk all the same come back, to
    /// be shown to readers; `revision` is the newest they can see.
    pub(super) fn recover(&mut self, revision: Revision) -> Result<Vec<Change>, CommitError> {
        let State::Failed(doubtful) = &mut self.state else { return Ok(Vec::new()) };
        let (database, found) = file::reopen(&self.path).map_err(CommitError::Reopen)?;
        let landed = doubtful.last().is_some_and(|last| last.event.revision == found);
        if !landed && found != revision {
            return Err(CommitError::Astray { found });
        }
        let doubtful = std::mem::take(doubtful);
        if landed {
            self.sum = doubtful.iter().fold(self.sum, |sum, change| sum.after(&change.event));
        }
        self.state = State::Well(database);
        tracing::info!(path = %self.path.display(), "the store can be written again");
        Ok(if landed { doubtful } else { Vec::new() })
    }

    /// Makes the events durable, all or none, and returns them with new values as they are stored. After an error it is
    /// open which.
    pub(super) fn commit(&mut self, events: Vec<Event>) -> Result<Vec<Change>, CommitError> {
        let State::Well(database) = &self.state else { return Err(CommitError::Database(redb::Error::PreviousIo)) };
        let changes = self.packer.pack(self.seal.as_ref(), events);
        let sum = changes.iter().fold(self.sum, |sum, change| sum.after(&change.event));
        let outcome = write(database, self.seal.as_ref(), &changes, self.packer.unsaved(), sum);
        match outcome {
            Ok(()) => {
                self.sum = sum;
                self.packer.saved();
                Ok(changes)
            }
            Err(error) => {
                self.state = State::Failed(changes);
                Err(error)
            }
        }
    }
}

fn write(
    database: &Database,
    seal: Option<&Seal>,
    changes: &[Change],
    samples: &[Named],
    sum: Sum,
) -> Result<(), CommitError> {
    let write = database.begin_write().map_err(redb::Error::from)?;
    {
        if !samples.is_empty() {
            let mut stored = write.open_table(SAMPLES).map_err(redb::Error::from)?;
            for (sort, sample) in samples {
                stored.insert((&**sort, sample.id()), sample.text()).map_err(redb::Error::from)?;
            }
        }
        let mut objects = write.open_table(OBJECTS).map_err(redb::Error::from)?;
        for change in changes {
            match &change.new {
                Some(new) => {
                    let record = encode(seal, new).ok_or(CommitError::Seal)?;
                    objects.insert(&*new.key, record.as_slice()).map_err(redb::Error::from)?
                }
                None => objects.remove(change.event.key()).map_err(redb::Error::from)?,
            };
        }
        let mut meta = write.open_table(META).map_err(redb::Error::from)?;
        if let Some(last) = changes.last() {
            meta.insert(REVISION, last.event.revision).map_err(redb::Error::from)?;
            meta.insert(SUM, sum.0).map_err(redb::Error::from)?;
        }
    }
    write.commit().map_err(redb::Error::from)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::Entry;

    fn events(numbers: Range<u64>) -> Vec<Event> {
        let words: Vec<String> = (0..60).map(|word| (word * 7919 % 997).to_string()).collect();
        let event = |n: u64| {
            let value = format!("{n} {}", words.join(" ")).into();
            let entry = Entry { key: format!("/registry/things/{n}").into(), value, created: n, modified: n };
            Event { revision: n, new: Some(entry), old: None }
        };
        numbers.map(event).collect()
    }

    #[test]
    fn samples_of_a_batch_that_failed_are_stored_with_the_next() {
        for (case, landed) in [("it did not land", 2..2), ("it landed all the same", 2..5)] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("store.redb");
            let (database, loaded) = file::open(&path, None).unwrap();
            let mut disk = Disk::new(path.clone(), None, database, loaded.sum, Packer::default());
            let before = disk.sum;
            let mut failed = Vec::new();
            if !landed.is_empty() {
                failed = disk.commit(events(landed.clone())).unwrap();
                disk.sum = before;
            }
            let lost = disk.packer.pack(None, events(100..130));
            assert!(!disk.packer.unsaved().is_empty(), "{case}: a sample was made on the way");
            disk.state = State::Failed(if landed.is_empty() { lost } else { failed });
            assert_eq!(disk.recover(1).unwrap().len(), landed.clone().count(), "{case}");
            disk.commit(events(landed.end..landed.end + 3)).unwrap();
            drop(disk);
            let (_, loaded) = file::open(&path, None).unwrap_or_else(|e| panic!("{case}: {e}"));
            assert_eq!(loaded.objects.len(), landed.count() + 3, "{case}");
            assert!(!loaded.samples.is_empty(), "{case}");
        }
    }
}
