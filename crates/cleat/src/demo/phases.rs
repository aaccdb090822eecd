//! Shows each phase and how long it took, as it happens.

use std::future::Future;
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

pub struct Phases {
    begun: Instant,
}

impl Phases {
    pub fn new() -> Self {
        Self { begun: Instant::now() }
    }

    /// Runs one phase. A phase that fails is named in the error.
    pub async fn phase<T>(&self, name: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        print!("  {name:<44}");
        // The line shows what is being waited for while it is.
        let _ = std::io::stdout().flush();
        let begun = Instant::now();
        let result = work.await;
        match &result {
            Ok(_) => println!("{:>12}", shown(begun.elapsed())),
            Err(_) => println!("{:>12}", "failed"),
        }
        result.with_context(|| format!("phase failed: {name}"))
    }

    pub fn finish(&self) {
        println!("\nAll of it held, in {}.", shown(self.begun.elapsed()));
    }
}

fn shown(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}
