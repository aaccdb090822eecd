//! `block.cleat.dev`: volumes are sparse image files in a pool directory, and loop devices where they are staged.
//!
//! # Guarantees
//! - A volume is staged only on a node it is published to, and published to several nodes only if its capability says
//!   that sharing is safe. Both are checked under the volume's lock, so several processes may serve one pool.
//! - A device is formatted only if it is blank, or if a durable record says that our own format of it was interrupted.
//! - After a crash at any point the repeated call completes or cleans up. The record of a volume is written before its
//!   image is made and removed after it, so an image never exists without one.
//!
//! # Assumptions
//! - The pool's file system keeps a rename atomic and honours fsync and flock; a pool shared between machines needs one
//!   that does so across them.
//! - All processes that serve one pool on a machine share its loop devices and mount namespace.
//!
//! # Crash points
//! `driver:recorded`, `driver:image-created`, `driver:deleting`, `driver:image-removed`, `driver:attached` (published to a node),
//! `driver:detached`, `driver:loop-attached`, `driver:format-recorded`, `driver:formatted`, `driver:staged`,
//! `driver:published`, `driver:unpublished` (unmounted, target still there), `driver:unstaged-mount` (unmounted, loop
//! device still there).
//!
//! | file | owns |
//! |---|---|
//! | `identity`, `controller`, `node` | one CSI service each: requests in, answers out |
//! | `request` | what a volume is to be, read from untrusted requests; pure |
//! | `record` | what is remembered of a volume, and which nodes may share it; pure |
//! | `backend` | the files of the pool: records, images, locks |
//! | `seen` | what the kernel has of a volume: devices and mounts |
//! | `stage` | the steps on a node: loop device, file system, mounts |
//! | `failure` | what went wrong, as a gRPC status |

mod backend;
mod controller;
mod failure;
mod identity;
mod node;
mod record;
mod request;
mod seen;
mod stage;

use std::{path::PathBuf, sync::Arc};

use cleat_csi::{
    Endpoint,
    server::{self, ServeError},
    v1::{controller_server::ControllerServer, identity_server::IdentityServer, node_server::NodeServer},
    validate,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::info;

pub use backend::PoolError;

pub const NAME: &str = "block.cleat.dev";

#[derive(Clone, Debug)]
pub struct Config {
    pub endpoint: Endpoint,
    /// Made if it is missing, as long as its parent exists.
    pub pool: PathBuf,
    pub node_id: String,
    pub controller: bool,
    pub node: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("node id {0:?} must have 1 to 256 bytes")]
    NodeId(String),
    #[error("neither the controller nor the node service is asked for")]
    NoService,
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// Serves until `stop`; calls in progress are allowed to finish.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), RunError> {
    let Config { endpoint, pool, node_id, controller, node } = config;
    if validate::bounded("node_id", &node_id, validate::MAX_NODE_ID).is_err() {
        return Err(RunError::NodeId(node_id));
    }
    if !controller && !node {
        return Err(RunError::NoService);
    }
    let pool = Arc::new(backend::Pool::open(&pool)?);
    let mut routes = Routes::builder();
    routes.add_service(IdentityServer::new(identity::Service::new(Arc::clone(&pool), controller)));
    if controller {
        routes.add_service(ControllerServer::new(controller::Service::new(Arc::clone(&pool))));
    }
    if node {
        routes.add_service(NodeServer::new(node::Service::new(Arc::clone(&pool), node_id.clone())));
    }
    let listener = server::bind(&endpoint).await?;
    info!(%endpoint, pool = %pool.root().display(), node_id, controller, node, "driver is listening");
    listener.serve(routes.routes(), stop).await?;
    info!("driver has stopped");
    Ok(())
}
