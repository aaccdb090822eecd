//! The command line of `cargo xtask`: names the chores and turns their outcome into an exit status.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{bench, ci, golden, tidy};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "The project's repeatable chores")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Everything a change must pass: fmt, clippy, tidy, test, deny
    Ci,
    /// The rules the compiler does not know: who imports whom, pure decisions, file sizes, leftovers
    Tidy,
    /// Measures one part on this machine and prints the figures
    Bench {
        name: bench::Name,
        /// As it is shipped: optimised as a whole, which takes a quarter of an hour to build
        #[arg(long)]
        shipped: bool,
    },
    /// Replays recorded behaviour of a real cluster against Cleat
    Golden(golden::Arguments),
}

pub(crate) fn run() -> ExitCode {
    let root = workspace_root();
    let outcome = match Arguments::parse().chore {
        Chore::Ci => ci::run(&root),
        Chore::Tidy => tidy::run(&root),
        Chore::Bench { name, shipped } => bench::run(&root, name, shipped),
        Chore::Golden(arguments) => golden::run(&root, &arguments),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// Cargo tells a running xtask where its manifest lies; the place it was compiled at may have moved since.
fn workspace_root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let manifest = PathBuf::from(manifest);
    manifest.parent().map(Path::to_path_buf).unwrap_or(manifest)
}
