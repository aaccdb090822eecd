//! A driver as a supervised child process: restarted with a growing delay when it exits, stopped when the stack stops.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tracing::{info, warn};

/// The environment variable with the process id of the supervisor. The child compares it with its parent's, and so
/// notices that the supervisor died before the child could ask to be killed with it.
pub const PARENT_PID_ENV: &str = "CLEAT_PARENT";

/// The delay before the first restart. It doubles with each, up to [`MAX_RESTART_DELAY`].
const INITIAL_RESTART_DELAY: Duration = Duration::from_millis(100);
const MAX_RESTART_DELAY: Duration = Duration::from_secs(10);
/// A child that ran for longer than this resets the restart delay.
const STABLE_RUN_TIME: Duration = Duration::from_secs(10);
/// How long a child may take to finish its calls after SIGTERM before it gets SIGKILL.
const TERMINATION_GRACE_PERIOD: Duration = Duration::from_secs(10);

/// The program that a child runs.
#[derive(Clone, Debug)]
pub struct Program {
    pub path: PathBuf,
    pub arguments: Vec<OsString>,
    /// Environment variables in addition to those of this process.
    pub environment: Vec<(&'static str, String)>,
}

/// A child process under supervision. If it is dropped without [`SupervisedChild::stop`], the child runs until this process
/// ends.
#[derive(Debug)]
pub struct SupervisedChild {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<ChildState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ChildState {
    /// A pidfd: unlike a process id, it never refers to another process after the child is reaped.
    child: Option<OwnedFd>,
    /// Set by [`SupervisedChild::stop`]: do not restart.
    stopping: bool,
    /// Set by the thread when the child has exited and will not be restarted.
    stopped: bool,
}

impl SupervisedChild {
    /// Starts a thread that starts the child and waits for it. The kernel sends the parent-death signal when the *thread* that
    /// started the child ends, so that a thread of the async runtime, which may end at any time, cannot be used.
    pub fn start(name: String, program: Program) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread_shared = shared.clone();
        let thread =
            std::thread::Builder::new().name(name.clone()).spawn(move || supervise(&name, &program, &thread_shared))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Stops the child with SIGTERM, and with SIGKILL after the grace period. Blocks until it has exited.
    pub fn stop(mut self) {
        let mut state = self.shared.state.lock();
        state.stopping = true;
        send_signal(&state, Signal::TERM);
        self.shared.changed.notify_all();
        let deadline = Instant::now() + TERMINATION_GRACE_PERIOD;
        while !state.stopped {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                send_signal(&state, Signal::KILL);
                break;
            }
        }
        drop(state);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn send_signal(state: &ChildState, signal: Signal) {
    if let Some(child) = &state.child {
        // Fails if the child has exited in the meantime, which is what the caller wants.
        let _ = pidfd_send_signal(child, signal);
    }
}

fn supervise(name: &str, program: &Program, shared: &Shared) {
    let mut delay = INITIAL_RESTART_DELAY;
    while !shared.state.lock().stopping {
        let started = Instant::now();
        match start(program).and_then(|child| wait_for_exit(child, shared)) {
            Ok(_) if shared.state.lock().stopping => break,
            Ok(status) => warn!(driver = name, %status, "driver exited and will be restarted"),
            Err(error) => warn!(driver = name, program = %program.path.display(), %error, "starting the driver failed"),
        }
        if started.elapsed() > STABLE_RUN_TIME {
            delay = INITIAL_RESTART_DELAY;
        }
        let mut state = shared.state.lock();
        if !state.stopping {
            let _ = shared.changed.wait_for(&mut state, delay);
        }
        delay = (delay * 2).min(MAX_RESTART_DELAY);
    }
    shared.state.lock().stopped = true;
    shared.changed.notify_all();
    info!(driver = name, "driver stopped");
}

fn start(program: &Program) -> std::io::Result<Child> {
    Command::new(&program.path)
        .args(&program.arguments)
        .envs(program.environment.iter().map(|(name, value)| (name, value)))
        .env(PARENT_PID_ENV, std::process::id().to_string())
        .stdin(Stdio::null())
        .spawn()
}

fn wait_for_exit(mut child: Child, shared: &Shared) -> std::io::Result<ExitStatus> {
    let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
    {
        let mut state = shared.state.lock();
        state.child = Some(handle);
        if state.stopping {
            send_signal(&state, Signal::TERM);
        }
    }
    let status = child.wait();
    shared.state.lock().child = None;
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Program {
        Program { path: "/bin/sh".into(), arguments: vec!["-c".into(), script.into()], environment: Vec::new() }
    }

    #[test]
    fn a_child_that_exits_is_restarted_until_it_is_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("first"), dir.path().join("second"));
        let script = format!(
            "if [ -e {0} ]; then touch {1}; exec sleep 1000; else touch {0}; exit 1; fi",
            first.display(),
            second.display()
        );
        let child = SupervisedChild::start("test".to_owned(), shell(&script)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !second.exists() {
            assert!(Instant::now() < deadline, "the child was not restarted");
            std::thread::yield_now();
        }
        child.stop();
    }

    #[test]
    fn stopping_does_not_wait_for_a_program_that_cannot_start() {
        let program = Program { path: "/nonexistent/driver".into(), arguments: Vec::new(), environment: Vec::new() };
        SupervisedChild::start("test".to_owned(), program).unwrap().stop();
    }
}
