//! Copies the image of a volume, also while the volume is in use, so that the copy is a consistent state of one point
//! in time.
//!
//! Where files of the pool can share blocks, the image is flushed and then reflinked: the kernel blocks writers during
//! the reflink, and the copy is what a power failure at that time would have left. Elsewhere the file system is frozen
//! while the image is copied.
use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use cleat_host::{Access, copy, freeze};

use super::{
    failure::Failure,
    kernel_state::{KernelState, is_device_node_mount},
    locks::LockMode,
    pool::Pool,
    record::{ImageContents, UnixTime, VolumeRecord},
    records::io_failure,
};

/// The volume or snapshot that a new volume is copied from.
pub(crate) struct CopySource {
    pub(crate) image: PathBuf,
    /// The lock that prevents changes of the source during the copy.
    pub(crate) lock: (PathBuf, LockMode),
    pub(crate) size: u64,
    pub(crate) file_system: Option<String>,
    pub(crate) contents: ImageContents,
    /// Only if the source is a volume: its pool and its id there, to freeze it.
    pub(crate) volume: Option<(Arc<Pool>, String)>,
    pub(crate) is_thick: bool,
    /// The root directory of the pool of the source.
    pub(crate) pool_root: PathBuf,
}

/// How to copy the image of a volume. Decided under the lock of the volume, before anything is written.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CopyPlan {
    /// Flush, then share the blocks.
    Reflink { flush: Option<FlushTarget> },
    /// Copy while the file system that is mounted at `at` is frozen.
    Freeze { at: PathBuf },
    /// Copy: no process can write to the image.
    Copy,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FlushTarget {
    /// The file system mounted at this path.
    FileSystem(PathBuf),
    Device(PathBuf),
}

/// Decides how to copy a volume. Fails if the volume is in use where it can be neither reflinked nor frozen.
pub(crate) fn plan_copy(pool: &Pool, id: &str, record: &VolumeRecord, reflink: bool) -> Result<CopyPlan, Failure> {
    let kernel = KernelState::of_image(&pool.image_path(id))?;
    let mounted = kernel
        .mounts
        .iter()
        .find(|mount| {
            !is_device_node_mount(mount, &kernel.devices) && !mount.super_options.iter().any(|option| option == "ro")
        })
        .map(|mount| mount.target.clone());
    let device =
        kernel.devices.iter().find(|device| device.access == Access::ReadWrite).map(|device| device.path.clone());
    if reflink {
        let flush = mounted.map(FlushTarget::FileSystem).or(device.map(FlushTarget::Device));
        return Ok(CopyPlan::Reflink { flush });
    }
    let other_machine = record
        .published
        .iter()
        .find(|(node, publication)| !publication.read_only && !pool.nodes.is_on_this_machine(node));
    match (mounted, device, other_machine) {
        (_, _, Some((node, _))) => Err(Failure::CannotFreeze {
            id: id.to_owned(),
            why: format!("it is published to {node}, on another machine"),
        }),
        (Some(at), _, None) => Ok(CopyPlan::Freeze { at }),
        (None, Some(_), None) if record.file_system.is_none() => {
            Err(Failure::CannotFreeze { id: id.to_owned(), why: "it is a raw device in use".to_owned() })
        }
        (None, _, None) => Ok(CopyPlan::Copy),
    }
}

impl FlushTarget {
    pub(crate) fn flush(&self) -> Result<(), Failure> {
        match self {
            FlushTarget::FileSystem(at) => Ok(freeze::flush(at)?),
            FlushTarget::Device(path) => {
                File::open(path).and_then(|device| device.sync_all()).map_err(io_failure("flush", path))
            }
        }
    }
}

/// Copies the source of a new volume to its image. The caller holds the locks of both.
pub(crate) fn copy_from_source(source: &CopySource, pool: &Pool, to: &Path, is_thin: bool) -> Result<(), Failure> {
    let reflink = pool.can_reflink && pool.root() == source.pool_root && is_thin && !source.is_thick;
    let mut frozen = None;
    if let Some((source_pool, id)) = &source.volume {
        source_pool.thaw_leftover(id)?;
        let record = source_pool.read_record(id)?.ok_or_else(|| Failure::VolumeNotFound(id.clone()))?;
        match plan_copy(source_pool, id, &record, reflink)? {
            CopyPlan::Reflink { flush } => flush.iter().try_for_each(FlushTarget::flush)?,
            CopyPlan::Freeze { at } => frozen = Some(source_pool.freeze(id, &at)?),
            CopyPlan::Copy => {}
        }
    }
    copy_image(&source.image, to, reflink)?;
    drop(frozen);
    Ok(())
}

pub(crate) fn copy_image(from: &Path, to: &Path, reflink: bool) -> Result<(), Failure> {
    if !reflink {
        return Ok(copy::copy_sparse(from, to)?);
    }
    if copy::reflink(from, to)? {
        Ok(())
    } else {
        let source = io::Error::from(io::ErrorKind::Unsupported);
        Err(Failure::Io { step: "share the blocks of", path: from.to_owned(), source })
    }
}

/// The modification time of the image.
pub(crate) fn last_modified(image: &Path) -> Result<UnixTime, Failure> {
    let metadata = fs::metadata(image).map_err(io_failure("inspect", image))?;
    Ok(UnixTime(metadata.mtime(), i32::try_from(metadata.mtime_nsec()).unwrap_or(0)))
}
