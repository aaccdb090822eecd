//! Code that only tests and benchmarks use. Other crates list this one under `[dev-dependencies]` and nowhere else.
//!
//! Everything except the object builders is behind a cargo feature, so that a crate builds only what its tests need.
//! Functions panic when a step fails: that fails the test.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed step fails the test")]

pub mod build;

#[cfg(feature = "server")]
mod api_server;
#[cfg(feature = "server")]
mod clock;
#[cfg(feature = "stack")]
mod machine;
#[cfg(feature = "driver")]
mod scripted_driver;
#[cfg(feature = "stack")]
pub mod stack;
#[cfg(feature = "wait")]
pub mod wait;

#[cfg(feature = "server")]
pub use api_server::{ApiScope, TestApiServer, merged};
#[cfg(feature = "server")]
pub use clock::ManualClock;
#[cfg(feature = "stack")]
pub use machine::Machine;
#[cfg(feature = "driver")]
pub use scripted_driver::{
    DRIVER_NAME, DriverState, Method, NodeCall, PUBLISH_CONTEXT, ScriptedDriver, ScriptedReply, ZONE_KEY,
};
