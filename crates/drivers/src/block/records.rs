//! A directory of records and images: `<id>.json` and `<id>.img`. Used for volumes, snapshots and groups. Every
//! function blocks. The caller holds the lock of the id that it changes, and makes sure that an image it removes is not
//! in use.
//!
//! An object exists if and only if its record exists. A deletion removes the record of an empty image, and renames the
//! record of an image with data to `<id>.gone` (the record is then called retired). Files that a crash leaves after
//! that are leftovers: the next deletion or creation of the same id removes them.
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use cleat_crash::point;
use serde::{Serialize, de::DeserializeOwned};

use super::{failure::Failure, request::is_id};

pub(crate) struct RecordDir {
    directory: PathBuf,
    new_file_sync: NewFileSync,
    /// Held while names are removed from the directory. The kernel serialises these removals itself, but its waiters
    /// spin, and a deletion waits there several times; with the mutex it waits once and sleeps.
    removal: Mutex<()>,
}

/// A record that is visible to every process, but that a power failure may remove until it is synced.
#[must_use]
pub(crate) struct UnsyncedRecord<'a> {
    directory: &'a RecordDir,
    path: PathBuf,
    file: File,
}

impl UnsyncedRecord<'_> {
    /// Makes the record durable.
    pub(crate) fn sync(self) -> Result<(), Failure> {
        self.file.sync_all().map_err(io_failure("sync the record", &self.path))?;
        match self.directory.new_file_sync {
            NewFileSync::FileOnly => Ok(()),
            NewFileSync::FileAndDirectory => self.directory.sync(),
        }
    }
}

/// What has to be synced to make a new file and its name durable.
#[derive(Clone, Copy, PartialEq)]
enum NewFileSync {
    /// The file: ext4, xfs and btrfs commit its name together with it.
    FileOnly,
    /// The file, then its directory: all that POSIX guarantees.
    FileAndDirectory,
}

/// The names of the crash points of a deletion. They differ between volumes, snapshots and groups.
pub(crate) struct DeletionCrashPoints {
    pub(crate) retired: &'static str,
    pub(crate) image_removed: &'static str,
}

