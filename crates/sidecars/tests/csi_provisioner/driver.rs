//! A driver on a real socket that keeps volumes in memory and replies as the test scripts.

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

/// How one call is answered.
#[derive(Clone)]
pub(crate) enum ScriptedReply {
    Fail(Status),
    /// The call takes effect, but no reply is sent.
    Hang,
    /// The reply has a volume of one byte.
    TooSmall,
    /// The reply has a volume without its content source.
    WithoutSource,
}

#[derive(Default)]
pub(crate) struct Script {
    /// The replies to the next CreateVolume calls; further calls succeed.
    pub(crate) create_replies: VecDeque<ScriptedReply>,
    pub(crate) delete_replies: VecDeque<ScriptedReply>,
    pub(crate) free_bytes: i64,
    pub(crate) created: Vec<v1::CreateVolumeRequest>,
    pub(crate) deleted: Vec<v1::DeleteVolumeRequest>,
    pub(crate) capacity_requests: Vec<v1::GetCapacityRequest>,
    /// The existing volumes, by the name in their CreateVolume request.
    pub(crate) volumes: BTreeMap<String, v1::Volume>,
}

/// One driver instance with its own socket.
#[derive(Clone)]
pub(crate) struct ScriptedDriver {
    pub(crate) script: Arc<Mutex<Script>>,
    pub(crate) name: &'static str,
    /// The zone of its node, as NodeGetInfo reports it.
    pub(crate) zone: Option<&'static str>,
    pub(crate) supports_topology: bool,
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

impl ScriptedDriver {
    pub(crate) fn new(name: &'static str) -> Self {
        let script = Script { free_bytes: i64::MAX, ..Script::default() };
        Self { script: Arc::new(Mutex::new(script)), name, zone: None, supports_topology: false }
    }

    /// Serves on a socket in the directory until `stop` is cancelled.
    pub(crate) async fn serve(&self, dir: &Path, stop: &CancellationToken) -> Endpoint {
        let socket = format!("{}-{}.sock", self.name, self.zone.unwrap_or("anywhere"));
        let endpoint = Endpoint::unix(dir.join(socket));
        let mut routes = Routes::builder();
        routes.add_service(identity_server::IdentityServer::new(self.clone()));
        routes.add_service(controller_server::ControllerServer::new(self.clone()));
        routes.add_service(node_server::NodeServer::new(self.clone()));
        let listener = server::bind(&endpoint).await.unwrap();
        tokio::spawn(listener.serve(routes.routes(), stop.clone()));
        endpoint
    }

    fn create(&self, request: &v1::CreateVolumeRequest, reply: Option<&ScriptedReply>) -> v1::Volume {
        let requested = request.capacity_range.map_or(0, |range| range.required_bytes);
        let topologies = request.accessibility_requirements.as_ref().map(|r| r.preferred.clone()).unwrap_or_default();
        let volume = v1::Volume {
            volume_id: format!("vol-{}", request.name),
            capacity_bytes: if matches!(reply, Some(ScriptedReply::TooSmall)) { 1 } else { requested },
            volume_context: HashMap::from([("made".to_owned(), "here".to_owned())]),
            content_source: request
                .volume_content_source
                .clone()
                .filter(|_| !matches!(reply, Some(ScriptedReply::WithoutSource))),
            accessible_topology: topologies.into_iter().take(1).collect(),
        };
        self.script.lock().volumes.entry(request.name.clone()).or_insert(volume).clone()
    }
}

#[tonic::async_trait]
impl identity_server::Identity for ScriptedDriver {
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
        capabilities
            .extend(self.supports_topology.then(|| capability(PluginCapability::VolumeAccessibilityConstraints)));
        Ok(Response::new(v1::GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        Ok(Response::new(v1::ProbeResponse { ready: None }))
    }
}

#[tonic::async_trait]
impl node_server::Node for ScriptedDriver {
    async fn node_get_info(
        &self,
        _: Request<v1::NodeGetInfoRequest>,
    ) -> Result<Response<v1::NodeGetInfoResponse>, Status> {
        let accessible_topology = self.zone.map(zone);
        Ok(Response::new(v1::NodeGetInfoResponse { accessible_topology, ..Default::default() }))
    }
}

#[tonic::async_trait]
impl controller_server::Controller for ScriptedDriver {
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
        script.capacity_requests.push(request.into_inner());
        Ok(Response::new(v1::GetCapacityResponse { available_capacity: script.free_bytes, ..Default::default() }))
    }

    async fn create_volume(
        &self,
        request: Request<v1::CreateVolumeRequest>,
    ) -> Result<Response<v1::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let reply = {
            let mut script = self.script.lock();
            script.created.push(request.clone());
            script.create_replies.pop_front()
        };
        match &reply {
            Some(ScriptedReply::Fail(status)) => return Err(status.clone()),
            Some(ScriptedReply::Hang) => {
                self.create(&request, None);
                std::future::pending::<()>().await;
            }
            Some(ScriptedReply::TooSmall | ScriptedReply::WithoutSource) | None => {}
        }
        let volume = Some(self.create(&request, reply.as_ref()));
        Ok(Response::new(v1::CreateVolumeResponse { volume }))
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Result<Response<v1::DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        let mut script = self.script.lock();
        script.deleted.push(request.clone());
        if let Some(ScriptedReply::Fail(status)) = script.delete_replies.pop_front() {
            return Err(status);
        }
        script.volumes.retain(|_, volume| volume.volume_id != request.volume_id);
        Ok(Response::new(v1::DeleteVolumeResponse {}))
    }
}
