//! Where batches go: into the log, and with the log to the container.

use std::io;
use std::sync::Arc;

use super::checkpoint::{Backlog, Checkpointer, Pace, StoreError};
use super::file::Opened;
use super::frame::{Frame, Item};
use super::log::Log;
use super::pack::Packer;
use super::record::encode;
use super::seal::Seal;
use super::state::Change;
use super::statistics::Statistics;
use crate::Event;

#[derive(Debug, thiserror::Error)]
pub(super) enum CommitError {
    #[error("the log cannot be written")]
    Log(#[from] io::Error),
    #[error("a value cannot be encrypted")]
    Seal,
    #[error("the log is full and cannot be emptied")]
    Full(#[source] Arc<StoreError>),
    #[error("the container cannot be written")]
    Unmarked(#[source] Arc<StoreError>),
}

/// How long a file of the log gets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// From here on the container is brought up to date as soon as it can be.
    pub(super) turn: u64,
    /// From here on writers wait for that.
    pub(super) wait: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { turn: 4 << 20, wait: 64 << 20 }
    }
}

pub(super) struct Disk {
    limits: Limits,
    seal: Option<Arc<Seal>>,
    packer: Packer,
    log: Log,
    frame: Frame,
    /// What only the log has, and what nobody is storing yet.
    backlog: Backlog,
    /// Does the container say that there is a log? Without that a log would be taken for rubbish.
    marked: bool,
    checkpointer: Checkpointer,
}

impl Disk {
    pub(super) fn new(
        limits: Limits,
        seal: Option<Arc<Seal>>,
        packer: Packer,
        opened: Opened,
        statistics: Arc<Statistics>,
    ) -> io::Result<Self> {
        let Opened { container, log, backlog, marked } = opened;
        let checkpointer = Checkpointer::start(container, statistics)?;
        let mut disk = Self { limits, seal, packer, log, frame: Frame::default(), backlog, marked, checkpointer };
        if !disk.backlog.is_empty() {
            disk.hand_over();
        }
        Ok(disk)
    }

    /// Makes the events durable, all or none, and returns them with new values as they are stored. After an error it is
    /// open which, until the next batch is durable or the store is opened again.
    pub(super) fn commit(&mut self, events: Vec<Event>) -> Result<Vec<Change>, CommitError> {
        self.mark()?;
        self.make_room()?;
        let changes = self.packer.pack(self.seal.as_deref(), events);
        let (Some(first), Some(last)) = (changes.first(), changes.last()) else { return Ok(changes) };
        self.frame.clear();
        for (sort, dictionary) in self.packer.unsaved() {
            self.frame.push(&Item::Dictionary { sort, id: dictionary.id(), text: dictionary.text() });
        }
        for change in &changes {
            match &change.new {
                Some(new) => {
                    let record = encode(self.seal.as_deref(), new).ok_or(CommitError::Seal)?;
                    self.frame.push(&Item::Stored { key: &new.key, record: &record });
                }
                None => self.frame.push(&Item::Removed { key: change.event.key() }),
            }
        }
        self.log.append(&mut self.frame, first.event.revision, last.event.revision)?;
        self.backlog.add(self.packer.unsaved(), &changes);
        self.packer.saved();
        Ok(changes)
    }

    /// Before the first batch.
    fn mark(&mut self) -> Result<(), CommitError> {
        if self.marked {
            return Ok(());
        }
        self.log.prepare()?;
        if let Pace::Idle(revision) = self.checkpointer.pace() {
            self.checkpointer.give(Backlog { revision, ..Backlog::default() });
        }
        match self.checkpointer.settle() {
            Pace::Failing(error) => Err(CommitError::Unmarked(error)),
            Pace::Idle(_) | Pace::Busy => {
                self.marked = true;
                Ok(())
            }
        }
    }

    fn make_room(&mut self) -> Result<(), CommitError> {
        let length = self.log.length();
        if length.is_some_and(|length| length < self.limits.turn) {
            return Ok(());
        }
        let is_full = length.is_some_and(|length| length >= self.limits.wait);
        match if is_full { self.checkpointer.settle() } else { self.checkpointer.pace() } {
            Pace::Idle(stored) => {
                self.log.release(stored, self.limits.turn);
                if length.is_some() {
                    self.hand_over();
                }
                Ok(())
            }
            Pace::Failing(error) if is_full => Err(CommitError::Full(error)),
            Pace::Failing(_) | Pace::Busy => Ok(()),
        }
    }

    /// Only when the other thread is idle.
    fn hand_over(&mut self) {
        self.log.turn();
        // A file that cannot be ended yet may have been handed over already.
        if !self.backlog.is_empty() {
            self.checkpointer.give(std::mem::take(&mut self.backlog));
        }
    }

