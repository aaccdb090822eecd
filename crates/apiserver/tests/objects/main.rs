//! Objects as clients see them: kinds, custom resources, patches and ownership, the known incompatibilities and the
//! golden shapes. Over HTTP, without a socket.

#![allow(clippy::unwrap_used)]

mod apply;
mod custom;
mod kinds;
mod patches;
mod rows;
mod rows_wire;
mod shapes;
mod talk;
