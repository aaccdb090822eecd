//! The CSI driver `block.cleat.dev`. Volumes are sparse image files in a pool directory, and loop devices where they
//! are staged.
//!
//! # Guarantees
//! - A volume is staged only on a node that it is published to, and published to several nodes only if its capability
//!   allows sharing. Both are checked under the lock of the volume, so several processes may serve one pool.
//! - A device is formatted only if it is blank, or if a durable record says that the driver's own format was
//!   interrupted.
//! - After a crash at any point the repeated call completes or cleans up. A volume exists if and only if its record
//!   exists. An image contains no data before the record is written, and no data that is still needed after the record
//!   is removed.
//!
//! # Assumptions
//! - On the file system of the pool a rename is atomic, and fsync and flock work. A pool that is shared between
//!   machines needs a file system where this holds across machines.
//! - All processes that serve one pool on a machine share its loop devices and its mount namespace.
//! - An administrator who wants several disks mounts them, or creates directories, below `pools/` in the pool
//!   directory.
//!
//! # Crash points
//! - CreateVolume: `driver:image-begun` (no record yet), `driver:recorded`, `driver:image-created`, `driver:filled`
//!   (copied from its source, not complete yet).
//! - DeleteVolume: `driver:deleting`, `driver:image-removed`.
//! - ControllerPublish and ControllerUnpublish: `driver:attached`, `driver:detached`.
//! - NodeStage: `driver:loop-attached`, `driver:format-recorded`, `driver:formatted`, `driver:staged`.
//! - NodePublish, NodeUnpublish and NodeUnstage: `driver:published`, `driver:unpublished` (unmounted, the target still
//!   exists), `driver:unstaged-mount` (unmounted, the loop device is still attached).
//! - Expansion: `driver:expansion-recorded`, `driver:image-expanded`, `driver:device-grown`, `driver:grown`.
//! - Snapshots: `driver:snapshot-recorded`, `driver:frozen`, `driver:snapshot-copying` (its caller may know it),
//!   `driver:snapshot-copied`, `driver:snapshot-deleting`, `driver:snapshot-image-removed`.
//! - Group snapshots: `driver:group-recorded`, `driver:group-copied`, `driver:group-member-deleted`,
//!   `driver:group-deleting`.
//!
//! | file | owns |
//! |---|---|
//! | `identity`, `controller`, `group`, `node` | one CSI service each |
//! | `request`, `parameters`, `paging` | parsing and validation of untrusted requests; pure |
//! | `response` | conversion of records to CSI messages; pure |
//! | `topology` | the nodes that can access the pool; pure |
//! | `record` | the records, and the decision which nodes may share a volume; pure |
//! | `pools`, `pool` | all pools; one pool and its volumes |
//! | `records`, `locks` | the files of a directory; the locks between processes |
//! | `node_registry` | the registered nodes and their volume limits |
//! | `create`, `snapshot`, `image_copy` | volumes, snapshots, and consistent copies of images in use |
//! | `frozen` | freezing file systems so that a crash cannot leave them frozen |
//! | `kernel_state` | loop devices and mounts of a volume |
//! | `stage` | the operations on a node: loop device, file system, mounts |
//! | `health` | problems of a volume |
//! | `audit` | inconsistencies of a pool and their repair |
//! | `failure` | errors and their gRPC codes |
//! | `worker` | runs the calls of the controller services |

mod audit;
mod controller;
mod create;
mod failure;
mod frozen;
mod group;
mod health;
mod identity;
mod image_copy;
mod kernel_state;
mod locks;
mod node;
mod node_registry;
mod paging;
mod parameters;
mod pool;
mod pools;
mod record;
mod records;
mod request;
mod response;
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

pub use audit::{AuditError, Finding, RepairOutcome, audit};
pub use failure::PoolError;
pub use identity::NAME;
use topology::Accessibility;

/// The default of [`Config::max_volumes`].
pub const DEFAULT_MAX_VOLUMES: u32 = 256;

