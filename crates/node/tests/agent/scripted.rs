//! A driver that does nothing but what the test tells it to, and remembers every call.

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

/// What the next call of a method answers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    Fail(Code),
    /// No answer at all, as long as the caller cares to wait.
    Hang,
}

#[derive(Clone)]
pub(crate) struct Scripted {
    script: Arc<Mutex<HashMap<&'static str, VecDeque<Answer>>>>,
    calls: Arc<watch::Sender<Vec<String>>>,
}

impl Scripted {
    pub(crate) fn serve(socket: &Path, stop: CancellationToken) -> Scripted {
        let driver = Scripted { script: Arc::default(), calls: Arc::new(watch::Sender::new(Vec::new())) };
        let (endpoint, routes) = (Endpoint::unix(socket), Routes::new(NodeServer::new(driver.clone())));
        tokio::spawn(async move { server::serve(&endpoint, routes, stop).await.unwrap() });
        driver
    }

    pub(crate) fn next(&self, method: &'static str, answer: Answer) {
        self.script.lock().entry(method).or_default().push_back(answer);
    }

    /// Method, and uid of the pod, of every call that changes something, in order.
    pub(crate) fn calls(&self) -> Vec<String> {
        self.calls.borrow().clone()
    }

    pub(crate) async fn until_called(&self, method: &str) {
        let mut calls = self.calls.subscribe();
        let called = calls.wait_for(|calls| calls.iter().any(|c| c.starts_with(method)));
        tokio::time::timeout(Duration::from_secs(90), called).await.expect(method).unwrap();
    }

    async fn called(&self, method: &'static str, path: &str) -> Result<(), Status> {
        let pod = path.split('/').skip_while(|c| *c != "pods").nth(1).unwrap_or_default();
        self.calls.send_modify(|calls| calls.push(format!("{method} {pod}").trim_end().to_owned()));
        let answer = self.script.lock().get_mut(method).and_then(VecDeque::pop_front);
        match answer {
            None => Ok(()),
            Some(Answer::Fail(code)) => Err(Status::new(code, "as the test says")),
            Some(Answer::Hang) => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl Node for Scripted {
    async fn node_stage_volume(
        &self,
        request: Request<v1::NodeStageVolumeRequest>,
    ) -> Result<Response<v1::NodeStageVolumeResponse>, Status> {
        self.called("stage", &request.into_inner().staging_target_path).await?;
        Ok(Response::new(Default::default()))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<v1::NodeUnstageVolumeRequest>,
    ) -> Result<Response<v1::NodeUnstageVolumeResponse>, Status> {
        self.called("unstage", &request.into_inner().staging_target_path).await?;
        Ok(Response::new(Default::default()))
    }

    async fn node_publish_volume(
        &self,
        request: Request<v1::NodePublishVolumeRequest>,
    ) -> Result<Response<v1::NodePublishVolumeResponse>, Status> {
        self.called("publish", &request.into_inner().target_path).await?;
        Ok(Response::new(Default::default()))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<v1::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<v1::NodeUnpublishVolumeResponse>, Status> {
        self.called("unpublish", &request.into_inner().target_path).await?;
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
