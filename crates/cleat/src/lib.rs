//! Arguments and wiring: how the parts become `cleat up`, `cleat demo`, `cleat driver` and the sidecars.

pub mod cli;
pub mod demo;
pub mod driver;
pub mod sidecars;
pub mod up;
