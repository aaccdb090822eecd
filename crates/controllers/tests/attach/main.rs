//! The attach/detach controller with a real API server. The tests do the work of the external attacher and the node
//! agents: they write what a driver would have answered, and what a node has in use.

#![allow(clippy::unwrap_used)]

mod detach;
mod faults;
mod fixture;
mod flex;
