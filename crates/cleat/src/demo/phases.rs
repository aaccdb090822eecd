//! Shows each phase and how long it took, as it happens.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::cli::say;

pub(super) struct Phases {
    begun: Instant,
}

impl Phases {
    pub(super) fn new() -> Self {
        Self { begun: Instant::now() }
    }

    /// Runs one phase. A phase that fails is named in the error.
    pub(super) async fn phase<T>(&self, name: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        // The line shows what is being waited for while it is.
        say(&format!("  {name:<44}"));
        let begun = Instant::now();
        let result = work.await;
        match &result {
            Ok(_) => say(&format!("{:>12}\n", shown(begun.elapsed()))),
            Err(_) => say(&format!("{:>12}\n", "failed")),
        }
        result.with_context(|| format!("phase failed: {name}"))
    }

    pub(super) fn finish(&self) {
        say(&format!("\nAll of it held, in {}.\n", shown(self.begun.elapsed())));
    }
}

fn shown(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}
