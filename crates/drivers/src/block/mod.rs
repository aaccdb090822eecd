//! `block.cleat.dev`: volumes are sparse image files in a pool directory, and loop devices where they are staged.
//!
//! # Guarantees
//! - A volume is staged only on a node it is published to, and published to several nodes only if its capability says
//!   that sharing is safe. Both are checked under the volume's lock, so several processes may serve one pool.
//! - A device is formatted only if it is blank, or if a durable record says that our own format of it was interrupted.
//! - After a crash at any point the repeated call completes or cleans up. A volume exists if its record does; an image
//!   holds nothing before the record is written, and nothing anybody wants once it is gone.
//!
//! # Assumptions
//! - The pool's file system keeps a rename atomic and honours fsync and flock; a pool shared between machines needs one
//!   that does so across them.
//! - All processes that serve one pool on a machine share its loop devices and mount namespace.
//!
//! - An administrator who wants several disks mounts or makes each below `pools/` in the pool's directory.
//!
//! # Crash points
//! `driver:image-begun` (no record yet), `driver:recorded`, `driver:image-created`, `driver:deleting`, `driver:image-removed`, `driver:attached` (published to a node),
//! `driver:detached`, `driver:loop-attached`, `driver:format-recorded`, `driver:formatted`, `driver:staged`,
//! `driver:published`, `driver:unpublished` (unmounted, target still there), `driver:unstaged-mount` (unmounted, loop
//! device still there); `driver:filled` (copied from its source, not usable yet), `driver:expansion-recorded`,
//! `driver:image-expanded`, `driver:device-grown`, `driver:grown`; `driver:snapshot-recorded`, `driver:frozen`,
//! `driver:snapshot-copying` (its caller may know of it), `driver:snapshot-copied`, `driver:snapshot-deleting`,
//! `driver:snapshot-image-removed`; `driver:group-recorded`, `driver:group-copied`, `driver:group-member-deleted`,
//! `driver:group-deleting`.
//!
//! | file | owns |
//! |---|---|
//! | `identity`, `controller`, `group`, `node` | one CSI service each: requests in, answers out |
//! | `request`, `parameters` | what a volume is to be, read from untrusted requests; pure |
//! | `topology` | from where the pool is reached; pure |
//! | `record` | what is remembered of a volume, and which nodes may share it; pure |
//! | `pools`, `backend`, `shelf`, `locks` | the pools, the volumes of one, the files of a directory, the locks between processes |
//! | `nodes` | which nodes there are, and how much they take |
//! | `create`, `snapshot`, `cut` | volumes from sources, snapshots, and how an image in use is copied |
//! | `seen` | what the kernel has of a volume: devices and mounts |
//! | `stage` | the steps on a node: loop device, file system, mounts |
//! | `health` | what is wrong with a volume |
//! | `audit` | what does not match, and its repair |
//! | `failure` | what went wrong, as a gRPC status |
//! | `worker` | where the controllers' calls run |

mod audit;
mod backend;
mod controller;
mod create;
mod cut;
mod failure;
mod group;
mod health;
mod identity;
mod locks;
mod node;
mod nodes;
mod parameters;
mod pools;
mod record;
mod request;
mod seen;
mod shelf;
mod snapshot;
mod stage;
mod topology;
mod worker;

use std::{path::PathBuf, sync::Arc};

use cleat_csi::{
    Endpoint,
    server::{self, ServeError},
    v1::{
        controller_server::ControllerServer, group_controller_server::GroupControllerServer,
        identity_server::IdentityServer, node_server::NodeServer,
    },
    validate,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::{info, warn};

pub use audit::{AuditError, Finding, Outcome, audit};
pub use backend::PoolError;
use topology::Reach;

pub const NAME: &str = "block.cleat.dev";

/// Loop devices cost little; this keeps a runaway scheduler from finding out how little.
pub const MAX_VOLUMES: u32 = 256;

#[derive(Clone, Debug)]
pub struct Config {
    pub endpoint: Endpoint,
    /// Made if it is missing, as long as its parent exists.
    pub pool: PathBuf,
    pub node_id: String,
    pub controller: bool,
    pub node: bool,
    /// The pool is on this node's own disk: volumes are reached from here only.
    pub node_local: bool,
    /// How many volumes the node takes.
    pub max_volumes: u32,
}

impl Config {
    /// Both services, for a pool that every node reaches.
    pub fn new(endpoint: Endpoint, pool: impl Into<PathBuf>, node_id: impl Into<String>) -> Config {
        Config {
            endpoint,
            pool: pool.into(),
            node_id: node_id.into(),
            controller: true,
            node: true,
            node_local: false,
            max_volumes: MAX_VOLUMES,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("node id {0:?} must have 1 to 256 bytes")]
    NodeId(String),
    #[error("neither the controller nor the node service is asked for")]
    NoService,
    #[error("the node cannot be announced in its pool: {0}")]
    Announce(String),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// Makes a node known to a pool without serving it: for nodes that nobody mounts anything on.
pub fn announce(pool: &std::path::Path, node_id: &str, max_volumes: i64) -> Result<(), RunError> {
    let pools = pools::Pools::open(pool)?;
    pools.nodes.announce(node_id, max_volumes).map_err(|failure| RunError::Announce(failure.to_string()))
}

/// Serves until `stop`; calls in progress are allowed to finish.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), RunError> {
    let Config { endpoint, pool, node_id, controller, node, node_local, max_volumes } = config;
    if validate::bounded("node_id", &node_id, validate::MAX_NODE_ID_BYTES).is_err() {
        return Err(RunError::NodeId(node_id));
    }
    if !controller && !node {
        return Err(RunError::NoService);
    }
    let pools = Arc::new(pools::Pools::open(&pool)?);
    let reach = if node_local { Reach::Node(node_id.clone()) } else { Reach::Everywhere };
    let mut routes = Routes::builder();
    routes.add_service(IdentityServer::new(identity::Service::new(Arc::clone(&pools), controller, reach.clone())));
    if controller {
        let worker = worker::Worker::new(Arc::clone(&pools));
        routes.add_service(ControllerServer::new(controller::Service::new(worker.clone(), reach.clone())));
        routes.add_service(GroupControllerServer::new(group::Service::new(worker)));
    }
    if node {
        pools
            .nodes
            .announce(&node_id, max_volumes.into())
            .map_err(|failure| RunError::Announce(failure.to_string()))?;
        let service = node::Service::new(Arc::clone(&pools), &node_id, max_volumes.into(), reach);
        routes.add_service(NodeServer::new(service));
    }
    let listener = server::bind(&endpoint).await?;
    recover(&pools);
    info!(%endpoint, pool = %pools.root().display(), node_id, controller, node, "driver is listening");
    listener.serve(routes.routes(), stop).await?;
    info!("driver has stopped");
    Ok(())
}

/// Beside the service: a copy that a predecessor began may take long, and nobody has to wait for it.
fn recover(pools: &Arc<pools::Pools>) {
    let pools = Arc::clone(pools);
    let started = std::thread::Builder::new().name("recover".into()).spawn(move || {
        if let Err(error) = snapshot::recover(&pools) {
            warn!(error = &error as &dyn std::error::Error, "what a predecessor left is not looked at in full");
        }
    });
    if let Err(error) = started {
        warn!(%error, "what a predecessor left is not looked at");
    }
}
