//! The commands of the `cleat` binary: each wires the crates of the workspace together and contains no logic of its own.

pub mod cli;
pub mod console;
pub mod demo;
pub mod driver;
pub mod logging;
pub mod sidecars;
pub mod signals;
pub mod up;

/// With the system's allocator, a third of the CPU time of a burst of claims is spent in it, and more with every object held.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;
