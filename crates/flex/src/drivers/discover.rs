//! Scans the plugin directory, watches it with inotify, and calls `init` of every new driver.
//!
//! The directory `vendor~driver` contains the driver `vendor/driver` as the file `driver`. `init` is called when this
//! executable appears or is replaced. Changes of other files in the directory have no effect.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt as _;
use inotify::{EventMask, Inotify, WatchMask};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{DriverEntry, DriverState, Drivers};

const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(200);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Identifies one version of an executable: it differs after the file was replaced or changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExecutableId {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Drivers {
    /// Keeps the table of drivers up to date until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut pause = MIN_RETRY_INTERVAL;
        while !stop.is_cancelled() {
            let watched = tokio::select! {
                () = stop.cancelled() => return,
                watched = self.watch_directory(&stop) => watched,
            };
            match watched {
                // The directory was removed: create it again.
                Ok(()) => pause = MIN_RETRY_INTERVAL,
                Err(error) => {
                    warn!(directory = ?self.0.config.directory, %error, "cannot scan the directory of FlexVolume drivers");
                    self.apply_scan(BTreeMap::new(), &stop);
                    pause = (pause * 2).min(MAX_RETRY_INTERVAL);
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Returns when the directory itself is removed or moved.
    async fn watch_directory(&self, stop: &CancellationToken) -> io::Result<()> {
        let directory = &self.0.config.directory;
        fs::create_dir_all(directory)?;
        let inotify = Inotify::init()?;
        let mut watches = inotify.watches();
        let own = WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR;
        let names = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVED_TO | WatchMask::MOVED_FROM;
        let whole = watches.add(directory, own | names)?;
        let mut events = inotify.into_event_stream([0; 4096])?;
        loop {
            let mut found = BTreeMap::new();
            for (name, driver_dir) in driver_dirs(directory)? {
                let content = names | WatchMask::CLOSE_WRITE | WatchMask::ATTRIB | WatchMask::ONLYDIR;
                // The watch is added before the file is inspected: a change between the two is handled twice, not missed.
                let watched = watches.add(&driver_dir, content);
                let executable = driver_dir.join(executable_name(&name));
                if let (Ok(_), Some(id)) = (watched, executable_id(&executable)) {
                    found.insert(name, (executable, id));
                }
            }
            self.apply_scan(found, stop);
            let event = events.next().await.ok_or_else(|| io::Error::other("the watch has ended"))??;
            let gone = EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT;
            if event.wd == whole && event.mask.intersects(gone) {
                return Ok(());
            }
        }
    }

    /// Replaces the table by the result of a scan, and starts `init` of new and replaced drivers.
    fn apply_scan(&self, found: BTreeMap<String, (PathBuf, ExecutableId)>, stop: &CancellationToken) {
        let mut new = Vec::new();
        {
            let mut entries = self.0.entries.lock();
            let first = entries.is_none();
            let entries = entries.get_or_insert_default();
            let before = entries.len();
            entries.retain(|name, _| found.contains_key(name));
            let gone = before - entries.len();
            for (name, (executable, id)) in found {
                if entries.get(&name).is_some_and(|entry| entry.id == id) {
                    continue;
                }
                let state = DriverState::Starting;
                entries.insert(name.clone(), DriverEntry { executable, id, state, unsupported: HashSet::new() });
                new.push((name, id));
            }
            if !first && gone == 0 && new.is_empty() {
                return;
            }
        }
        self.0.changes.send_replace(());
        for (name, id) in new {
            let (drivers, stop) = (self.clone(), stop.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = drivers.initialize(name, id) => {}
                }
            });
        }
    }

    /// Calls `init` with backoff until it succeeds or the executable is replaced or removed.
    async fn initialize(&self, name: String, id: ExecutableId) {
        let mut pause = MIN_RETRY_INTERVAL;
        loop {
            let current = self.0.entries.lock().as_ref().and_then(|entries| entries.get(&name).cloned());
            let Some(current) = current.filter(|current| current.id == id) else { return };
            let response = self.call(&name, &current, "init", &[], None).await;
            let initialized = response.is_ok();
            let state = match response {
                Ok(response) => DriverState::Ready(response.capabilities),
                Err(error) => DriverState::Failing(error.to_string()),
            };
            info!(driver = name, ?state, "FlexVolume driver state changed");
            {
                let mut entries = self.0.entries.lock();
                let entry = entries.as_mut().and_then(|entries| entries.get_mut(&name)).filter(|entry| entry.id == id);
                let Some(entry) = entry else { return };
                entry.state = state;
                // `init` is repeated even if the driver responds that it does not support it.
                entry.unsupported.remove("init");
            }
            self.0.changes.send_replace(());
            if initialized {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_RETRY_INTERVAL);
        }
    }
}

/// Lists the names of the drivers, each with its directory.
fn driver_dirs(directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut driver_dirs = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.filter(|name| !name.starts_with('.') && path.is_dir()) {
            driver_dirs.push((name.replace('~', "/"), path));
        }
    }
    Ok(driver_dirs)
}

fn executable_name(driver: &str) -> &str {
    driver.rsplit('/').next().unwrap_or(driver)
}

fn executable_id(executable: &Path) -> Option<ExecutableId> {
    let meta = fs::metadata(executable).ok().filter(fs::Metadata::is_file)?;
    Some(ExecutableId { device: meta.dev(), inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()) })
}
