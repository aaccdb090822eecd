//! The project's development tasks. `cargo xtask help` lists them.

mod bench;
mod ci;
mod cli;
mod golden;
mod tidy;

fn main() -> std::process::ExitCode {
    cli::run()
}
