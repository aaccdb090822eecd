//! Copies large files: by sharing their blocks (a reflink) where the file system supports it, or by copying all data
//! except holes. Does not interpret the files. The caller makes sure that a source does not change while it is copied.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ioctl_ficlone, seek};
use rustix::io::Errno;

const CHUNK_BYTES: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("copy {from:?} to {to:?}: {step}")]
    Copy { from: PathBuf, to: PathBuf, step: &'static str, source: io::Error },
    #[error("allocate {size} bytes for {file:?}")]
    Allocate { file: PathBuf, size: u64, source: io::Error },
}

impl CopyError {
    /// Whether the copy failed because the file system is full or a quota is exceeded.
    pub fn is_disk_full(&self) -> bool {
        let (CopyError::Copy { source, .. } | CopyError::Allocate { source, .. }) = self;
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

/// Whether the errno means that the two files cannot share blocks: they are on different file systems, or the file
/// system does not support it.
fn is_reflink_unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS)
}

/// Makes `to` a copy that shares its blocks with `from`, durable when it returns. Returns `Ok(false)` if these files
/// cannot share blocks; `to` is then empty. The kernel blocks writers of `from` during the call, so the copy is a
/// consistent state of one point in time.
pub fn reflink(from: &Path, to: &Path) -> Result<bool, CopyError> {
    let error = |step| move |source| CopyError::Copy { from: from.into(), to: to.into(), step, source };
    let (source, target) = open(from, to)?;
    match ioctl_ficlone(&target, &source) {
        Ok(()) => {
            target.sync_all().map_err(error("sync"))?;
            Ok(true)
        }
        Err(errno) if is_reflink_unsupported(errno) => Ok(false),
        Err(errno) => Err(error("share its blocks")(errno.into())),
    }
}

/// Makes `to` a copy of `from` with blocks of its own, durable when it returns. Holes of `from` are holes of `to`.
pub fn copy_sparse(from: &Path, to: &Path) -> Result<(), CopyError> {
    let errno_error =
        |step| move |errno: Errno| CopyError::Copy { from: from.into(), to: to.into(), step, source: errno.into() };
    let error = |step| move |source| CopyError::Copy { from: from.into(), to: to.into(), step, source };
    let (source, target) = open(from, to)?;
    let size = source.metadata().map_err(error("inspect"))?.len();
    target.set_len(size).map_err(error("size"))?;
    let mut buffer = vec![0; CHUNK_BYTES as usize];
    let mut offset = 0;
    while offset < size {
        let start = match seek(&source, SeekFrom::Data(offset)) {
            Ok(start) => start,
            // There is only a hole up to the end of the file.
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno_error("find data")(errno)),
        };
        let end = seek(&source, SeekFrom::Hole(start)).map_err(errno_error("find the end of data"))?.min(size);
        offset = start;
        while offset < end {
            let length = (end - offset).min(CHUNK_BYTES) as usize;
            // Not copy_file_range: it may share the blocks, which is what `reflink` is for.
            source.read_exact_at(&mut buffer[..length], offset).map_err(error("read"))?;
            target.write_all_at(&buffer[..length], offset).map_err(error("write"))?;
            offset += length as u64;
        }
    }
    target.sync_all().map_err(error("sync"))
}

/// Allocates blocks for the first `size` bytes of `file`, so that writing there cannot fail with "no space left".
pub fn allocate(file: &Path, size: u64) -> Result<(), CopyError> {
    let error = |source| CopyError::Allocate { file: file.into(), size, source };
    let opened = OpenOptions::new().write(true).open(file).map_err(error)?;
    fallocate(&opened, FallocateFlags::empty(), 0, size).map_err(|errno| error(errno.into()))?;
    opened.sync_all().map_err(error)
}

/// The bytes of disk space that are allocated for `file`.
pub fn allocated_bytes(file: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(file)?.blocks() * 512)
}

/// Whether files in `directory` can share blocks. Tried with two small files: the type of the file system does not
/// tell, because it depends on how it was formatted.
pub fn can_reflink(directory: &Path) -> Result<bool, CopyError> {
    // Several processes may probe at the same time, and processes in different containers may have the same process id.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let name = |what: &str| directory.join(format!(".probe-{}-{now}-{what}", std::process::id()));
    let (from, to) = (name("from"), name("to"));
    let written = std::fs::write(&from, [0xa5; 4096]);
    let written = written.map_err(|source| CopyError::Copy { from: from.clone(), to: to.clone(), step: "try", source });
    let tried = written.and_then(|()| reflink(&from, &to));
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
