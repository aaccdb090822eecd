//! `cargo xtask ci`: runs every check in order and prints how long each takes. The first failure ends the run with its status.
//!
//! All cargo steps use the dev profile and no RUSTFLAGS of their own, so that they share build artefacts.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::tidy;

const FMT: &[&str] = &["fmt", "--all", "--check"];
const CLIPPY: &[&str] = &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
const TEST: &[&str] = &["test", "--workspace"];
const DENY: &[&str] = &["deny", "check", "bans", "licenses", "sources"];
/// Runs each test program in its own mount namespace. Without it, a mount namespace that another process creates at the same time
/// would contain a copy of the test's mounts and keep their devices busy. The mounts of a failed test end with its program.
const PRIVATE_MOUNTS: &[&str] = &["--config", r#"target."cfg(unix)".runner=["unshare","--mount"]"#];
/// Runs only the test programs as root, so that the files that cargo writes belong to the user.
const PRIVATE_MOUNTS_AS_ROOT: &[&str] = &["--config", r#"target."cfg(unix)".runner=["sudo","-E","unshare","--mount"]"#];

type Step = fn(&Path) -> Result<Outcome>;

const STEPS: &[(&str, Step)] =
    &[("fmt", fmt), ("clippy", clippy), ("tidy", check_tidy), ("test", test), ("deny", deny)];

enum Outcome {
    Passed,
    Failed(u8),
    Skipped(&'static str),
}

pub(crate) fn run(root: &Path) -> Result<ExitCode> {
    let started = Instant::now();
    for (name, step) in STEPS {
        eprintln!("==> {name}");
        let step_started = Instant::now();
        let outcome = step(root)?;
        let seconds = step_started.elapsed().as_secs_f64();
        match outcome {
            Outcome::Passed => eprintln!("==> {name}: ok in {seconds:.1} s"),
            Outcome::Skipped(why) => eprintln!("==> {name}: skipped, {why}"),
            Outcome::Failed(status) => {
                eprintln!("==> {name}: failed after {seconds:.1} s with status {status}");
                return Ok(ExitCode::from(status));
            }
        }
    }
    eprintln!("==> ci: ok in {:.1} s", started.elapsed().as_secs_f64());
    Ok(ExitCode::SUCCESS)
}

fn fmt(root: &Path) -> Result<Outcome> {
    run_cargo(root, FMT)
}

fn clippy(root: &Path) -> Result<Outcome> {
    run_cargo(root, CLIPPY)
}

fn check_tidy(root: &Path) -> Result<Outcome> {
    Ok(if tidy::report(root)? { Outcome::Passed } else { Outcome::Failed(1) })
}

/// Prints the output of cargo test, and after it one line with the totals of all test programs.
fn test(root: &Path) -> Result<Outcome> {
    let mut command = cargo(root, TEST);
    if is_root()? {
        command.args(PRIVATE_MOUNTS);
    } else {
        eprintln!("    mounts need root: the test programs run under sudo");
        command.args(PRIVATE_MOUNTS_AS_ROOT);
    }
    let mut child = command.stdout(Stdio::piped()).spawn().context("starting cargo test")?;
    let mut totals = Totals::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).split(b'\n') {
            let line = line.context("reading the output of cargo test")?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            totals.add(&line);
        }
    }
    let status = child.wait().context("waiting for cargo test")?;
    println!("{totals}");
    Ok(outcome(status))
}

fn deny(root: &Path) -> Result<Outcome> {
    let probe = cargo(root, &["deny", "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        return Ok(Outcome::Skipped("cargo-deny is not installed (cargo install --locked cargo-deny)"));
    }
    run_cargo(root, DENY)
}

fn run_cargo(root: &Path, arguments: &[&str]) -> Result<Outcome> {
    let status = cargo(root, arguments).status().with_context(|| format!("starting cargo {}", arguments.join(" ")))?;
    Ok(outcome(status))
}

/// A cargo command with the environment of one that a user starts.
pub(crate) fn cargo(root: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root);
    // Some build scripts, such as ring's, rerun when these variables change, and a user's next build would run them again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

fn is_root() -> Result<bool> {
    Ok(std::fs::metadata("/proc/self").context("reading /proc/self")?.uid() == 0)
}

fn outcome(status: ExitStatus) -> Outcome {
    if status.success() {
        return Outcome::Passed;
    }
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Outcome::Failed(u8::try_from(code).unwrap_or(1))
}

#[derive(Debug, Default, PartialEq)]
struct Totals {
    programs: u32,
    passed: u32,
    failed: u32,
    ignored: u32,
}

impl Totals {
    /// Counts a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …`; other lines change nothing.
    fn add(&mut self, line: &str) {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". ")) else {
            return;
        };
        self.programs += 1;
        for count in counts.split("; ") {
            let Some((number, what)) = count.split_once(' ') else { continue };
            let number: u32 = number.parse().unwrap_or(0);
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Totals { programs, passed, failed, ignored } = self;
        write!(out, "tests in all: {passed} passed, {failed} failed, {ignored} ignored, in {programs} test programs")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_count_only_closing_lines() {
        let mut totals = Totals::default();
        for line in [
            "running 4 tests",
            "test bind::decide::tests::waits ... ok",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: FAILED. 5 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1.20s",
        ] {
            totals.add(line);
        }
        assert_eq!(totals, Totals { programs: 2, passed: 8, failed: 2, ignored: 1 });
    }

    #[test]
    fn the_status_of_a_failed_command_is_kept() {
        for (case, raw, want) in [("exit 101", 101 << 8, 101), ("killed by signal 9", 9, 137)] {
            match outcome(ExitStatus::from_raw(raw)) {
                Outcome::Failed(status) => assert_eq!(status, want, "{case}"),
                Outcome::Passed | Outcome::Skipped(_) => panic!("{case} counted as a pass"),
            }
        }
        assert!(matches!(outcome(ExitStatus::from_raw(0)), Outcome::Passed));
    }
}