impl RecordDir {
    pub(crate) fn open(directory: PathBuf) -> io::Result<RecordDir> {
        ensure_directory(&directory)?;
        let new_file_sync = NewFileSync::required_on(&directory)?;
        Ok(RecordDir { directory, new_file_sync, removal: Mutex::new(()) })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn image_path(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.img"))
    }

    pub(crate) fn record_path(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.json"))
    }

    pub(crate) fn retired_path(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.gone"))
    }

    /// Where `write` prepares a record. The lock of the id makes sure that only one process uses it; `list` ignores it
    /// because of the leading dot.
    pub(crate) fn temporary_path(&self, id: &str) -> PathBuf {
        self.directory.join(format!(".{id}.json"))
    }

    /// Reads a record; `None` if there is none. Needs no lock, because records are replaced atomically; without the
    /// lock the record may have been replaced by the time this returns.
    pub(crate) fn read<T: DeserializeOwned>(&self, id: &str) -> Result<Option<T>, Failure> {
        if !is_id(id) {
            return Ok(None);
        }
        let path = self.record_path(id);
        match fs::read(&path) {
            // Empty or all zeroes: a power failure interrupted `write_new`.
            Ok(bytes) if bytes.iter().all(|byte| *byte == 0) => Ok(None),
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).map_err(|source| Failure::InvalidRecord { path, source })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Failure::Io { step: "read", path, source }),
        }
    }

    /// Replaces a record atomically. It is durable when this returns.
    pub(crate) fn write<T: Serialize>(&self, id: &str, record: &T) -> Result<(), Failure> {
        let path = self.record_path(id);
        let temporary = self.temporary_path(id);
        write_file(OpenOptions::new().create(true).truncate(true), &temporary, &self.encode(id, record)?)
            .map_err(io_failure("write the record", &temporary))?;
        fs::rename(&temporary, &path).map_err(io_failure("replace the record", &path))?;
        self.sync()
    }

    /// Writes the first record of an id, without a temporary file: the file and its name then become durable in one
    /// commit of the file system's journal, which concurrent calls share. A power failure may leave an empty file,
    /// which `read` treats as no record. That is safe because no caller reports the object before
    /// [`UnsyncedRecord::sync`] returns.
    pub(crate) fn write_new<T: Serialize>(&self, id: &str, record: &T) -> Result<UnsyncedRecord<'_>, Failure> {
        let path = self.record_path(id);
        let bytes = self.encode(id, record)?;
        let opened = open_for_writing(OpenOptions::new().create(true).truncate(true), &path);
        let written = opened.and_then(|mut file| file.write_all(&bytes).map(|()| file));
        let file = written.map_err(io_failure("write the record", &path))?;
        Ok(UnsyncedRecord { directory: self, path, file })
    }

    /// Opens a record that exists, to sync it: the process that wrote it may have died before it was durable.
    pub(crate) fn open_unsynced(&self, id: &str) -> Result<UnsyncedRecord<'_>, Failure> {
        let path = self.record_path(id);
        let file = File::open(&path).map_err(io_failure("open the record", &path))?;
        Ok(UnsyncedRecord { directory: self, path, file })
    }

    fn encode<T: Serialize>(&self, id: &str, record: &T) -> Result<Vec<u8>, Failure> {
        serde_json::to_vec(record).map_err(|source| Failure::InvalidRecord { path: self.record_path(id), source })
    }

    /// The ids of all records that are greater than `after`, in ascending order.
    pub(crate) fn list(&self, after: &str) -> Result<Vec<String>, Failure> {
        let mut ids: Vec<String> = self
            .file_names()?
            .into_iter()
            .filter_map(|name| name.strip_suffix(".json").filter(|id| is_id(id) && *id > after).map(str::to_owned))
            .collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// The names of all files in the directory.
    pub(crate) fn file_names(&self) -> Result<Vec<String>, Failure> {
        let failed = |source| Failure::Io { step: "list", path: self.directory.clone(), source };
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(failed)? {
            names.extend(entry.map_err(failed)?.file_name().to_str().map(str::to_owned));
        }
        Ok(names)
    }

    /// Whether neither a record nor an image nor a retired record of this id exists. If it returns true, that is
    /// durable.
    pub(crate) fn is_absent(&self, id: &str) -> Result<bool, Failure> {
        if [self.record_path(id), self.retired_path(id), self.image_path(id)].iter().any(|path| path.exists()) {
            return Ok(false);
        }
        // The process that removed the files may have died before that was durable.
        self.sync().map(|()| true)
    }

    /// Removes the record and the image; the removal is durable when this returns. The steps change one directory, and
    /// the file system keeps them in order, so one sync at the end is enough.
    pub(crate) fn remove(&self, id: &str, points: &DeletionCrashPoints) -> Result<(), Failure> {
        let (record, image) = (self.record_path(id), self.image_path(id));
        let state = inspect_image(&image)?;
        if state == ImageState::Data {
            // Without the mutex: freeing the blocks takes long, and must not delay other deletions.
            fs::rename(&record, self.retired_path(id)).map_err(io_failure("retire the record", &record))?;
            point(points.retired);
            self.remove_leftover_files(id, points)?;
            return self.sync();
        }
        {
            let _guard = self.removal.lock().unwrap_or_else(PoisonError::into_inner);
            let temporary = self.temporary_path(id);
            remove_file(&temporary).map_err(io_failure("remove the record", &temporary))?;
            // The record need not be retired: an empty image without a record counts as a leftover.
            fs::remove_file(&record).map_err(io_failure("remove the record", &record))?;
            point(points.retired);
            if state == ImageState::Empty {
                fs::remove_file(&image).map_err(io_failure("remove the image", &image))?;
                point(points.image_removed);
            }
        }
        self.sync()
    }

    /// Creates the empty image of an id that has no record. Leftovers of an interrupted creation or deletion of the id
    /// are removed first; they always include an image or a retired record, so only these two are checked.
    pub(crate) fn create_image(&self, id: &str, points: &DeletionCrashPoints) -> Result<File, Failure> {
        let image = self.image_path(id);
        let failure = || io_failure("make the image", &image);
        let create = || open_for_writing(OpenOptions::new().create_new(true), &image);
        match create() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => {
                let file = created.map_err(failure())?;
                if !self.retired_path(id).exists() {
                    return Ok(file);
                }
            }
        }
        // This removal must be durable before the new record is written: otherwise a power failure could leave the new
        // record beside the image of the deleted object.
        self.remove_leftovers(id, points)?;
        create().map_err(failure())
    }

    /// Removes the leftovers of an id that has no record. The removal is durable when this returns.
    pub(crate) fn remove_leftovers(&self, id: &str, points: &DeletionCrashPoints) -> Result<(), Failure> {
        if self.remove_leftover_files(id, points)? { self.sync() } else { Ok(()) }
    }

    /// For an id whose record is missing or retired. Returns whether a file was removed.
    fn remove_leftover_files(&self, id: &str, points: &DeletionCrashPoints) -> Result<bool, Failure> {
        let (image, retired) = (self.image_path(id), self.retired_path(id));
        if inspect_image(&image)? == ImageState::Data && !retired.exists() {
            // No interrupted step of the driver leaves this state: the record was lost. The data must be preserved.
            return Err(Failure::ImageWithoutRecord { path: image });
        }
        let mut removed = remove_file(&image).map_err(io_failure("remove the image", &image))?;
        if removed {
            point(points.image_removed);
        }
        for path in [self.temporary_path(id), self.record_path(id), retired] {
            removed |= remove_file(&path).map_err(io_failure("remove the record", &path))?;
        }
        Ok(removed)
    }

    pub(crate) fn sync(&self) -> Result<(), Failure> {
        sync_directory(&self.directory).map_err(io_failure("sync", &self.directory))
    }
}

