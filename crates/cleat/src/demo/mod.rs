//! `cleat demo`: one claim's whole life, on the real stack, in a temporary directory.
//!
//! It counts as passed only if every phase held and nothing is left behind: no object, no image, no mount, no loop
//! device, no process.

mod leftovers;
mod phases;
mod story;

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio_util::sync::CancellationToken;

use crate::cli::{DemoArgs, say};
use crate::up::{Config, Stack, require_root, signals};
use phases::Phases;
use story::Tale;

/// Far longer than the whole takes; a phase that hangs is a failure, with the state of things as its reason.
const PATIENCE: Duration = Duration::from_secs(60);

pub async fn command(args: DemoArgs) -> Result<()> {
    require_root()?;
    let program = std::env::current_exe().context("finding the cleat binary")?;
    let stop = CancellationToken::new();
    signals::cancel_on_end(stop.clone())?;
    // Sockets have short names; the system's temporary directory keeps them so.
    let directory = tempfile::Builder::new().prefix("cleat-").tempdir().context("making a temporary directory")?;
    let told = Phases::new();
    let path = directory.path().to_owned();
    let config = Config::scratch(&path, 2, program);
    let result = round_trip(config, &told, &stop).await;
    // Whatever happened, no mount may keep the directory from being removed.
    let swept = leftovers::sweep(&path);
    if args.keep {
        say(&format!("kept: {}\n", directory.keep().display()));
    }
    result.and(swept)?;
    told.finish();
    Ok(())
}

/// Stops the stack whatever became of the tale, also when the user interrupts it.
async fn round_trip(config: Config, told: &Phases, stop: &CancellationToken) -> Result<()> {
    say(&format!("cleat demo: one claim, two nodes, in {}\n\n", config.data_dir.display()));
    let stack = told.phase("stack started", Stack::start(config)).await?;
    let result = tokio::select! {
        result = tell(&stack, told) => result,
        () = stop.cancelled() => Err(anyhow::anyhow!("interrupted")),
    };
    let layout = stack.layout().clone();
    told.phase("stack stopped", async {
        stack.stop().await;
        Ok(())
    })
    .await?;
    result?;
    told.phase("nothing left behind", async { leftovers::none(&layout) }).await
}

async fn tell(stack: &Stack, told: &Phases) -> Result<()> {
    let tale = Tale::new(stack);
    match tokio::time::timeout(PATIENCE, tale.tell(told)).await {
        Ok(result) => result,
        Err(_) => bail!("not done after {PATIENCE:?}; {}", tale.state().await),
    }
}
