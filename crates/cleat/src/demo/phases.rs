//! Prints each phase of the demo and how long it takes, while it runs.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::console::print;

pub(super) struct PhaseReport {
    started: Instant,
}

impl PhaseReport {
    pub(super) fn start() -> Self {
        Self { started: Instant::now() }
    }

    /// Runs one phase and prints its duration. The error of a failed phase names the phase.
    pub(super) async fn phase<T>(&self, name: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        // Printed first, so that a user sees which phase is running.
        print(&format!("  {name:<44}"));
        let started = Instant::now();
        let result = work.await;
        match &result {
            Ok(_) => print(&format!("{:>12}\n", milliseconds(started.elapsed()))),
            Err(_) => print(&format!("{:>12}\n", "failed")),
        }
        result.with_context(|| format!("phase failed: {name}"))
    }

    pub(super) fn finish(&self) {
        print(&format!("\nAll of it held, in {}.\n", milliseconds(self.started.elapsed())));
    }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}
