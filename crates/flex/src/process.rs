//! Runs a program with a deadline, and captures its standard output and standard error as one stream.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::net::unix::pipe::Receiver;
use tokio::process::{Child, Command};
use tokio::time::Instant;

/// Output beyond this length is read and discarded.
pub(crate) const MAX_OUTPUT_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct ProcessOutput {
    pub(crate) status: ExitStatus,
    pub(crate) bytes: Vec<u8>,
    /// The program wrote more than [`MAX_OUTPUT_BYTES`].
    pub(crate) truncated: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// The program did not start.
    #[error(transparent)]
    Start(io::Error),
    #[error(transparent)]
    Wait(io::Error),
    /// The deadline has passed; the program's process group was killed.
    #[error("killed")]
    Deadline,
}

/// Dropping the future does not kill the program: it continues without a parent that waits for it.
pub(crate) async fn run(
    program: &Path,
    arguments: &[&str],
    input: Option<File>,
    deadline: Duration,
) -> Result<ProcessOutput, RunError> {
    let until = Instant::now() + deadline;
    let (output, child) = start(program, arguments, input).map_err(RunError::Start)?;
    let mut running = RunningProcess { output: Some(output), child, captured: Vec::new(), truncated: false };
    match tokio::time::timeout_at(until, running.wait()).await {
        Ok(status) => {
            let status = status.map_err(RunError::Wait)?;
            Ok(ProcessOutput { status, bytes: running.captured, truncated: running.truncated })
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

struct RunningProcess {
    /// `None` after the end of the stream.
    output: Option<Receiver>,
    child: Child,
    captured: Vec<u8>,
    truncated: bool,
}

impl RunningProcess {
    /// Waits for the program itself, not for the end of its output: a process that it left running may hold the pipe open.
    async fn wait(&mut self) -> io::Result<ExitStatus> {
        loop {
            let Some(output) = &self.output else { return self.child.wait().await };
            let exited = tokio::select! {
                biased;
                readable = output.readable() => { readable?; None }
                status = self.child.wait() => Some(status?),
            };
            // Output that was written before the exit must be read before returning.
            self.drain()?;
            if let Some(status) = exited {
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
                    let fits = (MAX_OUTPUT_BYTES - self.captured.len()).min(read);
                    self.captured.extend_from_slice(&chunk[..fits]);
                    self.truncated |= fits < read;
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

    async fn shell(script: &str, deadline: Duration) -> Result<ProcessOutput, RunError> {
        run(Path::new("/bin/sh"), &["-c", script], None, deadline).await
    }

    #[tokio::test]
    async fn both_streams_are_captured_in_the_order_of_writing() {
        let output = shell("printf a; printf b >&2; printf c; exit 3", LONG).await.unwrap();
        assert_eq!((output.bytes.as_slice(), output.status.code(), output.truncated), (&b"abc"[..], Some(3), false));
    }

    #[tokio::test]
    async fn long_output_neither_blocks_the_program_nor_fills_memory() {
        let output = shell("head -c 3000000 /dev/zero", LONG).await.unwrap();
        assert_eq!((output.bytes.len(), output.truncated), (MAX_OUTPUT_BYTES, true));
    }

    #[tokio::test]
    async fn background_processes_are_not_waited_for() {
        let output = shell("sleep 600 & echo $!", LONG).await.unwrap();
        let pid: i32 = String::from_utf8(output.bytes).unwrap().trim().parse().unwrap();
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }

    #[tokio::test]
    async fn the_process_group_is_killed_at_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait", file.display());
        // On a busy machine the script may not have written its file within a second.
        for seconds in [1, 10, 60] {
            let error = shell(&script, Duration::from_secs(seconds)).await.unwrap_err();
            assert!(matches!(error, RunError::Deadline), "{error}");
            if file.exists() {
                break;
            }
        }
        let pid = std::fs::read_to_string(&file).unwrap();
        // A killed process does not end at once: it must be scheduled once more.
        let alive = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            !stat.is_empty() && !stat.contains(") Z") && !stat.contains(") X")
        };
        let until = Instant::now() + LONG;
        while alive() {
            assert!(Instant::now() < until, "process {pid} is still running");
            tokio::task::yield_now().await;
        }
    }
}
