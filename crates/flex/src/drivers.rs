//! The table of drivers in the plugin directory, and the calls that a control plane makes: attach, detach, isattached.

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

use crate::lock::{CallLock, LockError};
use crate::options::VolumeOptions;
use crate::process::{self, RunError};
use crate::response::{self, Capabilities, DriverResponse, ResponseError};
use discover::ExecutableId;

#[derive(Clone, Debug)]
pub struct Config {
    /// The directory that contains `vendor~driver/driver`. Created if it does not exist.
    pub directory: PathBuf,
    /// The directory of the lock files. A held lock file marks a call that still runs, also one that an earlier process
    /// started.
    pub lock_dir: PathBuf,
    /// The time after which a call is killed.
    pub deadline: Duration,
}

impl Config {
    pub fn new(directory: impl Into<PathBuf>, lock_dir: impl Into<PathBuf>) -> Self {
        // Kubernetes sets no limit. A call that takes longer than ten minutes is assumed to hang.
        Self { directory: directory.into(), lock_dir: lock_dir.into(), deadline: Duration::from_secs(600) }
    }
}

/// Whether a driver can be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverState {
    Absent,
    /// The directory has not been scanned yet, or the driver has not answered its first `init`.
    Starting,
    /// The last `init` failed, with this message. It is repeated with backoff.
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
    /// The lock is held by a call that an earlier process started, or by what is left of a call that was killed at its
    /// deadline.
    #[error("an earlier call for this volume and node is still running")]
    Busy,
    #[error("cannot lock the call: {0}")]
    Lock(#[source] io::Error),
    #[error("cannot run {executable:?}: {source}")]
    Start { executable: PathBuf, source: io::Error },
    #[error("{command} command: cannot wait for it: {source}")]
    Wait { command: &'static str, source: io::Error },
    #[error("{command} command failed, {source}")]
    Response { command: &'static str, source: ResponseError },
    #[error("{command} command failed: {status}, and yet the answer says Success")]
    Exit { command: &'static str, status: ExitStatus },
    #[error("{command} command failed: the answer is longer than {limit} bytes", limit = process::MAX_OUTPUT_BYTES)]
    ResponseTooLong { command: &'static str },
    /// The call was killed. It may have taken effect.
    #[error("{command} command did not end within {after:?}")]
    Deadline { command: &'static str, after: Duration },
}

impl CallError {
    fn is_not_supported(&self) -> bool {
        matches!(self, Self::Response { source: ResponseError::NotSupported, .. })
    }
}

/// The drivers of one directory. Clones share one table.
#[derive(Clone)]
pub struct Drivers(Arc<DriversInner>);

struct DriversInner {
    config: Config,
    /// By driver name. `None` until the first scan of the directory.
    entries: Mutex<Option<BTreeMap<String, DriverEntry>>>,
    changes: watch::Sender<()>,
}

#[derive(Clone, Debug)]
struct DriverEntry {
    executable: PathBuf,
    id: ExecutableId,
    state: DriverState,
    /// Commands to which the driver responded "Not supported". They are not called again until the executable changes.
    unsupported: HashSet<&'static str>,
}

impl Drivers {
    /// Every driver is [`DriverState::Starting`] until [`Drivers::run`] has scanned the directory.
    pub fn new(config: Config) -> Self {
        Self(Arc::new(DriversInner { config, entries: Mutex::new(None), changes: watch::Sender::new(()) }))
    }

    pub fn state(&self, driver: &str) -> DriverState {
        match self.0.entries.lock().as_ref() {
            None => DriverState::Starting,
            Some(entries) => entries.get(driver).map_or(DriverState::Absent, |entry| entry.state.clone()),
        }
    }

    /// Notifies after every change of any driver's state.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.0.changes.subscribe()
    }

    /// Returns the error that a call to the driver would fail with now, before it starts a process.
    pub fn check(&self, driver: &str) -> Result<(), CallError> {
        self.find(driver).map(drop)
    }

    /// Returns the device path; empty if the driver reports none or does not support `attach`.
    pub async fn attach(&self, driver: &str, options: &VolumeOptions, node: &str) -> Result<String, CallError> {
        let entry = self.find(driver)?;
        let lock = self.lock(&[driver, &options.volume, node])?;
        let response = self.call(driver, &entry, "attach", &[&options.to_json(), node], Some(&lock)).await;
        ignore_unsupported(response).map(|response| response.unwrap_or_default().device)
    }

    pub async fn detach(&self, driver: &str, volume: &str, node: &str) -> Result<(), CallError> {
        let entry = self.find(driver)?;
        let lock = self.lock(&[driver, volume, node])?;
        ignore_unsupported(self.call(driver, &entry, "detach", &[volume, node], Some(&lock)).await)?;
        lock.remove();
        Ok(())
    }

    /// `None` if the driver does not support `isattached`.
    pub async fn is_attached(
        &self,
        driver: &str,
        options: &VolumeOptions,
        node: &str,
    ) -> Result<Option<bool>, CallError> {
        let entry = self.find(driver)?;
        let response = self.call(driver, &entry, "isattached", &[&options.to_json(), node], None).await;
        ignore_unsupported(response).map(|response| response.map(|response| response.attached))
    }

    fn find(&self, driver: &str) -> Result<DriverEntry, CallError> {
        let name = || driver.to_owned();
        let entries = self.0.entries.lock();
        let Some(entries) = entries.as_ref() else { return Err(CallError::Starting(name())) };
        let Some(entry) = entries.get(driver) else {
            return Err(CallError::Absent { driver: name(), directory: self.0.config.directory.clone() });
        };
        match &entry.state {
            DriverState::Ready(_) => Ok(entry.clone()),
            DriverState::Failing(why) => Err(CallError::Failing { driver: name(), why: why.clone() }),
            DriverState::Starting | DriverState::Absent => Err(CallError::Starting(name())),
        }
    }

    fn lock(&self, key: &[&str]) -> Result<CallLock, CallError> {
        let Config { lock_dir, deadline, .. } = &self.0.config;
        CallLock::acquire(lock_dir, key, *deadline).map_err(|error| match error {
            LockError::Held => CallError::Busy,
            LockError::Io(source) => CallError::Lock(source),
        })
    }

    async fn call(
        &self,
        driver: &str,
        entry: &DriverEntry,
        command: &'static str,
        arguments: &[&str],
        lock: Option<&CallLock>,
    ) -> Result<DriverResponse, CallError> {
        if entry.unsupported.contains(command) {
            return Err(CallError::Response { command, source: ResponseError::NotSupported });
        }
        let arguments: Vec<&str> = [command].into_iter().chain(arguments.iter().copied()).collect();
        let input = lock.map(CallLock::duplicate_file).transpose().map_err(CallError::Lock)?;
        let output = process::run(&entry.executable, &arguments, input, self.0.config.deadline).await;
        // After a kill, processes that left the process group may still run and hold the lock file open. The lock then stays
        // held until they end.
        if let (Some(lock), false) = (lock, matches!(output, Err(RunError::Deadline))) {
            lock.release();
        }
        let response = self.interpret_exit(command, entry, output);
        match &response {
            Ok(_) => debug!(driver, command, "driver called"),
            Err(error) if error.is_not_supported() => self.record_unsupported(driver, entry, command),
            Err(error) => warn!(driver, command, %error, "driver call failed"),
        }
        response
    }

    fn interpret_exit(
        &self,
        command: &'static str,
        entry: &DriverEntry,
        output: Result<process::ProcessOutput, RunError>,
    ) -> Result<DriverResponse, CallError> {
        let output = output.map_err(|error| match error {
            RunError::Start(source) => CallError::Start { executable: entry.executable.clone(), source },
            RunError::Wait(source) => CallError::Wait { command, source },
            RunError::Deadline => CallError::Deadline { command, after: self.0.config.deadline },
        })?;
        if output.truncated {
            return Err(CallError::ResponseTooLong { command });
        }
        let response = response::parse(&output.bytes).map_err(|source| CallError::Response { command, source })?;
        if !output.status.success() {
            return Err(CallError::Exit { command, status: output.status });
        }
        Ok(response)
    }

    fn record_unsupported(&self, driver: &str, entry: &DriverEntry, command: &'static str) {
        let mut entries = self.0.entries.lock();
        let current = entries.as_mut().and_then(|entries| entries.get_mut(driver));
        if let Some(current) = current.filter(|current| current.id == entry.id) {
            current.unsupported.insert(command);
        }
    }
}

/// Turns "Not supported" into `Ok(None)`: by the protocol such a command counts as done.
fn ignore_unsupported(response: Result<DriverResponse, CallError>) -> Result<Option<DriverResponse>, CallError> {
    match response {
        Ok(response) => Ok(Some(response)),
        Err(error) if error.is_not_supported() => Ok(None),
        Err(error) => Err(error),
    }
}
