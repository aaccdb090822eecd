//! What the command line accepts.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// The environment variable that says how much is logged, in the form of tracing's filters.
pub const LOG: &str = "CLEAT_LOG";

/// The Kubernetes volume stack in one binary.
#[derive(Debug, Parser)]
#[command(name = "cleat", version, about)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the whole stack: API server, controllers, sidecars, node agents and the block driver.
    Up(UpArgs),
    /// Takes one claim through its whole life in a temporary directory, and says how long each phase took.
    Demo(DemoArgs),
    /// Runs one CSI driver.
    Driver {
        #[command(subcommand)]
        driver: crate::driver::DriverCommand,
    },
    /// Makes and deletes the volumes of one CSI driver, in place of external-provisioner.
    CsiProvisioner(Box<crate::sidecars::ProvisionerCommand>),
    /// Attaches and detaches the volumes of one CSI driver, in place of external-attacher.
    CsiAttacher(Box<crate::sidecars::AttacherCommand>),
    /// Does the work of several sidecars of one CSI driver in one process.
    Sidecars(Box<crate::sidecars::SidecarsCommand>),
}

#[derive(Args, Debug)]
pub struct UpArgs {
    /// Where everything is kept: the store, certificates, the kubeconfig, volumes and node directories.
    #[arg(long, value_name = "DIR")]
    pub data_dir: PathBuf,
    /// How many nodes to run on this machine.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub nodes: u16,
    /// Where the API server listens; port 0 takes a free one.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:6443")]
    pub listen: SocketAddr,
    /// Notes every request in this file, as lines of JSON.
    #[arg(long, value_name = "FILE")]
    pub audit_log: Option<PathBuf>,
    /// Encrypts Secrets on disk with the first key in this file: 32 bytes in base64, one key a line. Older keys may
    /// follow; a start moves everything to the first.
    #[arg(long, value_name = "FILE")]
    pub encryption_key: Option<PathBuf>,
    /// Leaves volumes attached to nodes that are not ready, however long that lasts, until the node is back or marked out of
    /// service. Without this they are detached after six minutes.
    #[arg(long)]
    pub disable_force_detach_on_timeout: bool,
    /// Where FlexVolume drivers lie, as `vendor~driver/driver`. Without this: `flexvolume` in the data directory.
    #[arg(long, value_name = "DIR")]
    pub flex_volume_plugin_dir: Option<PathBuf>,
    /// Leaves a part of the stack to a program of its own, such as `cleat csi-provisioner`.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    pub without: Vec<crate::up::Part>,
}

#[derive(Args, Debug)]
pub struct DemoArgs {
    /// Leaves the directory behind, for a look at it.
    #[arg(long)]
    pub keep: bool,
}

impl Cli {
    pub fn run(self) -> ExitCode {
        let default = match &self.command {
            // The demonstration tells its own story.
            Command::Demo(_) => "error",
            Command::Up(_) | Command::Driver { .. } => "info",
            Command::CsiProvisioner(command) => command.log_level(),
            Command::CsiAttacher(command) => command.log_level(),
            Command::Sidecars(command) => command.log_level(),
        };
        log_to_stderr(default);
        let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                eprintln!("cleat: cannot start: {error}");
                return ExitCode::FAILURE;
            }
        };
        let result = match self.command {
            Command::Up(args) => runtime.block_on(crate::up::command(args)),
            Command::Demo(args) => runtime.block_on(crate::demo::command(args)),
            Command::Driver { driver } => runtime.block_on(crate::driver::command(driver)),
            Command::CsiProvisioner(command) => runtime.block_on(command.run()),
            Command::CsiAttacher(command) => runtime.block_on(command.run()),
            Command::Sidecars(command) => runtime.block_on(command.run()),
        };
        // A blocking call that hangs must not keep the process.
        runtime.shutdown_timeout(std::time::Duration::from_secs(2));
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("cleat: {error:#}");
                ExitCode::FAILURE
            }
        }
    }
}

/// Tells the user something. A reader that went away is no reason to stop.
pub fn say(text: &str) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

fn log_to_stderr(default: &str) {
    use std::io::IsTerminal as _;
    let filter = EnvFilter::try_from_env(LOG).unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}
