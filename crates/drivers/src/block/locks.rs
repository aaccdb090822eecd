//! Locks between processes: flock on files that are never removed. A lock dies with its holder, so none is ever stale.
//!
//! Ids share lock files by their hash: none has to be made or removed with a volume, and that two ids meet in one costs a
//! short wait now and then. Whoever needs several takes them in one call: in order, and each file once.
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

const LOCKS: u16 = 4096;

/// Longer than any step that is done under a lock, except a format or a copy.
const PATIENCE: Duration = Duration::from_secs(10);

/// Ordered so that of two wishes for one file the stronger wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hold {
    /// Others may read too.
    Shared,
    Exclusive,
}

/// Held until it is dropped.
pub(crate) struct Held {
    _files: Vec<File>,
}

/// Waits, but not for ever; `who` is named in the refusal.
pub(crate) fn take(wanted: impl IntoIterator<Item = (PathBuf, Hold)>, who: &str) -> Result<Held, Failure> {
    take_until(wanted, who, Instant::now() + PATIENCE)
}

/// Nothing if somebody else has it now.
pub(crate) fn try_take(path: PathBuf, who: &str) -> Result<Option<Held>, Failure> {
    match take_until([(path, Hold::Exclusive)], who, Instant::now()) {
        Ok(held) => Ok(Some(held)),
        Err(Failure::Busy(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}

fn take_until(wanted: impl IntoIterator<Item = (PathBuf, Hold)>, who: &str, until: Instant) -> Result<Held, Failure> {
    let mut paths = BTreeMap::new();
    for (path, hold) in wanted {
        let strongest = paths.entry(path).or_insert(hold);
        *strongest = hold.max(*strongest);
    }
    let files = paths.into_iter().map(|(path, hold)| take_one(&path, hold, who, until)).collect::<Result<_, _>>()?;
    Ok(Held { _files: files })
}

fn take_one(path: &Path, hold: Hold, who: &str, until: Instant) -> Result<File, Failure> {
    let failed = |source| Failure::Files { step: "lock", path: path.to_owned(), source };
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path).map_err(failed)?;
    let operation = match hold {
        Hold::Shared => FlockOperation::NonBlockingLockShared,
        Hold::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    let mut pause = Duration::from_micros(200);
    loop {
        match flock(&file, operation) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < until => {}
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Err(Failure::Busy(who.to_owned())),
            Err(errno) => return Err(failed(errno.into())),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// The lock file's name for `id`; different sorts of ids never meet in one file.
pub(crate) fn name(sort: &str, id: &str) -> String {
    let digest = Sha256::digest(id.as_bytes());
    let number = u16::from_be_bytes([digest[0], digest[1]]) % LOCKS;
    format!("{sort}{number:03x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ids_that_meet_in_one_file_are_locked_together_and_readers_share() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let both = take([(path("1"), Hold::Exclusive), (path("1"), Hold::Shared)], "a").unwrap();
        assert!(try_take(path("1"), "b").unwrap().is_none());
        drop(both);
        let reader = take([(path("1"), Hold::Shared)], "a").unwrap();
        let _another = take([(path("1"), Hold::Shared), (path("2"), Hold::Exclusive)], "b").unwrap();
        assert!(try_take(path("1"), "c").unwrap().is_none());
        drop(reader);
    }

    #[test]
    fn names_are_stable_and_sorts_differ() {
        assert_eq!(name("", "pvc-1"), name("", "pvc-1"));
        assert_ne!(name("", "pvc-1"), name("s", "pvc-1"));
    }
}
