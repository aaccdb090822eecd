//! The agent with a real driver, real devices and real mounts (needs root), and with a scripted driver.
#![allow(clippy::unwrap_used)]

mod failures;
mod fixture;
mod json_api;
mod lifecycle;
