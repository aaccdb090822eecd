//! The block driver over real sockets, with real loop devices, file systems and mounts. Needs root and xfsprogs.
#![allow(clippy::unwrap_used)]

mod crash;
mod lifecycle;
mod refusals;
mod rig;
