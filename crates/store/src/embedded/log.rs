//! The log: every batch since the container was last brought up to date, in files beside it.
//!
//! A file is a row of frames (`frame`), one per batch, each beginning at a multiple of [`GRAIN`]. A batch is one write into
//! room that the file has already, and one sync of data: the file system has nothing of its own to write. When the container
//! has everything that is in a file, the file is written from its beginning again; what is left of its last use is older than
//! the container and so told apart.
//!
//! Only the last frame can be half written: no batch is begun before the one before it is on disk. So a frame that is not
//! whole ends the log, unless whole ones follow it: then something was damaged that had been acknowledged.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use ring::rand::{SecureRandom as _, SystemRandom};

use super::file::{parent, sync_parent};
use super::frame::{Found, Frame, GRAIN, whole};
use crate::{OpenError, Revision};

/// How much a file grows at a time.
const STEP: u64 = 256 << 10;

/// One file.
struct Slot {
    path: PathBuf,
    file: File,
    /// Tells frames of this use of the file from those of an earlier one.
    usage: u64,
    /// Where the next frame goes.
    end: u64,
    /// How much is there to be written to.
    room: u64,
    /// The newest revision in it; nothing if it is free.
    last: Option<Revision>,
}

impl Slot {
    fn make(path: PathBuf) -> io::Result<Self> {
        // What is written here may be secret.
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        sync_parent(&path)?;
        let room = file.metadata()?.len();
        Ok(Self { path, file, usage: 0, end: 0, room, last: None })
    }

    fn reserve(&mut self, size: u64) -> io::Result<()> {
        let end = self.end + size;
        if end <= self.room {
            return Ok(());
        }
        // Zeros are written, not only promised: a sync would otherwise have to write what the file system notes of them.
        let room = end.next_multiple_of(STEP);
        let zeros = vec![0; usize::try_from(room - self.room).unwrap_or(0)];
        let grown = self.file.write_all_at(&zeros, self.room).and_then(|()| self.file.sync_all());
        if grown.is_err() {
            // What was got of it would be missed elsewhere.
            let _ = self.file.set_len(self.room);
        }
        self.room = grown.map(|()| room)?;
        Ok(())
    }
}

pub(super) struct Log {
    /// What the names of the files begin with.
    base: PathBuf,
    slots: Vec<Slot>,
    active: Option<usize>,
    /// The active file may have a frame at its end that nobody was told of.
    doubtful: bool,
}

/// A log as it was found.
pub(super) struct Read {
    pub(super) log: Log,
    /// The batches that the container has not, oldest first.
    pub(super) frames: Vec<Found>,
}

impl Log {
    /// None yet.
    pub(super) fn new(path: &Path) -> Self {
        Self { base: path.into(), slots: Vec::new(), active: None, doubtful: false }
    }

