//! FlexVolume drivers: executables in a directory that are called with arguments and respond with JSON.
//!
//! [`Drivers`] finds them, calls `init` of each to learn its capabilities, and makes the calls of a control plane: attach,
//! detach, isattached. This crate does not know Kubernetes objects. Drivers are not trusted: the size of a response and the
//! duration of a call are limited. A call that was killed at its deadline may have taken effect.

mod drivers;
mod lock;
mod options;
mod process;
mod response;

pub use drivers::{CallError, Config, DriverState, Drivers};
pub use options::VolumeOptions;
pub use response::{Capabilities, DriverResponse, ResponseError};
