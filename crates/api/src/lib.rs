//! The shared vocabulary of Cleat: API object keys, well-known names, quantities, selectors and small pure rules that
//! several components must agree on.
//!
//! This crate imports no other crate of the workspace, does no I/O and reads no clock.

pub mod access;
pub mod claim;
pub mod condition;
pub mod flex;
pub mod key;
pub mod matching;
pub mod migrate;
pub mod names;
pub mod pod;
pub mod quantity;
pub mod selector;
pub mod toleration;
pub mod transport;
pub mod well_known;

pub use k8s_openapi;
pub use key::Key;
pub use quantity::Quantity;
