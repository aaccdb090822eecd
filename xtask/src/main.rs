//! The project's repeatable chores; `cargo xtask` lists them.

mod bench;
mod ci;
mod cli;
mod golden;
mod tidy;

fn main() -> std::process::ExitCode {
    cli::run()
}
