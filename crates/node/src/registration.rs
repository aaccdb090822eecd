//! Drivers announce themselves by a socket in `plugins_registry`. Each socket is asked who it is, its driver is entered in the
//! CSINode and on the Node, and told the outcome; when the socket goes, so does the entry.
//!
//! Woken by inotify; sockets that fail are tried again with backoff.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cleat_csi::registration::{CSI_PLUGIN, PluginInfo};
use cleat_csi::{CallError, Client, Endpoint, EndpointError, RegistrationClient};
use cleat_runtime::work::{Severity, work};
use cleat_runtime::{Backoff, Outcome, Queue};
use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};
use tracing::{debug, info, warn};

use crate::agent::Shared;
use crate::drivers::{FileId, Registered, Version};
use crate::layout::is_component;
use crate::plugin::csi::Driver;
use crate::registry::{self, Announced, RegistryError};

const NODE_GET_INFO: Duration = Duration::from_secs(120);
const AT_ONCE: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    #[error("watch {dir:?}")]
    Watch { dir: PathBuf, source: io::Error },
    #[error("socket {socket:?}: {source}")]
    Look { socket: PathBuf, source: io::Error },
    #[error("socket {socket:?}: GetInfo: {source}")]
    GetInfo { socket: PathBuf, source: CallError },
    #[error("socket {socket:?}: {why}")]
    Invalid { socket: PathBuf, why: String },
    #[error("driver {driver}: endpoint: {source}")]
    Endpoint { driver: String, source: EndpointError },
    #[error("driver {driver}: {source}")]
    Call { driver: String, source: CallError },
    #[error("driver {driver}: {source}")]
    Enter { driver: String, source: RegistryError },
    #[error("driver {driver}: leave: {source}")]
    Leave { driver: String, source: RegistryError },
}

impl From<&RegistrationError> for Severity {
    fn from(error: &RegistrationError) -> Severity {
        match error {
            // A socket whose owner died with it: normal after a crash.
            RegistrationError::GetInfo { .. } => Severity::Expected,
            _ => Severity::Warning,
        }
    }
}

/// Watches the registry until the agent stops.
pub(crate) async fn run(agent: Arc<Shared>) -> Result<(), RegistrationError> {
    let dir = agent.layout.plugins_registry();
    let queue: Queue<PathBuf> = Queue::new(Backoff::new(Duration::from_millis(10), Duration::from_secs(30)));
    let events = watch(&dir)?;
    // Watched first, listed second: what comes in between is seen twice, not never.
    for socket in list(&dir)? {
        queue.add(socket);
    }
    let follow = follow(dir, events, queue.clone(), agent.clone());
    let visits = work("registration", queue, AT_ONCE, agent.stop.clone(), {
        let agent = agent.clone();
        move |socket: PathBuf| {
            let agent = agent.clone();
            async move { Box::pin(visit(&agent, &socket)).await.map(|()| Outcome::Done) }
        }
    });
    tokio::join!(follow, visits);
    Ok(())
}

fn watch(dir: &Path) -> Result<inotify::EventStream<[u8; 4096]>, RegistrationError> {
    let error = |source| RegistrationError::Watch { dir: dir.into(), source };
    let inotify = Inotify::init().map_err(error)?;
    let mask = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVED_TO | WatchMask::MOVED_FROM;
    inotify.watches().add(dir, mask).map_err(error)?;
    inotify.into_event_stream([0; 4096]).map_err(error)
}

fn list(dir: &Path) -> Result<Vec<PathBuf>, RegistrationError> {
    let error = |source| RegistrationError::Watch { dir: dir.into(), source };
    let mut sockets = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(error)? {
        sockets.push(entry.map_err(error)?.path());
    }
    Ok(sockets)
}

async fn follow(dir: PathBuf, mut events: inotify::EventStream<[u8; 4096]>, queue: Queue<PathBuf>, agent: Arc<Shared>) {
    loop {
        let event = tokio::select! {
            () = agent.stop.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            Some(Ok(event)) => match event.name {
                Some(name) => queue.add(dir.join(name)),
                // The kernel dropped events: look at everything.
                None => list(&dir).unwrap_or_default().into_iter().for_each(|s| queue.add(s)),
            },
            Some(Err(error)) => warn!(%error, "the watch on the plugin registry was interrupted"),
            None => return,
        }
    }
}