    /// Reads what is beside the container at `path`, which has everything up to `revision`.
    pub(super) fn read(path: &Path, revision: Revision) -> Result<Read, OpenError> {
        let failed = |path: &Path, source: io::Error| OpenError::Io {
            step: "read the log of",
            path: path.into(),
            source: Box::new(source),
        };
        let corrupt = |what: &str| OpenError::Corrupt { path: path.into(), what: what.into() };
        let mut log = Self::new(path);
        let mut rows = Vec::new();
        let mut strays = Vec::new();
        let count = names(path).map_err(|error| failed(path, error))?.len();
        for number in 0..count {
            let name = log.name(number);
            let bytes = match fs::read(&name) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(corrupt("a part of its log is missing"));
                }
                Err(error) => return Err(failed(&name, error)),
            };
            let slot = Slot::make(name.clone()).map_err(|error| failed(&name, error))?;
            let Row { frames, last, strays: beyond } = row(&bytes);
            // What was found may be in memory only, if whoever wrote it was killed before its sync, or that failed.
            match slot.file.write_all_at(&bytes[last.clone()], last.start as u64) {
                // Some file systems need room even for that; readers need none.
                Err(error) if error.kind() != io::ErrorKind::StorageFull => return Err(failed(&name, error)),
                _ => slot.file.sync_data().map_err(|error| failed(&name, error))?,
            }
            let newest = frames.last().map(|frame| frame.last).filter(|newest| *newest > revision);
            log.slots.push(Slot { last: newest, ..slot });
            rows.push(frames);
            strays.extend(beyond);
        }
        rows.sort_by_key(|row| row.first().map(|frame| frame.first));
        let mut newest = revision;
        let mut found = Vec::new();
        for frame in rows.into_iter().flatten().filter(|frame| frame.last > revision) {
            if frame.first != newest + 1 {
                return Err(corrupt("a part of its log is missing"));
            }
            newest = frame.last;
            found.push(frame);
        }
        if strays.iter().any(|frame| frame.last > newest) {
            return Err(corrupt("its log is damaged before its end"));
        }
        Ok(Read { log, frames: found })
    }

    /// Is there no file?
    pub(super) fn is_absent(&self) -> bool {
        self.slots.is_empty()
    }

    fn name(&self, number: usize) -> PathBuf {
        PathBuf::from(format!("{}.log{number}", self.base.display()))
    }

    /// Makes sure that there is a file to write to.
    pub(super) fn prepare(&mut self) -> io::Result<()> {
        if self.slots.is_empty() {
            self.slots.push(Slot::make(self.name(0))?);
        }
        Ok(())
    }

    /// How long the file is that is being written, if one is.
    pub(super) fn length(&self) -> Option<u64> {
        self.active.map(|active| self.slots[active].end)
    }

    /// Makes a batch durable. After an error it may be on disk or not, until the next one is.
    pub(super) fn append(&mut self, frame: &mut Frame, first: Revision, last: Revision) -> io::Result<()> {
        let active = self.activate()?;
        let slot = &mut self.slots[active];
        if self.doubtful {
            // With this on disk, the doubtful one is not.
            slot.file.write_all_at(&[0; GRAIN], slot.end)?;
            slot.file.sync_data()?;
            self.doubtful = false;
        }
        let bytes = frame.sealed(slot.usage, first, last);
        slot.reserve(bytes.len() as u64)?;
        self.doubtful = true;
        slot.file.write_all_at(bytes, slot.end)?;
        slot.file.sync_data()?;
        self.doubtful = false;
        slot.end += bytes.len() as u64;
        slot.last = Some(last);
        Ok(())
    }

    /// The file to write to: the one in use, else a free one, else a new one.
    fn activate(&mut self) -> io::Result<usize> {
        if let Some(active) = self.active {
            return Ok(active);
        }
        let free = match self.slots.iter().position(|slot| slot.last.is_none()) {
            Some(free) => free,
            None => {
                self.slots.push(Slot::make(self.name(self.slots.len()))?);
                self.slots.len() - 1
            }
        };
        let mut usage = [0; 8];
        SystemRandom::new().fill(&mut usage).map_err(|_| io::Error::other("no random bytes"))?;
        let slot = &mut self.slots[free];
        (slot.usage, slot.end) = (u64::from_le_bytes(usage), 0);
        self.active = Some(free);
        Ok(free)
    }

    /// Ends the file that is being written; the next batch begins another.
    pub(super) fn turn(&mut self) {
        // A doubtful frame at its end is seen to first.
        if !self.doubtful {
            self.active = None;
        }
    }

    /// The container has everything up to `revision`: what has nothing newer can be written again.
    pub(super) fn release(&mut self, revision: Revision, keep: u64) {
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if self.active != Some(number) && slot.last.is_some_and(|last| last <= revision) {
                slot.last = None;
                // One that had to take much gives it back.
                if slot.room > 2 * keep && slot.file.set_len(keep).is_ok() {
                    slot.room = keep;
                }
            }
        }
    }

    /// Makes all writing to the file in use fail, or not any more.
    #[cfg(test)]
    pub(super) fn fail(&mut self, fail: bool) {
        if let Some(active) = self.active {
            let slot = &mut self.slots[active];
            slot.file = OpenOptions::new().read(true).write(!fail).open(&slot.path).unwrap();
        }
    }

    /// Removes the files, when the container has everything.
    pub(super) fn remove(&mut self) -> io::Result<()> {
        self.active = None;
        // The last first: a row of names without a gap is what is looked for.
        while let Some(slot) = self.slots.pop() {
            fs::remove_file(&slot.path)?;
        }
        Ok(())
    }
}

