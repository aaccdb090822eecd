//! kubectl, the real program, against a server on a TLS socket.

#![allow(clippy::unwrap_used)]

mod apply;
mod auth;
mod everyday;
mod full_session;
mod session;
