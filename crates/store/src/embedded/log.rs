//! The log: every batch since the last checkpoint, in files beside the database.
//!
//! A file is a sequence of frames (`frame`), one per batch, each at a multiple of [`SECTOR_BYTES`]. Appending a batch
//! is one write into space that is already allocated and one data sync, so that the file system has no metadata of its
//! own to write. When the database has everything that is in a file, the file is overwritten from its beginning. Frames
//! of its earlier use are recognised by their generation and by revisions that the database has already.
//!
//! Only the last frame can be incomplete: a batch starts after the batch before it is durable. An invalid frame
//! therefore ends the log. If valid frames follow it, an acknowledged batch was damaged, and the store is refused.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use ring::rand::{SecureRandom as _, SystemRandom};

use super::directory::{parent_dir, sync_parent_dir};
use super::frame::{Frame, FrameBuilder, SECTOR_BYTES};
use crate::entry::Revision;
use crate::error::OpenError;

/// A file grows by multiples of this.
const GROWTH_BYTES: u64 = 256 << 10;

struct LogFile {
    path: PathBuf,
    file: File,
    /// A random number, chosen anew each time the file is overwritten from its beginning.
    generation: u64,
    /// Offset of the next frame.
    end: u64,
    /// Length of the file; the bytes after `end` are allocated.
    allocated: u64,
    /// The newest revision in the file; `None` if the file is free.
    last: Option<Revision>,
}

impl LogFile {
    fn open(path: PathBuf) -> io::Result<Self> {
        // The log may hold Secrets.
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        sync_parent_dir(&path)?;
        let allocated = file.metadata()?.len();
        Ok(Self { path, file, generation: 0, end: 0, allocated, last: None })
    }

    /// Allocates space for a frame of this size.
    fn reserve(&mut self, size: u64) -> io::Result<()> {
        let end = self.end + size;
        if end <= self.allocated {
            return Ok(());
        }
        // Zeros are written instead of only extending the file: otherwise each later sync would have to write the file
        // system's metadata too.
        let allocated = end.next_multiple_of(GROWTH_BYTES);
        let zeros = vec![0; usize::try_from(allocated - self.allocated).unwrap_or(0)];
        let grown = self.file.write_all_at(&zeros, self.allocated).and_then(|()| self.file.sync_all());
        if grown.is_err() {
            // On a full disk, gives back the part that was allocated: other files may need it.
            let _ = self.file.set_len(self.allocated);
        }
        self.allocated = grown.map(|()| allocated)?;
        Ok(())
    }
}

pub(super) struct Log {
    /// Path of the database; the names of the log's files begin with it.
    database: PathBuf,
    files: Vec<LogFile>,
    /// Index of the file that batches are appended to.
    active: Option<usize>,
    /// The active file may have a complete frame at its end that was never acknowledged.
    tail_uncertain: bool,
}

/// The result of reading a log.
pub(super) struct LoggedBatches {
    pub(super) log: Log,
    /// The batches that are newer than the database, oldest first.
    pub(super) frames: Vec<Frame>,
}

impl Log {
    /// A log without files.
    pub(super) fn new(database: &Path) -> Self {
        Self { database: database.into(), files: Vec::new(), active: None, tail_uncertain: false }
    }

