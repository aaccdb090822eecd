//! The command line of `cargo xtask`: runs one task and turns its result into an exit status.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{bench, ci, golden, tidy};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Runs the project's development tasks")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs every check that a change must pass: fmt, clippy, tidy, test, deny
    Ci,
    /// Checks the rules that the compiler does not: imports, names, pure decisions, file sizes, unfinished work
    Tidy,
    /// Runs benchmarks on this machine and prints the figures
    Bench {
        /// One or more benchmarks, run one after the other
        #[arg(required = true)]
        names: Vec<bench::Name>,
        /// Builds with the profile of the shipped binary, which takes about 15 minutes
        #[arg(long)]
        shipped: bool,
    },
    /// Compares Cleat with the recorded behaviour of a real cluster
    Golden(golden::Arguments),
}

pub(crate) fn run() -> ExitCode {
    let root = workspace_root();
    let outcome = match Arguments::parse().task {
        Task::Ci => ci::run(&root),
        Task::Tidy => tidy::run(&root),
        Task::Bench { names, shipped } => bench::run(&root, &names, shipped),
        Task::Golden(arguments) => golden::run(&root, &arguments),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// Cargo sets the manifest directory for a running xtask. The one at compile time is only the fallback: the workspace may have
/// been moved since.
fn workspace_root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let manifest = PathBuf::from(manifest);
    manifest.parent().map(Path::to_path_buf).unwrap_or(manifest)
}
