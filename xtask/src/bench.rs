//! `cargo xtask bench NAME`: runs one benchmark after saying on which machine, in the release profile or, with
//! `--shipped`, in that of what is shipped.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::ci::cargo;

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Name {
    /// What the API server carries: writes, watchers, lists, memory, start
    Api,
    /// One claim's way, stage by stage, one claim at a time
    Spine,
    /// A burst of pods with claims that wait for them, until all are scheduled and their volumes made
    Schedule,
    /// Claims one at a time and in storms, there and back, and static pairs
    Claims,
    /// The block driver's calls beside the same work without it
    Driver,
    /// One attachment at a time, and storms of them over simulated nodes
    Attach,
}

pub(crate) fn run(root: &Path, name: Name, shipped: bool) -> Result<ExitCode> {
    let (package, bench) = match name {
        Name::Api => ("cleat-apiserver", "api"),
        Name::Spine => ("cleat", "spine"),
        Name::Schedule => ("cleat", "schedule"),
        Name::Claims => ("cleat", "claims"),
        Name::Driver => ("cleat-drivers", "driver"),
        Name::Attach => ("cleat", "attach"),
    };
    println!("{}\n", machine());
    let mut arguments = vec!["bench", "--quiet", "--package", package, "--bench", bench];
    if shipped {
        arguments.extend(["--profile", "dist"]);
    }
    let status = cargo(root, &arguments).status().context("running cargo bench")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the figures depend on: processor, cores, memory, kernel.
fn machine() -> String {
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map_or("unknown", |(_, value)| value.trim()).to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "{}, {cores} cores, {} of memory, Linux {}",
        field("/proc/cpuinfo", "model name"),
        field("/proc/meminfo", "MemTotal"),
        kernel.trim()
    )
}
