//! The volumes of one pool: `volumes/`, `snapshots/`, `locks/`, `held/`. Everything blocks.
//!
//! Must not look at devices or mounts; callers make sure that an image they remove is not in use.
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use cleat_crash::point;
use cleat_host::copy;

use super::{
    cut::{self, Origin},
    failure::Failure,
    locks::{self, Hold},
    nodes::Nodes,
    parameters,
    record::{Contents, Publication, Record, Source, Verdict},
    request::{Wanted, id_for, is_id},
    shelf::{Points, Shelf, failed, make_directory, sync_directory},
};

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("pool {}: {step}", .path.display())]
    Open {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("pool {}: try whether files can share blocks", .path.display())]
    Clone {
        path: PathBuf,
        #[source]
        source: copy::CopyError,
    },
}

pub(crate) struct Pool {
    root: PathBuf,
    pub(crate) volumes: Shelf,
    pub(crate) snapshots: Shelf,
    locks: PathBuf,
    held: PathBuf,
    /// Whether its file system can share blocks between files.
    pub(crate) clones: bool,
    pub(crate) nodes: Arc<Nodes>,
}

/// A volume while no other process changes it.
pub(crate) struct Locked<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) id: &'a str,
    _lock: locks::Held,
}

const POINTS: Points = Points { retired: "driver:deleting", image_removed: "driver:image-removed" };

/// What CreateVolume is to make, beside its name.
pub(crate) struct Blueprint<'a> {
    pub(crate) wanted: &'a Wanted,
    pub(crate) capacity: u64,
    pub(crate) file_system: Option<String>,
    pub(crate) source: Option<Source>,
    /// The source as it was found. Not needed for a volume that is complete already.
    pub(crate) origin: Option<&'a Origin>,
}

impl Pool {
    pub(crate) fn open(root: &Path, nodes: Arc<Nodes>) -> Result<Pool, PoolError> {
        let failed = |step| move |source| PoolError::Open { step, path: root.to_owned(), source };
        // The kernel names backing files by their full path, and so must we.
        let root = root.canonicalize().map_err(failed("resolve it"))?;
        let (locks, held) = (root.join("locks"), root.join("held"));
        make_directory(&locks).map_err(failed("make locks/"))?;
        make_directory(&held).map_err(failed("make held/"))?;
        let volumes = Shelf::open(root.join("volumes")).map_err(failed("make volumes/"))?;
        let snapshots = Shelf::open(root.join("snapshots")).map_err(failed("make snapshots/"))?;
        sync_directory(&root).map_err(failed("sync it"))?;
        let clones = copy::can_reflink(&root).map_err(|source| PoolError::Clone { path: root.clone(), source })?;
        Ok(Pool { root, volumes, snapshots, locks, held, clones, nodes })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn image(&self, id: &str) -> PathBuf {
        self.volumes.image(id)
    }

    /// Where it is written down that a volume's file system is frozen, and at which mount.
    pub(crate) fn held(&self, id: &str) -> PathBuf {
        self.held.join(id)
    }

    pub(crate) fn held_directory(&self) -> &Path {
        &self.held
    }

    pub(crate) fn volume_lock(&self, id: &str) -> PathBuf {
        self.locks.join(locks::name("", id))
    }

    pub(crate) fn snapshot_lock(&self, id: &str) -> PathBuf {
        self.locks.join(locks::name("s", id))
    }

    pub(crate) fn group_lock(&self, id: &str) -> PathBuf {
        self.locks.join(locks::name("g", id))
    }

    /// Waits for other processes; calls of this process on one volume exclude each other before they come here.
    pub(crate) fn lock<'a>(&'a self, id: &'a str) -> Result<Locked<'a>, Failure> {
        self.lock_with(id, [])
    }

    /// The volume, and what else it takes.
    pub(crate) fn lock_with<'a>(
        &'a self,
        id: &'a str,
        others: impl IntoIterator<Item = (PathBuf, Hold)>,
    ) -> Result<Locked<'a>, Failure> {
        if !is_id(id) {
            return Err(Failure::NoVolume(id.to_owned()));
        }
        let own = (self.volume_lock(id), Hold::Exclusive);
        let lock = locks::take(std::iter::once(own).chain(others), id)?;
        // Whoever froze it is gone: nobody but us has the lock.
        cut::release(self, id)?;
        Ok(Locked { pool: self, id, _lock: lock })
    }

    /// The volume locked, with its record.
    pub(crate) fn existing<'a>(&'a self, id: &'a str) -> Result<Option<(Locked<'a>, Record)>, Failure> {
        if !is_id(id) {
            return Ok(None);
        }
        let volume = self.lock(id)?;
        Ok(self.peek(id)?.map(|record| (volume, record)))
    }

    /// Removes what a creation or deletion that was cut short has left of a volume that does not exist.
    pub(crate) fn sweep(&self, id: &str) -> Result<(), Failure> {
        if !is_id(id) || self.volumes.is_gone(id)? {
            return Ok(());
        }
        let _volume = self.lock(id)?;
        if self.peek(id)?.is_some() {
            // Created in the meantime.
            return Ok(());
        }
        self.volumes.clear(id, &POINTS)
    }

    pub(crate) fn must_exist<'a>(&'a self, id: &'a str) -> Result<(Locked<'a>, Record), Failure> {
        match self.existing(id)? {
            Some((_, record)) if record.filling => Err(Failure::Unfilled(id.to_owned())),
            Some(found) => Ok(found),
            None => Err(Failure::NoVolume(id.to_owned())),
        }
    }

    /// Idempotent by name. Returns the volume's id with its record.
    pub(crate) fn create(&self, name: &str, blueprint: &Blueprint<'_>) -> Result<(String, Record), Failure> {
        let id = id_for(name);
        let Blueprint { wanted, capacity, file_system, source, origin } = blueprint;
        let volume = self.lock_with(&id, origin.iter().map(|origin| origin.lock.clone()))?;
        if let Some(existing) = self.peek(&id)? {
            let compatible = existing.name == name
                && wanted.range.admits(existing.capacity)
                && existing.parameters == wanted.parameters
                && existing.file_system == *file_system
                && existing.source == *source;
            return match (compatible, existing.filling, origin) {
                (false, _, _) => Err(Failure::Incompatible(id.clone())),
                (true, true, Some(origin)) => Ok((id.clone(), volume.fill_or_remove(existing, origin)?)),
                (true, _, _) => {
                    volume.ensure_image(&existing)?;
                    self.volumes.found(&id)?.sync()?;
                    Ok((id.clone(), existing))
                }
            };
        }
        if source.is_some() && origin.is_none() {
            // Deleted since the caller looked.
            return Err(Failure::Busy(id.clone()));
        }
        let mut record = Record {
            name: name.to_owned(),
            capacity: *capacity,
            parameters: wanted.parameters.clone(),
            mutable: wanted.mutable.clone(),
            file_system: file_system.clone(),
            source: source.clone(),
            filling: origin.is_some(),
            ..Record::default()
        };
        match origin {
            Some(origin) => {
                self.volumes.clear(&id, &POINTS)?;
                let recorded = self.volumes.write_first(&id, &record).inspect_err(|_| volume.give_up())?;
                point("driver:recorded");
                recorded.sync()?;
                record = volume.fill_or_remove(record, origin)?;
            }
            None => {
                let image = self.volumes.new_image(&id, &POINTS)?;
                point("driver:image-begun");
                // A volume that has no room is not made: its caller may choose another place, and never come back.
                let recorded = self.volumes.write_first(&id, &record).inspect_err(|_| volume.give_up())?;
                point("driver:recorded");
                let size = || volume.size_image(&image, 0, &record).inspect_err(|_| volume.give_up());
                if parameters::is_thick(&record.parameters) {
                    // Blocks without a record would be taken for data that somebody has lost.
                    recorded.sync()?;
                    size()?;
                } else {
                    // One wait for the disk: most file systems take the image along, and where one does not, whoever
                    // needs the image makes it again.
                    size()?;
                    recorded.sync()?;
                }
            }
        }
        point("driver:image-created");
        Ok((id.clone(), record))
    }

    /// Ids in order, those after `after` only.
    pub(crate) fn list(&self, after: &str) -> Result<Vec<String>, Failure> {
        self.volumes.list(after)
    }

    /// Without the lock: a record is replaced as a whole, so what is read was true a moment ago.
    pub(crate) fn peek(&self, id: &str) -> Result<Option<Record>, Failure> {
        self.volumes.read(id)
    }
}

