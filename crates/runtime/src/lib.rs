//! The building blocks of controllers: shared caches, a work queue of keys, conditional writes, leader election, a clock and an
//! event recorder.
//!
//! No code here depends on volumes. All requests go through [`Client`], so that they work with the embedded API server, a remote
//! one and a real Kubernetes cluster.

pub mod cache;
pub mod caches;
mod calls;
pub mod client;
pub mod clock;
mod decode;
pub mod events;
pub mod lease;
mod list_watch;
pub mod metadata_watch;
pub mod metrics;
pub mod queue;
mod reflector;
mod watch_lines;
pub mod work;
pub mod write;

pub use cache::{Cache, Cached, Change, Index};
pub use caches::Caches;
pub use client::Client;
pub use clock::{Clock, SystemClock};
pub use events::{EventType, Recorder};
pub use queue::{Backoff, Queue};
pub use work::{Outcome, work};
