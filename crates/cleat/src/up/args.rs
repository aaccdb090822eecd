//! The arguments of `cleat up`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

#[derive(Args, Debug)]
pub struct UpArgs {
    /// Directory for all state: the store, certificates, the kubeconfig, volumes and the nodes' directories.
    #[arg(long, value_name = "DIR")]
    pub data_dir: PathBuf,
    /// Number of nodes to run on this machine.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub nodes: u16,
    /// Address that the API server listens on. Port 0 chooses a free port.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:6443")]
    pub listen: SocketAddr,
    /// Writes an audit log to this file: one line of JSON for each request.
    #[arg(long, value_name = "FILE")]
    pub audit_log: Option<PathBuf>,
    /// Encrypts Secrets on disk with the first key in this file: 32 bytes in base64, one key per line. Older keys may
    /// follow. At start, all Secrets are encrypted again with the first key.
    #[arg(long, value_name = "FILE")]
    pub encryption_key: Option<PathBuf>,
    /// Keeps volumes attached to nodes that are not ready until the node is ready again or has the out-of-service taint.
    /// Without this flag they are detached after six minutes.
    #[arg(long)]
    pub disable_force_detach_on_timeout: bool,
    /// Directory of FlexVolume drivers, as `vendor~driver/driver`. Default: `flexvolume` in the data directory.
    #[arg(long, value_name = "DIR")]
    pub flex_volume_plugin_dir: Option<PathBuf>,
    /// Does not run these parts of the stack. Run them as separate processes, such as `cleat csi-provisioner`.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    pub without: Vec<StackPart>,
}

/// A part of the stack that can run as a separate process, as a client of the stack's API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StackPart {
    /// Creates and deletes the block driver's volumes.
    Provisioner,
    /// Attaches and detaches the block driver's volumes.
    Attacher,
}
