//! The drivers in the directory, and the calls a control plane makes.

mod discover;

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::answer::{self, Answer, AnswerError, Capabilities};
use crate::lock::{Lock, Unavailable};
use crate::options::Options;
use crate::process::{self, RunError};
use discover::FileId;

#[derive(Clone, Debug)]
pub struct Config {
    /// Where `vendor~driver/driver` lies. Made if it is not there.
    pub directory: PathBuf,
    /// Where calls under way are marked, so that a restart knows of them.
    pub calls: PathBuf,
    /// How long one call may take.
    pub deadline: Duration,
}

impl Config {
    pub fn new(directory: impl Into<PathBuf>, calls: impl Into<PathBuf>) -> Self {
        // Kubernetes waits for ever. Nothing that is attached within the hour takes longer than this.
        Self { directory: directory.into(), calls: calls.into(), deadline: Duration::from_secs(600) }
    }
}

/// What is known of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    Absent,
    /// It may be there, and has not said yet what it can do.
    Starting,
    /// It is there, and does not say what it can do. It is asked again.
    Failing(String),
    Ready(Capabilities),
}

#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("there is no FlexVolume driver {driver} in {directory:?}")]
    Absent { driver: String, directory: PathBuf },
    #[error("FlexVolume driver {0} has not answered init yet")]
    Starting(String),
    #[error("FlexVolume driver {driver} cannot be used: {why}")]
    Failing { driver: String, why: String },
    /// A call of a former life of this process, or what is left of one that ran out of time.
    #[error("an earlier call for this volume and node is still running")]
    Busy,
    #[error("cannot mark the call as begun: {0}")]
    Mark(#[source] io::Error),
    #[error("cannot run {executable:?}: {source}")]
    Start { executable: PathBuf, source: io::Error },
    #[error("{command} command: cannot follow it: {source}")]
    Follow { command: &'static str, source: io::Error },
    #[error("{command} command failed, {source}")]
    Answer { command: &'static str, source: AnswerError },
    #[error("{command} command failed: {status}, and yet the answer says Success")]
    Exit { command: &'static str, status: ExitStatus },
    #[error("{command} command failed: the answer is longer than {limit} bytes", limit = process::KEEP)]
    Long { command: &'static str },
    /// It may have done its work.
    #[error("{command} command did not end within {after:?}")]
    Deadline { command: &'static str, after: Duration },
}

impl CallError {
    fn is_not_supported(&self) -> bool {
        matches!(self, Self::Answer { source: AnswerError::NotSupported, .. })
    }
}

/// The drivers of one directory; a handle that can be passed around.
#[derive(Clone)]
pub struct Drivers(Arc<Shared>);

struct Shared {
    config: Config,
    /// `None` until the directory has been looked at.
    known: Mutex<Option<BTreeMap<String, Known>>>,
    changes: watch::Sender<()>,
}

#[derive(Clone, Debug)]
struct Known {
    executable: PathBuf,
    id: FileId,
    state: State,
    /// Commands that it said it does not support. Another executable is asked anew.
    unsupported: HashSet<&'static str>,
}

impl Drivers {
    /// They are looked for once [`Drivers::run`] runs.
    pub fn new(config: Config) -> Self {
        Self(Arc::new(Shared { config, known: Mutex::new(None), changes: watch::Sender::new(()) }))
    }

    pub fn state(&self, driver: &str) -> State {
        match self.0.known.lock().as_ref() {
            None => State::Starting,
            Some(known) => known.get(driver).map_or(State::Absent, |known| known.state.clone()),
        }
    }

    /// Wakes whenever some driver's state may have changed.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.0.changes.subscribe()
    }

    /// Why the driver cannot be called, if it cannot.
    pub fn check(&self, driver: &str) -> Result<(), CallError> {
        self.find(driver).map(drop)
    }

    /// Returns the device, which may be empty.
    pub async fn attach(&self, driver: &str, options: &Options, node: &str) -> Result<String, CallError> {
        let found = self.find(driver)?;
        let lock = self.lock(&[driver, &options.volume, node])?;
        let attached = self.call(driver, &found, "attach", &[&options.json(), node], Some(&lock)).await;
        supported(attached).map(|answer| answer.unwrap_or_default().device)
    }

    pub async fn detach(&self, driver: &str, volume: &str, node: &str) -> Result<(), CallError> {
        let found = self.find(driver)?;
        let lock = self.lock(&[driver, volume, node])?;
        supported(self.call(driver, &found, "detach", &[volume, node], Some(&lock)).await)?;
        lock.remove();
        Ok(())
    }

    /// `None` if the driver cannot tell.
    pub async fn is_attached(&self, driver: &str, options: &Options, node: &str) -> Result<Option<bool>, CallError> {
        let found = self.find(driver)?;
        let answer = self.call(driver, &found, "isattached", &[&options.json(), node], None).await;
        supported(answer).map(|answer| answer.map(|answer| answer.attached))
    }

    fn find(&self, driver: &str) -> Result<Known, CallError> {
        let name = || driver.to_owned();
        let known = self.0.known.lock();
        let Some(known) = known.as_ref() else { return Err(CallError::Starting(name())) };
        let Some(found) = known.get(driver) else {
            return Err(CallError::Absent { driver: name(), directory: self.0.config.directory.clone() });
        };
        match &found.state {
            State::Ready(_) => Ok(found.clone()),
            State::Failing(why) => Err(CallError::Failing { driver: name(), why: why.clone() }),
            State::Starting | State::Absent => Err(CallError::Starting(name())),
        }
    }

    fn lock(&self, what: &[&str]) -> Result<Lock, CallError> {
        let Config { calls, deadline, .. } = &self.0.config;
        Lock::take(calls, what, *deadline).map_err(|unavailable| match unavailable {
            Unavailable::Held => CallError::Busy,
            Unavailable::Failed(source) => CallError::Mark(source),
        })
    }

    async fn call(
        &self,
        driver: &str,
        found: &Known,
        command: &'static str,
        arguments: &[&str],
        lock: Option<&Lock>,
    ) -> Result<Answer, CallError> {
        if found.unsupported.contains(command) {
            return Err(CallError::Answer { command, source: AnswerError::NotSupported });
        }
        let arguments: Vec<&str> = [command].into_iter().chain(arguments.iter().copied()).collect();
        let input = lock.map(Lock::held_open).transpose().map_err(CallError::Mark)?;
        let ended = process::run(&found.executable, &arguments, input, self.0.config.deadline).await;
        // After the deadline something may still run that the kill did not reach: then the lock stays as long as that does.
        if let (Some(lock), false) = (lock, matches!(ended, Err(RunError::Deadline))) {
            lock.release();
        }
        let answer = self.judge(command, found, ended);
        match &answer {
            Ok(_) => debug!(driver, command, "driver called"),
            Err(error) if error.is_not_supported() => self.note_unsupported(driver, found, command),
            Err(error) => warn!(driver, command, %error, "driver call failed"),
        }
        answer
    }

    fn judge(
        &self,
        command: &'static str,
        found: &Known,
        ended: Result<process::Ended, RunError>,
    ) -> Result<Answer, CallError> {
        let ended = ended.map_err(|error| match error {
            RunError::Start(source) => CallError::Start { executable: found.executable.clone(), source },
            RunError::Wait(source) => CallError::Follow { command, source },
            RunError::Deadline => CallError::Deadline { command, after: self.0.config.deadline },
        })?;
        if ended.cut {
            return Err(CallError::Long { command });
        }
        let answer = answer::read(&ended.output).map_err(|source| CallError::Answer { command, source })?;
        if !ended.status.success() {
            return Err(CallError::Exit { command, status: ended.status });
        }
        Ok(answer)
    }

    fn note_unsupported(&self, driver: &str, found: &Known, command: &'static str) {
        let mut known = self.0.known.lock();
        if let Some(now) = known.as_mut().and_then(|known| known.get_mut(driver)).filter(|now| now.id == found.id) {
            now.unsupported.insert(command);
        }
    }
}

/// `None` for a command that the driver leaves to others: it counts as done.
fn supported(answer: Result<Answer, CallError>) -> Result<Option<Answer>, CallError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_not_supported() => Ok(None),
        Err(error) => Err(error),
    }
}
