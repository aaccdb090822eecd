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
    /// Where to listen: unix:///path, tcp://host:port, or a bare path.
    #[arg(long, value_name = "ENDPOINT", required_unless_present = "audit")]
    endpoint: Option<String>,
    /// The directory of the volumes.
    #[arg(long, value_name = "DIR")]
    pool: PathBuf,
    /// What this node is called in publish calls.
    #[arg(long, value_name = "ID", required_unless_present = "audit")]
    node_id: Option<String>,
    /// Which services to offer.
    #[arg(long, value_delimiter = ',', default_value = "controller,node")]
    mode: Vec<Mode>,
    /// The pool is on this node's own disk: its volumes are reached from here only.
    #[arg(long)]
    node_local: bool,
    /// How many volumes the node takes.
    #[arg(long, value_name = "N", default_value_t = block::DEFAULT_MAX_VOLUMES, value_parser = clap::value_parser!(u32).range(1..))]
    max_volumes: u32,
    /// Lists what does not match in the pool, instead of serving it: lost images, interrupted snapshots, forgotten devices.
    #[arg(long, conflicts_with_all = ["endpoint", "node_id", "mode", "node_local", "max_volumes"])]
    audit: bool,
    /// Repairs what the audit finds, as far as no data can be lost by it.
    #[arg(long, requires = "audit")]
    repair: bool,
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
    if args.audit {
        return audit(args.pool, args.repair).await;
    }
    if args.with_parent {
        end_with_parent()?;
    }
    let config = block::Config {
        endpoint: Endpoint::parse(&args.endpoint.unwrap_or_default()).context("--endpoint")?,
        pool: args.pool,
        node_id: args.node_id.unwrap_or_default(),
        controller: args.mode.contains(&Mode::Controller),
        node: args.mode.contains(&Mode::Node),
        node_local: args.node_local,
        max_volumes: args.max_volumes,
    };
    let stop = CancellationToken::new();
    signals::cancel_on_end(stop.clone())?;
    block::run(config, stop).await?;
    Ok(())
}

/// Succeeds only if everything matches, or does so now.
async fn audit(pool: PathBuf, repair: bool) -> Result<()> {
    if !pool.is_dir() {
        bail!("there is no pool at {}", pool.display());
    }
    let findings = tokio::task::spawn_blocking(move || block::audit(&pool, repair)).await??;
    for finding in &findings {
        crate::cli::say(&format!("{finding}\n"));
    }
    let left = findings.iter().filter(|finding| !matches!(finding.outcome, block::RepairOutcome::Repaired(_))).count();
    match (findings.len(), left) {
        (0, _) => crate::cli::say("everything matches\n"),
        (_, 0) => {}
        _ => bail!("{left} of {} findings are left", findings.len()),
    }
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
