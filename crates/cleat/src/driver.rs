//! `cleat driver …`: runs a CSI driver as a separate process, or checks its data.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use cleat_csi::Endpoint;
use cleat_drivers::block;
use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

use crate::up::supervise::PARENT_PID_ENV;
use crate::{console, signals};

#[derive(Debug, Subcommand)]
pub enum DriverCommand {
    /// The driver block.cleat.dev: volumes are image files, used through loop devices.
    Block(BlockArgs),
}

#[derive(Args, Debug)]
pub struct BlockArgs {
    /// Address to listen on: unix:///path, tcp://host:port, or a path.
    #[arg(long, value_name = "ENDPOINT", required_unless_present = "audit")]
    endpoint: Option<String>,
    /// Directory of the volumes' images and records.
    #[arg(long, value_name = "DIR")]
    pool: PathBuf,
    /// Id of this node in CSI calls.
    #[arg(long, value_name = "ID", required_unless_present = "audit")]
    node_id: Option<String>,
    /// CSI services to serve.
    #[arg(long, value_delimiter = ',', default_value = "controller,node")]
    mode: Vec<ServiceMode>,
    /// The pool is on a local disk of this node: its volumes are accessible from this node only.
    #[arg(long)]
    node_local: bool,
    /// Maximum number of volumes on this node.
    #[arg(long, value_name = "N", default_value_t = block::DEFAULT_MAX_VOLUMES, value_parser = clap::value_parser!(u32).range(1..))]
    max_volumes: u32,
    /// Does not serve; checks the pool and lists what is inconsistent: missing images, interrupted snapshots, unused loop devices.
    #[arg(long, conflicts_with_all = ["endpoint", "node_id", "mode", "node_local", "max_volumes"])]
    audit: bool,
    /// Repairs what the audit finds, where this cannot lose data.
    #[arg(long, requires = "audit")]
    repair: bool,
    /// Exits when the process that started it exits.
    #[arg(long, hide = true)]
    with_parent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ServiceMode {
    Controller,
    Node,
}

pub async fn command(command: DriverCommand) -> Result<()> {
    let DriverCommand::Block(args) = command;
    if args.audit {
        return audit(args.pool, args.repair).await;
    }
    if args.with_parent {
        exit_with_parent()?;
    }
    let config = block::Config {
        endpoint: Endpoint::parse(&args.endpoint.unwrap_or_default()).context("--endpoint")?,
        pool: args.pool,
        node_id: args.node_id.unwrap_or_default(),
        controller: args.mode.contains(&ServiceMode::Controller),
        node: args.mode.contains(&ServiceMode::Node),
        node_local: args.node_local,
        max_volumes: args.max_volumes,
    };
    let stop = CancellationToken::new();
    signals::cancel_on_termination(stop.clone())?;
    block::run(config, stop).await?;
    Ok(())
}

/// Prints the inconsistencies of a pool. Fails if one is left, repaired ones excepted.
async fn audit(pool: PathBuf, repair: bool) -> Result<()> {
    if !pool.is_dir() {
        bail!("there is no pool at {}", pool.display());
    }
    let findings = tokio::task::spawn_blocking(move || block::audit(&pool, repair)).await??;
    for finding in &findings {
        console::print(&format!("{finding}\n"));
    }
    let left = findings.iter().filter(|finding| !matches!(finding.outcome, block::RepairOutcome::Repaired(_))).count();
    match (findings.len(), left) {
        (0, _) => console::print("everything matches\n"),
        (_, 0) => {}
        _ => bail!("{left} of {} findings are left", findings.len()),
    }
    Ok(())
}

/// Has the kernel kill this process when its parent exits. Fails if the parent has exited already.
fn exit_with_parent() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context("setting the parent-death signal")?;
    // If the parent exited before the signal was set, this process now has another parent: init or a subreaper.
    let parent = rustix::process::getppid().map(rustix::process::Pid::as_raw_nonzero);
    match std::env::var(PARENT_PID_ENV).ok().and_then(|pid| pid.parse::<i32>().ok()) {
        Some(expected) if parent.is_some_and(|pid| pid.get() == expected) => Ok(()),
        _ => bail!("the process that started this driver is gone"),
    }
}
