//! A node service that mounts nothing: it logs every call, succeeds, or responds as the test has scripted it.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cleat_csi::v1::node_server::{Node, NodeServer};
use cleat_csi::v1::{self, node_service_capability as capability};
use cleat_csi::{Endpoint, server};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};

/// The response to one call of a method; without one the call succeeds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ScriptedResponse {
    Fail(Code),
    /// The call does not return.
    Hang,
}

#[derive(Clone)]
pub(crate) struct ScriptedDriver {
    script: Arc<Mutex<HashMap<&'static str, VecDeque<ScriptedResponse>>>>,
    calls: Arc<watch::Sender<Vec<String>>>,
}

impl ScriptedDriver {
    pub(crate) fn serve(socket: &Path, stop: CancellationToken) -> ScriptedDriver {
        let driver = ScriptedDriver { script: Arc::default(), calls: Arc::new(watch::Sender::new(Vec::new())) };
        let (endpoint, routes) = (Endpoint::unix(socket), Routes::new(NodeServer::new(driver.clone())));
        tokio::spawn(async move { server::serve(&endpoint, routes, stop).await.unwrap() });
        driver
    }

    pub(crate) fn push_response(&self, method: &'static str, response: ScriptedResponse) {
        self.script.lock().entry(method).or_default().push_back(response);
    }

    /// The method and the uid of the pod of every stage, publish, unpublish and unstage, in order.
    pub(crate) fn calls(&self) -> Vec<String> {
        self.calls.borrow().clone()
    }

    pub(crate) async fn wait_for_call(&self, method: &str) {
        let mut calls = self.calls.subscribe();
        let called = calls.wait_for(|calls| calls.iter().any(|c| c.starts_with(method)));
        tokio::time::timeout(Duration::from_secs(90), called).await.expect(method).unwrap();
    }

    async fn respond(&self, method: &'static str, path: &str) -> Result<(), Status> {
        let pod = path.split('/').skip_while(|c| *c != "pods").nth(1).unwrap_or_default();
        self.calls.send_modify(|calls| calls.push(format!("{method} {pod}").trim_end().to_owned()));
        let response = self.script.lock().get_mut(method).and_then(VecDeque::pop_front);
        match response {
            None => Ok(()),
            Some(ScriptedResponse::Fail(code)) => Err(Status::new(code, "as the test says")),
            Some(ScriptedResponse::Hang) => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl Node for ScriptedDriver {
    async fn node_stage_volume(
        &self,
        request: Request<v1::NodeStageVolumeRequest>,
    ) -> Result<Response<v1::NodeStageVolumeResponse>, Status> {
        self.respond("stage", &request.into_inner().staging_target_path).await?;
        Ok(Response::new(Default::default()))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<v1::NodeUnstageVolumeRequest>,
    ) -> Result<Response<v1::NodeUnstageVolumeResponse>, Status> {
        self.respond("unstage", &request.into_inner().staging_target_path).await?;
        Ok(Response::new(Default::default()))
    }

    async fn node_publish_volume(
        &self,
        request: Request<v1::NodePublishVolumeRequest>,
    ) -> Result<Response<v1::NodePublishVolumeResponse>, Status> {
        self.respond("publish", &request.into_inner().target_path).await?;
        Ok(Response::new(Default::default()))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<v1::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<v1::NodeUnpublishVolumeResponse>, Status> {
        self.respond("unpublish", &request.into_inner().target_path).await?;
        Ok(Response::new(Default::default()))
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<v1::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<v1::NodeGetVolumeStatsResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn node_expand_volume(
        &self,
        _: Request<v1::NodeExpandVolumeRequest>,
    ) -> Result<Response<v1::NodeExpandVolumeResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<v1::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<v1::NodeGetCapabilitiesResponse>, Status> {
        let rpc = capability::Rpc { r#type: capability::rpc::Type::StageUnstageVolume as i32 };
        let stages = v1::NodeServiceCapability { r#type: Some(capability::Type::Rpc(rpc)) };
        Ok(Response::new(v1::NodeGetCapabilitiesResponse { capabilities: vec![stages] }))
    }

    async fn node_get_info(
        &self,
        _: Request<v1::NodeGetInfoRequest>,
    ) -> Result<Response<v1::NodeGetInfoResponse>, Status> {
        Ok(Response::new(v1::NodeGetInfoResponse { node_id: "scripted".to_owned(), ..Default::default() }))
    }
}
