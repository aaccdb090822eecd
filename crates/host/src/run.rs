//! Runs an external program with a deadline, and captures its output. At the deadline its whole process group is
//! killed. Must not interpret the output.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// How much of each output stream is stored. The rest is read and discarded.
const MAX_OUTPUT_BYTES: usize = 64 * 1024;
/// Appended to PATH: system programs are found whatever PATH this process was started with.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How long `kill_group` waits for a killed program before it leaves the reaping to a thread.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// The exit status and the output of a program that has ended.
#[derive(Debug)]
pub struct ProgramOutput {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl ProgramOutput {
    /// The text for an error message: stderr, or stdout if stderr is empty.
    pub fn message(&self) -> &str {
        let err = self.stderr.trim();
        if err.is_empty() { self.stdout.trim() } else { err }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{program} is not installed{}", package_hint(.package))]
    Missing { program: String, package: Option<&'static str> },
    #[error("start {program}")]
    Start { program: String, source: io::Error },
    #[error("wait for {program}")]
    Wait { program: String, source: io::Error },
    #[error("{program} was killed at its deadline of {after:?}; its output: {message}")]
    Deadline { program: String, after: Duration, message: String },
}

fn package_hint(package: &Option<&'static str>) -> String {
    package.map(|p| format!(": install the package {p} (apt-get install {p})")).unwrap_or_default()
}

/// The Debian package that contains a program which this crate may run.
pub fn package_of(program: &str) -> Option<&'static str> {
    Some(match program {
        "mkfs.ext2" | "mkfs.ext3" | "mkfs.ext4" | "e2fsck" | "resize2fs" => "e2fsprogs",
        "mkfs.xfs" | "xfs_growfs" | "xfs_repair" => "xfsprogs",
        "mkfs.btrfs" | "btrfs" => "btrfs-progs",
        "mount" | "umount" => "mount",
        "fsck" | "blkid" => "util-linux",
        "mount.nfs" => "nfs-common",
        _ => return None,
    })
}

/// Runs `program` with `arguments`. Standard input is empty, the locale is C, the working directory is `/`.
pub fn run<A: AsRef<OsStr>>(program: &str, arguments: &[A], deadline: Duration) -> Result<ProgramOutput, RunError> {
    let started = Instant::now();
    let mut child = Command::new(program)
        .args(arguments)
        .env("LC_ALL", "C")
        .env("PATH", search_path())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => RunError::Missing { program: program.into(), package: package_of(program) },
            _ => RunError::Start { program: program.into(), source },
        })?;

    let mut captured = [CapturedPipe::new(child.stdout.take()), CapturedPipe::new(child.stderr.take())];
    let ended = wait_for_exit(&mut child, &mut captured, started + deadline);
    let [stdout, stderr] = captured.map(|c| String::from_utf8_lossy(&c.bytes).into_owned());
    match ended {
        Ok(Some(status)) => {
            tracing::debug!(program, ?status, elapsed = ?started.elapsed(), "program ended");
            Ok(ProgramOutput { status, stdout, stderr })
        }
        Ok(None) => {
            kill_group(child);
            let message = if stderr.trim().is_empty() { stdout } else { stderr };
            Err(RunError::Deadline { program: program.into(), after: deadline, message: message.trim().into() })
        }
        Err(source) => {
            kill_group(child);
            Err(RunError::Wait { program: program.into(), source })
        }
    }
}

fn search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    if !path.is_empty() {
        path.push(":");
    }
    path.push(SYSTEM_PATH);
    path
}

struct CapturedPipe {
    pipe: Option<OwnedFd>,
    bytes: Vec<u8>,
}

impl CapturedPipe {
    fn new(pipe: Option<impl Into<OwnedFd>>) -> Self {
        CapturedPipe { pipe: pipe.map(Into::into), bytes: Vec::new() }
    }

    /// Reads once. Called when poll reports the pipe as readable, so it does not block; at end of file the pipe is
    /// closed.
    fn read(&mut self) -> io::Result<()> {
        let Some(pipe) = &self.pipe else { return Ok(()) };
        let mut chunk = [0u8; 8192];
        let n = rustix::io::read(pipe, &mut chunk)?;
        if n == 0 {
            self.pipe = None;
        }
        let remaining = MAX_OUTPUT_BYTES.saturating_sub(self.bytes.len());
        self.bytes.extend_from_slice(&chunk[..n.min(remaining)]);
        Ok(())
    }
}

