//! Objects at the HTTP interface, without a socket: kinds, custom resources, patches, field ownership, behaviour that
//! incompatible servers often get wrong, and complete replies field by field.

#![allow(clippy::unwrap_used)]

mod apply;
mod compatibility;
mod compatibility_wire;
mod custom;
mod golden_replies;
mod kinds;
mod patches;
mod test_api;
