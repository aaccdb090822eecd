//! FlexVolume drivers: programs in a directory that are called with arguments and answer with JSON.
//!
//! [`Drivers`] finds them, asks each what it can do, and makes the calls of a control plane: attach, detach, isattached.
//! It knows nothing of Kubernetes objects. What a driver says is not trusted: its answer is bounded in size, its time is
//! bounded too, and whoever ran out of time may have acted.

mod answer;
mod drivers;
mod lock;
mod options;
mod process;

pub use answer::{Answer, AnswerError, Capabilities};
pub use drivers::{CallError, Config, Drivers, State};
pub use options::Options;
