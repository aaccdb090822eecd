//! CSI and FlexVolume sidecars: they turn API objects into driver calls and write the results back.
//!
//! Stages: [`csi_provisioner`], [`capacity`], [`csi_attacher`] and [`node_registrar`] for CSI drivers, [`flex_attacher`]
//! for FlexVolume drivers. Every stage that reconciles objects has `mod.rs`, `observe.rs`, `decide` and `act.rs`, and
//! `memory.rs` if it remembers anything between reconciles. Stages never import each other. A CSI stage serves one
//! driver and ignores the objects of all other drivers.

mod attachment;
pub mod capacity;
pub mod csi_attacher;
pub mod csi_provisioner;
pub mod driver;
pub mod error;
pub mod flex_attacher;
pub mod node_registrar;

use std::sync::Arc;

use cleat_runtime::{Caches, Client, Clock};

pub use driver::Driver;
pub use error::SidecarError;

/// The API access and the clock that every stage gets.
#[derive(Clone)]
pub struct Context {
    pub client: Client,
    pub caches: Caches,
    pub clock: Arc<dyn Clock>,
}
