//! The nodes that volumes can be published to. Each node service registers itself in the pool, in the file
//! `nodes/<hash of the node id>`, and this file stays when the process stops.
//!
//! Also counts the volumes that are published to each node, for the limit of volumes per node.
use std::{
    collections::{HashMap, HashSet},
    fs::OpenOptions,
    io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    failure::Failure,
    records::{ensure_directory, io_failure, sync_directory, write_file},
};

/// The ids of the volumes that are published to each node.
pub(crate) type VolumesByNode = HashMap<String, HashSet<String>>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeRecord {
    pub(crate) node_id: String,
    pub(crate) max_volumes: i64,
    /// The boot id of the machine that the node runs on. Nodes with the same boot id share loop devices and mounts.
    #[serde(default)]
    pub(crate) machine: String,
}

pub(crate) struct NodeRegistry {
    directory: PathBuf,
    /// The boot id of this machine.
    machine: String,
    /// A cache of the publications in the records, read at first use and updated by this process. Other processes
    /// publish too, so it may lack some; `reserve` reads the records again before it refuses.
    published: Mutex<Option<VolumesByNode>>,
}

impl NodeRegistry {
    pub(crate) fn open(root: &Path) -> io::Result<NodeRegistry> {
        let directory = root.join("nodes");
        ensure_directory(&directory)?;
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        Ok(NodeRegistry { directory, machine, published: Mutex::default() })
    }

    pub(crate) fn register(&self, node_id: &str, max_volumes: i64) -> Result<(), Failure> {
        let path = self.path(node_id);
        let machine = self.machine.clone();
        let record = NodeRecord { node_id: node_id.to_owned(), max_volumes, machine };
        let bytes =
            serde_json::to_vec(&record).map_err(|source| Failure::InvalidRecord { path: path.clone(), source })?;
        // Several processes may register the same node at the same time: each uses a temporary file of its own.
        let temporary = path.with_extension(format!("{}", std::process::id()));
        write_file(OpenOptions::new().create(true).truncate(true), &temporary, &bytes)
            .map_err(io_failure("register the node in", &temporary))?;
        std::fs::rename(&temporary, &path).map_err(io_failure("register the node in", &path))?;
        sync_directory(&self.directory).map_err(io_failure("sync", &self.directory))
    }

    pub(crate) fn find(&self, node_id: &str) -> Result<Option<NodeRecord>, Failure> {
        let path = self.path(node_id);
        match std::fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).map_err(|source| Failure::InvalidRecord { path, source })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Failure::Io { step: "read", path, source }),
        }
    }

    /// Whether the node runs on this machine, so that this process sees the loop devices and mounts of the node.
    pub(crate) fn is_on_this_machine(&self, node_id: &str) -> bool {
        matches!(self.find(node_id), Ok(Some(found)) if found.machine == self.machine)
    }

    /// Counts a publication of `volume` to `node`. Fails if the node has its maximum of other volumes. `read_published`
    /// reads the publications from the records.
    pub(crate) fn reserve(
        &self,
        node: &NodeRecord,
        volume: &str,
        read_published: impl Fn() -> Result<VolumesByNode, Failure>,
    ) -> Result<(), Failure> {
        let mut published = self.published();
        if published.is_none() {
            *published = Some(read_published()?);
        }
        let exceeds_limit = |published: &VolumesByNode| {
            let volumes = published.get(&node.node_id);
            volumes.is_some_and(|volumes| !volumes.contains(volume) && volumes.len() as i64 >= node.max_volumes)
        };
        if published.as_ref().is_some_and(exceeds_limit) {
            let current = read_published()?;
            let refused = exceeds_limit(&current);
            *published = Some(current);
            if refused {
                return Err(Failure::NodeVolumeLimit { node: node.node_id.clone(), limit: node.max_volumes });
            }
        }
        if let Some(published) = published.as_mut() {
            published.entry(node.node_id.clone()).or_default().insert(volume.to_owned());
        }
        Ok(())
    }

    /// Stops counting the publication of `volume` to `node`, or to all nodes if `node` is `None`.
    pub(crate) fn release(&self, node: Option<&str>, volume: &str) {
        for (id, volumes) in self.published().iter_mut().flatten() {
            if node.is_none_or(|node| node == id) {
                volumes.remove(volume);
            }
        }
    }

    // No panic can leave the map inconsistent, so a poisoned mutex is used all the same.
    fn published(&self) -> MutexGuard<'_, Option<VolumesByNode>> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, node_id: &str) -> PathBuf {
        let digest: String = Sha256::digest(node_id.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        self.directory.join(digest)
    }
}
