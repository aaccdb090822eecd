//! Serializes the calls for one volume on one node, also across restarts of this process.
//!
//! The lock is an advisory lock (`flock`) on a file that the driver gets as its standard input. It stays held until the last
//! process of the call has ended, even if the process that started the call has died. A restarted control plane therefore
//! never detaches a volume while an attach that it started before the restart is still running.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};

/// A held lock. Dropping it closes this process's file; the lock is released once the driver has closed its copy too.
pub(crate) struct CallLock {
    path: PathBuf,
    file: File,
}

/// Why the lock was not acquired.
#[derive(Debug)]
pub(crate) enum LockError {
    Held,
    Io(io::Error),
}

impl From<io::Error> for LockError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl CallLock {
    /// A lock that has been held for longer than `max_call_duration` is replaced: no call takes that long, so its
    /// holder is a process that a driver left running.
    pub(crate) fn acquire(directory: &Path, key: &[&str], max_call_duration: Duration) -> Result<Self, LockError> {
        fs::create_dir_all(directory)?;
        let path = directory.join(file_name(key));
        let open = || OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let mut file = open()?;
        if let Err(error) = file.try_lock() {
            match error {
                TryLockError::Error(error) => return Err(error.into()),
                TryLockError::WouldBlock if !is_older(&file, max_call_duration)? => return Err(LockError::Held),
                TryLockError::WouldBlock => {}
            }
            fs::remove_file(&path)?;
            file = open()?;
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => LockError::Held,
                TryLockError::Error(error) => error.into(),
            })?;
        }
        file.set_modified(SystemTime::now())?;
        Ok(Self { path, file })
    }

    /// A second handle of the lock file, for the driver to keep open. The file is empty.
    pub(crate) fn duplicate_file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Releases the lock even if processes that the driver left running still have the file open.
    pub(crate) fn release(&self) {
        let _ = self.file.unlock();
    }

    /// Deletes the lock file, after the last call for this volume and node.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn is_older(file: &File, age: Duration) -> io::Result<bool> {
    let since = file.metadata()?.modified()?;
    Ok(SystemTime::now().duration_since(since).is_ok_and(|elapsed| elapsed > age))
}

fn file_name(key: &[&str]) -> String {
    let digest = Sha256::digest(key.join("\0").as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &[&str] = &["vendor/driver", "volume", "node"];

    #[test]
    fn a_lock_is_held_as_long_as_the_file_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let long = Duration::from_secs(3600);
        let lock = CallLock::acquire(dir.path(), KEY, long).unwrap();
        assert!(matches!(CallLock::acquire(dir.path(), KEY, long), Err(LockError::Held)));
        assert!(CallLock::acquire(dir.path(), &["vendor/driver", "volume", "other"], long).is_ok());
        let inherited = lock.duplicate_file().unwrap();
        drop(lock);
        assert!(matches!(CallLock::acquire(dir.path(), KEY, long), Err(LockError::Held)), "a child lives");
        drop(inherited);
        assert!(CallLock::acquire(dir.path(), KEY, long).is_ok());
    }

    #[test]
    fn processes_that_outlive_their_call_do_not_hold_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let long = Duration::from_secs(3600);
        let lock = CallLock::acquire(dir.path(), KEY, long).unwrap();
        let _daemon = lock.duplicate_file().unwrap();
        lock.release();
        let again = CallLock::acquire(dir.path(), KEY, long).unwrap();
        again.file.set_modified(SystemTime::now() - 2 * long).unwrap();
        assert!(CallLock::acquire(dir.path(), KEY, long).is_ok(), "older than any call");
    }
}
