//! What the writer counts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Upper ends of the classes of batch sizes; the last class has none.
const LIMITS: [u64; 8] = [1, 2, 4, 8, 16, 64, 256, 1024];

#[derive(Debug, Default)]
pub struct Statistics {
    /// Batches made durable.
    pub commits: AtomicU64,
    /// Writes made durable.
    pub writes: AtomicU64,
    /// Batches that could not be made durable.
    pub failures: AtomicU64,
    /// Did the last batch fail?
    pub failing: AtomicBool,
    /// Times the container was brought up to date with the log.
    pub checkpoints: AtomicU64,
    /// Times it could not be.
    pub checkpoint_failures: AtomicU64,
    sizes: [AtomicU64; LIMITS.len() + 1],
}

impl Statistics {
    pub(super) fn committed(&self, writes: usize) {
        let writes = writes as u64;
        self.failing.store(false, Ordering::Relaxed);
        self.commits.fetch_add(1, Ordering::Relaxed);
        self.writes.fetch_add(writes, Ordering::Relaxed);
        let class = LIMITS.iter().position(|limit| writes <= *limit).unwrap_or(LIMITS.len());
        self.sizes[class].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn failed(&self) {
        self.failing.store(true, Ordering::Relaxed);
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn checkpointed(&self, succeeded: bool) {
        let counted = if succeeded { &self.checkpoints } else { &self.checkpoint_failures };
        counted.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of batches in each class of sizes, with the class's upper end.
    pub fn sizes(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let limits = LIMITS.into_iter().map(Some).chain([None]);
        limits.zip(self.sizes.iter().map(|count| count.load(Ordering::Relaxed)))
    }
}
