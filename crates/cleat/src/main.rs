//! The `cleat` binary: everything it does is in the library beside it.

use clap::Parser as _;

fn main() -> std::process::ExitCode {
    cleat::cli::Cli::parse().run()
}