    /// Reads the log beside the database at `path`, which has everything up to `revision`.
    pub(super) fn read(path: &Path, revision: Revision) -> Result<LoggedBatches, OpenError> {
        let failed = |path: &Path, source: io::Error| OpenError::Io {
            step: "read the log of",
            path: path.into(),
            source: Box::new(source),
        };
        let corrupt = |what: &str| OpenError::Corrupt { path: path.into(), what: what.into() };
        let mut log = Self::new(path);
        let mut sequences = Vec::new();
        let mut unreachable = Vec::new();
        let count = find_files(path).map_err(|error| failed(path, error))?.len();
        for number in 0..count {
            let name = log.file_name(number);
            let bytes = match fs::read(&name) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(corrupt("a part of its log is missing"));
                }
                Err(error) => return Err(failed(&name, error)),
            };
            let file = LogFile::open(name.clone()).map_err(|error| failed(&name, error))?;
            let scan = scan(&bytes);
            // The last frame may be in the page cache only: its writer was killed before the sync, or the sync failed.
            // Writing it again makes the following sync cover it.
            match file.file.write_all_at(&bytes[scan.last_frame.clone()], scan.last_frame.start as u64) {
                // Some file systems need free space even to overwrite. A full disk must not prevent reading.
                Err(error) if error.kind() != io::ErrorKind::StorageFull => return Err(failed(&name, error)),
                _ => file.file.sync_data().map_err(|error| failed(&name, error))?,
            }
            let last = scan.frames.last().map(|frame| frame.last).filter(|last| *last > revision);
            log.files.push(LogFile { last, ..file });
            sequences.push(scan.frames);
            unreachable.extend(scan.unreachable);
        }
        sequences.sort_by_key(|frames| frames.first().map(|frame| frame.first));
        let mut newest = revision;
        let mut frames = Vec::new();
        for frame in sequences.into_iter().flatten().filter(|frame| frame.last > revision) {
            if frame.first != newest + 1 {
                return Err(corrupt("a part of its log is missing"));
            }
            newest = frame.last;
            frames.push(frame);
        }
        if unreachable.iter().any(|frame| frame.last > newest) {
            return Err(corrupt("its log is damaged before its end"));
        }
        Ok(LoggedBatches { log, frames })
    }

    pub(super) fn has_files(&self) -> bool {
        !self.files.is_empty()
    }

    fn file_name(&self, number: usize) -> PathBuf {
        PathBuf::from(format!("{}.log{number}", self.database.display()))
    }

    /// Creates the first file if there is none.
    pub(super) fn ensure_file(&mut self) -> io::Result<()> {
        if self.files.is_empty() {
            self.files.push(LogFile::open(self.file_name(0))?);
        }
        Ok(())
    }

    /// Bytes of frames in the active file; `None` if no file is active.
    pub(super) fn active_len(&self) -> Option<u64> {
        self.active.map(|active| self.files[active].end)
    }

    /// Makes a batch durable. After an error it is uncertain whether the batch is on disk, until the next batch
    /// succeeds: then it is not.
    pub(super) fn append(&mut self, frame: &mut FrameBuilder, first: Revision, last: Revision) -> io::Result<()> {
        let active = self.activate()?;
        let file = &mut self.files[active];
        if self.tail_uncertain {
            // Destroys the header of the uncertain frame before another batch with the same revisions is written.
            file.file.write_all_at(&[0; SECTOR_BYTES], file.end)?;
            file.file.sync_data()?;
            self.tail_uncertain = false;
        }
        let bytes = frame.finish(file.generation, first, last);
        file.reserve(bytes.len() as u64)?;
        self.tail_uncertain = true;
        file.file.write_all_at(bytes, file.end)?;
        file.file.sync_data()?;
        self.tail_uncertain = false;
        file.end += bytes.len() as u64;
        file.last = Some(last);
        Ok(())
    }

    /// Returns the index of the active file. Without one, activates a free file, or creates a file if none is free.
    fn activate(&mut self) -> io::Result<usize> {
        if let Some(active) = self.active {
            return Ok(active);
        }
        let free = match self.files.iter().position(|file| file.last.is_none()) {
            Some(free) => free,
            None => {
                self.files.push(LogFile::open(self.file_name(self.files.len()))?);
                self.files.len() - 1
            }
        };
        let mut generation = [0; 8];
        SystemRandom::new().fill(&mut generation).map_err(|_| io::Error::other("no random bytes"))?;
        let file = &mut self.files[free];
        (file.generation, file.end) = (u64::from_le_bytes(generation), 0);
        self.active = Some(free);
        Ok(free)
    }

    /// Closes the active file; the next batch starts another. Does nothing while the file's tail is uncertain: the next
    /// batch must first destroy the uncertain frame.
    pub(super) fn rotate(&mut self) {
        if !self.tail_uncertain {
            self.active = None;
        }
    }

    /// Frees the files whose batches are all in the database, which has everything up to `revision`. A free file larger
    /// than twice `keep` bytes is cut to `keep` bytes.
    pub(super) fn release(&mut self, revision: Revision, keep: u64) {
        for (number, file) in self.files.iter_mut().enumerate() {
            if self.active != Some(number) && file.last.is_some_and(|last| last <= revision) {
                file.last = None;
                if file.allocated > 2 * keep && file.file.set_len(keep).is_ok() {
                    file.allocated = keep;
                }
            }
        }
    }

    /// Makes every write to the active file fail, or succeed again.
    #[cfg(test)]
    pub(super) fn set_failing(&mut self, failing: bool) {
        if let Some(active) = self.active {
            let file = &mut self.files[active];
            file.file = OpenOptions::new().read(true).write(!failing).open(&file.path).unwrap();
        }
    }

    /// Removes the files. The caller has made sure that the database has everything.
    pub(super) fn remove(&mut self) -> io::Result<()> {
        self.active = None;
        // The highest number first: `read` takes a gap in the numbers for a missing file.
        while let Some(file) = self.files.pop() {
            fs::remove_file(&file.path)?;
        }
        Ok(())
    }
}

