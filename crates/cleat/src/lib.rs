//! Arguments and wiring: how the parts become `cleat up`, `cleat demo` and `cleat driver`.

pub mod cli;
pub mod demo;
pub mod driver;
pub mod up;
