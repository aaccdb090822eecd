//! Controllers that know only API objects.
//!
//! Each stage is a directory of four files: `mod.rs` (the contract and the loop), `observe.rs` (cache to snapshot),
//! `decide.rs` (pure: snapshot in, decision out) and `act.rs` (one function per decision). Stages never import each
//! other; they meet in API objects.

pub mod attach;
pub mod bind;
pub mod collect;
pub mod ephemeral;
pub mod lifecycle;
pub mod protect;
pub mod schedule;

use std::sync::Arc;

use cleat_runtime::{Caches, Client, Clock};

/// What every controller is given.
#[derive(Clone)]
pub struct Context {
    pub client: Client,
    pub caches: Caches,
    pub clock: Arc<dyn Clock>,
}
