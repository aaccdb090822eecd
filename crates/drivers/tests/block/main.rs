//! The block driver over real sockets, with real loop devices, file systems and mounts. Needs root and xfsprogs.
#![allow(clippy::unwrap_used)]

mod audit;
mod copies;
mod crash;
mod crash_copies;
mod fixture;
mod groups;
mod growth;
mod lifecycle;
mod options;
mod refusals;
mod sanity;
