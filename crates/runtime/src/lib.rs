//! What a controller is made of: shared caches, a keyed work queue, a clock and an event recorder.
//!
//! Nothing here knows what a volume is. Everything goes through [`Client`], so it works the same on the embedded API
//! server, on a remote one and on a real Kubernetes cluster.

pub mod cache;
pub mod caches;
pub mod client;
pub mod clock;
pub mod events;
pub mod follow;
pub mod lease;
pub mod metrics;
pub mod queue;
mod reflect;
mod watch;
mod wire;
pub mod work;
pub mod write;

pub use cache::{Cache, Cached, Change, Index};
pub use caches::Caches;
pub use client::Client;
pub use clock::{Clock, SystemClock};
pub use events::{EventType, Recorder};
pub use queue::{Backoff, Queue};
pub use work::{Outcome, work};