impl Locked<'_> {
    pub(crate) fn image(&self) -> PathBuf {
        self.pool.image(self.id)
    }

    pub(crate) fn write(&self, record: &Record) -> Result<(), Failure> {
        self.pool.volumes.write(self.id, record)
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
        let length = image.metadata().map_err(failed("inspect the image"))?.len();
        self.size_image(&image, length, record)
    }

    fn size_image(&self, image: &File, length: u64, record: &Record) -> Result<(), Failure> {
        let path = self.image();
        if length < record.capacity {
            image.set_len(record.capacity).map_err(failed("size the image", &path))?;
        }
        if parameters::is_thick(&record.parameters) {
            copy::allocate(&path, record.capacity)?;
        }
        Ok(())
    }

    fn fill_or_remove(&self, record: Record, origin: &Origin) -> Result<Record, Failure> {
        self.fill(record, origin).inspect_err(|_| self.give_up())
    }

    fn fill(&self, mut record: Record, origin: &Origin) -> Result<Record, Failure> {
        let thin = !parameters::is_thick(&record.parameters);
        cut::copy_origin(origin, self.pool, &self.image(), thin)?;
        record.contents = origin.contents;
        record.grow = record.capacity > origin.size && record.file_system.is_some();
        self.ensure_image(&record)?;
        point("driver:filled");
        record.filling = false;
        self.write(&record)?;
        Ok(record)
    }

    fn give_up(&self) {
        let volumes = &self.pool.volumes;
        let removed = match volumes.record(self.id).exists() {
            true => volumes.remove(self.id, &POINTS),
            false => volumes.clear(self.id, &POINTS),
        };
        if let Err(error) = removed {
            tracing::warn!(id = self.id, error = &error as &dyn std::error::Error, "a volume half made is left behind");
        }
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

    /// The record first: a repeated call finds the image too small for it, and goes on.
    pub(crate) fn expand(&self, record: &mut Record, capacity: u64) -> Result<(), Failure> {
        if capacity > record.capacity {
            let before = record.capacity;
            record.capacity = capacity;
            record.grow |= record.file_system.is_some() && record.contents != Contents::Nothing;
            self.write(record)?;
            point("driver:expansion-recorded");
            if let Err(failure) = self.ensure_image(record) {
                // The size was not promised to anybody yet.
                record.capacity = before;
                self.write(record)?;
                return Err(failure);
            }
            point("driver:image-expanded");
            return Ok(());
        }
        self.ensure_image(record)
    }

    pub(crate) fn remove(self) -> Result<(), Failure> {
        self.pool.volumes.remove(self.id, &POINTS)
    }
}

impl Source {
    pub(crate) fn id(&self) -> &str {
        match self {
            Source::Volume(id) | Source::Snapshot(id) => id,
        }
    }
}
