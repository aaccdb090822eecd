//! The Identity service: the name, the capabilities and the readiness of the driver.
use std::{collections::HashMap, sync::Arc};

use cleat_csi::v1::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse, identity_server::Identity, plugin_capability,
};
use tonic::{Request, Response, Status};

use super::{pools::Pools, topology::Accessibility};

pub const NAME: &str = "block.cleat.dev";

pub(crate) struct IdentityService {
    pools: Arc<Pools>,
    serves_controller: bool,
    accessibility: Accessibility,
}

impl IdentityService {
    pub(crate) fn new(pools: Arc<Pools>, serves_controller: bool, accessibility: Accessibility) -> IdentityService {
        IdentityService { pools, serves_controller, accessibility }
    }
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: NAME.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: HashMap::new(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        use plugin_capability::{service::Type as Service, volume_expansion::Type as Expansion};
        let service = |kind: Service| PluginCapability {
            r#type: Some(plugin_capability::Type::Service(plugin_capability::Service { r#type: kind.into() })),
        };
        let expansion = plugin_capability::VolumeExpansion { r#type: Expansion::Online.into() };
        let mut capabilities =
            vec![PluginCapability { r#type: Some(plugin_capability::Type::VolumeExpansion(expansion)) }];
        if self.serves_controller {
            capabilities.extend([Service::ControllerService, Service::GroupControllerService].map(service));
        }
        if self.accessibility.is_node_local() {
            let constraints = [Service::VolumeAccessibilityConstraints, Service::SnapshotAccessibilityConstraints];
            capabilities.extend(constraints.map(service));
        }
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        match tokio::fs::metadata(self.pools.root()).await {
            Ok(metadata) if metadata.is_dir() => Ok(Response::new(ProbeResponse { ready: Some(true) })),
            _ => Err(Status::failed_precondition(format!("the pool {} is gone", self.pools.root().display()))),
        }
    }
}
