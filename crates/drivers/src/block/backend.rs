//! The files of a pool: `volumes/<id>.json`, `volumes/<id>.img`, `locks/<number>`. Everything blocks.
//!
//! A volume exists if and only if its record does. Deletion renames the record to `<id>.gone` first: what that names is
//! rubbish, and whoever deletes or creates the volume next finishes the removal. Must not look at devices or mounts; callers make sure that an image
//! they remove is not in use.
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use cleat_crash::point;
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::{
    failure::Failure,
    record::{Contents, Publication, Record, Verdict},
    request::{Wanted, id_for, is_id},
};

/// Volumes share lock files by their hash: none has to be made or removed with a volume, and that two volumes meet in one
/// costs a short wait now and then.
const LOCKS: u16 = 4096;

/// Longer than any step that is done under a lock, except a format.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("pool {}: {step}", .path.display())]
    Open {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

pub(crate) struct Pool {
    root: PathBuf,
    volumes: PathBuf,
    locks: PathBuf,
    sync_names: SyncNames,
}

/// What it takes to make the name of a new file durable.
#[derive(Clone, Copy, PartialEq)]
enum SyncNames {
    /// ext4, xfs and btrfs commit it together with the file.
    WithFile,
    /// What POSIX promises.
    WithDirectory,
}

/// A volume while no other process changes it.
pub(crate) struct Locked<'a> {
    pool: &'a Pool,
    id: &'a str,
    _lock: File,
}