/// The files of a log beside the container at `path`, in no order.
pub(super) fn names(path: &Path) -> io::Result<Vec<PathBuf>> {
    let beginning = format!("{}.log", path.file_name().unwrap_or_default().to_string_lossy());
    let mut found = Vec::new();
    for entry in fs::read_dir(parent(path))? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.strip_prefix(&beginning)?.parse::<usize>().ok());
        found.extend(number.map(|_| entry.path()));
    }
    Ok(found)
}

/// What a file holds.
struct Row {
    /// From its beginning.
    frames: Vec<Found>,
    /// Where the last of them is.
    last: Range<usize>,
    /// Any of the same use that is not reached from the beginning.
    strays: Vec<Found>,
}

fn row(bytes: &[u8]) -> Row {
    let mut frames: Vec<Found> = Vec::new();
    let mut last = 0..0;
    while let Some((frame, size)) = whole(&bytes[last.end.min(bytes.len())..]) {
        if frames.last().is_some_and(|before| before.usage != frame.usage || before.last + 1 != frame.first) {
            break;
        }
        frames.push(frame);
        last = last.end..last.end + size;
    }
    let usage = frames.first().map(|frame| frame.usage);
    let rest = (last.end..bytes.len()).step_by(GRAIN).filter_map(|at| whole(&bytes[at..]));
    let strays = rest.map(|(frame, _)| frame).filter(|frame| usage.is_none_or(|usage| usage == frame.usage)).collect();
    Row { frames, last: last.start..last.end.min(bytes.len()), strays }
}

#[cfg(test)]
mod tests {
    use super::super::frame::{HEAD, Item};
    use super::*;

    /// A frame that stores its own number under a key, and is some grains long.
    fn frame(number: u64) -> Frame {
        let mut frame = Frame::default();
        frame.clear();
        frame.push(&Item::Dictionary { sort: "/k", id: 7, text: b"text" });
        frame.push(&Item::Stored { key: "/k/1", record: &[number as u8; 700] });
        frame.push(&Item::Removed { key: "/k/2" });
        frame
    }

