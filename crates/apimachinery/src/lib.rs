//! Rules that are the same for every kind of the API: how a kind is described ([`kind`], [`descriptor`]), and how its
//! objects are decoded, validated, patched, encoded and shown in tables, and which manager owns which of their fields.
//!
//! This crate knows no HTTP request, no client identity and no single kind. Only [`kind_store`] calls the store; all other
//! modules are pure.

pub mod address;
pub mod cache;
pub mod column;
pub mod descriptor;
pub mod error;
pub mod field_error;
pub mod field_ownership;
pub mod json_scanner;
pub mod kind;
pub mod kind_store;
pub mod managed_fields;
pub mod meta;
pub mod names;
pub mod part;
pub mod patch;
#[cfg(test)]
mod random_object;
pub mod render;
pub mod schema;
pub mod selector;
pub mod strict_decoding;
pub mod table;
#[cfg(test)]
mod test_kinds;
