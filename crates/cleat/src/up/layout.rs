//! Where things are below the data directory.

use std::path::{Path, PathBuf};

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

    /// FlexVolume drivers, unless they lie elsewhere.
    pub fn flex_drivers(&self) -> PathBuf {
        self.root.join("flexvolume")
    }

    /// The marks of FlexVolume drivers' calls under way.
    pub fn flex_calls(&self) -> PathBuf {
        self.root.join("flexvolume-calls")
    }

    pub fn controller_socket(&self) -> PathBuf {
        self.root.join("controller.sock")
    }

    /// A node's directory, laid out as the kubelet's.
    pub fn node(&self, name: &str) -> PathBuf {
        self.root.join("nodes").join(name)
    }

    pub fn node_socket(&self, name: &str, driver: &str) -> PathBuf {
        self.node(name).join("plugins").join(driver).join("csi.sock")
    }

    pub fn registry(&self, node: &str) -> PathBuf {
        self.node(node).join("plugins_registry")
    }
}

pub fn node_names(count: u16) -> Vec<String> {
    (1..=count).map(|n| format!("node-{n}")).collect()
}