impl Pool {
    pub(crate) fn open(root: &Path) -> Result<Pool, PoolError> {
        let failed = |step| move |source| PoolError::Open { step, path: root.to_owned(), source };
        make_directory(root).map_err(failed("make it"))?;
        // The kernel names backing files by their full path, and so must we.
        let root = root.canonicalize().map_err(failed("resolve it"))?;
        let (volumes, locks) = (root.join("volumes"), root.join("locks"));
        make_directory(&volumes).map_err(failed("make volumes/"))?;
        make_directory(&locks).map_err(failed("make locks/"))?;
        sync_directory(&root).map_err(failed("sync it"))?;
        let sync_names = SyncNames::on(&volumes).map_err(failed("look at its file system"))?;
        Ok(Pool { root, volumes, locks, sync_names })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn image(&self, id: &str) -> PathBuf {
        self.volumes.join(format!("{id}.img"))
    }

    fn record(&self, id: &str) -> PathBuf {
        self.volumes.join(format!("{id}.json"))
    }

    fn gone(&self, id: &str) -> PathBuf {
        self.volumes.join(format!("{id}.gone"))
    }

    /// Waits for other processes; calls of this process on one volume exclude each other before they come here.
    pub(crate) fn lock<'a>(&'a self, id: &'a str) -> Result<Locked<'a>, Failure> {
        if !is_id(id) {
            return Err(Failure::NoVolume(id.to_owned()));
        }
        let path = self.locks.join(lock_name(id));
        let failed = |source| Failure::Files { step: "lock", path: path.clone(), source };
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(failed)?;
        let until = Instant::now() + LOCK_PATIENCE;
        let mut pause = Duration::from_micros(200);
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Locked { pool: self, id, _lock: file }),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) if Instant::now() < until => {}
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                    return Err(Failure::Busy(id.to_owned()));
                }
                Err(errno) => return Err(failed(errno.into())),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// The volume locked, with its record.
    pub(crate) fn existing<'a>(&'a self, id: &'a str) -> Result<Option<(Locked<'a>, Record)>, Failure> {
        if self.peek(id)?.is_none() {
            return Ok(None);
        }
        let volume = self.lock(id)?;
        Ok(self.peek(id)?.map(|record| (volume, record)))
    }

    /// Removes what a creation or deletion that was cut short has left of a volume that does not exist.
    pub(crate) fn sweep(&self, id: &str) -> Result<(), Failure> {
        if !is_id(id) || ![self.record(id), self.gone(id), self.image(id)].iter().any(|path| path.exists()) {
            return Ok(());
        }
        let volume = self.lock(id)?;
        if self.peek(id)?.is_some() {
            // Created in the meantime.
            return Ok(());
        }
        volume.remove_remains()?;
        sync_directory(&self.volumes).map_err(failed("sync", &self.volumes))
    }

    pub(crate) fn must_exist<'a>(&'a self, id: &'a str) -> Result<(Locked<'a>, Record), Failure> {
        self.existing(id)?.ok_or_else(|| Failure::NoVolume(id.to_owned()))
    }

    /// Idempotent by name. Returns the volume's id with its record.
    pub(crate) fn create(&self, name: &str, wanted: &Wanted, capacity: u64) -> Result<(String, Record), Failure> {
        let id = id_for(name);
        let volume = self.lock(&id)?;
        let file_system = wanted.file_system.map(|format| format.name().to_owned());
        if let Some(existing) = self.peek(&id)? {
            let compatible = existing.name == name
                && wanted.range.admits(existing.capacity)
                && existing.parameters == wanted.parameters
                && existing.file_system == file_system;
            if !compatible {
                return Err(Failure::Incompatible(id.clone()));
            }
            volume.ensure_image(&existing)?;
            return Ok((id.clone(), existing));
        }
        volume.remove_remains()?;
        let record = Record {
            name: name.to_owned(),
            capacity,
            parameters: wanted.parameters.clone(),
            file_system,
            contents: Contents::Nothing,
            published: Default::default(),
        };
        volume.write_first(&record)?;
        point("driver:recorded");
        volume.ensure_image(&record)?;
        point("driver:image-created");
        Ok((id.clone(), record))
    }

    /// Ids in order, those after `after` only.
    pub(crate) fn list(&self, after: &str) -> Result<Vec<String>, Failure> {
        let failed = |source| Failure::Files { step: "list", path: self.volumes.clone(), source };
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.volumes).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json")).filter(|id| is_id(id) && *id > after);
            ids.extend(id.map(str::to_owned));
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// Without the lock: a record is replaced as a whole, so what is read was true a moment ago.
    pub(crate) fn peek(&self, id: &str) -> Result<Option<Record>, Failure> {
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

impl Locked<'_> {
    pub(crate) fn image(&self) -> PathBuf {
        self.pool.image(self.id)
    }

    /// Durable when it returns, and never half written.
    pub(crate) fn write(&self, record: &Record) -> Result<(), Failure> {
        let path = self.pool.record(self.id);
        let temporary = self.temporary();
        write_file(OpenOptions::new().create(true).truncate(true), &temporary, &self.encode(record)?)
            .map_err(failed("write the record", &temporary))?;
        fs::rename(&temporary, &path).map_err(failed("replace the record", &path))?;
        sync_directory(&self.pool.volumes).map_err(failed("sync the directory of", &path))
    }

    /// The first record of a volume goes without a temporary file: file and name then become durable in one commit of the
    /// file system's journal, which calls in parallel share. Cut short by a power failure it is an empty file, which `peek` takes for
    /// none: nobody was told of it.
    fn write_first(&self, record: &Record) -> Result<(), Failure> {
        let path = self.pool.record(self.id);
        write_file(OpenOptions::new().create(true).truncate(true), &path, &self.encode(record)?)
            .map_err(failed("write the record", &path))?;
        match self.pool.sync_names {
            SyncNames::WithFile => Ok(()),
            SyncNames::WithDirectory => {
                sync_directory(&self.pool.volumes).map_err(failed("sync the directory of", &path))
            }
        }
    }

    fn encode(&self, record: &Record) -> Result<Vec<u8>, Failure> {
        serde_json::to_vec(record).map_err(|source| Failure::Record { path: self.pool.record(self.id), source })
    }

    /// Makes the image as large as the record says. It is not synced on its own: whoever needs it comes through here
    /// and repairs what a power cut took away, as long as nothing can have been written yet.
    pub(crate) fn ensure_image(&self, record: &Record) -> Result<(), Failure> {
        let path = self.image();
        let failed = |step| failed(step, &path);
        let mut options = OpenOptions::new();
        options.write(true).mode(0o600).create(record.contents == Contents::Nothing).truncate(false);
        let image = match options.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Failure::ImageLost(self.id.to_owned()));
            }
            other => other.map_err(failed("open the image"))?,
        };
        if image.metadata().map_err(failed("inspect the image"))?.len() < record.capacity {
            image.set_len(record.capacity).map_err(failed("size the image"))?;
        }
        Ok(())
    }

    pub(crate) fn publish(&self, mut record: Record, node: &str, wanted: Publication) -> Result<(), Failure> {
        match record.may_publish(node, wanted) {
            Verdict::AlreadyPublished => Ok(()),
            Verdict::Conflict => Err(Failure::OtherPublication { id: self.id.to_owned(), node: node.to_owned() }),
            Verdict::HeldBy(nodes) => Err(Failure::Published { id: self.id.to_owned(), nodes }),
            Verdict::Publish => {
                record.published.insert(node.to_owned(), wanted);
                self.write(&record)?;
                point("driver:attached");
                Ok(())
            }
        }
    }

    /// From one node, or from all of them.
    pub(crate) fn unpublish(&self, mut record: Record, node: Option<&str>) -> Result<(), Failure> {
        let before = record.published.len();
        record.published.retain(|published, _| node.is_some_and(|node| node != published));
        if record.published.len() < before {
            self.write(&record)?;
            point("driver:detached");
        }
        Ok(())
    }

    /// Three changes in one directory, which its file system keeps in order, and one sync for all of them.
    pub(crate) fn remove(self) -> Result<(), Failure> {
        let record = self.pool.record(self.id);
        fs::rename(&record, self.pool.gone(self.id)).map_err(failed("retire the record", &record))?;
        point("driver:deleting");
        self.remove_remains()?;
        sync_directory(&self.pool.volumes).map_err(failed("sync the directory of", &record))
    }

    /// For a volume without a record, or with one that was retired.
    fn remove_remains(&self) -> Result<(), Failure> {
        let (image, gone) = (self.image(), self.pool.gone(self.id));
        let holds_data = fs::metadata(&image).is_ok_and(|found| found.blocks() > 0);
        if holds_data && !gone.exists() {
            // No step of ours leaves this behind: somebody has lost a record, and must not lose the data too.
            return Err(Failure::Orphan { path: image });
        }
        if remove_file(&image).map_err(failed("remove the image", &image))? {
            point("driver:image-removed");
        }
        for path in [self.temporary(), self.pool.record(self.id), gone] {
            remove_file(&path).map_err(failed("remove the record", &path))?;
        }
        Ok(())
    }

    /// Under the lock nobody else uses this name; the leading dot keeps it out of listings.
    fn temporary(&self) -> PathBuf {
        self.pool.volumes.join(format!(".{}.json", self.id))
    }
}

fn failed(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::Full { step, path },
        _ => Failure::Files { step, path, source },
    }
}

fn write_file(options: &mut OpenOptions, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = options.write(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Whether there was one.
fn remove_file(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn lock_name(id: &str) -> String {
    let digest = Sha256::digest(id.as_bytes());
    let number = u16::from_be_bytes([digest[0], digest[1]]) % LOCKS;
    format!("{number:03x}")
}

fn make_directory(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        other => other,
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
