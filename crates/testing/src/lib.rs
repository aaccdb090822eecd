//! Code that only tests and benchmarks use. Other crates list this one under `[dev-dependencies]` and nowhere else.

pub mod build;
