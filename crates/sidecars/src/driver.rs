//! A connected CSI driver: its name and its capabilities, queried once when the sidecar starts.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use cleat_csi::v1::controller_service_capability::{Type, rpc};
use cleat_csi::{CallError, Client, Code};
use tokio_util::sync::CancellationToken;

pub use cleat_csi::v1::controller_service_capability::rpc::Type as Capability;
pub use cleat_csi::v1::plugin_capability::service::Type as PluginCapability;

const READY_TIMEOUT: Duration = Duration::from_secs(30);
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(50);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Driver {
    pub client: Client,
    pub name: String,
    pub capabilities: HashSet<Capability>,
    pub plugin_capabilities: HashSet<PluginCapability>,
}

impl Driver {
    /// Waits until the driver answers, without a time limit. Returns `None` if `stop` is cancelled first.
    pub async fn connect(client: Client, stop: &CancellationToken) -> Option<Self> {
        let mut interval = MIN_RETRY_INTERVAL;
        loop {
            let result = tokio::select! {
                () = stop.cancelled() => return None,
                result = Self::query(&client) => result,
            };
            match result {
                Ok(driver) => return Some(driver),
                Err(error) => tracing::warn!(endpoint = ?client.endpoint(), %error, "driver does not answer yet"),
            }
            tokio::select! {
                () = stop.cancelled() => return None,
                () = tokio::time::sleep(interval) => interval = (interval * 2).min(MAX_RETRY_INTERVAL),
            }
        }
    }

    async fn query(client: &Client) -> Result<Self, CallError> {
        client.wait_ready(READY_TIMEOUT).await?;
        let name = client.get_plugin_info().await?.name;
        let plugin = client.get_plugin_capabilities().await?;
        let plugin_capabilities = plugin.capabilities.into_iter().filter_map(plugin_capability).collect();
        let capabilities = match client.controller_get_capabilities().await {
            Ok(reply) => reply.capabilities.into_iter().filter_map(controller_capability).collect(),
            // The driver has no controller service.
            Err(error) if error.code() == Code::Unimplemented => HashSet::new(),
            Err(error) => return Err(error),
        };
        Ok(Self { client: client.clone(), name, capabilities, plugin_capabilities })
    }

    /// Asks the driver for the topology of the node it runs on, and waits as [`Self::connect`] does.
    ///
    /// The outer `None` means that `stop` was cancelled, the inner one that the driver reports no topology.
    pub async fn node_topology(&self, stop: &CancellationToken) -> Option<Option<BTreeMap<String, String>>> {
        let mut interval = MIN_RETRY_INTERVAL;
        loop {
            let result = tokio::select! {
                () = stop.cancelled() => return None,
                result = self.client.node_get_info() => result,
            };
            match result {
                Ok(info) => {
                    return Some(info.accessible_topology.map(|topology| topology.segments.into_iter().collect()));
                }
                Err(error) => tracing::warn!(driver = self.name, %error, "driver does not report its node's topology"),
            }
            tokio::select! {
                () = stop.cancelled() => return None,
                () = tokio::time::sleep(interval) => interval = (interval * 2).min(MAX_RETRY_INTERVAL),
            }
        }
    }

    pub fn has_capability(&self, capability: Capability) -> bool {
        self.capabilities.contains(&capability)
    }

    pub fn has_plugin_capability(&self, capability: PluginCapability) -> bool {
        self.plugin_capabilities.contains(&capability)
    }
}

fn plugin_capability(capability: cleat_csi::v1::PluginCapability) -> Option<PluginCapability> {
    match capability.r#type? {
        cleat_csi::v1::plugin_capability::Type::Service(service) => PluginCapability::try_from(service.r#type).ok(),
        cleat_csi::v1::plugin_capability::Type::VolumeExpansion(_) => None,
    }
}

fn controller_capability(capability: cleat_csi::v1::ControllerServiceCapability) -> Option<Capability> {
    match capability.r#type? {
        Type::Rpc(cleat_csi::v1::controller_service_capability::Rpc { r#type }) => rpc::Type::try_from(r#type).ok(),
    }
}
