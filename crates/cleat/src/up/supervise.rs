//! A driver as a supervised child: started, started again when it dies, ended with us.

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

/// Tells the child who started it, so that it notices when that is no longer its parent.
pub const PARENT: &str = "CLEAT_PARENT";

const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A child that ran this long did start; the next pause is a short one again.
const STARTED: Duration = Duration::from_secs(10);
/// How long a child may take to finish its calls after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);

/// What to run.
#[derive(Clone, Debug)]
pub struct Program {
    pub path: PathBuf,
    pub arguments: Vec<OsString>,
    /// Variables it gets besides those of this process.
    pub environment: Vec<(&'static str, String)>,
}

/// A running child. Dropping it without [`Supervised::end`] leaves the child to die with this process.
#[derive(Debug)]
pub struct Supervised {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// A handle that never names another process, even after the child is reaped.
    child: Option<OwnedFd>,
    ending: bool,
    ended: bool,
}

impl Supervised {
    /// The child is started and awaited on a thread of its own: the kernel ties "dies with its parent" to the thread
    /// that started it, and the threads of the async runtime come and go.
    pub fn start(name: String, program: Program) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let ours = shared.clone();
        let thread =
            std::thread::Builder::new().name(name.clone()).spawn(move || keep_alive(&name, &program, &ours))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Ends the child: SIGTERM, and SIGKILL if it does not finish in time. Blocks until it is gone.
    pub fn end(mut self) {
        let mut state = self.shared.state.lock();
        state.ending = true;
        signal(&state, Signal::TERM);
        self.shared.changed.notify_all();
        let deadline = Instant::now() + GRACE;
        while !state.ended {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                signal(&state, Signal::KILL);
                break;
            }
        }
        drop(state);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn signal(state: &State, signal: Signal) {
    if let Some(child) = &state.child {
        // It may have ended by itself a moment ago.
        let _ = pidfd_send_signal(child, signal);
    }
}

fn keep_alive(name: &str, program: &Program, shared: &Shared) {
    let mut pause = PAUSE;
    while !shared.state.lock().ending {
        let begun = Instant::now();
        match start(program).and_then(|child| await_end(child, shared)) {
            Ok(_) if shared.state.lock().ending => break,
            Ok(status) => warn!(driver = name, %status, "driver ended; it is started again"),
            Err(error) => warn!(driver = name, program = %program.path.display(), %error, "driver does not start"),
        }
        if begun.elapsed() > STARTED {
            pause = PAUSE;
        }
        let mut state = shared.state.lock();
        if !state.ending {
            let _ = shared.changed.wait_for(&mut state, pause);
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    shared.state.lock().ended = true;
    shared.changed.notify_all();
    info!(driver = name, "driver stopped");
}

fn start(program: &Program) -> std::io::Result<Child> {
    Command::new(&program.path)
        .args(&program.arguments)
        .envs(program.environment.iter().map(|(name, value)| (name, value)))
        .env(PARENT, std::process::id().to_string())
        .stdin(Stdio::null())
        .spawn()
}

fn await_end(mut child: Child, shared: &Shared) -> std::io::Result<ExitStatus> {
    let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
    {
        let mut state = shared.state.lock();
        state.child = Some(handle);
        if state.ending {
            signal(&state, Signal::TERM);
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
    fn a_child_that_dies_is_started_again_and_ends_when_told() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("first"), dir.path().join("second"));
        let script = format!(
            "if [ -e {0} ]; then touch {1}; exec sleep 1000; else touch {0}; exit 1; fi",
            first.display(),
            second.display()
        );
        let child = Supervised::start("test".to_owned(), shell(&script)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !second.exists() {
            assert!(Instant::now() < deadline, "the child was not started again");
            std::thread::yield_now();
        }
        child.end();
    }

    #[test]
    fn ending_does_not_wait_for_a_program_that_cannot_start() {
        let program = Program { path: "/nonexistent/driver".into(), arguments: Vec::new(), environment: Vec::new() };
        Supervised::start("test".to_owned(), program).unwrap().end();
    }
}
