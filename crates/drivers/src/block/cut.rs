//! Copies of an image that show one moment, also while the volume is in use.
//!
//! Where the pool can share blocks, the kernel keeps writers out for the instant that takes: what was written before is
//! flushed first, and the copy is what a power cut at that instant would have left. Elsewhere the file system is frozen
//! for as long as the copy takes, and a note in `held/` outlives us: whoever locks the volume next thaws it.
use std::{
    fs::{File, OpenOptions},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use cleat_crash::point;
use cleat_host::{Access, copy, freeze};

use super::{
    backend::Pool,
    failure::Failure,
    locks::Hold,
    record::{Contents, Moment, Record},
    seen::{Seen, is_node_of},
    shelf::{failed, remove_file, write_file},
};

/// What a new volume is copied from.
pub(crate) struct Origin {
    pub(crate) image: PathBuf,
    /// What keeps it as it is during the copy.
    pub(crate) lock: (PathBuf, Hold),
    pub(crate) size: u64,
    pub(crate) file_system: Option<String>,
    pub(crate) contents: Contents,
    /// Of a volume: which one of which pool, to hold it still.
    pub(crate) volume: Option<(std::sync::Arc<Pool>, String)>,
    pub(crate) thick: bool,
    pub(crate) root: PathBuf,
}

/// How to copy a volume's image. Made under the volume's lock, before anything is written.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    Share {
        flush: Option<Flush>,
    },
    /// Frozen at this mount.
    Hold {
        at: PathBuf,
    },
    /// Nobody can write to it.
    Copy,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Flush {
    FileSystem(PathBuf),
    Device(PathBuf),
}

pub(crate) fn plan(pool: &Pool, id: &str, record: &Record, share: bool) -> Result<Plan, Failure> {
    let seen = Seen::of_image(&pool.image(id))?;
    let mounted = seen
        .uses
        .iter()
        .find(|used| !is_node_of(used, &seen.devices) && !used.super_options.iter().any(|option| option == "ro"))
        .map(|used| used.target.clone());
    let device =
        seen.devices.iter().find(|device| device.access == Access::ReadWrite).map(|device| device.path.clone());
    if share {
        let flush = mounted.map(Flush::FileSystem).or(device.map(Flush::Device));
        return Ok(Plan::Share { flush });
    }
    let elsewhere = record.published.iter().find(|(node, held)| !held.read_only && !pool.nodes.is_here(node));
    match (mounted, device, elsewhere) {
        (_, _, Some((node, _))) => Err(Failure::CannotHold {
            id: id.to_owned(),
            why: format!("it is published to {node}, on another machine"),
        }),
        (Some(at), _, None) => Ok(Plan::Hold { at }),
        (None, Some(_), None) if record.file_system.is_none() => {
            Err(Failure::CannotHold { id: id.to_owned(), why: "it is a raw device in use".to_owned() })
        }
        (None, _, None) => Ok(Plan::Copy),
    }
}

impl Flush {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self {
            Flush::FileSystem(at) => Ok(freeze::flush(at)?),
            Flush::Device(path) => File::open(path).and_then(|device| device.sync_all()).map_err(failed("flush", path)),
        }
    }
}

/// A volume's file system while it is frozen.
pub(crate) struct Still {
    note: PathBuf,
    at: PathBuf,
}

impl Still {
    pub(crate) fn hold(pool: &Pool, id: &str, at: &Path) -> Result<Still, Failure> {
        let note = pool.held(id);
        write_file(OpenOptions::new().create(true).truncate(true), &note, at.as_os_str().as_bytes())
            .map_err(failed("note a freeze in", &note))?;
        // From here on dropping it undoes everything, also after a failure.
        let still = Still { note, at: at.to_owned() };
        freeze::freeze(at)?;
        point("driver:frozen");
        Ok(still)
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        let thawed = freeze::thaw(&self.at);
        match thawed {
            Ok(()) => drop(remove_file(&self.note)),
            // The note stays: whoever locks the volume next tries again.
            Err(error) => tracing::error!(error = &error as &dyn std::error::Error, "a file system stays frozen"),
        }
    }
}

/// Thaws what a process that died has left frozen. Under the volume's lock.
pub(crate) fn release(pool: &Pool, id: &str) -> Result<(), Failure> {
    let note = pool.held(id);
    let at = match std::fs::read(&note) {
        Ok(bytes) => PathBuf::from(std::ffi::OsStr::from_bytes(&bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(failed("read", &note)(source)),
    };
    // Only a mount of this very volume: the path may be somebody else's by now.
    if Seen::of_image(&pool.image(id))?.uses.iter().any(|used| used.target == at) {
        freeze::thaw(&at)?;
    }
    remove_file(&note).map_err(failed("remove", &note))?;
    Ok(())
}

/// For CreateVolume with a source, under the locks of both.
pub(crate) fn copy_origin(origin: &Origin, pool: &Pool, to: &Path, thin: bool) -> Result<(), Failure> {
    let share = pool.clones && pool.root() == origin.root && thin && !origin.thick;
    let mut still = None;
    if let Some((source, id)) = &origin.volume {
        release(source, id)?;
        let record = source.peek(id)?.ok_or_else(|| Failure::NoVolume(id.clone()))?;
        match plan(source, id, &record, share)? {
            Plan::Share { flush } => flush.iter().try_for_each(Flush::run)?,
            Plan::Hold { at } => still = Some(Still::hold(source, id, &at)?),
            Plan::Copy => {}
        }
    }
    copy_image(&origin.image, to, share)?;
    drop(still);
    Ok(())
}

/// Copies or shares, as was decided.
pub(crate) fn copy_image(from: &Path, to: &Path, share: bool) -> Result<(), Failure> {
    if !share {
        return Ok(copy::copy_sparse(from, to)?);
    }
    if copy::reflink(from, to)? {
        Ok(())
    } else {
        let source = std::io::Error::from(std::io::ErrorKind::Unsupported);
        Err(Failure::Files { step: "share the blocks of", path: from.to_owned(), source })
    }
}

/// When the image was last changed.
pub(crate) fn changed(image: &Path) -> Result<Moment, Failure> {
    let found = std::fs::metadata(image).map_err(failed("inspect", image))?;
    Ok(Moment(found.mtime(), i32::try_from(found.mtime_nsec()).unwrap_or(0)))
}
