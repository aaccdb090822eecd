//! Runs a program to its end, with captured output and a deadline; the whole process group dies at the deadline. Must not
//! interpret what the program says.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// More output than this is read and thrown away: programs are not trusted to be brief.
const KEEP: usize = 64 * 1024;
/// Where system programs live, whatever PATH the caller was started with.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How long a killed program gets to leave the kernel before its reaping is left to a thread.
const AFTER_KILL: Duration = Duration::from_secs(2);

/// A finished program.
#[derive(Debug)]
pub struct Output {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// What the program said, for an error message: stderr, or stdout if that is empty.
    pub fn said(&self) -> &str {
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
    #[error("{program} was killed after {after:?} without an end; it said: {said}")]
    Deadline { program: String, after: Duration, said: String },
}

fn package_hint(package: &Option<&'static str>) -> String {
    package.map(|p| format!(": install the package {p} (apt-get install {p})")).unwrap_or_default()
}

/// The Debian package that brings a program this crate calls.
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
pub fn run<A: AsRef<OsStr>>(program: &str, arguments: &[A], deadline: Duration) -> Result<Output, RunError> {
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

    let mut captured = [Captured::new(child.stdout.take()), Captured::new(child.stderr.take())];
    let ended = follow(&mut child, &mut captured, started + deadline);
    let [stdout, stderr] = captured.map(|c| String::from_utf8_lossy(&c.kept).into_owned());
    match ended {
        Ok(Some(status)) => {
            tracing::debug!(program, ?status, elapsed = ?started.elapsed(), "program ended");
            Ok(Output { status, stdout, stderr })
        }
        Ok(None) => {
            kill_group(child);
            let said = if stderr.trim().is_empty() { stdout } else { stderr };
            Err(RunError::Deadline { program: program.into(), after: deadline, said: said.trim().into() })
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

struct Captured {
    pipe: Option<OwnedFd>,
    kept: Vec<u8>,
}

impl Captured {
    fn new(pipe: Option<impl Into<OwnedFd>>) -> Self {
        Captured { pipe: pipe.map(Into::into), kept: Vec::new() }
    }

    /// Reads once; the pipe is known to have something, or its end, to say.
    fn read(&mut self) -> io::Result<()> {
        let Some(pipe) = &self.pipe else { return Ok(()) };
        let mut chunk = [0u8; 8192];
        let n = rustix::io::read(pipe, &mut chunk)?;
        if n == 0 {
            self.pipe = None;
        }
        let room = KEEP.saturating_sub(self.kept.len());
        self.kept.extend_from_slice(&chunk[..n.min(room)]);
        Ok(())
    }
}

/// Collects output until the program ends: its status, or `None` at the deadline.
///
/// The end is that of the program itself, seen through a pidfd: a background child of it may hold the pipes open.
fn follow(child: &mut Child, captured: &mut [Captured; 2], until: Instant) -> io::Result<Option<ExitStatus>> {
    let pid = Pid::from_child(child);
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = timespec(left);
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
        let spoke: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let ended = spoke[0];
        for (slot, i) in open.iter().enumerate() {
            if spoke[slot + 1] {
                captured[*i].read()?;
            }
        }
        // What was written before the end is read first, pipe by pipe, until nothing is waiting.
        if ended && !spoke[1..].iter().any(|s| *s) {
            return child.wait().map(Some);
        }
    }
}

fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: d.as_secs().min(i32::MAX as u64) as i64, tv_nsec: i64::from(d.subsec_nanos()) }
}

/// Ends the program and all it started. A process stuck in the kernel cannot be waited for here: a thread does.
fn kill_group(mut child: Child) {
    let pid = Pid::from_child(&child);
    let _ = kill_process_group(pid, Signal::KILL);
    let process = pidfd_open(pid, PidfdFlags::empty());
    if let Ok(process) = process {
        let timeout = timespec(AFTER_KILL);
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
        assert_eq!(out.said(), "err");
    }

    #[test]
    fn a_talkative_program_neither_blocks_nor_fills_memory() {
        let out = run("sh", &["-c", "head -c 3000000 /dev/zero | tr '\\0' x"], LONG).unwrap();
        assert_eq!(out.stdout.len(), KEEP);
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
    fn the_whole_group_dies_at_the_deadline() {
        let err = run("sh", &["-c", "sleep 60 & echo $!; wait"], Duration::from_millis(200)).unwrap_err();
        let RunError::Deadline { said, .. } = err else { panic!("{err}") };
        let pid: i32 = said.parse().unwrap();
        // A killed process is not gone at once: it has to run once more to die.
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if stat.is_empty() || stat.contains(") Z") || stat.contains(") X") {
                break;
            }
            assert!(Instant::now() < until, "still there: {stat}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let err = run("mkfs.nothing", &[""; 0], LONG).unwrap_err();
        assert_eq!(err.to_string(), "mkfs.nothing is not installed");
        let err = RunError::Missing { program: "mkfs.xfs".into(), package: package_of("mkfs.xfs") };
        assert_eq!(
            err.to_string(),
            "mkfs.xfs is not installed: install the package xfsprogs (apt-get install xfsprogs)"
        );
    }
}
