//! Copies of large files: by sharing their blocks where the file system can, else by copying what is not a hole. Knows
//! nothing of what is in the files; whether they may change meanwhile is the caller's business.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ioctl_ficlone, seek};
use rustix::io::Errno;

/// What is read and written at once.
const CHUNK: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("copy {from:?} to {to:?}: {step}")]
    Copy { from: PathBuf, to: PathBuf, step: &'static str, source: io::Error },
    #[error("allocate {size} bytes for {file:?}")]
    Allocate { file: PathBuf, size: u64, source: io::Error },
}

impl CopyError {
    /// Whether there was no room left.
    pub fn full(&self) -> bool {
        let (CopyError::Copy { source, .. } | CopyError::Allocate { source, .. }) = self;
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

/// The kernel's ways to say that two files cannot share blocks: another file system, or one that never does.
fn cannot_share(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS)
}

/// Makes `to` a copy that shares its blocks with `from`. `Ok(false)`: this cannot be done here, and `to` is empty. The
/// kernel keeps writers of `from` out until it is done, so the copy is of one moment.
pub fn clone(from: &Path, to: &Path) -> Result<bool, CopyError> {
    let error = |step| move |source| CopyError::Copy { from: from.into(), to: to.into(), step, source };
    let (source, target) = open(from, to)?;
    match ioctl_ficlone(&target, &source) {
        Ok(()) => {
            target.sync_all().map_err(error("sync"))?;
            Ok(true)
        }
        Err(errno) if cannot_share(errno) => Ok(false),
        Err(errno) => Err(error("share its blocks")(errno.into())),
    }
}

/// Makes `to` a copy of `from` with blocks of its own, holes and all, durable when it returns.
pub fn sparse(from: &Path, to: &Path) -> Result<(), CopyError> {
    let error =
        |step| move |errno: Errno| CopyError::Copy { from: from.into(), to: to.into(), step, source: errno.into() };
    let other = |step| move |source| CopyError::Copy { from: from.into(), to: to.into(), step, source };
    let (source, target) = open(from, to)?;
    let size = source.metadata().map_err(other("inspect"))?.len();
    target.set_len(size).map_err(other("size"))?;
    let mut buffer = vec![0; CHUNK as usize];
    let mut at = 0;
    while at < size {
        let start = match seek(&source, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Only a hole is left.
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(error("find data")(errno)),
        };
        let end = seek(&source, SeekFrom::Hole(start)).map_err(error("find the end of data"))?.min(size);
        at = start;
        while at < end {
            let length = (end - at).min(CHUNK) as usize;
            // Not copy_file_range: it shares the blocks where it can, and callers who want that call clone.
            source.read_exact_at(&mut buffer[..length], at).map_err(other("read"))?;
            target.write_all_at(&buffer[..length], at).map_err(other("write"))?;
            at += length as u64;
        }
    }
    target.sync_all().map_err(other("sync"))
}

/// Gives the first `size` bytes of `file` blocks of their own, so that writing there cannot fail for lack of room.
pub fn allocate(file: &Path, size: u64) -> Result<(), CopyError> {
    let error = |source| CopyError::Allocate { file: file.into(), size, source };
    let opened = OpenOptions::new().write(true).open(file).map_err(error)?;
    fallocate(&opened, FallocateFlags::empty(), 0, size).map_err(|errno| error(errno.into()))?;
    opened.sync_all().map_err(error)
}

/// Bytes that `file` takes on disk.
pub fn occupied(file: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(file)?.blocks() * 512)
}

/// Whether files in `directory` can share blocks. Tried, not looked up: it depends on how the file system was made.
pub fn can_clone(directory: &Path) -> Result<bool, CopyError> {
    // Several processes may try at once, and containers repeat each other's process ids.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let name = |what: &str| directory.join(format!(".probe-{}-{now}-{what}", std::process::id()));
    let (from, to) = (name("from"), name("to"));
    let written = std::fs::write(&from, [0xa5; 4096]);
    let written = written.map_err(|source| CopyError::Copy { from: from.clone(), to: to.clone(), step: "try", source });
    let tried = written.and_then(|()| clone(&from, &to));
    let _ = std::fs::remove_file(&from);
    let _ = std::fs::remove_file(&to);
    tried
}

fn open(from: &Path, to: &Path) -> Result<(File, File), CopyError> {
    let error = |step| move |source| CopyError::Copy { from: from.into(), to: to.into(), step, source };
    let source = File::open(from).map_err(error("open the source"))?;
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    Ok((source, options.open(to).map_err(error("open the target"))?))
}
