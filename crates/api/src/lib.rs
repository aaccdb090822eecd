//! The vocabulary of Cleat: the names, keys and small pure rules that every component agrees on.
//!
//! This crate knows no other crate of the workspace, does no I/O and reads no clock.

pub mod access;
pub mod claim;
pub mod condition;
pub mod flex;
pub mod handed;
pub mod key;
pub mod keys;
pub mod matching;
pub mod migrate;
pub mod names;
pub mod pod;
pub mod quantity;
pub mod selector;
pub mod toleration;
pub mod transport;

pub use handed::{Answer, Handed};
pub use k8s_openapi;
pub use key::Key;
pub use quantity::Quantity;
