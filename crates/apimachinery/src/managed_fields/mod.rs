//! Objects with the owners of their fields: both are read from a stored object, changed by a write and stored again. The
//! rules of ownership are in [`field_ownership`](crate::field_ownership).

mod current_object;
mod managed_object;
mod tracker;

pub use current_object::{CurrentObject, decode};
pub use managed_object::{EncodedObject, ManagedObject, SplitObject};
pub use tracker::OwnershipTracker;
