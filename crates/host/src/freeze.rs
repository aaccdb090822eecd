//! Brings a mounted file system to a state that a copy of its device can use: flushed, or flushed and held still.
//!
//! A freeze outlives the process that made it. Whoever freezes must have written down that it does, so that its
//! successor can thaw.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::mount::last_errno;

/// `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)`.
const FIFREEZE: libc::Ioctl = 0xc004_5877_u32 as libc::Ioctl;
const FITHAW: libc::Ioctl = 0xc004_5878_u32 as libc::Ioctl;

#[derive(Debug, thiserror::Error)]
#[error("{step} the file system at {at:?}")]
pub struct FreezeError {
    pub step: &'static str,
    pub at: PathBuf,
    pub source: io::Error,
}

/// Writes out what the file system at `at` holds in memory.
pub fn flush(at: &Path) -> Result<(), FreezeError> {
    let error = |source| FreezeError { step: "flush", at: at.into(), source };
    rustix::fs::syncfs(File::open(at).map_err(error)?).map_err(|errno| error(errno.into()))
}

/// Flushes the file system at `at` and makes its writers wait. Frozen already is success.
pub fn freeze(at: &Path) -> Result<(), FreezeError> {
    match control(at, FIFREEZE, "freeze")? {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(errno) => Err(FreezeError { step: "freeze", at: at.into(), source: errno.into() }),
    }
}

/// Lets writers go on. Not frozen is success.
pub fn thaw(at: &Path) -> Result<(), FreezeError> {
    match control(at, FITHAW, "thaw")? {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(FreezeError { step: "thaw", at: at.into(), source: errno.into() }),
    }
}

fn control(at: &Path, request: libc::Ioctl, step: &'static str) -> Result<Result<(), Errno>, FreezeError> {
    let directory = File::open(at).map_err(|source| FreezeError { step, at: at.into(), source })?;
    // SAFETY: the fd is open for the length of the call, and both requests ignore their argument.
    let result = unsafe { libc::ioctl(directory.as_raw_fd(), request, 0) };
    Ok(if result == 0 { Ok(()) } else { Err(last_errno()) })
}
