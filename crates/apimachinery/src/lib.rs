//! Rules that hold for every kind of the API, whatever the kind is: how a kind is described ([`kind`], [`descriptor`]),
//! how its objects are decoded, validated, patched, owned and shown.
//!
//! Everything here is pure: no request, no caller, no I/O. The one use of the store is its types ([`view`]).

pub mod address;
pub mod cache;
pub mod column;
pub mod descriptor;
pub mod error;
pub mod field;
pub mod field_ownership;
pub mod json_scanner;
pub mod kind;
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
pub mod strict;
pub mod table;
#[cfg(test)]
mod test_kinds;
pub mod view;
