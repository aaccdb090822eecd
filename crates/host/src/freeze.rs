//! Flushes or freezes a mounted file system, so that a copy of its device is consistent.
//!
//! A freeze outlives the process that made it. A caller must record durably that it is about to freeze, so that another
//! process can thaw the file system after a crash.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::errno::last_errno;

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

/// Writes the dirty data of the file system at `at` to its device.
pub fn flush(at: &Path) -> Result<(), FreezeError> {
    let error = |source| FreezeError { step: "flush", at: at.into(), source };
    rustix::fs::syncfs(File::open(at).map_err(error)?).map_err(|errno| error(errno.into()))
}

/// Flushes the file system at `at` and blocks its writers until `thaw`. Succeeds if it is frozen already.
pub fn freeze(at: &Path) -> Result<(), FreezeError> {
    match freeze_ioctl(at, FIFREEZE, "freeze")? {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(errno) => Err(FreezeError { step: "freeze", at: at.into(), source: errno.into() }),
    }
}

/// Unblocks the writers of the file system at `at`. Succeeds if it is not frozen.
pub fn thaw(at: &Path) -> Result<(), FreezeError> {
    match freeze_ioctl(at, FITHAW, "thaw")? {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(FreezeError { step: "thaw", at: at.into(), source: errno.into() }),
    }
}

fn freeze_ioctl(at: &Path, request: libc::Ioctl, step: &'static str) -> Result<Result<(), Errno>, FreezeError> {
    let directory = File::open(at).map_err(|source| FreezeError { step, at: at.into(), source })?;
    // SAFETY: the fd is open during the call, and both requests ignore their argument.
    let result = unsafe { libc::ioctl(directory.as_raw_fd(), request, 0) };
    Ok(if result == 0 { Ok(()) } else { Err(last_errno()) })
}
