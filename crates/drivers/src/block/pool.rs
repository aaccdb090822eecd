//! One pool: its directories `volumes/`, `snapshots/`, `locks/` and `held/`, and the operations on the record and the
//! image of one volume. Every function blocks.
//!
//! Must not attach devices or mount; the caller makes sure that an image it removes is not in use.
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
    failure::{Failure, PoolError},
    frozen::{self, FrozenFileSystem},
    locks::{self, LockMode},
    node_registry::NodeRegistry,
    parameters,
    record::{ImageContents, Publication, PublishDecision, VolumeRecord},
    records::{DeletionCrashPoints, RecordDir, ensure_directory, io_failure, sync_directory},
    request::is_id,
};

pub(crate) struct Pool {
    root: PathBuf,
    pub(crate) volumes: RecordDir,
    pub(crate) snapshots: RecordDir,
    lock_dir: PathBuf,
    freeze_record_dir: PathBuf,
    /// Whether files of the pool can share blocks.
    pub(crate) can_reflink: bool,
    pub(crate) nodes: Arc<NodeRegistry>,
}

/// A volume whose lock this process holds: no other process changes it.
pub(crate) struct LockedVolume<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) id: &'a str,
    _lock: locks::LockGuard,
}

pub(crate) const VOLUME_DELETION: DeletionCrashPoints =
    DeletionCrashPoints { retired: "driver:deleting", image_removed: "driver:image-removed" };

impl Pool {
    pub(crate) fn open(root: &Path, nodes: Arc<NodeRegistry>) -> Result<Pool, PoolError> {
        let failed = |step| move |source| PoolError::Open { step, path: root.to_owned(), source };
        // The kernel shows the backing file of a loop device by its full path, which is compared with paths in the
        // pool.
        let root = root.canonicalize().map_err(failed("resolve it"))?;
        let (lock_dir, freeze_record_dir) = (root.join("locks"), root.join("held"));
        ensure_directory(&lock_dir).map_err(failed("make locks/"))?;
        ensure_directory(&freeze_record_dir).map_err(failed("make held/"))?;
        let volumes = RecordDir::open(root.join("volumes")).map_err(failed("make volumes/"))?;
        let snapshots = RecordDir::open(root.join("snapshots")).map_err(failed("make snapshots/"))?;
        sync_directory(&root).map_err(failed("sync it"))?;
        let can_reflink =
            copy::can_reflink(&root).map_err(|source| PoolError::Reflink { path: root.clone(), source })?;
        Ok(Pool { root, volumes, snapshots, lock_dir, freeze_record_dir, can_reflink, nodes })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn image_path(&self, id: &str) -> PathBuf {
        self.volumes.image_path(id)
    }

    pub(crate) fn volume_lock(&self, id: &str) -> PathBuf {
        self.lock_dir.join(locks::lock_file_name("", id))
    }

    pub(crate) fn snapshot_lock(&self, id: &str) -> PathBuf {
        self.lock_dir.join(locks::lock_file_name("s", id))
    }

    pub(crate) fn group_lock(&self, id: &str) -> PathBuf {
        self.lock_dir.join(locks::lock_file_name("g", id))
    }

    /// Freezes the file system of a volume that is mounted at `at`. The caller holds the lock of the volume.
    pub(crate) fn freeze(&self, id: &str, at: &Path) -> Result<FrozenFileSystem, Failure> {
        FrozenFileSystem::freeze(self.freeze_record_dir.join(id), at)
    }

    /// Thaws the file system of a volume if a process that died has left it frozen. The caller holds the lock of the
    /// volume.
    pub(crate) fn thaw_leftover(&self, id: &str) -> Result<(), Failure> {
        frozen::thaw_leftover(&self.freeze_record_dir.join(id), &self.image_path(id))
    }

    /// The ids of the volumes that are recorded as frozen.
    pub(crate) fn frozen_volumes(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.freeze_record_dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|id| is_id(id)).collect()
    }

    /// Locks a volume against other processes. Calls of this process for one volume exclude each other before
    /// (`worker`).
    pub(crate) fn lock<'a>(&'a self, id: &'a str) -> Result<LockedVolume<'a>, Failure> {
        self.lock_with(id, [])
    }

