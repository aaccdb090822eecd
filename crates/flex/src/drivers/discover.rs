//! Finds drivers, and finds out when they come, change and go.
//!
//! A directory `vendor~driver` holds the driver `vendor/driver` in a file `driver`. A driver is asked what it can do when its
//! executable is new or another one; what else changes in its directory means nothing.

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

use super::{Drivers, Known, State};

const FIRST_RETRY: Duration = Duration::from_millis(200);
const LAST_RETRY: Duration = Duration::from_secs(60);

/// One state of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Drivers {
    /// Looks for drivers until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut pause = FIRST_RETRY;
        while !stop.is_cancelled() {
            let followed = tokio::select! {
                () = stop.cancelled() => return,
                followed = self.follow(&stop) => followed,
            };
            match followed {
                // The directory was taken away; it is made again.
                Ok(()) => pause = FIRST_RETRY,
                Err(error) => {
                    warn!(directory = ?self.0.config.directory, %error, "FlexVolume drivers cannot be looked for");
                    self.update(BTreeMap::new(), &stop);
                    pause = (pause * 2).min(LAST_RETRY);
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Ends when the directory itself goes.
    async fn follow(&self, stop: &CancellationToken) -> io::Result<()> {
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
            for (name, home) in homes(directory)? {
                let content = names | WatchMask::CLOSE_WRITE | WatchMask::ATTRIB | WatchMask::ONLYDIR;
                // Watched first, looked at second: what changes in between is seen twice, not never.
                let watched = watches.add(&home, content);
                let executable = home.join(executable_name(&name));
                if let (Ok(_), Some(id)) = (watched, identify(&executable)) {
                    found.insert(name, (executable, id));
                }
            }
            self.update(found, stop);
            let event = events.next().await.ok_or_else(|| io::Error::other("the watch has ended"))??;
            let gone = EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT;
            if event.wd == whole && event.mask.intersects(gone) {
                return Ok(());
            }
        }
    }

    /// Takes over what the directory holds now, and asks whoever is new.
    fn update(&self, found: BTreeMap<String, (PathBuf, FileId)>, stop: &CancellationToken) {
        let mut new = Vec::new();
        {
            let mut known = self.0.known.lock();
            let first = known.is_none();
            let known = known.get_or_insert_default();
            let before = known.len();
            known.retain(|name, _| found.contains_key(name));
            let gone = before - known.len();
            for (name, (executable, id)) in found {
                if known.get(&name).is_some_and(|known| known.id == id) {
                    continue;
                }
                let state = State::Starting;
                known.insert(name.clone(), Known { executable, id, state, unsupported: HashSet::new() });
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
                    () = drivers.probe(name, id) => {}
                }
            });
        }
    }

    /// Asks a driver what it can do, until it says so or is another one.
    async fn probe(&self, name: String, id: FileId) {
        let mut pause = FIRST_RETRY;
        loop {
            let current = self.0.known.lock().as_ref().and_then(|known| known.get(&name).cloned());
            let Some(current) = current.filter(|current| current.id == id) else { return };
            let answer = self.call(&name, &current, "init", &[], None).await;
            let done = answer.is_ok();
            let state = match answer {
                Ok(answer) => State::Ready(answer.capabilities),
                Err(error) => State::Failing(error.to_string()),
            };
            info!(driver = name, ?state, "FlexVolume driver found");
            {
                let mut known = self.0.known.lock();
                let known = known.as_mut().and_then(|known| known.get_mut(&name)).filter(|known| known.id == id);
                let Some(known) = known else { return };
                known.state = state;
                // Whoever does not support init is asked all the same.
                known.unsupported.remove("init");
            }
            self.0.changes.send_replace(());
            if done {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LAST_RETRY);
        }
    }
}

/// The drivers' names, each with its directory.
fn homes(directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut homes = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.filter(|name| !name.starts_with('.') && path.is_dir()) {
            homes.push((name.replace('~', "/"), path));
        }
    }
    Ok(homes)
}

fn executable_name(driver: &str) -> &str {
    driver.rsplit('/').next().unwrap_or(driver)
}

fn identify(executable: &Path) -> Option<FileId> {
    let meta = fs::metadata(executable).ok().filter(fs::Metadata::is_file)?;
    Some(FileId { device: meta.dev(), inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()) })
}
