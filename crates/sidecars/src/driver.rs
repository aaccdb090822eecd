//! One CSI driver as its sidecars see it: who it is and what it can do, asked once at the start.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use cleat_csi::v1::controller_service_capability::{Type, rpc};
use cleat_csi::{CallError, Client, Code};
use tokio_util::sync::CancellationToken;

pub use cleat_csi::v1::controller_service_capability::rpc::Type as Capability;
pub use cleat_csi::v1::plugin_capability::service::Type as PluginCapability;

#[derive(Clone, Debug)]
pub struct Driver {
    pub client: Client,
    pub name: String,
    pub capabilities: HashSet<Capability>,
    pub plugin: HashSet<PluginCapability>,
}

impl Driver {
    /// Waits until the driver answers, however long it takes to start. `None` if `stop` came first.
    pub async fn connect(client: Client, stop: &CancellationToken) -> Option<Self> {
        let mut pause = Duration::from_millis(50);
        loop {
            let asked = tokio::select! {
                () = stop.cancelled() => return None,
                asked = Self::ask(&client) => asked,
            };
            match asked {
                Ok(driver) => return Some(driver),
                Err(error) => tracing::warn!(endpoint = ?client.endpoint(), %error, "driver does not answer yet"),
            }
            tokio::select! {
                () = stop.cancelled() => return None,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(Duration::from_secs(10)),
            }
        }
    }

    async fn ask(client: &Client) -> Result<Self, CallError> {
        client.wait_ready(Duration::from_secs(30)).await?;
        let name = client.get_plugin_info().await?.name;
        let plugin = client.get_plugin_capabilities().await?.capabilities.into_iter().filter_map(service).collect();
        let capabilities = match client.controller_get_capabilities().await {
            Ok(reply) => reply.capabilities.into_iter().filter_map(kind).collect(),
            // A driver without a controller part.
            Err(error) if error.code() == Code::Unimplemented => HashSet::new(),
            Err(error) => return Err(error),
        };
        Ok(Self { client: client.clone(), name, capabilities, plugin })
    }

    /// Where the driver says that its node is; inside, `None` if it says nothing. Waits as [`Self::connect`] does.
    pub async fn place(&self, stop: &CancellationToken) -> Option<Option<BTreeMap<String, String>>> {
        let mut pause = Duration::from_millis(50);
        loop {
            let asked = tokio::select! {
                () = stop.cancelled() => return None,
                asked = self.client.node_get_info() => asked,
            };
            match asked {
                Ok(info) => return Some(info.accessible_topology.map(|place| place.segments.into_iter().collect())),
                Err(error) => tracing::warn!(driver = self.name, %error, "driver does not say where its node is"),
            }
            tokio::select! {
                () = stop.cancelled() => return None,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(Duration::from_secs(10)),
            }
        }
    }

    pub fn can(&self, capability: Capability) -> bool {
        self.capabilities.contains(&capability)
    }

    pub fn offers(&self, capability: PluginCapability) -> bool {
        self.plugin.contains(&capability)
    }
}

fn service(capability: cleat_csi::v1::PluginCapability) -> Option<PluginCapability> {
    match capability.r#type? {
        cleat_csi::v1::plugin_capability::Type::Service(service) => PluginCapability::try_from(service.r#type).ok(),
        cleat_csi::v1::plugin_capability::Type::VolumeExpansion(_) => None,
    }
}

fn kind(capability: cleat_csi::v1::ControllerServiceCapability) -> Option<Capability> {
    match capability.r#type? {
        Type::Rpc(cleat_csi::v1::controller_service_capability::Rpc { r#type }) => rpc::Type::try_from(r#type).ok(),
    }
}
