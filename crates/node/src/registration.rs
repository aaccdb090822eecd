//! Registers the drivers whose sockets are in `plugins_registry`: calls GetInfo of each socket, adds its driver to the
//! CSINode and the Node, and sends it the outcome. When the socket is removed, the driver is removed too.
//!
//! Woken by inotify; a failed registration is repeated with backoff.

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

use crate::context::AgentContext;
use crate::csi_node::{self, CsiNodeError};
use crate::drivers::{DriverNodeInfo, DriverRegistration, FileId, Version};
use crate::layout::is_path_component;
use crate::plugin::csi::CsiDriver;

const NODE_GET_INFO_TIMEOUT: Duration = Duration::from_secs(120);
const MAX_CONCURRENT_REGISTRATIONS: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    #[error("watch {dir:?}")]
    Watch { dir: PathBuf, source: io::Error },
    #[error("socket {socket:?}: {source}")]
    Inspect { socket: PathBuf, source: io::Error },
    #[error("socket {socket:?}: GetInfo: {source}")]
    GetInfo { socket: PathBuf, source: CallError },
    #[error("socket {socket:?}: {why}")]
    Invalid { socket: PathBuf, why: String },
    #[error("driver {driver}: endpoint: {source}")]
    Endpoint { driver: String, source: EndpointError },
    #[error("driver {driver}: {source}")]
    Call { driver: String, source: CallError },
    #[error("driver {driver}: {source}")]
    AddDriver { driver: String, source: CsiNodeError },
    #[error("driver {driver}: remove: {source}")]
    RemoveDriver { driver: String, source: CsiNodeError },
}

impl From<&RegistrationError> for Severity {
    fn from(error: &RegistrationError) -> Severity {
        match error {
            // The process of the socket has died: normal after a crash.
            RegistrationError::GetInfo { .. } => Severity::Expected,
            _ => Severity::Warning,
        }
    }
}

/// Runs until the agent stops.
pub(crate) async fn run(agent: Arc<AgentContext>) -> Result<(), RegistrationError> {
    let dir = agent.layout.plugins_registry_dir();
    let queue: Queue<PathBuf> = Queue::new(Backoff::new(Duration::from_millis(10), Duration::from_secs(30)));
    let events = watch(&dir)?;
    // The watch is added before the directory is listed: a socket that appears between the two is handled twice, not missed.
    for socket in list(&dir)? {
        queue.add(socket);
    }
    let watch_events = watch_events(dir, events, queue.clone(), agent.clone());
    let reconciles = work("registration", queue, MAX_CONCURRENT_REGISTRATIONS, agent.stop.clone(), {
        let agent = agent.clone();
        move |socket: PathBuf| {
            let agent = agent.clone();
            async move { Box::pin(reconcile_socket(&agent, &socket)).await.map(|()| Outcome::Done) }
        }
    });
    tokio::join!(watch_events, reconciles);
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

async fn watch_events(
    dir: PathBuf,
    mut events: inotify::EventStream<[u8; 4096]>,
    queue: Queue<PathBuf>,
    agent: Arc<AgentContext>,
) {
    loop {
        let event = tokio::select! {
            () = agent.stop.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            Some(Ok(event)) => match event.name {
                Some(name) => queue.add(dir.join(name)),
                // The kernel has dropped events: check all sockets.
                None => list(&dir).unwrap_or_default().into_iter().for_each(|s| queue.add(s)),
            },
            Some(Err(error)) => warn!(%error, "reading events of the plugin registry failed"),
            None => return,
        }
    }
}

/// Makes the registration match the socket: registers a new or replaced one, deregisters a removed one.
async fn reconcile_socket(agent: &AgentContext, socket: &Path) -> Result<(), RegistrationError> {
    let hidden = socket.file_name().is_none_or(|n| n.to_string_lossy().starts_with('.'));
    let present = match std::fs::symlink_metadata(socket) {
        Ok(meta) if meta.file_type().is_socket() && !hidden => {
            Some(FileId { inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()) })
        }
        Ok(_) => None,
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(RegistrationError::Inspect { socket: socket.into(), source }),
    };
    let registered = agent.drivers.by_socket(socket);
    match (present, registered) {
        (None, None) => Ok(()),
        (None, Some((name, _))) => deregister(agent, &name, socket).await,
        (Some(file), Some((_, registered_file))) if file == registered_file => Ok(()),
        (Some(file), old) => {
            let name = register(agent, socket, file).await?;
            // Another driver has replaced the one that used this path before.
            match old {
                Some((old, _)) if old != name => deregister(agent, &old, socket).await,
                _ => Ok(()),
            }
        }
    }
}

