//! Field ownership: which manager owns which field (`metadata.managedFields`), and server-side apply, which follows from
//! it.
//!
//! Everything here is pure. Objects are JSON values with a schema. The caller decodes the result into the typed object and
//! stores that.

pub mod apply;
pub mod compare;
pub mod entries;
mod merge;
mod raw_managed_fields;
pub mod set;

pub use apply::{ApplyError, Conflict};
pub use compare::{difference, fields};
pub use entries::Operation;
pub use raw_managed_fields::RawManagedFields;