#[derive(Clone, Debug)]
pub struct Config {
    pub endpoint: Endpoint,
    /// The directory of the default pool. Created if it is missing; its parent must exist.
    pub pool: PathBuf,
    pub node_id: String,
    /// Whether to serve the controller and group controller services.
    pub controller: bool,
    /// Whether to serve the node service.
    pub node: bool,
    /// The pool is on a local disk of this node: its volumes can be accessed from this node only.
    pub node_local: bool,
    /// How many volumes may be published to the node.
    pub max_volumes: u32,
}

impl Config {
    /// Serves all services, for a pool that every node can access.
    pub fn new(endpoint: Endpoint, pool: impl Into<PathBuf>, node_id: impl Into<String>) -> Config {
        Config {
            endpoint,
            pool: pool.into(),
            node_id: node_id.into(),
            controller: true,
            node: true,
            node_local: false,
            max_volumes: DEFAULT_MAX_VOLUMES,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("node id {0:?} must have 1 to 256 bytes")]
    NodeId(String),
    #[error("neither the controller nor the node service is asked for")]
    NoService,
    #[error("the node cannot be registered in its pool: {0}")]
    RegisterNode(String),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// Registers a node in a pool without serving it: for simulated nodes, on which nothing is mounted.
pub fn register_node(pool: &std::path::Path, node_id: &str, max_volumes: i64) -> Result<(), RunError> {
    let pools = pools::Pools::open(pool)?;
    pools.nodes.register(node_id, max_volumes).map_err(|failure| RunError::RegisterNode(failure.to_string()))
}

/// Serves until `stop` is cancelled. Calls that are in progress then may finish.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), RunError> {
    let Config { endpoint, pool, node_id, controller, node, node_local, max_volumes } = config;
    if validate::bounded("node_id", &node_id, validate::MAX_NODE_ID_BYTES).is_err() {
        return Err(RunError::NodeId(node_id));
    }
    if !controller && !node {
        return Err(RunError::NoService);
    }
    let pools = Arc::new(pools::Pools::open(&pool)?);
    let accessibility = if node_local { Accessibility::Node(node_id.clone()) } else { Accessibility::AllNodes };
    let mut routes = Routes::builder();
    routes.add_service(IdentityServer::new(identity::IdentityService::new(
        Arc::clone(&pools),
        controller,
        accessibility.clone(),
    )));
    if controller {
        let worker = worker::Worker::new(Arc::clone(&pools));
        routes.add_service(ControllerServer::new(controller::ControllerService::new(
            worker.clone(),
            accessibility.clone(),
        )));
        routes.add_service(GroupControllerServer::new(group::GroupControllerService::new(worker)));
    }
    if node {
        pools
            .nodes
            .register(&node_id, max_volumes.into())
            .map_err(|failure| RunError::RegisterNode(failure.to_string()))?;
        let service = node::NodeService::new(Arc::clone(&pools), &node_id, max_volumes.into(), accessibility);
        routes.add_service(NodeServer::new(service));
    }
    let listener = server::bind(&endpoint).await?;
    start_recovery(&pools);
    info!(%endpoint, pool = %pools.root().display(), node_id, controller, node, "driver is listening");
    listener.serve(routes.routes(), stop).await?;
    info!("driver has stopped");
    Ok(())
}

/// Repairs in the background what a driver that died has left: repeating an interrupted copy may take long, and no call
/// has to wait for it.
fn start_recovery(pools: &Arc<pools::Pools>) {
    let pools = Arc::clone(pools);
    let started = std::thread::Builder::new().name("recover".into()).spawn(move || {
        if let Err(error) = snapshot::recover(&pools) {
            warn!(error = &error as &dyn std::error::Error, "recovery of interrupted snapshots failed");
        }
    });
    if let Err(error) = started {
        warn!(%error, "could not start the recovery thread");
    }
}
