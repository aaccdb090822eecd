//! The binder and the provisioner on a real API server, beside a driver over a real socket whose answers the test writes: what
//! the driver is told, what comes of its failures, and that nothing is forgotten.

#![allow(clippy::unwrap_used)]

mod driver;
mod failures;
mod local;
mod requests;
mod rig;
mod sources;
