//! The command line: parses the arguments, starts logging and the async runtime, runs the chosen command.
//!
//! The arguments of each command are defined beside the command. The commands must not import this module.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::{demo, driver, logging, sidecars, up};

/// How long blocking calls that are still running may take when the command has ended.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs Kubernetes volumes without a cluster: API server, controllers, CSI sidecars and node agents in one process.
#[derive(Debug, Parser)]
#[command(name = "cleat", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the whole stack: API server, controllers, CSI sidecars, node agents and the block driver.
    Up(up::UpArgs),
    /// Creates, uses and deletes one volume on a temporary stack, and prints how long each step takes.
    Demo(demo::DemoArgs),
    /// Runs one CSI driver.
    Driver {
        #[command(subcommand)]
        driver: driver::DriverCommand,
    },
    /// Creates and deletes the volumes of one CSI driver. Replaces external-provisioner.
    CsiProvisioner(Box<sidecars::ProvisionerCommand>),
    /// Attaches and detaches the volumes of one CSI driver. Replaces external-attacher.
    CsiAttacher(Box<sidecars::AttacherCommand>),
    /// Runs several sidecars of one CSI driver in one process.
    Sidecars(Box<sidecars::SidecarsCommand>),
}

impl Cli {
    pub fn run(self) -> ExitCode {
        let default_level = match &self.command {
            // The demo prints its progress itself.
            Command::Demo(_) => "error",
            Command::Up(_) | Command::Driver { .. } => "info",
            Command::CsiProvisioner(command) => command.log_level(),
            Command::CsiAttacher(command) => command.log_level(),
            Command::Sidecars(command) => command.log_level(),
        };
        logging::init(default_level);
        let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                eprintln!("cleat: cannot start: {error}");
                return ExitCode::FAILURE;
            }
        };
        let result = match self.command {
            Command::Up(args) => runtime.block_on(up::command(args)),
            Command::Demo(args) => runtime.block_on(demo::command(args)),
            Command::Driver { driver } => runtime.block_on(driver::command(driver)),
            Command::CsiProvisioner(command) => runtime.block_on(command.run()),
            Command::CsiAttacher(command) => runtime.block_on(command.run()),
            Command::Sidecars(command) => runtime.block_on(command.run()),
        };
        // Without a timeout a blocking call that hangs would keep the process from exiting.
        runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("cleat: {error:#}");
                ExitCode::FAILURE
            }
        }
    }
}