    /// Takes the lock of the volume together with `others`.
    pub(crate) fn lock_with<'a>(
        &'a self,
        id: &'a str,
        others: impl IntoIterator<Item = (PathBuf, LockMode)>,
    ) -> Result<LockedVolume<'a>, Failure> {
        if !is_id(id) {
            return Err(Failure::VolumeNotFound(id.to_owned()));
        }
        let own = (self.volume_lock(id), LockMode::Exclusive);
        let lock = locks::acquire(std::iter::once(own).chain(others), id)?;
        // A freeze is only made under this lock, so the process that made a recorded one is dead.
        self.thaw_leftover(id)?;
        Ok(LockedVolume { pool: self, id, _lock: lock })
    }

    /// Locks a volume and reads its record; `None` if it does not exist.
    pub(crate) fn lock_if_exists<'a>(
        &'a self,
        id: &'a str,
    ) -> Result<Option<(LockedVolume<'a>, VolumeRecord)>, Failure> {
        if !is_id(id) {
            return Ok(None);
        }
        let volume = self.lock(id)?;
        Ok(self.read_record(id)?.map(|record| (volume, record)))
    }

    /// Locks a volume and reads its record. Fails if the volume does not exist, or is still being copied from its
    /// source.
    pub(crate) fn lock_existing<'a>(&'a self, id: &'a str) -> Result<(LockedVolume<'a>, VolumeRecord), Failure> {
        match self.lock_if_exists(id)? {
            Some((_, record)) if record.filling => Err(Failure::VolumeIncomplete(id.to_owned())),
            Some(found) => Ok(found),
            None => Err(Failure::VolumeNotFound(id.to_owned())),
        }
    }

    /// Removes the leftovers of an interrupted creation or deletion of a volume that does not exist.
    pub(crate) fn remove_leftovers(&self, id: &str) -> Result<(), Failure> {
        if !is_id(id) || self.volumes.is_absent(id)? {
            return Ok(());
        }
        let _volume = self.lock(id)?;
        if self.read_record(id)?.is_some() {
            // Created in the meantime.
            return Ok(());
        }
        self.volumes.remove_leftovers(id, &VOLUME_DELETION)
    }

    /// The ids of all volumes that are greater than `after`, in ascending order.
    pub(crate) fn list(&self, after: &str) -> Result<Vec<String>, Failure> {
        self.volumes.list(after)
    }

    /// Reads the record of a volume. Needs no lock; see [`RecordDir::read`].
    pub(crate) fn read_record(&self, id: &str) -> Result<Option<VolumeRecord>, Failure> {
        self.volumes.read(id)
    }
}

impl LockedVolume<'_> {
    pub(crate) fn image_path(&self) -> PathBuf {
        self.pool.image_path(self.id)
    }

    pub(crate) fn write(&self, record: &VolumeRecord) -> Result<(), Failure> {
        self.pool.volumes.write(self.id, record)
    }

    /// Makes the image as large as the record says, and creates it if the volume never had data. The image is not
    /// synced on its own: every use of it calls this first, which restores what a power failure removed.
    pub(crate) fn ensure_image(&self, record: &VolumeRecord) -> Result<(), Failure> {
        let path = self.image_path();
        let failure = |step| io_failure(step, &path);
        let mut options = OpenOptions::new();
        options.write(true).mode(0o600).create(record.contents == ImageContents::Nothing).truncate(false);
        let image = match options.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Failure::ImageLost(self.id.to_owned()));
            }
            other => other.map_err(failure("open the image"))?,
        };
        let length = image.metadata().map_err(failure("inspect the image"))?.len();
        self.resize_image(&image, length, record)
    }

    /// Extends the open image from `length` to the recorded capacity, and allocates its blocks if the volume is thick.
    pub(crate) fn resize_image(&self, image: &File, length: u64, record: &VolumeRecord) -> Result<(), Failure> {
        let path = self.image_path();
        if length < record.capacity {
            image.set_len(record.capacity).map_err(io_failure("size the image", &path))?;
        }
        if parameters::is_thick(&record.parameters) {
            copy::allocate(&path, record.capacity)?;
        }
        Ok(())
    }

    /// Removes the files of a volume whose creation failed. A failure is only logged: the caller reports the first one.
    pub(crate) fn remove_incomplete(&self) {
        let volumes = &self.pool.volumes;
        let removed = match volumes.record_path(self.id).exists() {
            true => volumes.remove(self.id, &VOLUME_DELETION),
            false => volumes.remove_leftovers(self.id, &VOLUME_DELETION),
        };
        if let Err(error) = removed {
            tracing::warn!(
                id = self.id,
                error = &error as &dyn std::error::Error,
                "could not remove an incomplete volume"
            );
        }
    }

    pub(crate) fn publish(&self, mut record: VolumeRecord, node: &str, wanted: Publication) -> Result<(), Failure> {
        match record.decide_publish(node, wanted) {
            PublishDecision::AlreadyPublished => Ok(()),
            PublishDecision::RefuseOtherAccess => {
                Err(Failure::PublishedWithOtherAccess { id: self.id.to_owned(), node: node.to_owned() })
            }
            PublishDecision::RefuseOtherNodes(nodes) => Err(Failure::Published { id: self.id.to_owned(), nodes }),
            PublishDecision::Publish => {
                record.published.insert(node.to_owned(), wanted);
                self.write(&record)?;
                point("driver:attached");
                Ok(())
            }
        }
    }

    /// Removes the publication to one node, or all of them if `node` is `None`.
    pub(crate) fn unpublish(&self, mut record: VolumeRecord, node: Option<&str>) -> Result<(), Failure> {
        let before = record.published.len();
        record.published.retain(|published, _| node.is_some_and(|node| node != published));
        if record.published.len() < before {
            self.write(&record)?;
            point("driver:detached");
        }
        Ok(())
    }

    /// Enlarges the volume. The record is written first: after a crash the repeated call finds the image smaller than
    /// the record, and enlarges it.
    pub(crate) fn expand(&self, record: &mut VolumeRecord, capacity: u64) -> Result<(), Failure> {
        if capacity > record.capacity {
            let before = record.capacity;
            record.capacity = capacity;
            record.needs_grow |= record.file_system.is_some() && record.contents != ImageContents::Nothing;
            self.write(record)?;
            point("driver:expansion-recorded");
            if let Err(failure) = self.ensure_image(record) {
                // The new size has not been returned to any caller.
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
        self.pool.volumes.remove(self.id, &VOLUME_DELETION)
    }
}
