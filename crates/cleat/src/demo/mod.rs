//! `cleat demo`: creates, uses and deletes one claim's volume on a real stack in a temporary directory.
//!
//! Succeeds only if every phase succeeds and nothing is left behind: no object, no image, no mount, no loop device, no
//! process.

mod cleanup;
mod phases;
mod round_trip;

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use tokio_util::sync::CancellationToken;

use crate::console::print;
use crate::signals;
use crate::up::{Stack, StackConfig, require_root};
use phases::PhaseReport;
use round_trip::RoundTrip;

/// The limit for the whole round trip, far above what it takes. A phase that hangs then fails with the state of the objects.
const ROUND_TRIP_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Args, Debug)]
pub struct DemoArgs {
    /// Keeps the temporary directory, so that it can be inspected.
    #[arg(long)]
    pub keep: bool,
}

pub async fn command(args: DemoArgs) -> Result<()> {
    require_root()?;
    let program = std::env::current_exe().context("finding the cleat binary")?;
    let stop = CancellationToken::new();
    signals::cancel_on_termination(stop.clone())?;
    // Socket paths are limited to about 100 bytes; the system's temporary directory has a short one.
    let directory = tempfile::Builder::new().prefix("cleat-").tempdir().context("creating a temporary directory")?;
    let report = PhaseReport::start();
    let path = directory.path().to_owned();
    let config = StackConfig::scratch(&path, 2, program);
    let result = run_on_stack(config, &report, &stop).await;
    // Also after a failure: a mount would keep the directory from being removed.
    let released = cleanup::release_mounts_and_devices(&path);
    if args.keep {
        print(&format!("kept: {}\n", directory.keep().display()));
    }
    result.and(released)?;
    report.finish();
    Ok(())
}

/// Starts a stack, runs the round trip and stops the stack, also after a failure or an interrupt.
async fn run_on_stack(config: StackConfig, report: &PhaseReport, stop: &CancellationToken) -> Result<()> {
    print(&format!("cleat demo: one claim, two nodes, in {}\n\n", config.data_dir.display()));
    let stack = report.phase("stack started", Stack::start(config)).await?;
    let result = tokio::select! {
        result = run_round_trip(&stack, report) => result,
        () = stop.cancelled() => Err(anyhow::anyhow!("interrupted")),
    };
    let layout = stack.layout().clone();
    report
        .phase("stack stopped", async {
            stack.stop().await;
            Ok(())
        })
        .await?;
    result?;
    report.phase("nothing left behind", async { cleanup::check_nothing_left(&layout) }).await
}

async fn run_round_trip(stack: &Stack, report: &PhaseReport) -> Result<()> {
    let round_trip = RoundTrip::new(stack);
    match tokio::time::timeout(ROUND_TRIP_TIMEOUT, round_trip.run(report)).await {
        Ok(result) => result,
        Err(_) => bail!("not done after {ROUND_TRIP_TIMEOUT:?}; {}", round_trip.describe_state().await),
    }
}