/// Reads output until the program exits, and returns its status; `None` at the deadline.
///
/// The exit is observed through a pidfd, not by the end of the pipes: a background child of the program may keep them
/// open.
fn wait_for_exit(
    child: &mut Child,
    captured: &mut [CapturedPipe; 2],
    deadline: Instant,
) -> io::Result<Option<ExitStatus>> {
    let pid = Pid::from_child(child);
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        let timeout = timespec(deadline.saturating_duration_since(Instant::now()));
        let mut fds = vec![PollFd::new(&process, PollFlags::IN)];
        let open: Vec<usize> = (0..2).filter(|i| captured[*i].pipe.is_some()).collect();
        for i in &open {
            if let Some(pipe) = &captured[*i].pipe {
                fds.push(PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN));
            }
        }
        let ready = match poll(&mut fds, Some(&timeout)) {
            Ok(n) => n,
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        };
        if ready == 0 {
            return Ok(None);
        }
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let ended = is_ready[0];
        for (slot, i) in open.iter().enumerate() {
            if is_ready[slot + 1] {
                captured[*i].read()?;
            }
        }
        // Output that was written before the exit is read first: until poll reports no readable pipe.
        if ended && !is_ready[1..].iter().any(|s| *s) {
            return child.wait().map(Some);
        }
    }
}

fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: d.as_secs().min(i32::MAX as u64) as i64, tv_nsec: i64::from(d.subsec_nanos()) }
}

/// Kills the program and its process group. A process that is stuck in the kernel does not die at once; a thread then
/// waits for it.
fn kill_group(mut child: Child) {
    let pid = Pid::from_child(&child);
    let _ = kill_process_group(pid, Signal::KILL);
    let process = pidfd_open(pid, PidfdFlags::empty());
    if let Ok(process) = process {
        let timeout = timespec(KILL_TIMEOUT);
        let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout));
    }
    if !matches!(child.try_wait(), Ok(Some(_))) {
        let _ = std::thread::Builder::new().name("reap".into()).spawn(move || child.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn captures_both_streams_and_the_status() {
        let out = run("sh", &["-c", "echo out; echo err >&2; exit 3"], LONG).unwrap();
        assert_eq!((out.stdout.as_str(), out.stderr.as_str(), out.status.code()), ("out\n", "err\n", Some(3)));
        assert_eq!(out.message(), "err");
    }

    #[test]
    fn output_above_the_limit_is_discarded_and_does_not_block_the_program() {
        let out = run("sh", &["-c", "head -c 3000000 /dev/zero | tr '\\0' x"], LONG).unwrap();
        assert_eq!(out.stdout.len(), MAX_OUTPUT_BYTES);
    }

    #[test]
    fn a_background_child_that_holds_the_pipe_is_not_waited_for() {
        let started = Instant::now();
        let out = run("sh", &["-c", "sleep 60 & echo $!"], LONG).unwrap();
        assert!(started.elapsed() < Duration::from_secs(20));
        let pid: i32 = out.stdout.trim().parse().unwrap();
        let _ = rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }

    #[test]
    fn the_whole_process_group_is_killed_at_the_deadline() {
        let err = run("sh", &["-c", "sleep 60 & echo $!; wait"], Duration::from_millis(200)).unwrap_err();
        let RunError::Deadline { message, .. } = err else { panic!("{err}") };
        let pid: i32 = message.parse().unwrap();
        // A killed process does not end at once: the kernel has to schedule it first.
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if stat.is_empty() || stat.contains(") Z") || stat.contains(") X") {
                break;
            }
            assert!(Instant::now() < deadline, "the process still exists: {stat}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_error_for_a_missing_program_names_its_package() {
        let err = run("mkfs.nothing", &[""; 0], LONG).unwrap_err();
        assert_eq!(err.to_string(), "mkfs.nothing is not installed");
        let err = RunError::Missing { program: "mkfs.xfs".into(), package: package_of("mkfs.xfs") };
        assert_eq!(
            err.to_string(),
            "mkfs.xfs is not installed: install the package xfsprogs (apt-get install xfsprogs)"
        );
    }
}
