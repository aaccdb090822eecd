//! Operations on the host: mounts, loop devices, file systems and external programs.
//!
//! Every function blocks, and may hang on a device or a server that does not respond; async callers use [`offload`].
//! The crate knows nothing of Kubernetes or CSI, holds no state between calls (except the idle threads of [`offload`])
//! and makes no decisions: the caller says what to do, the crate does it and reports the result. It is the only crate
//! that may contain unsafe code.

mod access;
pub mod copy;
mod errno;
pub mod filesystem;
pub mod freeze;
mod grow;
pub mod loopdev;
pub mod mount;
mod mount_options;
pub mod mountinfo;
mod offload;
mod probe;
pub mod run;

pub use access::Access;
pub use offload::{OffloadError, offload};