/// Brings the registration made through one socket in line with the socket.
async fn visit(agent: &Shared, socket: &Path) -> Result<(), RegistrationError> {
    let hidden = socket.file_name().is_none_or(|n| n.to_string_lossy().starts_with('.'));
    let present = match std::fs::symlink_metadata(socket) {
        Ok(meta) if meta.file_type().is_socket() && !hidden => {
            Some(FileId { inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()) })
        }
        Ok(_) => None,
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(RegistrationError::Look { socket: socket.into(), source }),
    };
    let registered = agent.drivers.by_socket(socket);
    match (present, registered) {
        (None, None) => Ok(()),
        (None, Some((name, _))) => leave(agent, &name, socket).await,
        (Some(file), Some((_, known))) if file == known => Ok(()),
        (Some(file), old) => {
            let name = register(agent, socket, file).await?;
            // The socket was taken over by another driver.
            match old {
                Some((old, _)) if old != name => leave(agent, &old, socket).await,
                _ => Ok(()),
            }
        }
    }
}

async fn register(agent: &Shared, socket: &Path, file: FileId) -> Result<String, RegistrationError> {
    let plugin = RegistrationClient::new(socket);
    let info =
        plugin.get_info().await.map_err(|source| RegistrationError::GetInfo { socket: socket.into(), source })?;
    let entered = enter(agent, socket, file, &info).await;
    let outcome = entered.as_ref().map(drop).map_err(|e| e.to_string());
    if let Err(error) = plugin.notify(outcome).await {
        warn!(%error, driver = info.name, "the driver could not be told the outcome of its registration");
    }
    entered?;
    info!(driver = info.name, "driver registered");
    for id in agent.state.lock().volumes_of_driver(&info.name) {
        agent.wake_volume(id);
    }
    Ok(info.name)
}

async fn enter(agent: &Shared, socket: &Path, file: FileId, info: &PluginInfo) -> Result<(), RegistrationError> {
    let invalid = |why: String| RegistrationError::Invalid { socket: socket.into(), why };
    let version = validate(info).map_err(invalid)?;
    if let Some(other) = agent.drivers.entry(&info.name)
        && other.socket != socket
        && other.version >= version
        && other.socket.exists()
    {
        return Err(invalid(format!("driver {} is already registered through {:?}", info.name, other.socket)));
    }
    let endpoint = match info.endpoint.as_str() {
        "" => Endpoint::unix(socket),
        text => {
            Endpoint::parse(text).map_err(|source| RegistrationError::Endpoint { driver: info.name.clone(), source })?
        }
    };
    let call = |source| RegistrationError::Call { driver: info.name.clone(), source };
    let client = Client::new(endpoint).with_deadline(NODE_GET_INFO);
    let node = client.node_get_info().await.map_err(call)?;
    if node.node_id.is_empty() {
        return Err(invalid(format!("driver {} gave no node id", info.name)));
    }
    let driver = Driver::connect(client).await.map_err(call)?;
    let topology: BTreeMap<String, String> =
        node.accessible_topology.map(|t| t.segments.into_iter().collect()).unwrap_or_default();
    let announced =
        Announced { name: info.name.clone(), node_id: node.node_id, max_volumes: node.max_volumes_per_node, topology };
    registry::enter(agent, &announced)
        .await
        .map_err(|source| RegistrationError::Enter { driver: info.name.clone(), source })?;
    agent.drivers.insert(&info.name, Registered { driver, socket: socket.into(), file, version, announced });
    Ok(())
}

fn validate(info: &PluginInfo) -> Result<Version, String> {
    if info.r#type != CSI_PLUGIN {
        return Err(format!("plugin type {:?} has no handler here", info.r#type));
    }
    if !is_component(&info.name) {
        return Err(format!("driver name {:?} cannot be part of a path", info.name));
    }
    Version::best(&info.supported_versions)
        .ok_or_else(|| format!("none of the versions {:?} is supported", info.supported_versions))
}

async fn leave(agent: &Shared, name: &str, socket: &Path) -> Result<(), RegistrationError> {
    // Entry by entry: the objects first, so that a failure is repeated by the next visit.
    if agent.drivers.entry(name).is_some_and(|r| r.socket == socket) {
        let left = registry::leave(agent, name).await;
        left.map_err(|source| RegistrationError::Leave { driver: name.to_owned(), source })?;
    }
    if agent.drivers.remove(name, socket) {
        info!(driver = name, "driver deregistered");
    } else {
        debug!(driver = name, "a newer registration stays");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_csi_plugins_of_a_known_version_are_taken() {
        let info = |kind: &str, name: &str, version: &str| PluginInfo {
            r#type: kind.into(),
            name: name.into(),
            endpoint: String::new(),
            supported_versions: vec![version.into()],
        };
        for (case, info, ok) in [
            ("a CSI driver", info("CSIPlugin", "block.cleat.dev", "1.0.0"), true),
            ("a device plugin", info("DevicePlugin", "gpu", "1.0.0"), false),
            ("a version of the future", info("CSIPlugin", "d", "2.0.0"), false),
            ("a name that leaves its directory", info("CSIPlugin", "../d", "1.0.0"), false),
        ] {
            assert_eq!(validate(&info).is_ok(), ok, "{case}");
        }
    }
}
