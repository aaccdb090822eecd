//! Who owns which field: `metadata.managedFields`, and server-side apply, which is decided by it.
//!
//! Everything here is pure. An object is looked at as JSON, through its schema; what is stored is the typed object
//! the result decodes to.

mod apply;
mod compare;
mod document;
mod entries;
mod merge;
mod precedent;
mod set;
mod shape;
mod track;

pub(crate) use apply::{ApplyError, Conflict};
pub(crate) use compare::{difference, fields};
pub(crate) use document::{Divided, Document, Encoded, Recorded};
pub(crate) use entries::Operation;
pub(crate) use precedent::Precedents;
pub(crate) use track::Tracker;