/// The files of the log beside the database at `path`, in no order.
pub(super) fn find_files(path: &Path) -> io::Result<Vec<PathBuf>> {
    let prefix = format!("{}.log", path.file_name().unwrap_or_default().to_string_lossy());
    let mut found = Vec::new();
    for entry in fs::read_dir(parent_dir(path))? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.strip_prefix(&prefix)?.parse::<usize>().ok());
        found.extend(number.map(|_| entry.path()));
    }
    Ok(found)
}

/// The frames in one file.
struct FileScan {
    /// The valid frames from the beginning of the file, with consecutive revisions and one generation.
    frames: Vec<Frame>,
    /// Byte range of the last of them.
    last_frame: Range<usize>,
    /// Valid frames of the same generation that follow an invalid one; of any generation if `frames` is empty.
    unreachable: Vec<Frame>,
}

fn scan(bytes: &[u8]) -> FileScan {
    let mut frames: Vec<Frame> = Vec::new();
    let mut last = 0..0;
    while let Some((frame, size)) = Frame::parse(&bytes[last.end.min(bytes.len())..]) {
        if frames.last().is_some_and(|before| before.generation != frame.generation || before.last + 1 != frame.first) {
            break;
        }
        frames.push(frame);
        last = last.end..last.end + size;
    }
    let generation = frames.first().map(|frame| frame.generation);
    let rest = (last.end..bytes.len()).step_by(SECTOR_BYTES).filter_map(|at| Frame::parse(&bytes[at..]));
    let unreachable = rest
        .map(|(frame, _)| frame)
        .filter(|frame| generation.is_none_or(|generation| generation == frame.generation))
        .collect();
    FileScan { frames, last_frame: last.start..last.end.min(bytes.len()), unreachable }
}

#[cfg(test)]
mod tests {
    use super::super::frame::{FrameItem, HEADER_BYTES};
    use super::*;

    /// A frame of several sectors with a record that consists of its number.
    fn frame(number: u64) -> FrameBuilder {
        let mut frame = FrameBuilder::default();
        frame.clear();
        frame.push(&FrameItem::Dictionary { group: "/k", id: 7, bytes: b"text" });
        frame.push(&FrameItem::Stored { key: "/k/1", record: &[number as u8; 700] });
        frame.push(&FrameItem::Removed { key: "/k/2" });
        frame
    }

    fn append(log: &mut Log, numbers: std::ops::RangeInclusive<u64>) {
        numbers.for_each(|n| log.append(&mut frame(n), n, n).unwrap());
    }

    struct LogDir(tempfile::TempDir);

    impl LogDir {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("store")
        }

        fn read(&self, after: Revision) -> Result<LoggedBatches, OpenError> {
            Log::read(&self.path(), after)
        }

        fn log(&self) -> Log {
            let mut log = self.read(0).unwrap().log;
            log.ensure_file().unwrap();
            log
        }

        fn revisions(&self, after: Revision) -> Vec<Revision> {
            self.read(after).unwrap().frames.iter().map(|frame| frame.last).collect()
        }

        fn refusal(&self, after: Revision) -> String {
            self.read(after).err().expect("it is refused").to_string()
        }

        fn bytes(&self, number: usize) -> Vec<u8> {
            fs::read(self.file(number)).unwrap()
        }

        fn file(&self, number: usize) -> PathBuf {
            self.0.path().join(format!("store.log{number}"))
        }

