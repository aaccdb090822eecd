//! The attach/detach controller on a real API server. The test is the attacher and the node agents: it says what a driver
//! would have answered, and what a node has in use.

#![allow(clippy::unwrap_used)]

mod everyday;
mod faults;
mod flex;
mod rig;
