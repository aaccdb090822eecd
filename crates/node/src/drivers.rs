//! The table of CSI drivers that are registered on this node. In memory only: after a restart it is filled from the sockets.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use parking_lot::RwLock;

use crate::plugin::csi::CsiDriver;

/// A version of the CSI specification: `major.minor.patch`.
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

    /// The highest of a driver's versions that this agent supports (1.x).
    pub(crate) fn highest_supported(all: &[String]) -> Option<Version> {
        all.iter().filter_map(|v| Version::parse(v)).filter(|v| v.0 == 1).max()
    }
}

/// The response of NodeGetInfo, with the name of the driver.
#[derive(Clone, Debug)]
pub(crate) struct DriverNodeInfo {
    pub(crate) name: String,
    pub(crate) node_id: String,
    pub(crate) max_volumes: i64,
    pub(crate) topology: BTreeMap<String, String>,
}

/// The registration of one driver through one socket.
#[derive(Clone, Debug)]
pub(crate) struct DriverRegistration {
    pub(crate) driver: CsiDriver,
    pub(crate) socket: PathBuf,
    pub(crate) file: FileId,
    pub(crate) version: Version,
    pub(crate) node_info: DriverNodeInfo,
}

/// Distinguishes a socket from a later one at the same path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    pub(crate) inode: u64,
    /// ctime, seconds and nanoseconds.
    pub(crate) changed: (i64, i64),
}

#[derive(Default)]
pub(crate) struct RegisteredDrivers(RwLock<HashMap<String, DriverRegistration>>);

impl RegisteredDrivers {
    pub(crate) fn get(&self, name: &str) -> Option<CsiDriver> {
        self.0.read().get(name).map(|r| r.driver.clone())
    }

    pub(crate) fn registration(&self, name: &str) -> Option<DriverRegistration> {
        self.0.read().get(name).cloned()
    }

    pub(crate) fn all_node_info(&self) -> Vec<DriverNodeInfo> {
        self.0.read().values().map(|r| r.node_info.clone()).collect()
    }

    pub(crate) fn by_socket(&self, socket: &Path) -> Option<(String, FileId)> {
        self.0.read().iter().find(|(_, r)| r.socket == socket).map(|(name, r)| (name.clone(), r.file))
    }

    pub(crate) fn insert(&self, name: &str, registration: DriverRegistration) {
        self.0.write().insert(name.to_owned(), registration);
    }

    /// Removes the registration through this socket. A newer one of the same driver through another socket stays.
    /// Returns whether it was removed.
    pub(crate) fn remove(&self, name: &str, socket: &Path) -> bool {
        let mut all = self.0.write();
        let is_own = all.get(name).is_some_and(|r| r.socket == socket);
        if is_own {
            all.remove(name);
        }
        is_own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_supported_version_is_chosen() {
        let highest =
            |all: &[&str]| Version::highest_supported(&all.iter().map(ToString::to_string).collect::<Vec<_>>());
        for (case, all, want) in [
            ("one version", &["1.0.0"][..], Some(Version(1, 0, 0))),
            ("several", &["1.2.0", "v1.10.1", "0.3.0"], Some(Version(1, 10, 1))),
            ("newer majors are skipped", &["2.0.0", "1.0.0"], Some(Version(1, 0, 0))),
            ("only unsupported versions", &["2.0.0", "0.3.0", "x"], None),
            ("none", &[], None),
        ] {
            assert_eq!(highest(all), want, "{case}");
        }
    }
}