impl NewFileSync {
    fn required_on(directory: &Path) -> io::Result<NewFileSync> {
        const EXT4: u64 = 0xef53;
        const XFS: u64 = 0x5846_5342;
        const BTRFS: u64 = 0x9123_683e;
        let kind = rustix::fs::statfs(directory)?.f_type as u64;
        Ok(if [EXT4, XFS, BTRFS].contains(&kind) { NewFileSync::FileOnly } else { NewFileSync::FileAndDirectory })
    }
}

/// For `map_err`: the failure of a step with a file of the pool.
pub(crate) fn io_failure(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::PoolFull { step, path },
        _ => Failure::Io { step, path, source },
    }
}

/// Writes a file and syncs it. Its name is not durable yet.
pub(crate) fn write_file(options: &mut OpenOptions, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = open_for_writing(options, path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn open_for_writing(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.write(true).mode(0o600).open(path)
}

/// Whether an image file exists and contains data.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum ImageState {
    Missing,
    /// It has no allocated blocks, or its length is 0: some file systems allocate a block for a file of length 0.
    Empty,
    Data,
}

pub(crate) fn inspect_image(image: &Path) -> Result<ImageState, Failure> {
    match fs::metadata(image) {
        Ok(metadata) if metadata.len() > 0 && metadata.blocks() > 0 => Ok(ImageState::Data),
        Ok(_) => Ok(ImageState::Empty),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(ImageState::Missing),
        Err(error) => Err(io_failure("inspect the image", image)(error)),
    }
}

/// Removes a file if it exists, and returns whether it did. Checks first, because unlink takes the lock of the
/// directory even if the file does not exist, and blocks other calls.
pub(crate) fn remove_file(path: &Path) -> io::Result<bool> {
    if !fs::exists(path)? {
        return Ok(false);
    }
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

pub(crate) fn ensure_directory(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        other => other,
    }
}

pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
