//! Paths in the data directory.

use std::path::{Path, PathBuf};

/// Names the paths of one data directory. Creates nothing.
#[derive(Clone, Debug)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The block driver's volumes.
    pub fn pool(&self) -> PathBuf {
        self.root.join("pool")
    }

    /// The default directory of FlexVolume drivers.
    pub fn flex_drivers(&self) -> PathBuf {
        self.root.join("flexvolume")
    }

    /// Lock files of FlexVolume driver calls that are running.
    pub fn flex_calls(&self) -> PathBuf {
        self.root.join("flexvolume-calls")
    }

    /// The socket of the block driver's controller service.
    pub fn controller_socket(&self) -> PathBuf {
        self.root.join("controller.sock")
    }

    /// A node's root directory, with the layout of the kubelet's.
    pub fn node(&self, name: &str) -> PathBuf {
        self.root.join("nodes").join(name)
    }

    /// The socket of a driver's node service.
    pub fn node_socket(&self, name: &str, driver: &str) -> PathBuf {
        self.node(name).join("plugins").join(driver).join("csi.sock")
    }

    /// The directory in which a node's drivers register.
    pub fn registry(&self, node: &str) -> PathBuf {
        self.node(node).join("plugins_registry")
    }
}

/// `node-1` to `node-<count>`.
pub fn node_names(count: u16) -> Vec<String> {
    (1..=count).map(|n| format!("node-{n}")).collect()
}
