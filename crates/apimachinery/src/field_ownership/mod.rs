//! Who owns which field: `metadata.managedFields`, and server-side apply, which is decided by it.
//!
//! Everything here is pure. An object is looked at as JSON, through its schema; what is stored is the typed object
//! the result decodes to.

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
