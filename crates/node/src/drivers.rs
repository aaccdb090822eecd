//! The drivers registered on this node, by name. In memory only: after a restart it fills again from the sockets.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use parking_lot::RwLock;

use crate::plugin::csi::Driver;
use crate::registry::Announced;

/// A version `major.minor.patch` that a driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) u32, pub(crate) u32, pub(crate) u32);

impl Version {
    /// Accepts `1`, `1.0`, `v1.2.3` and a suffix after `-` or `+`.
    pub(crate) fn parse(text: &str) -> Option<Version> {
        let text = text.trim().trim_start_matches('v');
        let text = text.split(['-', '+']).next()?;
        let mut parts = text.split('.').map(|p| p.parse::<u32>().ok());
        let version = Version(parts.next()??, parts.next().unwrap_or(Some(0))?, parts.next().unwrap_or(Some(0))?);
        parts.next().is_none().then_some(version)
    }

    /// The highest of a driver's versions that this agent speaks.
    pub(crate) fn best(all: &[String]) -> Option<Version> {
        all.iter().filter_map(|v| Version::parse(v)).filter(|v| v.0 == 1).max()
    }
}

/// One registration: which driver, through which socket file.
#[derive(Clone, Debug)]
pub(crate) struct Registered {
    pub(crate) driver: Driver,
    pub(crate) socket: PathBuf,
    pub(crate) file: FileId,
    pub(crate) version: Version,
    pub(crate) announced: Announced,
}

/// Tells a socket from a later one at the same path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    pub(crate) inode: u64,
    pub(crate) changed: (i64, i64),
}

#[derive(Default)]
pub(crate) struct Drivers(RwLock<HashMap<String, Registered>>);

impl Drivers {
    pub(crate) fn get(&self, name: &str) -> Option<Driver> {
        self.0.read().get(name).map(|r| r.driver.clone())
    }

    pub(crate) fn entry(&self, name: &str) -> Option<Registered> {
        self.0.read().get(name).cloned()
    }

    pub(crate) fn announced(&self) -> Vec<Announced> {
        self.0.read().values().map(|r| r.announced.clone()).collect()
    }

    pub(crate) fn by_socket(&self, socket: &Path) -> Option<(String, FileId)> {
        self.0.read().iter().find(|(_, r)| r.socket == socket).map(|(name, r)| (name.clone(), r.file))
    }

    pub(crate) fn insert(&self, name: &str, registered: Registered) {
        self.0.write().insert(name.to_owned(), registered);
    }

    /// Only the registration made through this socket: a newer one of the same driver is not touched.
    pub(crate) fn remove(&self, name: &str, socket: &Path) -> bool {
        let mut all = self.0.write();
        let ours = all.get(name).is_some_and(|r| r.socket == socket);
        if ours {
            all.remove(name);
        }
        ours
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_version_is_the_highest_that_is_understood() {
        let best = |all: &[&str]| Version::best(&all.iter().map(ToString::to_string).collect::<Vec<_>>());
        for (case, all, want) in [
            ("the usual", &["1.0.0"][..], Some(Version(1, 0, 0))),
            ("several", &["1.2.0", "v1.10.1", "0.3.0"], Some(Version(1, 10, 1))),
            ("newer majors are skipped", &["2.0.0", "1.0.0"], Some(Version(1, 0, 0))),
            ("only what is not understood", &["2.0.0", "0.3.0", "x"], None),
            ("none", &[], None),
        ] {
            assert_eq!(best(all), want, "{case}");
        }
    }
}
