//! Arguments and wiring: how the parts become `cleat up`, `cleat demo`, `cleat driver` and the sidecars.

pub mod cli;
pub mod demo;
pub mod driver;
pub mod sidecars;
pub mod up;

/// The system's allocator takes a third of the CPU time in a storm of claims, and more with every object it holds.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;
