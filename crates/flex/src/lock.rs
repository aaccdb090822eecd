//! One call at a time for a volume on a node, also when the process that made the last one is dead.
//!
//! The lock is a file that the driver gets as its standard input: as long as anything of a call lives, the lock is held,
//! whoever started it. A restarted control plane so never detaches while an attach of its former life is still running.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};

/// What the calls for one volume on one node share.
pub(crate) struct Lock {
    path: PathBuf,
    file: File,
}

/// Why there is no lock.
#[derive(Debug)]
pub(crate) enum Unavailable {
    Held,
    Failed(io::Error),
}

impl From<io::Error> for Unavailable {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl Lock {
    /// `lasts`: how long a call may take. Whatever holds the lock for longer is no call any more, but something that a driver
    /// left running.
    pub(crate) fn take(directory: &Path, what: &[&str], lasts: Duration) -> Result<Self, Unavailable> {
        fs::create_dir_all(directory)?;
        let path = directory.join(file_name(what));
        let open = || OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let mut file = open()?;
        if let Err(error) = file.try_lock() {
            match error {
                TryLockError::Error(error) => return Err(error.into()),
                TryLockError::WouldBlock if !is_older(&file, lasts)? => return Err(Unavailable::Held),
                TryLockError::WouldBlock => {}
            }
            fs::remove_file(&path)?;
            file = open()?;
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => Unavailable::Held,
                TryLockError::Error(error) => error.into(),
            })?;
        }
        file.set_modified(SystemTime::now())?;
        Ok(Self { path, file })
    }

    /// What the driver is to keep open. It reads as empty, and cannot be written to.
    pub(crate) fn held_open(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The call has ended, and whatever the driver left running is no part of it.
    pub(crate) fn release(&self) {
        let _ = self.file.unlock();
    }

    /// Nothing is left to call for.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn is_older(file: &File, age: Duration) -> io::Result<bool> {
    let since = file.metadata()?.modified()?;
    Ok(SystemTime::now().duration_since(since).is_ok_and(|elapsed| elapsed > age))
}

fn file_name(what: &[&str]) -> String {
    let digest = Sha256::digest(what.join("\0").as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHAT: &[&str] = &["vendor/driver", "volume", "node"];

    #[test]
    fn a_lock_is_held_by_whoever_has_the_file_open() {
        let dir = tempfile::tempdir().unwrap();
        let long = Duration::from_secs(3600);
        let lock = Lock::take(dir.path(), WHAT, long).unwrap();
        assert!(matches!(Lock::take(dir.path(), WHAT, long), Err(Unavailable::Held)));
        assert!(Lock::take(dir.path(), &["vendor/driver", "volume", "other"], long).is_ok());
        let inherited = lock.held_open().unwrap();
        drop(lock);
        assert!(matches!(Lock::take(dir.path(), WHAT, long), Err(Unavailable::Held)), "a child lives");
        drop(inherited);
        assert!(Lock::take(dir.path(), WHAT, long).is_ok());
    }

    #[test]
    fn what_outlives_its_call_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let long = Duration::from_secs(3600);
        let lock = Lock::take(dir.path(), WHAT, long).unwrap();
        let _daemon = lock.held_open().unwrap();
        lock.release();
        let again = Lock::take(dir.path(), WHAT, long).unwrap();
        again.file.set_modified(SystemTime::now() - 2 * long).unwrap();
        assert!(Lock::take(dir.path(), WHAT, long).is_ok(), "older than any call");
    }
}
