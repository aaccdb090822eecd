//! Counters of the writer and of the checkpointer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Upper bounds of the buckets of batch sizes, in writes; the last bucket has none.
const BATCH_SIZE_BOUNDS: [u64; 8] = [1, 2, 4, 8, 16, 64, 256, 1024];

#[derive(Debug, Default)]
pub struct StoreStatistics {
    /// Batches made durable.
    pub commits: AtomicU64,
    /// Writes made durable.
    pub writes: AtomicU64,
    /// Batches that could not be made durable.
    pub failures: AtomicU64,
    /// True if the last batch failed.
    pub failing: AtomicBool,
    /// Checkpoints that succeeded.
    pub checkpoints: AtomicU64,
    /// Attempts of checkpoints that failed.
    pub checkpoint_failures: AtomicU64,
    batch_sizes: [AtomicU64; BATCH_SIZE_BOUNDS.len() + 1],
}

impl StoreStatistics {
    pub(super) fn count_commit(&self, writes: usize) {
        let writes = writes as u64;
        self.failing.store(false, Ordering::Relaxed);
        self.commits.fetch_add(1, Ordering::Relaxed);
        self.writes.fetch_add(writes, Ordering::Relaxed);
        let bucket = BATCH_SIZE_BOUNDS.iter().position(|bound| writes <= *bound).unwrap_or(BATCH_SIZE_BOUNDS.len());
        self.batch_sizes[bucket].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_failure(&self) {
        self.failing.store(true, Ordering::Relaxed);
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_checkpoint(&self, succeeded: bool) {
        let counter = if succeeded { &self.checkpoints } else { &self.checkpoint_failures };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of batches in each bucket, with the bucket's upper bound in writes.
    pub fn batch_sizes(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bounds = BATCH_SIZE_BOUNDS.into_iter().map(Some).chain([None]);
        bounds.zip(self.batch_sizes.iter().map(|count| count.load(Ordering::Relaxed)))
    }
}
