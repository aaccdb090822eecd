//! Identity service: who the driver is and whether it can work.
use std::{collections::HashMap, sync::Arc};

use cleat_csi::v1::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse, identity_server::Identity, plugin_capability,
};
use tonic::{Request, Response, Status};

use super::{NAME, backend::Pool};

pub(crate) struct Service {
    pool: Arc<Pool>,
    controller: bool,
}

impl Service {
    pub(crate) fn new(pool: Arc<Pool>, controller: bool) -> Service {
        Service { pool, controller }
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
        let service = plugin_capability::Service { r#type: plugin_capability::service::Type::ControllerService.into() };
        let controller = PluginCapability { r#type: Some(plugin_capability::Type::Service(service)) };
        let capabilities = if self.controller { vec![controller] } else { Vec::new() };
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        match tokio::fs::metadata(self.pool.root()).await {
            Ok(found) if found.is_dir() => Ok(Response::new(ProbeResponse { ready: Some(true) })),
            _ => Err(Status::failed_precondition(format!("the pool {} is gone", self.pool.root().display()))),
        }
    }
}