    /// Leaves the container up to date and no log, if that can be done.
    pub(super) fn close(mut self) {
        if matches!(self.checkpointer.settle(), Pace::Idle(_)) && !self.backlog.is_empty() {
            self.hand_over();
        }
        let pace = self.checkpointer.settle();
        let container = self.checkpointer.close();
        let (Some(container), Pace::Idle(_)) = (container, pace) else { return };
        // It may have recovered between the two looks: then there is more in the log.
        if !self.backlog.is_empty() {
            return;
        }
        // A mark that failed may have succeeded meanwhile; there is a file before it is tried.
        if !self.log.is_absent()
            && let Err(error) = container.stands_alone()
        {
            tracing::warn!(%error, "the store's log is kept");
            return;
        }
        cleat_crash::point("store:log-emptied");
        if let Err(error) = self.log.remove() {
            tracing::warn!(%error, "the store's log was emptied and cannot be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::super::file::{self, Loaded};
    use super::*;
    use crate::Entry;

    const SMALL: Limits = Limits { turn: 4 << 10, wait: 32 << 10 };

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("store.redb")
        }

        fn open(&self) -> Disk {
            let Loaded { dictionaries, next_dictionary, disk, .. } = file::open(&self.path(), None).unwrap();
            let packer = Packer::resumed(&dictionaries, next_dictionary, &[]);
            Disk::new(SMALL, None, packer, disk, Arc::default()).unwrap()
        }

        /// A store whose container cannot be written until what is elsewhere is brought back.
        fn lost(&self) -> (Opened, PathBuf) {
            let mut opened = file::open(&self.path(), None).unwrap().disk;
            opened.container.lose();
            let away = self.0.path().join("away");
            fs::rename(self.path(), &away).unwrap();
            (opened, away)
        }

        /// The files as they are now, elsewhere: what a machine finds that lost its power.
        fn copy(&self) -> Self {
            let copy = Self::new();
            for entry in fs::read_dir(self.0.path()).unwrap() {
                let entry = entry.unwrap();
                fs::copy(entry.path(), copy.0.path().join(entry.file_name())).unwrap();
            }
            copy
        }

        fn contents(&self) -> BTreeMap<String, Vec<u8>> {
            let loaded = file::open(&self.path(), None).unwrap();
            loaded.objects.iter().map(|found| (found.0.key.to_string(), found.0.entry().value.to_vec())).collect()
        }

        fn logs(&self) -> usize {
            (0..).take_while(|n| Path::new(&format!("{}.log{n}", self.path().display())).exists()).count()
        }
    }

    /// What is written with this revision: one of twenty keys, and at times its removal.
    struct Writes {
        revision: u64,
        now: BTreeMap<String, Entry>,
    }

    impl Writes {
        fn new() -> Self {
            Self { revision: 1, now: BTreeMap::new() }
        }

        fn next(&mut self) -> Event {
            self.revision += 1;
            let n = self.revision;
            let key = format!("/registry/things/{}", n * 7 % 20);
            let words: Vec<String> = (0..60).map(|word| (word * 7919 % 997).to_string()).collect();
            let old = self.now.remove(&key);
            let value = format!("{n} {}", words.join(" ")).into();
            let entry = Entry { key: key.as_str().into(), value, created: n, modified: n };
            let new = (old.is_none() || !n.is_multiple_of(3)).then_some(entry);
            self.now.extend(new.clone().map(|new| (key, new)));
            Event { revision: n, new, old }
        }

        fn contents(&self) -> BTreeMap<String, Vec<u8>> {
            self.now.iter().map(|(key, entry)| (key.clone(), entry.value.to_vec())).collect()
        }
    }

    #[test]
    fn the_container_follows_the_log() {
        let place = Place::new();
        let mut disk = place.open();
        let mut writes = Writes::new();
        for _ in 0..500 {
            disk.commit(vec![writes.next(), writes.next()]).unwrap();
        }
        assert!(place.logs() <= 3, "files are written again: {}", place.logs());
        disk.close();
        assert_eq!(place.logs(), 0, "the container is whole without a log");
        assert_eq!(place.contents(), writes.contents());
    }

    #[test]
    fn what_is_found_after_a_power_failure_is_what_was_acknowledged() {
        let place = Place::new();
        let mut disk = place.open();
        let mut writes = Writes::new();
        for n in 0..200 {
            disk.commit(vec![writes.next()]).unwrap();
            if n % 5 == 0 {
                // A container in the middle of being written is a test of the container.
                disk.checkpointer.settle();
                let found = place.copy();
                assert_eq!(found.contents(), writes.contents(), "after {n}");
                // What was found is opened once more before anything else was written, and goes on from there.
                let (mut again, mut more) = (found.open(), Writes { now: writes.now.clone(), ..writes });
                again.commit(vec![more.next()]).unwrap();
                again.close();
                assert_eq!(found.contents(), more.contents(), "after {n}, and one more");
            }
        }
    }

    #[test]
    fn a_container_that_cannot_be_written_stops_writers_only_when_the_log_is_full() {
        let place = Place::new();
        let (mut opened, away) = place.lost();
        let statistics = Arc::new(Statistics::default());
        opened.log.prepare().unwrap();
        opened.marked = true;
        let mut disk = Disk::new(SMALL, None, Packer::default(), opened, statistics).unwrap();
        let mut writes = Writes::new();
        let mut accepted = 0;
        let (refused, error) = loop {
            let before = Writes { now: writes.now.clone(), ..writes };
            match disk.commit(vec![writes.next()]) {
                Ok(_) => accepted += 1,
                Err(error) => break (before, error),
            }
        };
        assert!(matches!(&error, CommitError::Full(_)), "{error}");
        assert!(accepted > 40, "the log took {accepted}");
        let mut writes = refused;
        fs::rename(&away, place.path()).unwrap();
        // It tries again by itself.
        disk.checkpointer.recovered();
        disk.commit(vec![writes.next()]).unwrap();
        disk.close();
        assert_eq!((place.logs(), place.contents()), (0, writes.contents()));
    }

    #[test]
    fn a_log_that_fails_again_and_again_costs_nothing_that_was_acknowledged() {
        let place = Place::new();
        let mut disk = place.open();
        let mut writes = Writes::new();
        for _ in 0..3 {
            disk.commit(vec![writes.next()]).unwrap();
        }
        disk.log.fail(true);
        for _ in 0..4 {
            let mut lost = Writes { now: writes.now.clone(), ..writes };
            assert!(matches!(disk.commit(vec![lost.next()]), Err(CommitError::Log(_))));
            // As if the file had become long enough meanwhile: it is to be ended, and cannot be.
            disk.limits.turn = 1;
            disk.checkpointer.settle();
            assert_eq!(place.copy().contents(), writes.contents());
        }
        disk.log.fail(false);
        disk.commit(vec![writes.next()]).unwrap();
        assert_eq!(place.copy().contents(), writes.contents());
        disk.close();
        assert_eq!(place.contents(), writes.contents());
    }

    #[test]
    fn a_store_that_is_closed_or_never_written_leaves_no_log() {
        let place = Place::new();
        place.open().close();
        assert_eq!(place.logs(), 0);
        // What a close that was cut short left is rubbish.
        fs::write(format!("{}.log0", place.path().display()), b"anything").unwrap();
        drop(place.open());
        assert_eq!(place.logs(), 0);
    }

    #[test]
    fn a_mark_that_succeeds_unnoticed_is_taken_back() {
        let place = Place::new();
        let (opened, away) = place.lost();
        let mut disk = Disk::new(SMALL, None, Packer::default(), opened, Arc::default()).unwrap();
        let error = disk.commit(vec![Writes::new().next()]).unwrap_err();
        assert!(matches!(&error, CommitError::Unmarked(_)), "{error}");
        fs::rename(&away, place.path()).unwrap();
        disk.checkpointer.recovered();
        disk.close();
        assert_eq!((place.logs(), place.contents()), (0, BTreeMap::new()));
    }

    #[test]
    fn a_log_without_its_container_is_refused() {
        let place = Place::new();
        let mut disk = place.open();
        disk.commit(vec![Writes::new().next()]).unwrap();
        let copy = place.copy();
        fs::remove_file(copy.path()).unwrap();
        let error = file::open(&copy.path(), None).err().unwrap();
        assert!(error.to_string().contains("there is its log only"), "{error}");
        assert!(!copy.path().exists() && copy.logs() == 1, "and left alone");
    }

    #[test]
    fn samples_of_a_batch_that_failed_are_stored_with_the_next() {
        let place = Place::new();
        let mut disk = place.open();
        let mut writes = Writes::new();
        let lost: Vec<Event> = (0..30).map(|_| writes.next()).collect();
        disk.packer.pack(None, lost);
        assert!(!disk.packer.unsaved().is_empty(), "a dictionary was made on the way");
        let mut writes = Writes::new();
        disk.commit((0..3).map(|_| writes.next()).collect()).unwrap();
        let found = place.copy();
        assert_eq!(found.contents(), writes.contents());
        disk.close();
        assert_eq!(place.contents(), writes.contents());
        assert!(!file::open(&place.path(), None).unwrap().dictionaries.is_empty());
    }

    #[test]
    fn a_store_whose_log_is_gone_is_refused() {
        let place = Place::new();
        let mut disk = place.open();
        disk.commit(vec![Writes::new().next()]).unwrap();
        let copy = place.copy();
        fs::remove_file(format!("{}.log0", copy.path().display())).unwrap();
        let error = file::open(&copy.path(), None).err().unwrap();
        assert!(error.to_string().contains("its log is missing"), "{error}");
    }
}
