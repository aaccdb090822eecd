//! Controllers that work on API objects only. They do not call CSI drivers and do not access the host.
//!
//! Each stage is a directory: `mod.rs` (the contract and the loop), `observe.rs` (reads caches and live objects into a
//! snapshot, changes nothing), `decide.rs` (pure: snapshot in, decision out) and `act.rs` (carries the decision out).
//! State that a stage remembers between reconciles is in its `memory.rs`, which says what happens when it is lost.
//! Stages do not import each other: they communicate through API objects.

pub mod attach;
pub mod bind;
pub mod collect;
pub mod ephemeral;
pub mod lifecycle;
pub mod protect;
pub mod schedule;

use std::sync::Arc;

use cleat_runtime::{Caches, Client, Clock};

/// The parts that every controller needs.
#[derive(Clone)]
pub struct Context {
    /// Sends requests as the controller's own user.
    pub client: Client,
    /// Shared by all controllers of the process.
    pub caches: Caches,
    pub clock: Arc<dyn Clock>,
}
