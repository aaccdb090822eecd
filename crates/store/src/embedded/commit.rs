//! Makes batches durable: appends them to the log and starts checkpoints.

use std::io;
use std::sync::Arc;

use super::checkpoint::{Backlog, CheckpointError, CheckpointStatus, Checkpointer};
use super::encryption::Encryptor;
use super::frame::{FrameBuilder, FrameItem};
use super::log::Log;
use super::packer::Packer;
use super::record::encode;
use super::recovery::StoreFiles;
use super::state::Change;
use super::statistics::StoreStatistics;
use crate::entry::Event;

#[derive(Debug, thiserror::Error)]
pub(super) enum CommitError {
    #[error("the log cannot be written")]
    Log(#[from] io::Error),
    #[error("a value cannot be encrypted")]
    Encrypt,
    #[error("the log is full, because checkpoints fail")]
    LogFull(#[source] Arc<CheckpointError>),
    #[error("the database cannot be written")]
    Database(#[source] Arc<CheckpointError>),
}

/// Limits for the length of the log's active file, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogLimits {
    /// From this length on, the file is rotated and a checkpoint starts as soon as the last one has finished.
    pub(super) rotate_bytes: u64,
    /// From this length on, writes wait for the running checkpoint, and fail if it fails.
    pub(super) max_bytes: u64,
}

impl Default for LogLimits {
    fn default() -> Self {
        Self { rotate_bytes: 4 << 20, max_bytes: 64 << 20 }
    }
}

pub(super) struct Committer {
    limits: LogLimits,
    encryptor: Option<Arc<Encryptor>>,
    packer: Packer,
    log: Log,
    frame: FrameBuilder,
    /// The changes that are in the log and were not submitted to the checkpointer.
    backlog: Backlog,
    /// The database records that a log may exist. Without this record, the next start would remove the log's files.
    log_recorded: bool,
    checkpointer: Checkpointer,
}

impl Committer {
    pub(super) fn new(
        limits: LogLimits,
        encryptor: Option<Arc<Encryptor>>,
        packer: Packer,
        files: StoreFiles,
        statistics: Arc<StoreStatistics>,
    ) -> io::Result<Self> {
        let StoreFiles { database, log, backlog, log_recorded } = files;
        let checkpointer = Checkpointer::start(database, statistics)?;
        let frame = FrameBuilder::default();
        let mut committer = Self { limits, encryptor, packer, log, frame, backlog, log_recorded, checkpointer };
        if !committer.backlog.is_empty() {
            committer.start_checkpoint();
        }
        Ok(committer)
    }

    /// Makes the events durable, all or none, and returns them with their new values as stored. After an error it is
    /// uncertain whether they are durable, until the next batch succeeds or the store is opened again.
    pub(super) fn commit(&mut self, events: Vec<Event>) -> Result<Vec<Change>, CommitError> {
        self.record_log()?;
        self.rotate_if_due()?;
        let changes = self.packer.pack(self.encryptor.as_deref(), events);
        let (Some(first), Some(last)) = (changes.first(), changes.last()) else { return Ok(changes) };
        self.frame.clear();
        for unsaved in self.packer.unsaved() {
            let (id, bytes) = (unsaved.dictionary.id(), unsaved.dictionary.bytes());
            self.frame.push(&FrameItem::Dictionary { group: &unsaved.group, id, bytes });
        }
        for change in &changes {
            match &change.new {
                Some(new) => {
                    let record = encode(self.encryptor.as_deref(), new).ok_or(CommitError::Encrypt)?;
                    self.frame.push(&FrameItem::Stored { key: &new.key, record: &record });
                }
                None => self.frame.push(&FrameItem::Removed { key: change.event.key() }),
            }
        }
        self.log.append(&mut self.frame, first.event.revision, last.event.revision)?;
        self.backlog.add(self.packer.unsaved(), &changes);
        self.packer.mark_saved();
        Ok(changes)
    }

    /// Before the first batch: records in the database that a log may exist.
    fn record_log(&mut self) -> Result<(), CommitError> {
        if self.log_recorded {
            return Ok(());
        }
        // The file first: a database that expects a log is refused if there is no file.
        self.log.ensure_file()?;
        if let CheckpointStatus::Idle(revision) = self.checkpointer.status() {
            self.checkpointer.submit(Backlog::at(revision));
        }
        match self.checkpointer.wait() {
            CheckpointStatus::Failing(error) => Err(CommitError::Database(error)),
            CheckpointStatus::Idle(_) | CheckpointStatus::Busy => {
                self.log_recorded = true;
                Ok(())
            }
        }
    }

    /// Frees log files and starts a checkpoint if the active file is long enough. Waits if it is too long.
    fn rotate_if_due(&mut self) -> Result<(), CommitError> {
        let length = self.log.active_len();
        if length.is_some_and(|length| length < self.limits.rotate_bytes) {
            return Ok(());
        }
        let is_full = length.is_some_and(|length| length >= self.limits.max_bytes);
        match if is_full { self.checkpointer.wait() } else { self.checkpointer.status() } {
            CheckpointStatus::Idle(stored) => {
                self.log.release(stored, self.limits.rotate_bytes);
                if length.is_some() {
                    self.start_checkpoint();
                }
                Ok(())
            }
            CheckpointStatus::Failing(error) if is_full => Err(CommitError::LogFull(error)),
            CheckpointStatus::Failing(_) | CheckpointStatus::Busy => Ok(()),
        }
    }

    /// Rotates the log and submits the backlog. The caller makes sure that the checkpointer is idle.
    fn start_checkpoint(&mut self) {
        self.log.rotate();
        // Empty if an uncertain tail has prevented the rotation and the backlog was submitted before.
        if !self.backlog.is_empty() {
            self.checkpointer.submit(std::mem::take(&mut self.backlog));
        }
    }

    /// Stores everything in the database and removes the log. If that fails, the log stays and the next start replays
    /// it.
    pub(super) fn close(mut self) {
        if matches!(self.checkpointer.wait(), CheckpointStatus::Idle(_)) && !self.backlog.is_empty() {
            self.start_checkpoint();
        }
        let status = self.checkpointer.wait();
        let database = self.checkpointer.close();
        let (Some(database), CheckpointStatus::Idle(_)) = (database, status) else { return };
        // The checkpointer may have recovered between the two waits: then the backlog was not submitted.
        if !self.backlog.is_empty() {
            return;
        }
        // Whenever the database may expect a log, also after a `record_log` that failed and was stored by a later
        // retry, there is a file.
        if self.log.has_files()
            && let Err(error) = database.expect_no_log()
        {
            tracing::warn!(%error, "the store's log cannot be emptied; the next start replays it");
            return;
        }
        cleat_crash::point("store:log-emptied");
        if let Err(error) = self.log.remove() {
            tracing::warn!(%error, "the store's empty log cannot be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::super::recovery::{self, LoadedStore};
    use super::*;
    use crate::entry::Entry;

    const SMALL_LIMITS: LogLimits = LogLimits { rotate_bytes: 4 << 10, max_bytes: 32 << 10 };

    struct StoreDir(tempfile::TempDir);

    impl StoreDir {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("store.redb")
        }

        fn open(&self) -> Committer {
            let LoadedStore { dictionaries, next_dictionary_id, files, .. } =
                recovery::open(&self.path(), None).unwrap();
            let packer = Packer::resume(&dictionaries, next_dictionary_id, &[]);
            Committer::new(SMALL_LIMITS, None, packer, files, Arc::default()).unwrap()
        }

        /// A store whose database cannot be written until the file at the returned path is moved back.
        fn open_without_database(&self) -> (StoreFiles, PathBuf) {
            let mut files = recovery::open(&self.path(), None).unwrap().files;
            files.database.close_database();
            let moved = self.0.path().join("moved");
            fs::rename(self.path(), &moved).unwrap();
            (files, moved)
        }

        /// Copies the files as they are now: the state after a power failure.
        fn copy(&self) -> Self {
            let copy = Self::new();
            for entry in fs::read_dir(self.0.path()).unwrap() {
                let entry = entry.unwrap();
                fs::copy(entry.path(), copy.0.path().join(entry.file_name())).unwrap();
            }
            copy
        }

        fn contents(&self) -> BTreeMap<String, Vec<u8>> {
            let loaded = recovery::open(&self.path(), None).unwrap();
            loaded.objects.iter().map(|found| (found.0.key.to_string(), found.0.entry().value.to_vec())).collect()
        }

        fn log_count(&self) -> usize {
            (0..).take_while(|n| Path::new(&format!("{}.log{n}", self.path().display())).exists()).count()
        }
    }

    /// Generates writes to twenty keys, some of them deletions, and tracks the expected contents.
    struct Writes {
        revision: u64,
        current: BTreeMap<String, Entry>,
    }

    impl Writes {
        fn new() -> Self {
            Self { revision: 1, current: BTreeMap::new() }
        }

        fn next(&mut self) -> Event {
            self.revision += 1;
            let n = self.revision;
            let key = format!("/registry/things/{}", n * 7 % 20);
            let words: Vec<String> = (0..60).map(|word| (word * 7919 % 997).to_string()).collect();
            let old = self.current.remove(&key);
            let value = format!("{n} {}", words.join(" ")).into();
            let entry = Entry { key: key.as_str().into(), value, created: n, modified: n };
            let new = (old.is_none() || !n.is_multiple_of(3)).then_some(entry);
            self.current.extend(new.clone().map(|new| (key, new)));
            Event { revision: n, new, old }
        }

        fn contents(&self) -> BTreeMap<String, Vec<u8>> {
            self.current.iter().map(|(key, entry)| (key.clone(), entry.value.to_vec())).collect()
        }
    }

    #[test]
    fn checkpoints_keep_the_log_short() {
        let dir = StoreDir::new();
        let mut committer = dir.open();
        let mut writes = Writes::new();
        for _ in 0..500 {
            committer.commit(vec![writes.next(), writes.next()]).unwrap();
        }
        assert!(dir.log_count() <= 3, "log files are reused: {}", dir.log_count());
        committer.close();
        assert_eq!(dir.log_count(), 0, "the database is complete without a log");
        assert_eq!(dir.contents(), writes.contents());
    }

    #[test]
    fn acknowledged_writes_survive_a_power_failure() {
        let dir = StoreDir::new();
        let mut committer = dir.open();
        let mut writes = Writes::new();
        for n in 0..200 {
            committer.commit(vec![writes.next()]).unwrap();
            if n % 5 == 0 {
                // Copying the database during a transaction would test redb, not this module.
                committer.checkpointer.wait();
                let found = dir.copy();
                assert_eq!(found.contents(), writes.contents(), "after {n}");
                // The copy is opened again before anything else is written, and accepts the next write.
                let (mut again, mut more) = (found.open(), Writes { current: writes.current.clone(), ..writes });
                again.commit(vec![more.next()]).unwrap();
                again.close();
                assert_eq!(found.contents(), more.contents(), "after {n}, and one more");
            }
        }
    }

    #[test]
    fn a_database_that_cannot_be_written_stops_writers_only_when_the_log_is_full() {
        let dir = StoreDir::new();
        let (mut files, moved) = dir.open_without_database();
        let statistics = Arc::new(StoreStatistics::default());
        files.log.ensure_file().unwrap();
        files.log_recorded = true;
        let mut committer = Committer::new(SMALL_LIMITS, None, Packer::default(), files, statistics).unwrap();
        let mut writes = Writes::new();
        let mut accepted = 0;
        let (refused, error) = loop {
            let before = Writes { current: writes.current.clone(), ..writes };
            match committer.commit(vec![writes.next()]) {
                Ok(_) => accepted += 1,
                Err(error) => break (before, error),
            }
        };
        assert!(matches!(&error, CommitError::LogFull(_)), "{error}");
        assert!(accepted > 40, "the log accepted {accepted}");
        let mut writes = refused;
        fs::rename(&moved, dir.path()).unwrap();
        // The checkpointer retries.
        committer.checkpointer.wait_for_success();
        committer.commit(vec![writes.next()]).unwrap();
        committer.close();
        assert_eq!((dir.log_count(), dir.contents()), (0, writes.contents()));
    }

    #[test]
    fn a_log_that_fails_repeatedly_loses_no_acknowledged_write() {
        let dir = StoreDir::new();
        let mut committer = dir.open();
        let mut writes = Writes::new();
        for _ in 0..3 {
            committer.commit(vec![writes.next()]).unwrap();
        }
        committer.log.set_failing(true);
        for _ in 0..4 {
            let mut failed = Writes { current: writes.current.clone(), ..writes };
            assert!(matches!(committer.commit(vec![failed.next()]), Err(CommitError::Log(_))));
            // The file is long enough to be rotated, and cannot be, because its tail is uncertain.
            committer.limits.rotate_bytes = 1;
            committer.checkpointer.wait();
            assert_eq!(dir.copy().contents(), writes.contents());
        }
        committer.log.set_failing(false);
        committer.commit(vec![writes.next()]).unwrap();
        assert_eq!(dir.copy().contents(), writes.contents());
        committer.close();
        assert_eq!(dir.contents(), writes.contents());
    }

    #[test]
    fn a_store_that_is_closed_or_never_written_leaves_no_log() {
        let dir = StoreDir::new();
        dir.open().close();
        assert_eq!(dir.log_count(), 0);
        // A file that an interrupted close left behind is removed.
        fs::write(format!("{}.log0", dir.path().display()), b"anything").unwrap();
        drop(dir.open());
        assert_eq!(dir.log_count(), 0);
    }

    #[test]
    fn a_log_record_that_is_stored_late_is_undone_on_close() {
        let dir = StoreDir::new();
        let (files, moved) = dir.open_without_database();
        let mut committer = Committer::new(SMALL_LIMITS, None, Packer::default(), files, Arc::default()).unwrap();
        let error = committer.commit(vec![Writes::new().next()]).unwrap_err();
        assert!(matches!(&error, CommitError::Database(_)), "{error}");
        fs::rename(&moved, dir.path()).unwrap();
        committer.checkpointer.wait_for_success();
        committer.close();
        assert_eq!((dir.log_count(), dir.contents()), (0, BTreeMap::new()));
    }

    #[test]
    fn a_log_without_its_database_is_refused() {
        let dir = StoreDir::new();
        let mut committer = dir.open();
        committer.commit(vec![Writes::new().next()]).unwrap();
        let copy = dir.copy();
        fs::remove_file(copy.path()).unwrap();
        let error = recovery::open(&copy.path(), None).err().unwrap();
        assert!(error.to_string().contains("there is its log only"), "{error}");
        assert!(!copy.path().exists() && copy.log_count() == 1, "and left alone");
    }

    #[test]
    fn dictionaries_of_a_failed_batch_are_stored_with_the_next() {
        let dir = StoreDir::new();
        let mut committer = dir.open();
        let mut writes = Writes::new();
        let failed: Vec<Event> = (0..30).map(|_| writes.next()).collect();
        committer.packer.pack(None, failed);
        assert!(!committer.packer.unsaved().is_empty(), "the failed batch has led to a dictionary");
        let mut writes = Writes::new();
        committer.commit((0..3).map(|_| writes.next()).collect()).unwrap();
        let found = dir.copy();
        assert_eq!(found.contents(), writes.contents());
        committer.close();
        assert_eq!(dir.contents(), writes.contents());
        assert!(!recovery::open(&dir.path(), None).unwrap().dictionaries.is_empty());
    }

    #[test]
    fn a_store_whose_log_is_missing_is_refused() {
        let dir = StoreDir::new();
        let mut committer = dir.open();
        committer.commit(vec![Writes::new().next()]).unwrap();
        let copy = dir.copy();
        fs::remove_file(format!("{}.log0", copy.path().display())).unwrap();
        let error = recovery::open(&copy.path(), None).err().unwrap();
        assert!(error.to_string().contains("its log is missing"), "{error}");
    }
}
