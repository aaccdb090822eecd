//! What stands between API objects and a driver: provision, capacity, publish and register for CSI, callout for FlexVolume.
//!
//! Each stage has the same four files as a controller; stages never import each other. A stage of CSI serves one
//! driver and ignores the objects of all others.

mod attachment;
pub mod callout;
pub mod capacity;
pub mod driver;
pub mod failure;
pub mod provision;
pub mod publish;
pub mod register;

use std::sync::Arc;

use cleat_runtime::{Caches, Client, Clock};

pub use driver::Driver;
pub use failure::Failure;

/// What every sidecar is given.
#[derive(Clone)]
pub struct Context {
    pub client: Client,
    pub caches: Caches,
    pub clock: Arc<dyn Clock>,
}
