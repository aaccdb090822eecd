//! The real kubectl against a served socket.

#![allow(clippy::unwrap_used)]

mod apply;
mod auth;
mod everyday;
mod long;
mod session;
