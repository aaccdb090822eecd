//! Runs a program to its end, with both its outputs as one, and a deadline.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::net::unix::pipe::Receiver;
use tokio::process::{Child, Command};
use tokio::time::Instant;

/// More output than this is read and thrown away.
pub(crate) const KEEP: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) output: Vec<u8>,
    /// There was more output than anybody keeps.
    pub(crate) cut: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// Nothing has run.
    #[error(transparent)]
    Start(io::Error),
    #[error(transparent)]
    Wait(io::Error),
    /// It was killed, with everything that it had started.
    #[error("killed")]
    Deadline,
}

/// Dropping the future leaves the program alone: it goes on, and only nobody waits for it any more.
pub(crate) async fn run(
    program: &Path,
    arguments: &[&str],
    input: Option<File>,
    deadline: Duration,
) -> Result<Ended, RunError> {
    let until = Instant::now() + deadline;
    let (output, child) = start(program, arguments, input).map_err(RunError::Start)?;
    let mut running = Running { output: Some(output), child, kept: Vec::new(), cut: false };
    match tokio::time::timeout_at(until, running.end()).await {
        Ok(status) => {
            let status = status.map_err(RunError::Wait)?;
            Ok(Ended { status, output: running.kept, cut: running.cut })
        }
        Err(_) => {
            running.kill();
            Err(RunError::Deadline)
        }
    }
}

fn start(program: &Path, arguments: &[&str], input: Option<File>) -> io::Result<(Receiver, Child)> {
    let (output, stdout) = io::pipe()?;
    let stderr = stdout.try_clone()?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(input.map_or_else(Stdio::null, Stdio::from))
        .stdout(stdout)
        .stderr(stderr)
        .process_group(0)
        .spawn()?;
    Ok((Receiver::from_owned_fd(output.into())?, child))
}

struct Running {
    /// Until its end.
    output: Option<Receiver>,
    child: Child,
    kept: Vec<u8>,
    cut: bool,
}

impl Running {
    /// The end is that of the program itself: something that it left running may hold the pipe open.
    async fn end(&mut self) -> io::Result<ExitStatus> {
        loop {
            let Some(output) = &self.output else { return self.child.wait().await };
            let ended = tokio::select! {
                biased;
                readable = output.readable() => { readable?; None }
                status = self.child.wait() => Some(status?),
            };
            // What was written before the end is read first.
            self.drain()?;
            if let Some(status) = ended {
                return Ok(status);
            }
        }
    }

    fn drain(&mut self) -> io::Result<()> {
        let mut chunk = [0; 8 << 10];
        while let Some(output) = &self.output {
            match output.try_read(&mut chunk) {
                Ok(0) => self.output = None,
                Ok(read) => {
                    let room = (KEEP - self.kept.len()).min(read);
                    self.kept.extend_from_slice(&chunk[..room]);
                    self.cut |= room < read;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn kill(&mut self) {
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    async fn shell(script: &str, deadline: Duration) -> Result<Ended, RunError> {
        run(Path::new("/bin/sh"), &["-c", script], None, deadline).await
    }

    #[tokio::test]
    async fn both_outputs_are_one_in_the_order_of_writing() {
        let ended = shell("printf a; printf b >&2; printf c; exit 3", LONG).await.unwrap();
        assert_eq!((ended.output.as_slice(), ended.status.code(), ended.cut), (&b"abc"[..], Some(3), false));
    }

    #[tokio::test]
    async fn a_talkative_program_neither_blocks_nor_fills_memory() {
        let ended = shell("head -c 3000000 /dev/zero", LONG).await.unwrap();
        assert_eq!((ended.output.len(), ended.cut), (KEEP, true));
    }

    #[tokio::test]
    async fn what_it_leaves_running_is_not_waited_for() {
        let ended = shell("sleep 600 & echo $!", LONG).await.unwrap();
        let pid: i32 = String::from_utf8(ended.output).unwrap().trim().parse().unwrap();
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }

    #[tokio::test]
    async fn everything_that_it_started_dies_at_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait", file.display());
        // On a busy machine it may take long until the program gets that far.
        for seconds in [1, 10, 60] {
            let error = shell(&script, Duration::from_secs(seconds)).await.unwrap_err();
            assert!(matches!(error, RunError::Deadline), "{error}");
            if file.exists() {
                break;
            }
        }
        let pid = std::fs::read_to_string(&file).unwrap();
        // A killed process is not gone at once: it has to run once more to die.
        let alive = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            !stat.is_empty() && !stat.contains(") Z") && !stat.contains(") X")
        };
        let until = Instant::now() + LONG;
        while alive() {
            assert!(Instant::now() < until, "{pid} lives");
            tokio::task::yield_now().await;
        }
    }
}
