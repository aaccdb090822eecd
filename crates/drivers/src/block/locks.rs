//! Locks between processes: flock on files that are never removed. The kernel releases a lock when its holder dies, so
//! a lock is never stale.
//!
//! A fixed number of lock files is shared by all ids, by their hash: no lock file has to be created or removed with a
//! volume. Two ids with the same lock file exclude each other, which costs a short wait. A caller that needs several
//! locks must take them in one call, which takes them in a fixed order and each file once; otherwise two callers could
//! deadlock.
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use sha2::{Digest, Sha256};

use super::failure::Failure;

const LOCK_FILE_COUNT: u16 = 4096;

/// Longer than every operation under a lock except a format or a copy.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Ordered by strength: of two requests for one file, the greater mode is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LockMode {
    /// Other holders may have it in shared mode too.
    Shared,
    Exclusive,
}

/// Locks that are held until this is dropped.
pub(crate) struct LockGuard {
    _files: Vec<File>,
}

/// Takes all the locks. Fails with [`Failure::Busy`] after [`LOCK_TIMEOUT`]; `id` is named in that error.
pub(crate) fn acquire(locks: impl IntoIterator<Item = (PathBuf, LockMode)>, id: &str) -> Result<LockGuard, Failure> {
    acquire_until(locks, id, Instant::now() + LOCK_TIMEOUT)
}

/// Takes one lock in exclusive mode; `None` if it is held already.
pub(crate) fn try_acquire(path: PathBuf, id: &str) -> Result<Option<LockGuard>, Failure> {
    match acquire_until([(path, LockMode::Exclusive)], id, Instant::now()) {
        Ok(guard) => Ok(Some(guard)),
        Err(Failure::Busy(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}

fn acquire_until(
    locks: impl IntoIterator<Item = (PathBuf, LockMode)>,
    id: &str,
    deadline: Instant,
) -> Result<LockGuard, Failure> {
    let mut modes = BTreeMap::new();
    for (path, mode) in locks {
        let strongest = modes.entry(path).or_insert(mode);
        *strongest = mode.max(*strongest);
    }
    let files =
        modes.into_iter().map(|(path, mode)| acquire_one(&path, mode, id, deadline)).collect::<Result<_, _>>()?;
    Ok(LockGuard { _files: files })
}

fn acquire_one(path: &Path, mode: LockMode, id: &str, deadline: Instant) -> Result<File, Failure> {
    let failed = |source| Failure::Io { step: "lock", path: path.to_owned(), source };
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path).map_err(failed)?;
    let operation = match mode {
        LockMode::Shared => FlockOperation::NonBlockingLockShared,
        LockMode::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    let mut pause = Duration::from_micros(200);
    loop {
        match flock(&file, operation) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {}
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Err(Failure::Busy(id.to_owned())),
            Err(errno) => return Err(failed(errno.into())),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// The name of the lock file for `id`. Ids with different prefixes never share a lock file.
pub(crate) fn lock_file_name(prefix: &str, id: &str) -> String {
    let digest = Sha256::digest(id.as_bytes());
    let number = u16::from_be_bytes([digest[0], digest[1]]) % LOCK_FILE_COUNT;
    format!("{prefix}{number:03x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_with_the_same_lock_file_are_locked_once_and_shared_locks_coexist() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let both = acquire([(path("1"), LockMode::Exclusive), (path("1"), LockMode::Shared)], "a").unwrap();
        assert!(try_acquire(path("1"), "b").unwrap().is_none());
        drop(both);
        let reader = acquire([(path("1"), LockMode::Shared)], "a").unwrap();
        let _another = acquire([(path("1"), LockMode::Shared), (path("2"), LockMode::Exclusive)], "b").unwrap();
        assert!(try_acquire(path("1"), "c").unwrap().is_none());
        drop(reader);
    }

    #[test]
    fn lock_file_names_are_stable_and_differ_by_prefix() {
        assert_eq!(lock_file_name("", "pvc-1"), lock_file_name("", "pvc-1"));
        assert_ne!(lock_file_name("", "pvc-1"), lock_file_name("s", "pvc-1"));
    }
}
