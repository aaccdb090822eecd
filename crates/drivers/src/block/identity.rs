//! Identity service: who the driver is and whether it can work.
use std::{collections::HashMap, sync::Arc};

use cleat_csi::v1::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse, identity_server::Identity, plugin_capability,
};
use tonic::{Request, Response, Status};

use super::{NAME, pools::Pools, topology::Reach};

pub(crate) struct Service {
    pools: Arc<Pools>,
    controller: bool,
    reach: Reach,
}

impl Service {
    pub(crate) fn new(pools: Arc<Pools>, controller: bool, reach: Reach) -> Service {
        Service { pools, controller, reach }
    }
}

#[tonic::async_trait]
impl Identity for Service {
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
        if self.controller {
            capabilities.extend([Service::ControllerService, Service::GroupControllerService].map(service));
        }
        if self.reach.is_limited() {
            let constraints = [Service::VolumeAccessibilityConstraints, Service::SnapshotAccessibilityConstraints];
            capabilities.extend(constraints.map(service));
        }
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        match tokio::fs::metadata(self.pools.root()).await {
            Ok(found) if found.is_dir() => Ok(Response::new(ProbeResponse { ready: Some(true) })),
            _ => Err(Status::failed_precondition(format!("the pool {} is gone", self.pools.root().display()))),
        }
    }
}
