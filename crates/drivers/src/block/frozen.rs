//! Freezing the file system of a volume so that a crash cannot leave it frozen for ever.
//!
//! The path of the mount is recorded in `held/<id>` before the freeze. If the process dies, the next one that locks the
//! volume finds the record and thaws the file system. All functions require the lock of the volume.
use std::{
    ffi::OsStr,
    fs::{self, OpenOptions},
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use cleat_crash::point;
use cleat_host::freeze;

use super::{
    failure::Failure,
    kernel_state::KernelState,
    records::{io_failure, remove_file, write_file},
};

/// A frozen file system. Dropping it thaws the file system and removes the record of the freeze.
pub(crate) struct FrozenFileSystem {
    record: PathBuf,
    at: PathBuf,
}

impl FrozenFileSystem {
    /// Freezes the file system mounted at `at`, after recording that in the file `record`.
    pub(crate) fn freeze(record: PathBuf, at: &Path) -> Result<FrozenFileSystem, Failure> {
        write_file(OpenOptions::new().create(true).truncate(true), &record, at.as_os_str().as_bytes())
            .map_err(io_failure("note a freeze in", &record))?;
        // Created before the freeze: if that fails, dropping the value removes the record.
        let frozen = FrozenFileSystem { record, at: at.to_owned() };
        freeze::freeze(at)?;
        point("driver:frozen");
        Ok(frozen)
    }
}

impl Drop for FrozenFileSystem {
    fn drop(&mut self) {
        match freeze::thaw(&self.at) {
            Ok(()) => drop(remove_file(&self.record)),
            // The record stays: the next process that locks the volume thaws the file system.
            Err(error) => tracing::error!(
                at = %self.at.display(),
                error = &error as &dyn std::error::Error,
                "could not thaw a file system"
            ),
        }
    }
}

/// Thaws the file system that the file `record` names, if there is such a record, and removes the record. `image` is
/// the image of the volume.
pub(crate) fn thaw_leftover(record: &Path, image: &Path) -> Result<(), Failure> {
    let at = match fs::read(record) {
        Ok(bytes) => PathBuf::from(OsStr::from_bytes(&bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(io_failure("read", record)(source)),
    };
    // Only if this volume is still mounted there: the path may be in use for something else by now.
    if KernelState::of_image(image)?.mounts.iter().any(|mount| mount.target == at) {
        freeze::thaw(&at)?;
    }
    remove_file(record).map_err(io_failure("remove", record))?;
    Ok(())
}
