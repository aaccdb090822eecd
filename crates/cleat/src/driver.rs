//! `cleat driver …`: a CSI driver as a process of its own.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use cleat_csi::Endpoint;
use cleat_drivers::block;
use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

use crate::up::signals;

#[derive(Debug, Subcommand)]
pub enum DriverCommand {
    /// Block volumes on loop devices: block.cleat.dev.
    Block(BlockArgs),
}

#[derive(Args, Debug)]
pub struct BlockArgs {
    /// Where to listen: unix:///path, or a bare path.
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: String,
    /// The directory of the volumes.
    #[arg(long, value_name = "DIR")]
    pool: PathBuf,
    /// What this node is called in publish calls.
    #[arg(long, value_name = "ID")]
    node_id: String,
    /// Which services to offer.
    #[arg(long, value_delimiter = ',', default_value = "controller,node")]
    mode: Vec<Mode>,
    /// Ends when the process that started it ends.
    #[arg(long, hide = true)]
    with_parent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Controller,
    Node,
}

pub async fn command(command: DriverCommand) -> Result<()> {
    let DriverCommand::Block(args) = command;
    if args.with_parent {
        end_with_parent()?;
    }
    let config = block::Config {
        endpoint: Endpoint::parse(&args.endpoint).context("--endpoint")?,
        pool: args.pool,
        node_id: args.node_id,
        controller: args.mode.contains(&Mode::Controller),
        node: args.mode.contains(&Mode::Node),
    };
    let stop = CancellationToken::new();
    signals::cancel_on_end(stop.clone())?;
    block::run(config, stop).await?;
    Ok(())
}

fn end_with_parent() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context("ending with the parent")?;
    // The parent may have ended before the line above; its child then belongs to init or to a reaper.
    let parent = rustix::process::getppid().map(rustix::process::Pid::as_raw_nonzero);
    match std::env::var(crate::up::supervise::PARENT).ok().and_then(|pid| pid.parse::<i32>().ok()) {
        Some(expected) if parent.is_some_and(|pid| pid.get() == expected) => Ok(()),
        _ => bail!("the process that started this driver is gone"),
    }
}
