//! One directory of records and images: `<id>.json`, `<id>.img`. Everything blocks; callers hold the lock of the id they
//! change, and make sure that an image they remove is not in use.
//!
//! A thing exists if and only if its record does. Deletion removes the record of an empty image, and renames that of one
//! with data to `<id>.gone`: what is left then is rubbish, and whoever deletes or creates the id next finishes the removal.
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

pub(crate) struct Shelf {
    directory: PathBuf,
    sync_names: SyncNames,
    /// Who removes names from the directory. The kernel lets in one at a time, and those who wait for it there, several
    /// times for each removal, burn the time away.
    removal: Mutex<()>,
}

/// A record that every process sees, and a power failure may take away.
#[must_use]
pub(crate) struct Unsynced<'a> {
    shelf: &'a Shelf,
    path: PathBuf,
    file: File,
}

impl Unsynced<'_> {
    /// Durable when it returns.
    pub(crate) fn sync(self) -> Result<(), Failure> {
        self.file.sync_all().map_err(failed("sync the record", &self.path))?;
        match self.shelf.sync_names {
            SyncNames::WithFile => Ok(()),
            SyncNames::WithDirectory => self.shelf.sync(),
        }
    }
}

/// What it takes to make the name of a new file durable.
#[derive(Clone, Copy, PartialEq)]
enum SyncNames {
    /// ext4, xfs and btrfs commit it together with the file.
    WithFile,
    /// What POSIX promises.
    WithDirectory,
}

/// A crash point of a deletion, which volumes and snapshots name differently.
pub(crate) struct Points {
    pub(crate) retired: &'static str,
    pub(crate) image_removed: &'static str,
}

impl Shelf {
    pub(crate) fn open(directory: PathBuf) -> io::Result<Shelf> {
        make_directory(&directory)?;
        let sync_names = SyncNames::on(&directory)?;
        Ok(Shelf { directory, sync_names, removal: Mutex::new(()) })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn image(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.img"))
    }

    pub(crate) fn record(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.json"))
    }

    pub(crate) fn gone(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.gone"))
    }

    /// Under the lock nobody else uses this name; the leading dot keeps it out of listings.
    pub(crate) fn temporary(&self, id: &str) -> PathBuf {
        self.directory.join(format!(".{id}.json"))
    }

    /// Without the lock: a record is replaced as a whole, so what is read was true a moment ago.
    pub(crate) fn read<T: DeserializeOwned>(&self, id: &str) -> Result<Option<T>, Failure> {
        if !is_id(id) {
            return Ok(None);
        }
        let path = self.record(id);
        match fs::read(&path) {
            Ok(bytes) if bytes.iter().all(|byte| *byte == 0) => Ok(None),
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|source| Failure::Record { path, source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Failure::Files { step: "read", path, source }),
        }
    }

    /// Durable when it returns, and never half written.
    pub(crate) fn write<T: Serialize>(&self, id: &str, record: &T) -> Result<(), Failure> {
        let path = self.record(id);
        let temporary = self.temporary(id);
        write_file(OpenOptions::new().create(true).truncate(true), &temporary, &self.encode(id, record)?)
            .map_err(failed("write the record", &temporary))?;
        fs::rename(&temporary, &path).map_err(failed("replace the record", &path))?;
        self.sync()
    }

    /// The first record of an id goes without a temporary file: file and name then become durable in one commit of the
    /// file system's journal, which calls in parallel share. Cut short by a power failure it is an empty file, which
    /// `read` takes for none: nobody was told of it before [`Unsynced::sync`].
    pub(crate) fn write_first<T: Serialize>(&self, id: &str, record: &T) -> Result<Unsynced<'_>, Failure> {
        let path = self.record(id);
        let bytes = self.encode(id, record)?;
        let opened = open(OpenOptions::new().create(true).truncate(true), &path);
        let written = opened.and_then(|mut file| file.write_all(&bytes).map(|()| file));
        let file = written.map_err(failed("write the record", &path))?;
        Ok(Unsynced { shelf: self, path, file })
    }

