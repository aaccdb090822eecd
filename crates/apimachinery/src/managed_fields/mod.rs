//! Objects together with the owners of their fields: how both are read from a stored object, changed by a write and
//! stored again. The rules of ownership themselves are in [`field_ownership`](crate::field_ownership).

mod current;
mod document;
mod track;

pub use current::{Current, decode};
pub use document::{Document, Encoded, SplitObject};
pub use track::Tracker;
