//! The provisioner and the binder on a real API server, with a driver on a real socket whose replies the test scripts: which
//! requests the driver gets, how its failures are handled, and that no volume is lost.

#![allow(clippy::unwrap_used)]

mod failures;
mod fixture;
mod local;
mod requests;
mod sources;
