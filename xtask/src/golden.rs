//! `cargo xtask golden DIR`: starts Cleat and repeats recorded requests to a real cluster, with the recordings and the scripts
//! in a directory. Fails if Cleat behaves differently where it must not.
//!
//! The API recording is replayed as a whole. Of the volume recording only the groups in [`VOLUME_GROUPS`] are replayed, unless
//! `--all` is given. A group is added to the list when all of it passes.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::ci::cargo;

/// Groups of the volume recording that pass.
const VOLUME_GROUPS: &[&str] = &[
    "static",
    "prebound",
    "reclaim",
    "protection",
    "default-class",
    "dynamic",
    "clone",
    "wffc",
    "scheduling",
    "ephemeral",
    "attach",
    "api",
];

#[derive(Args)]
pub(crate) struct Arguments {
    /// Directory of the recordings, with `api` and `volumes` below it
    dir: PathBuf,
    /// Replay everything, also the groups that are known to fail
    #[arg(long)]
    all: bool,
    /// Print every difference
    #[arg(short, long)]
    verbose: bool,
}

pub(crate) fn run(root: &Path, arguments: &Arguments) -> Result<ExitCode> {
    let dir = arguments.dir.canonicalize().with_context(|| format!("finding {}", arguments.dir.display()))?;
    build(root)?;
    let mut passed = true;
    let api = dir.join("api/golden.py");
    if api.exists() {
        let mut replay = python(&api, arguments.verbose);
        replay.arg("--golden").arg(dir.join("api/api.json"));
        let data = ScratchDir::new("api")?;
        passed &= replay_against(
            &Server::start(root, "examples/serve", &[data.path(), "127.0.0.1:0".as_ref()])?,
            &data,
            replay,
        )?;
    }
    let volumes = dir.join("volumes/scenarios.py");
    if volumes.exists() {
        let mut replay = python(&volumes, arguments.verbose);
        replay.arg("--golden").arg(dir.join("volumes/volumes.json"));
        replay.args(["--storage-class", "cleat-block", "--driver", "block.cleat.dev"]);
        replay.args(["--wait-class", "cleat-block-wait"]);
        if !arguments.all {
            let globs: Vec<_> = VOLUME_GROUPS.iter().map(|group| format!("{group}/*")).collect();
            replay.args(["--only", &globs.join(",")]);
        }
        let data = ScratchDir::new("volumes")?;
        let up = ["up", "--listen", "127.0.0.1:0", "--data-dir"].map(Path::new);
        passed &= replay_against(&Server::start(root, "cleat", &[&up[..], &[data.path()]].concat())?, &data, replay)?;
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn build(root: &Path) -> Result<()> {
    for target in [&["--bin", "cleat"][..], &["--package", "cleat-apiserver", "--example", "serve"]] {
        let status = cargo(root, &["build", "--quiet"]).args(target).status()?;
        if !status.success() {
            bail!("cargo build {} failed", target.join(" "));
        }
    }
    Ok(())
}

fn python(script: &Path, verbose: bool) -> Command {
    let mut command = Command::new("python3");
    command.arg(script).arg("replay");
    if verbose {
        command.arg("-v");
    }
    command
}

fn replay_against(_server: &Server, data: &ScratchDir, mut replay: Command) -> Result<bool> {
    replay.arg("--kubeconfig").arg(data.path().join("kubeconfig"));
    let status = replay.status().context("running python3 (apt-get install python3 python3-yaml)")?;
    Ok(status.success())
}

/// A temporary directory, removed when it is dropped.
struct ScratchDir(PathBuf);

impl ScratchDir {
    fn new(name: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("cg-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self(path))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A running Cleat. Stopped with SIGINT when it is dropped, so that it stops its drivers.
struct Server(Child);

impl Server {
    fn start(root: &Path, program: &str, arguments: &[&Path]) -> Result<Self> {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        let path = target.join("debug").join(program);
        let mut child = Command::new(&path)
            .args(arguments)
            .env("CLEAT_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", path.display()))?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            // Cleat prints its first line when it is ready.
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line.is_empty() {
            bail!("{} did not start: {}", path.display(), child.wait()?);
        }
        Ok(Self(child))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}
