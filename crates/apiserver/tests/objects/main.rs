//! Kinds and custom resources as clients see them, and the known incompatibilities that concern objects, lists and
//! watches. Over HTTP, without a socket.

#![allow(clippy::unwrap_used)]

mod custom;
mod kinds;
mod rows;
mod talk;