async fn register(agent: &AgentContext, socket: &Path, file: FileId) -> Result<String, RegistrationError> {
    let plugin = RegistrationClient::new(socket);
    let info =
        plugin.get_info().await.map_err(|source| RegistrationError::GetInfo { socket: socket.into(), source })?;
    let added = add_driver(agent, socket, file, &info).await;
    let outcome = added.as_ref().map(drop).map_err(|e| e.to_string());
    if let Err(error) = plugin.notify(outcome).await {
        warn!(%error, driver = info.name, "NotifyRegistrationStatus failed");
    }
    added?;
    info!(driver = info.name, "driver registered");
    for id in agent.state.lock().volumes_of_driver(&info.name) {
        agent.wake_volume(id);
    }
    Ok(info.name)
}

async fn add_driver(
    agent: &AgentContext,
    socket: &Path,
    file: FileId,
    info: &PluginInfo,
) -> Result<(), RegistrationError> {
    let invalid = |why: String| RegistrationError::Invalid { socket: socket.into(), why };
    let version = validate(info).map_err(invalid)?;
    if let Some(other) = agent.drivers.registration(&info.name)
        && other.socket != socket
        && other.version >= version
        && other.socket.exists()
    {
        return Err(invalid(format!("driver {} is already registered through {:?}", info.name, other.socket)));
    }
    let endpoint = match info.endpoint.as_str() {
        "" => Endpoint::unix(socket),
        address => Endpoint::parse(address)
            .map_err(|source| RegistrationError::Endpoint { driver: info.name.clone(), source })?,
    };
    let call = |source| RegistrationError::Call { driver: info.name.clone(), source };
    let client = Client::new(endpoint).with_deadline(NODE_GET_INFO_TIMEOUT);
    let node = client.node_get_info().await.map_err(call)?;
    if node.node_id.is_empty() {
        return Err(invalid(format!("driver {} gave no node id", info.name)));
    }
    let driver = CsiDriver::connect(client).await.map_err(call)?;
    let topology: BTreeMap<String, String> =
        node.accessible_topology.map(|t| t.segments.into_iter().collect()).unwrap_or_default();
    let node_info = DriverNodeInfo {
        name: info.name.clone(),
        node_id: node.node_id,
        max_volumes: node.max_volumes_per_node,
        topology,
    };
    csi_node::add_driver(agent, &node_info)
        .await
        .map_err(|source| RegistrationError::AddDriver { driver: info.name.clone(), source })?;
    agent.drivers.insert(&info.name, DriverRegistration { driver, socket: socket.into(), file, version, node_info });
    Ok(())
}

fn validate(info: &PluginInfo) -> Result<Version, String> {
    if info.r#type != CSI_PLUGIN {
        return Err(format!("plugin type {:?} has no handler here", info.r#type));
    }
    if !is_path_component(&info.name) {
        return Err(format!("driver name {:?} cannot be part of a path", info.name));
    }
    Version::highest_supported(&info.supported_versions)
        .ok_or_else(|| format!("none of the versions {:?} is supported", info.supported_versions))
}

async fn deregister(agent: &AgentContext, name: &str, socket: &Path) -> Result<(), RegistrationError> {
    // The table last: if the update of the objects fails, the next reconcile still finds the registration and repeats it.
    if agent.drivers.registration(name).is_some_and(|r| r.socket == socket) {
        let removed = csi_node::remove_driver(agent, name).await;
        removed.map_err(|source| RegistrationError::RemoveDriver { driver: name.to_owned(), source })?;
    }
    if agent.drivers.remove(name, socket) {
        info!(driver = name, "driver deregistered");
    } else {
        debug!(driver = name, "driver not deregistered: another socket has registered it");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_csi_plugins_of_a_supported_version_are_registered() {
        let info = |kind: &str, name: &str, version: &str| PluginInfo {
            r#type: kind.into(),
            name: name.into(),
            endpoint: String::new(),
            supported_versions: vec![version.into()],
        };
        for (case, info, ok) in [
            ("a CSI driver", info("CSIPlugin", "block.cleat.dev", "1.0.0"), true),
            ("a device plugin", info("DevicePlugin", "gpu", "1.0.0"), false),
            ("an unsupported version", info("CSIPlugin", "d", "2.0.0"), false),
            ("a name that leaves its directory", info("CSIPlugin", "../d", "1.0.0"), false),
        ] {
            assert_eq!(validate(&info).is_ok(), ok, "{case}");
        }
    }
}