    fn append(log: &mut Log, numbers: std::ops::RangeInclusive<u64>) {
        numbers.for_each(|n| log.append(&mut frame(n), n, n).unwrap());
    }

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("store")
        }

        fn read(&self, after: Revision) -> Result<Read, OpenError> {
            Log::read(&self.path(), after)
        }

        fn log(&self) -> Log {
            let mut log = self.read(0).unwrap().log;
            log.prepare().unwrap();
            log
        }

        fn found(&self, after: Revision) -> Vec<Revision> {
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

        fn with(&self, number: usize, change: impl FnOnce(&mut Vec<u8>)) {
            let mut bytes = self.bytes(number);
            change(&mut bytes);
            fs::write(self.file(number), bytes).unwrap();
        }
    }

    #[test]
    fn what_was_appended_is_found() {
        let place = Place::new();
        let mut log = place.log();
        append(&mut log, 1..=3);
        log.turn();
        append(&mut log, 4..=5);
        let read = place.read(2).unwrap();
        assert_eq!(read.frames.iter().map(|frame| frame.last).collect::<Vec<_>>(), [3, 4, 5], "newer than asked for");
        let items: Vec<_> = read.frames[0].items().collect();
        let record = [3; 700];
        let wanted = [
            Item::Dictionary { sort: "/k", id: 7, text: b"text" },
            Item::Stored { key: "/k/1", record: &record },
            Item::Removed { key: "/k/2" },
        ];
        assert_eq!(items, wanted.map(Some));
    }

    #[test]
    fn a_file_is_written_again_when_the_container_has_it() {
        let place = Place::new();
        let mut log = place.log();
        append(&mut log, 1..=9);
        log.turn();
        append(&mut log, 10..=10);
        log.release(8, 1 << 20);
        log.turn();
        append(&mut log, 11..=11);
        assert!(place.file(2).exists(), "the first has something the container has not");
        log.release(10, 1 << 20);
        log.turn();
        append(&mut log, 12..=12);
        assert!(!place.file(3).exists());
        assert_eq!(place.found(10), [11, 12], "what is left of the first use is not in the way");
        assert!(place.refusal(8).contains("a part of its log is missing"));
    }

    #[test]
    fn what_the_container_has_is_free_after_a_start() {
        let place = Place::new();
        append(&mut place.log(), 1..=3);
        for life in 0..5 {
            let mut log = place.read(3 + life).unwrap().log;
            append(&mut log, 4 + life..=4 + life);
            assert!(!place.file(1).exists(), "life {life}");
        }
        append(&mut place.read(7).unwrap().log, 9..=9);
        assert!(place.file(1).exists(), "what it has not is kept");
    }

    #[test]
    fn a_half_written_end_is_left_out() {
        let place = Place::new();
        append(&mut place.log(), 1..=4);
        let good = place.bytes(0);
        let size = frame(0).sealed(0, 0, 0).len();
        for at in (3 * size..3 * size + HEAD + 700).step_by(41) {
            place.with(0, |bytes| bytes[at] ^= 1);
            assert_eq!(place.found(0), [1, 2, 3], "byte {at}");
            fs::write(place.file(0), &good[..at]).unwrap();
            assert_eq!(place.found(0), [1, 2, 3], "cut at {at}");
            fs::write(place.file(0), &good).unwrap();
        }
        assert_eq!(place.found(0), [1, 2, 3, 4]);
    }

    #[test]
    fn damage_before_the_end_is_refused() {
        let place = Place::new();
        append(&mut place.log(), 1..=4);
        let size = frame(0).sealed(0, 0, 0).len();
        for at in (0..3).flat_map(|n| [n * size, n * size + 9, n * size + HEAD + 300]) {
            place.with(0, |bytes| bytes[at] ^= 1);
            assert!(place.refusal(0).contains("damaged before its end"), "byte {at}");
            place.with(0, |bytes| bytes[at] ^= 1);
        }
        place.with(0, |bytes| bytes[9] ^= 1);
        assert!(place.found(4).is_empty(), "the container has all that");
    }

    #[test]
    fn a_part_that_is_missing_is_refused() {
        let place = Place::new();
        let mut log = place.log();
        append(&mut log, 1..=2);
        log.turn();
        append(&mut log, 3..=4);
        let first = place.bytes(0);
        place.with(0, Vec::clear);
        assert!(place.refusal(0).contains("a part of its log is missing"));
        fs::remove_file(place.file(0)).unwrap();
        assert!(place.refusal(0).contains("a part of its log is missing"), "not only what is in it");
        fs::write(place.file(0), first).unwrap();
        assert_eq!(place.found(0), [1, 2, 3, 4]);
    }

    #[test]
    fn a_doubtful_batch_is_gone_when_the_next_one_is_there() {
        let place = Place::new();
        let mut log = place.log();
        append(&mut log, 1..=1);
        let end = log.length().unwrap();
        append(&mut log, 2..=2);
        // As if its sync had failed.
        log.slots[0].end = end;
        log.doubtful = true;
        log.turn();
        assert_eq!(place.found(1), [2], "until then it may be there");
        let mut short = Frame::default();
        short.clear();
        short.push(&Item::Removed { key: "/k/9" });
        log.append(&mut short, 2, 2).unwrap();
        let read = place.read(1).unwrap();
        assert_eq!(read.frames[0].items().collect::<Vec<_>>(), [Some(Item::Removed { key: "/k/9" })]);
        assert_eq!(read.frames.len(), 1);
    }

    #[test]
    fn a_file_that_had_to_grow_gives_back() {
        let place = Place::new();
        let mut log = place.log();
        append(&mut log, 1..=1500);
        log.turn();
        append(&mut log, 1501..=1501);
        let before = place.bytes(0).len() as u64;
        assert!(before > 4 * STEP && before.is_multiple_of(STEP));
        log.release(1500, STEP);
        assert_eq!(place.bytes(0).len() as u64, STEP);
        log.remove().unwrap();
        assert!(!place.file(0).exists() && !place.file(1).exists());
    }
}