    /// For a record that was found: whoever wrote it may have died before it was durable.
    pub(crate) fn found(&self, id: &str) -> Result<Unsynced<'_>, Failure> {
        let path = self.record(id);
        let file = File::open(&path).map_err(failed("open the record", &path))?;
        Ok(Unsynced { shelf: self, path, file })
    }

    fn encode<T: Serialize>(&self, id: &str, record: &T) -> Result<Vec<u8>, Failure> {
        serde_json::to_vec(record).map_err(|source| Failure::Record { path: self.record(id), source })
    }

    /// Ids in order, those after `after` only.
    pub(crate) fn list(&self, after: &str) -> Result<Vec<String>, Failure> {
        let mut ids: Vec<String> = self
            .names()?
            .into_iter()
            .filter_map(|name| name.strip_suffix(".json").filter(|id| is_id(id) && *id > after).map(str::to_owned))
            .collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// The names of all files.
    pub(crate) fn names(&self) -> Result<Vec<String>, Failure> {
        let failed = |source| Failure::Files { step: "list", path: self.directory.clone(), source };
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(failed)? {
            names.extend(entry.map_err(failed)?.file_name().to_str().map(str::to_owned));
        }
        Ok(names)
    }

    /// Whether there is nothing of this id, neither a record nor what is left of one.
    pub(crate) fn is_gone(&self, id: &str) -> Result<bool, Failure> {
        if [self.record(id), self.gone(id), self.image(id)].iter().any(|path| path.exists()) {
            return Ok(false);
        }
        // Whoever removed it may have died before that was durable.
        self.sync().map(|()| true)
    }

    /// A few changes in one directory, which its file system keeps in order, and one sync for all of them.
    pub(crate) fn remove(&self, id: &str, points: &Points) -> Result<(), Failure> {
        let (record, image) = (self.record(id), self.image(id));
        let found = look(&image)?;
        if found == Found::Data {
            // Freeing the blocks takes its time, and needs no names: others may go on meanwhile.
            fs::rename(&record, self.gone(id)).map_err(failed("retire the record", &record))?;
            point(points.retired);
            self.remove_remains(id, points)?;
            return self.sync();
        }
        {
            let _alone = self.removal.lock().unwrap_or_else(PoisonError::into_inner);
            let temporary = self.temporary(id);
            remove_file(&temporary).map_err(failed("remove the record", &temporary))?;
            // An empty image without a record is rubbish by itself.
            fs::remove_file(&record).map_err(failed("remove the record", &record))?;
            point(points.retired);
            if found == Found::Empty {
                fs::remove_file(&image).map_err(failed("remove the image", &image))?;
                point(points.image_removed);
            }
        }
        self.sync()
    }

    /// The empty image of an id that has no record yet. What a creation or deletion that was cut short has left of the id
    /// is removed: whatever that is, an image or a retired record is among it.
    pub(crate) fn new_image(&self, id: &str, points: &Points) -> Result<File, Failure> {
        let image = self.image(id);
        let failed = || failed("make the image", &image);
        let fresh = || open(OpenOptions::new().create_new(true), &image);
        match fresh() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => {
                let made = made.map_err(failed())?;
                if !self.gone(id).exists() {
                    return Ok(made);
                }
            }
        }
        // Durably: the new record must never come to be that of an image that was to go.
        self.clear(id, points)?;
        fresh().map_err(failed())
    }

    /// Removes what is left of an id that has no record. That is durable when it returns.
    pub(crate) fn clear(&self, id: &str, points: &Points) -> Result<(), Failure> {
        if self.remove_remains(id, points)? { self.sync() } else { Ok(()) }
    }

    /// For an id without a record, or with one that was retired. Whether there was anything.
    fn remove_remains(&self, id: &str, points: &Points) -> Result<bool, Failure> {
        let (image, gone) = (self.image(id), self.gone(id));
        if look(&image)? == Found::Data && !gone.exists() {
            // No step of ours leaves this behind: somebody has lost a record, and must not lose the data too.
            return Err(Failure::Orphan { path: image });
        }
        let mut removed = remove_file(&image).map_err(failed("remove the image", &image))?;
        if removed {
            point(points.image_removed);
        }
        for path in [self.temporary(id), self.record(id), gone] {
            removed |= remove_file(&path).map_err(failed("remove the record", &path))?;
        }
        Ok(removed)
    }

    pub(crate) fn sync(&self) -> Result<(), Failure> {
        sync_directory(&self.directory).map_err(failed("sync", &self.directory))
    }
}

impl SyncNames {
    fn on(directory: &Path) -> io::Result<SyncNames> {
        const EXT4: u64 = 0xef53;
        const XFS: u64 = 0x5846_5342;
        const BTRFS: u64 = 0x9123_683e;
        let kind = rustix::fs::statfs(directory)?.f_type as u64;
        Ok(if [EXT4, XFS, BTRFS].contains(&kind) { SyncNames::WithFile } else { SyncNames::WithDirectory })
    }
}

pub(crate) fn failed(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::Full { step, path },
        _ => Failure::Files { step, path, source },
    }
}

pub(crate) fn write_file(options: &mut OpenOptions, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = open(options, path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.write(true).mode(0o600).open(path)
}

/// What there is of an image.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Found {
    Nothing,
    /// Nobody has written to it. Some file systems give a file of no length a block, too.
    Empty,
    Data,
}

pub(crate) fn look(image: &Path) -> Result<Found, Failure> {
    match fs::metadata(image) {
        Ok(found) if found.len() > 0 && found.blocks() > 0 => Ok(Found::Data),
        Ok(_) => Ok(Found::Empty),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Found::Nothing),
        Err(error) => Err(failed("inspect the image", image)(error)),
    }
}

/// Whether there was one. Looks first: removing what is not there would keep everybody else out of the directory.
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

pub(crate) fn make_directory(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        other => other,
    }
}

pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
