//! The `cleat` binary. All code is in the library of this crate.

use clap::Parser as _;

fn main() -> std::process::ExitCode {
    cleat::cli::Cli::parse().run()
}
