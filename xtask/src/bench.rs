//! `cargo xtask bench NAME…`: prints what the machine is and runs benchmarks in the release profile or, with `--shipped`, in
//! the profile of the shipped binary.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::ci::cargo;

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Name {
    /// API server: writes, watchers, lists, memory, start time
    Api,
    /// One claim at a time through all steps, from creation to deletion
    Spine,
    /// A burst of pods with WaitForFirstConsumer claims, until all are scheduled and provisioned
    Schedule,
    /// Claims one at a time and in bursts, created and deleted, and static volumes
    Claims,
    /// The block driver's calls, compared with the same work without the driver
    Driver,
    /// Attachments one at a time and in bursts, with simulated nodes
    Attach,
}

/// Runs the benchmarks one after the other; stops at the first that fails.
pub(crate) fn run(root: &Path, names: &[Name], shipped: bool) -> Result<ExitCode> {
    println!("{}\n", machine());
    for name in names {
        let (package, bench) = match name {
            Name::Api => ("cleat-apiserver", "api"),
            Name::Spine => ("cleat", "spine"),
            Name::Schedule => ("cleat", "schedule"),
            Name::Claims => ("cleat", "claims"),
            Name::Driver => ("cleat-drivers", "driver"),
            Name::Attach => ("cleat", "attach"),
        };
        let mut arguments = vec!["bench", "--quiet", "--package", package, "--bench", bench];
        if shipped {
            arguments.extend(["--profile", "dist"]);
        }
        let status = cargo(root, &arguments).status().context("running cargo bench")?;
        if !status.success() {
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Describes the machine: processor, cores, memory, kernel.
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
