//! The revisioned key-value store under the API server: one global revision, compare-and-swap writes, lists at a
//! snapshot, and watches without gaps or duplicates.
//!
//! [`Store`] is the contract; [`EmbeddedStore`] implements it on one machine. Values are opaque bytes: this crate knows
//! nothing of Kubernetes objects.
//!
//! Every implementation guarantees:
//! - Every successful write has its own revision, greater than all earlier ones. Revisions are never reused, also not
//!   after a restart. The first revision that a reader can observe is at least 1.
//! - A write is acknowledged only after it is durable. An accepted write completes even if the caller stops waiting.
//! - A list reports the revision of its snapshot. A watch from that revision delivers every later change under its
//!   prefix once and in order.
//! - A request for a revision whose history has been discarded fails with `TooOld`; it never skips changes silently.

pub mod embedded;
mod entry;
mod error;
mod store;

pub use embedded::EmbeddedStore;
pub use entry::{Entry, Event, Revision, StoredEntry};
pub use error::{ListError, OpenError, ReadError, WatchError, WriteError};
pub use store::{Range, Snapshot, Store, Watcher};
