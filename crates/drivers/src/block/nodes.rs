//! Which nodes there are: each node process announces itself in the pool, in `nodes/<hash of its id>`.
//!
//! An announcement stays when its process stops: a node that restarts is not a node that never was.
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
    shelf::{failed, make_directory, sync_directory, write_file},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Announcement {
    pub(crate) node_id: String,
    pub(crate) max_volumes: i64,
    /// The boot id of the machine it runs on: nodes that share it share loop devices and mounts.
    #[serde(default)]
    pub(crate) machine: String,
}

pub(crate) struct Nodes {
    directory: PathBuf,
    machine: String,
    /// Volumes by node, as far as this process published them; filled from the records at first use.
    published: Mutex<Option<HashMap<String, HashSet<String>>>>,
}

impl Nodes {
    pub(crate) fn open(root: &Path) -> io::Result<Nodes> {
        let directory = root.join("nodes");
        make_directory(&directory)?;
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        Ok(Nodes { directory, machine, published: Mutex::default() })
    }

    pub(crate) fn announce(&self, node_id: &str, max_volumes: i64) -> Result<(), Failure> {
        let path = self.path(node_id);
        let machine = self.machine.clone();
        let announcement = Announcement { node_id: node_id.to_owned(), max_volumes, machine };
        let bytes =
            serde_json::to_vec(&announcement).map_err(|source| Failure::Record { path: path.clone(), source })?;
        // Node processes of one id are one node; the temporary name is theirs alone.
        let temporary = path.with_extension(format!("{}", std::process::id()));
        write_file(OpenOptions::new().create(true).truncate(true), &temporary, &bytes)
            .map_err(failed("announce the node in", &temporary))?;
        std::fs::rename(&temporary, &path).map_err(failed("announce the node in", &path))?;
        sync_directory(&self.directory).map_err(failed("sync", &self.directory))
    }

    pub(crate) fn find(&self, node_id: &str) -> Result<Option<Announcement>, Failure> {
        let path = self.path(node_id);
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|source| Failure::Record { path, source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Failure::Files { step: "read", path, source }),
        }
    }

    /// Whether what the kernel shows here is also what that node sees.
    pub(crate) fn is_here(&self, node_id: &str) -> bool {
        matches!(self.find(node_id), Ok(Some(found)) if found.machine == self.machine)
    }

    /// Notes a publication, unless the node has as many as it takes. `count` reads the records: the answer of last resort,
    /// since other processes publish too.
    pub(crate) fn admit(
        &self,
        node: &Announcement,
        volume: &str,
        count: impl Fn() -> Result<HashMap<String, HashSet<String>>, Failure>,
    ) -> Result<(), Failure> {
        let mut published = self.published();
        if published.is_none() {
            *published = Some(count()?);
        }
        let full = |known: &HashMap<String, HashSet<String>>| {
            let volumes = known.get(&node.node_id);
            volumes.is_some_and(|held| !held.contains(volume) && held.len() as i64 >= node.max_volumes)
        };
        if published.as_ref().is_some_and(full) {
            let counted = count()?;
            let refused = full(&counted);
            *published = Some(counted);
            if refused {
                return Err(Failure::NodeFull { node: node.node_id.clone(), limit: node.max_volumes });
            }
        }
        if let Some(known) = published.as_mut() {
            known.entry(node.node_id.clone()).or_default().insert(volume.to_owned());
        }
        Ok(())
    }

    /// Forgets a publication, or all of a volume.
    pub(crate) fn release(&self, node: Option<&str>, volume: &str) {
        for (id, volumes) in self.published().iter_mut().flatten() {
            if node.is_none_or(|node| node == id) {
                volumes.remove(volume);
            }
        }
    }

    // A panic cannot leave the map half changed, so poison carries no information.
    fn published(&self) -> MutexGuard<'_, Option<HashMap<String, HashSet<String>>>> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, node_id: &str) -> PathBuf {
        let digest: String = Sha256::digest(node_id.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        self.directory.join(digest)
    }
}
