//! What the stack asks of the machine: mounts, loop devices, file systems, programs.
//!
//! Every function blocks and may hang on a dead device or server; async callers go through [`offload`]. The crate knows
//! nothing of Kubernetes or CSI, keeps no state of its own and decides nothing: callers say what, it says how it went.
//! It is the only crate with unsafe code.

pub mod copy;
pub mod filesystem;
pub mod freeze;
mod grow;
mod identity;
pub mod loopdev;
pub mod mount;
pub mod mountinfo;
mod offload;
mod options;
pub mod run;

pub use offload::{OffloadError, offload};

/// Whether a mount or a device accepts writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

impl Access {
    pub fn read_only(self) -> bool {
        self == Access::ReadOnly
    }
}
