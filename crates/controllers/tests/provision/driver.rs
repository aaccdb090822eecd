//! A driver over a real socket that keeps volumes in memory, and answers as the test has written.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use cleat_csi::v1::controller_service_capability::{Rpc, Type, rpc::Type as Capability};
use cleat_csi::v1::plugin_capability::{self, Service, service::Type as PluginCapability};
use cleat_csi::v1::{self, controller_server, identity_server, node_server};
use cleat_csi::{Endpoint, server};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// What a call comes to.
#[derive(Clone)]
pub(crate) enum Answer {
    Fail(Status),
    /// It is done, and nobody hears of it.
    Hang,
    /// A volume of one byte.
    Small,
    /// A volume that does not say what it was copied from.
    Forgetful,
}

#[derive(Default)]
pub(crate) struct Script {
    /// What the next calls come to; when there are none left, they succeed.
    pub(crate) creations: VecDeque<Answer>,
    pub(crate) deletions: VecDeque<Answer>,
    pub(crate) free: i64,
    pub(crate) created: Vec<v1::CreateVolumeRequest>,
    pub(crate) deleted: Vec<v1::DeleteVolumeRequest>,
    pub(crate) asked: Vec<v1::GetCapacityRequest>,
    /// The volumes that there are, by the name they were made under.
    pub(crate) volumes: BTreeMap<String, v1::Volume>,
}

/// One driver, with its own socket.
#[derive(Clone)]
pub(crate) struct Scripted {
    pub(crate) script: Arc<Mutex<Script>>,
    pub(crate) name: &'static str,
    /// Where its node is; a driver that is nowhere knows nothing of topology.
    pub(crate) place: Option<&'static str>,
    pub(crate) knows_topology: bool,
}

pub(crate) const ZONE: &str = "scripted.test/zone";

const CAPABILITIES: [Capability; 6] = [
    Capability::CreateDeleteVolume,
    Capability::CreateDeleteSnapshot,
    Capability::CloneVolume,
    Capability::ModifyVolume,
    Capability::GetCapacity,
    Capability::PublishUnpublishVolume,
];

pub(crate) fn zone(name: &str) -> v1::Topology {
    v1::Topology { segments: HashMap::from([(ZONE.to_owned(), name.to_owned())]) }
}

impl Scripted {
    pub(crate) fn new(name: &'static str) -> Self {
        let script = Script { free: i64::MAX, ..Script::default() };
        Self { script: Arc::new(Mutex::new(script)), name, place: None, knows_topology: false }
    }

    /// Serves on a socket in the directory until `stop`.
    pub(crate) async fn serve(&self, dir: &Path, stop: &CancellationToken) -> Endpoint {
        let socket = format!("{}-{}.sock", self.name, self.place.unwrap_or("anywhere"));
        let endpoint = Endpoint::unix(dir.join(socket));
        let mut routes = Routes::builder();
        routes.add_service(identity_server::IdentityServer::new(self.clone()));
        routes.add_service(controller_server::ControllerServer::new(self.clone()));
        routes.add_service(node_server::NodeServer::new(self.clone()));
        let listener = server::bind(&endpoint).await.unwrap();
        tokio::spawn(listener.serve(routes.routes(), stop.clone()));
        endpoint
    }

    fn make(&self, request: &v1::CreateVolumeRequest, answer: Option<&Answer>) -> v1::Volume {
        let wanted = request.capacity_range.map_or(0, |range| range.required_bytes);
        let places = request.accessibility_requirements.as_ref().map(|r| r.preferred.clone()).unwrap_or_default();
        let made = v1::Volume {
            volume_id: format!("vol-{}", request.name),
            capacity_bytes: if matches!(answer, Some(Answer::Small)) { 1 } else { wanted },
            volume_context: HashMap::from([("made".to_owned(), "here".to_owned())]),
            content_source: request
                .volume_content_source
                .clone()
                .filter(|_| !matches!(answer, Some(Answer::Forgetful))),
            accessible_topology: places.into_iter().take(1).collect(),
        };
        self.script.lock().volumes.entry(request.name.clone()).or_insert(made).clone()
    }
}

#[tonic::async_trait]
impl identity_server::Identity for Scripted {
    async fn get_plugin_info(
        &self,
        _: Request<v1::GetPluginInfoRequest>,
    ) -> Result<Response<v1::GetPluginInfoResponse>, Status> {
        Ok(Response::new(v1::GetPluginInfoResponse { name: self.name.to_owned(), ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<v1::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<v1::GetPluginCapabilitiesResponse>, Status> {
        let capability = |kind: PluginCapability| v1::PluginCapability {
            r#type: Some(plugin_capability::Type::Service(Service { r#type: kind.into() })),
        };
        let mut capabilities = vec![capability(PluginCapability::ControllerService)];
        capabilities.extend(self.knows_topology.then(|| capability(PluginCapability::VolumeAccessibilityConstraints)));
        Ok(Response::new(v1::GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        Ok(Response::new(v1::ProbeResponse { ready: None }))
    }
}

#[tonic::async_trait]
impl node_server::Node for Scripted {
    async fn node_get_info(
        &self,
        _: Request<v1::NodeGetInfoRequest>,
    ) -> Result<Response<v1::NodeGetInfoResponse>, Status> {
        let accessible_topology = self.place.map(zone);
        Ok(Response::new(v1::NodeGetInfoResponse { accessible_topology, ..Default::default() }))
    }
}

#[tonic::async_trait]
impl controller_server::Controller for Scripted {
    async fn controller_get_capabilities(
        &self,
        _: Request<v1::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<v1::ControllerGetCapabilitiesResponse>, Status> {
        let capability =
            |kind: Capability| v1::ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })) };
        let capabilities = CAPABILITIES.map(capability).into();
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn get_capacity(
        &self,
        request: Request<v1::GetCapacityRequest>,
    ) -> Result<Response<v1::GetCapacityResponse>, Status> {
        let mut script = self.script.lock();
        script.asked.push(request.into_inner());
        Ok(Response::new(v1::GetCapacityResponse { available_capacity: script.free, ..Default::default() }))
    }

    async fn create_volume(
        &self,
        request: Request<v1::CreateVolumeRequest>,
    ) -> Result<Response<v1::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let answer = {
            let mut script = self.script.lock();
            script.created.push(request.clone());
            script.creations.pop_front()
        };
        match &answer {
            Some(Answer::Fail(status)) => return Err(status.clone()),
            Some(Answer::Hang) => {
                self.make(&request, None);
                std::future::pending::<()>().await;
            }
            Some(Answer::Small | Answer::Forgetful) | None => {}
        }
        let volume = Some(self.make(&request, answer.as_ref()));
        Ok(Response::new(v1::CreateVolumeResponse { volume }))
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Result<Response<v1::DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        let mut script = self.script.lock();
        script.deleted.push(request.clone());
        if let Some(Answer::Fail(status)) = script.deletions.pop_front() {
            return Err(status);
        }
        script.volumes.retain(|_, volume| volume.volume_id != request.volume_id);
        Ok(Response::new(v1::DeleteVolumeResponse {}))
    }
}