        fn modify(&self, number: usize, change: impl FnOnce(&mut Vec<u8>)) {
            let mut bytes = self.bytes(number);
            change(&mut bytes);
            fs::write(self.file(number), bytes).unwrap();
        }
    }

    #[test]
    fn appended_batches_are_read_back() {
        let dir = LogDir::new();
        let mut log = dir.log();
        append(&mut log, 1..=3);
        log.rotate();
        append(&mut log, 4..=5);
        let read = dir.read(2).unwrap();
        assert_eq!(
            read.frames.iter().map(|frame| frame.last).collect::<Vec<_>>(),
            [3, 4, 5],
            "only those that are newer"
        );
        let items: Vec<_> = read.frames[0].items().collect();
        let record = [3; 700];
        let wanted = [
            FrameItem::Dictionary { group: "/k", id: 7, bytes: b"text" },
            FrameItem::Stored { key: "/k/1", record: &record },
            FrameItem::Removed { key: "/k/2" },
        ];
        assert_eq!(items, wanted.map(Some));
    }

    #[test]
    fn a_file_is_reused_when_the_database_has_its_batches() {
        let dir = LogDir::new();
        let mut log = dir.log();
        append(&mut log, 1..=9);
        log.rotate();
        append(&mut log, 10..=10);
        log.release(8, 1 << 20);
        log.rotate();
        append(&mut log, 11..=11);
        assert!(dir.file(2).exists(), "the first file has a batch that the database has not");
        log.release(10, 1 << 20);
        log.rotate();
        append(&mut log, 12..=12);
        assert!(!dir.file(3).exists());
        assert_eq!(dir.revisions(10), [11, 12], "frames of the first use are ignored");
        assert!(dir.refusal(8).contains("a part of its log is missing"));
    }

    #[test]
    fn files_that_the_database_has_are_free_after_a_start() {
        let dir = LogDir::new();
        append(&mut dir.log(), 1..=3);
        for restart in 0..5 {
            let mut log = dir.read(3 + restart).unwrap().log;
            append(&mut log, 4 + restart..=4 + restart);
            assert!(!dir.file(1).exists(), "restart {restart}");
        }
        append(&mut dir.read(7).unwrap().log, 9..=9);
        assert!(dir.file(1).exists(), "a file with a newer batch is not overwritten");
    }

    #[test]
    fn an_incomplete_last_frame_is_ignored() {
        let dir = LogDir::new();
        append(&mut dir.log(), 1..=4);
        let intact = dir.bytes(0);
        let size = frame(0).finish(0, 0, 0).len();
        for at in (3 * size..3 * size + HEADER_BYTES + 700).step_by(41) {
            dir.modify(0, |bytes| bytes[at] ^= 1);
            assert_eq!(dir.revisions(0), [1, 2, 3], "byte {at}");
            fs::write(dir.file(0), &intact[..at]).unwrap();
            assert_eq!(dir.revisions(0), [1, 2, 3], "cut at {at}");
            fs::write(dir.file(0), &intact).unwrap();
        }
        assert_eq!(dir.revisions(0), [1, 2, 3, 4]);
    }

    #[test]
    fn damage_before_the_end_is_refused() {
        let dir = LogDir::new();
        append(&mut dir.log(), 1..=4);
        let size = frame(0).finish(0, 0, 0).len();
        for at in (0..3).flat_map(|n| [n * size, n * size + 9, n * size + HEADER_BYTES + 300]) {
            dir.modify(0, |bytes| bytes[at] ^= 1);
            assert!(dir.refusal(0).contains("damaged before its end"), "byte {at}");
            dir.modify(0, |bytes| bytes[at] ^= 1);
        }
        dir.modify(0, |bytes| bytes[9] ^= 1);
        assert!(dir.revisions(4).is_empty(), "the database has all of these");
    }

    #[test]
    fn a_missing_part_is_refused() {
        let dir = LogDir::new();
        let mut log = dir.log();
        append(&mut log, 1..=2);
        log.rotate();
        append(&mut log, 3..=4);
        let first = dir.bytes(0);
        dir.modify(0, Vec::clear);
        assert!(dir.refusal(0).contains("a part of its log is missing"));
        fs::remove_file(dir.file(0)).unwrap();
        assert!(dir.refusal(0).contains("a part of its log is missing"), "the whole file is missing");
        fs::write(dir.file(0), first).unwrap();
        assert_eq!(dir.revisions(0), [1, 2, 3, 4]);
    }

    #[test]
    fn an_uncertain_batch_is_gone_once_the_next_one_is_durable() {
        let dir = LogDir::new();
        let mut log = dir.log();
        append(&mut log, 1..=1);
        let end = log.active_len().unwrap();
        append(&mut log, 2..=2);
        // The state after a sync that failed.
        log.files[0].end = end;
        log.tail_uncertain = true;
        log.rotate();
        assert_eq!(dir.revisions(1), [2], "until then it may be read");
        let mut short = FrameBuilder::default();
        short.clear();
        short.push(&FrameItem::Removed { key: "/k/9" });
        log.append(&mut short, 2, 2).unwrap();
        let read = dir.read(1).unwrap();
        assert_eq!(read.frames[0].items().collect::<Vec<_>>(), [Some(FrameItem::Removed { key: "/k/9" })]);
        assert_eq!(read.frames.len(), 1);
    }

    #[test]
    fn a_file_that_has_grown_is_cut_when_it_is_released() {
        let dir = LogDir::new();
        let mut log = dir.log();
        append(&mut log, 1..=1500);
        log.rotate();
        append(&mut log, 1501..=1501);
        let before = dir.bytes(0).len() as u64;
        assert!(before > 4 * GROWTH_BYTES && before.is_multiple_of(GROWTH_BYTES));
        log.release(1500, GROWTH_BYTES);
        assert_eq!(dir.bytes(0).len() as u64, GROWTH_BYTES);
        log.remove().unwrap();
        assert!(!dir.file(0).exists() && !dir.file(1).exists());
    }
}
