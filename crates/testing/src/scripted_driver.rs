//! A CSI driver on a real unix socket. It keeps volumes in memory, records its calls, and replies as the test scripts.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use cleat_csi::v1::controller_service_capability::{Rpc, Type, rpc::Type as Capability};
use cleat_csi::v1::node_service_capability as node_capability;
use cleat_csi::v1::plugin_capability::{self, Service, service::Type as PluginCapability};
use cleat_csi::v1::{self, controller_server, identity_server, node_server};
use cleat_csi::{Endpoint, server};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::wait::within_timeout;

pub const DRIVER_NAME: &str = "scripted.test";
/// The driver's topology key.
pub const ZONE_KEY: &str = "scripted.test/zone";
/// The one entry of the publish context in every reply to ControllerPublishVolume.
pub const PUBLISH_CONTEXT: (&str, &str) = ("device", "/dev/x");

const ALL_CAPABILITIES: &[Capability] = &[
    Capability::CreateDeleteVolume,
    Capability::CreateDeleteSnapshot,
    Capability::CloneVolume,
    Capability::ModifyVolume,
    Capability::GetCapacity,
    Capability::PublishUnpublishVolume,
    Capability::PublishReadonly,
];

/// The methods whose replies can be scripted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    CreateVolume,
    DeleteVolume,
    ControllerPublishVolume,
    ControllerUnpublishVolume,
    NodeStageVolume,
    NodePublishVolume,
    NodeUnpublishVolume,
    NodeUnstageVolume,
}

/// The reply to one call.
#[derive(Clone, Debug)]
pub enum ScriptedReply {
    Succeed,
    /// The call has no effect.
    Fail(Status),
    /// The call takes effect, but no reply is sent.
    Hang,
    /// CreateVolume: the volume has one byte.
    TooSmall,
    /// CreateVolume: the volume has no content source.
    WithoutSource,
}

/// A call of the node service.
#[derive(Clone, Debug)]
pub struct NodeCall {
    pub method: Method,
    /// The staging path for stage and unstage, the target path for publish and unpublish.
    pub path: String,
}

/// The requests that the driver got, in order, and its volumes.
#[derive(Default)]
pub struct DriverState {
    replies: HashMap<Method, VecDeque<ScriptedReply>>,
    free_bytes: i64,
    pub created: Vec<v1::CreateVolumeRequest>,
    pub deleted: Vec<v1::DeleteVolumeRequest>,
    pub capacity_requests: Vec<v1::GetCapacityRequest>,
    pub published: Vec<v1::ControllerPublishVolumeRequest>,
    pub unpublished: Vec<v1::ControllerUnpublishVolumeRequest>,
    pub node_calls: Vec<NodeCall>,
    /// The existing volumes, by the name in their CreateVolume request.
    pub volumes: BTreeMap<String, v1::Volume>,
}

/// One driver with its own socket. Clones share the state.
#[derive(Clone)]
pub struct ScriptedDriver {
    state: Arc<watch::Sender<DriverState>>,
    name: &'static str,
    capabilities: &'static [Capability],
    /// The zone of its node, as NodeGetInfo reports it.
    pub zone: Option<&'static str>,
    supports_topology: bool,
}

impl ScriptedDriver {
    /// Every call succeeds until the test scripts another reply.
    pub fn new(name: &'static str) -> Self {
        let state = DriverState { free_bytes: i64::MAX, ..DriverState::default() };
        let (state, capabilities) = (Arc::new(watch::Sender::new(state)), ALL_CAPABILITIES);
        Self { state, name, capabilities, zone: None, supports_topology: false }
    }

    /// Offers only these capabilities of the controller service.
    pub fn with_capabilities(self, capabilities: &'static [Capability]) -> Self {
        Self { capabilities, ..self }
    }

    /// Volumes are accessible only in their zone.
    pub fn with_topology(self) -> Self {
        Self { supports_topology: true, ..self }
    }

    /// With topology, on a node in the zone.
    pub fn in_zone(self, zone: &'static str) -> Self {
        Self { zone: Some(zone), ..self.with_topology() }
    }

    /// Serves on a socket in the directory until `stop` is cancelled.
    pub async fn serve(&self, directory: &Path, stop: &CancellationToken) -> Endpoint {
        let socket = format!("{}-{}.sock", self.name, self.zone.unwrap_or("anywhere"));
        let endpoint = Endpoint::unix(directory.join(socket));
        self.serve_at(&endpoint, stop).await;
        endpoint
    }

    pub async fn serve_at(&self, endpoint: &Endpoint, stop: &CancellationToken) {
        let mut routes = Routes::builder();
        routes.add_service(identity_server::IdentityServer::new(self.clone()));
        routes.add_service(controller_server::ControllerServer::new(self.clone()));
        routes.add_service(node_server::NodeServer::new(self.clone()));
        let listener = server::bind(endpoint).await.unwrap();
        tokio::spawn(listener.serve(routes.routes(), stop.clone()));
    }

    /// The replies to the next calls of the method, after those that are already scripted. Further calls succeed.
    pub fn script(&self, method: Method, replies: impl IntoIterator<Item = ScriptedReply>) {
        self.state.send_modify(|state| state.replies.entry(method).or_default().extend(replies));
    }

    /// What GetCapacity reports.
    pub fn set_free_bytes(&self, bytes: i64) {
        self.state.send_modify(|state| state.free_bytes = bytes);
    }

    /// Read access. Calls wait while the returned value exists.
    pub fn state(&self) -> watch::Ref<'_, DriverState> {
        self.state.borrow()
    }

    /// Waits until `find` returns a value. It is called after every change of the state.
    pub async fn wait_for<T>(&self, what: &str, find: impl Fn(&DriverState) -> Option<T>) -> T {
        let mut changes = self.state.subscribe();
        within_timeout(what, async {
            loop {
                if let Some(found) = find(&changes.borrow_and_update()) {
                    return found;
                }
                changes.changed().await.unwrap();
            }
        })
        .await
    }

    pub async fn wait_until(&self, what: &str, holds: impl Fn(&DriverState) -> bool) {
        self.wait_for(what, |state| holds(state).then_some(())).await;
    }

    /// Takes the reply that is scripted for a call, and applies the call to the state. Both are one change of the state.
    fn call<T>(&self, method: Method, apply: impl FnOnce(&mut DriverState, &ScriptedReply) -> T) -> (ScriptedReply, T) {
        let mut result = None;
        self.state.send_modify(|state| {
            let reply = state.replies.get_mut(&method).and_then(VecDeque::pop_front).unwrap_or(ScriptedReply::Succeed);
            let applied = apply(state, &reply);
            result = Some((reply, applied));
        });
        result.expect("send_modify calls its argument")
    }

    fn node_call(&self, method: Method, path: String) -> ScriptedReply {
        self.call(method, |state, _| state.node_calls.push(NodeCall { method, path })).0
    }
}

impl DriverState {
    /// The volume that exists under the requested name, created if there is none.
    fn create(&mut self, request: &v1::CreateVolumeRequest, reply: &ScriptedReply) -> v1::Volume {
        let requested_bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
        let topologies = request.accessibility_requirements.as_ref().map(|r| r.preferred.clone()).unwrap_or_default();
        let content_source = request.volume_content_source.clone();
        let volume = v1::Volume {
            volume_id: format!("vol-{}", request.name),
            capacity_bytes: if matches!(reply, ScriptedReply::TooSmall) { 1 } else { requested_bytes },
            volume_context: HashMap::from([("made".to_owned(), "here".to_owned())]),
            content_source: content_source.filter(|_| !matches!(reply, ScriptedReply::WithoutSource)),
            accessible_topology: topologies.into_iter().take(1).collect(),
        };
        self.volumes.entry(request.name.clone()).or_insert(volume).clone()
    }
}

impl ScriptedReply {
    fn has_effect(&self) -> bool {
        !matches!(self, Self::Fail(_))
    }

    /// Never returns for `Hang`.
    async fn send<T>(self, response: T) -> Result<Response<T>, Status> {
        match self {
            Self::Succeed | Self::TooSmall | Self::WithoutSource => Ok(Response::new(response)),
            Self::Fail(status) => Err(status),
            Self::Hang => std::future::pending().await,
        }
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
impl controller_server::Controller for ScriptedDriver {
    async fn controller_get_capabilities(
        &self,
        _: Request<v1::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<v1::ControllerGetCapabilitiesResponse>, Status> {
        let capability = |kind: &Capability| v1::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: (*kind).into() })),
        };
        let capabilities = self.capabilities.iter().map(capability).collect();
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn get_capacity(
        &self,
        request: Request<v1::GetCapacityRequest>,
    ) -> Result<Response<v1::GetCapacityResponse>, Status> {
        self.state.send_modify(|state| state.capacity_requests.push(request.into_inner()));
        let available_capacity = self.state().free_bytes;
        Ok(Response::new(v1::GetCapacityResponse { available_capacity, ..Default::default() }))
    }

    async fn create_volume(
        &self,
        request: Request<v1::CreateVolumeRequest>,
    ) -> Result<Response<v1::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let (reply, volume) = self.call(Method::CreateVolume, |state, reply| {
            state.created.push(request.clone());
            reply.has_effect().then(|| state.create(&request, reply))
        });
        reply.send(v1::CreateVolumeResponse { volume }).await
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Result<Response<v1::DeleteVolumeResponse>, Status> {
        let request = request.into_inner();
        let (reply, ()) = self.call(Method::DeleteVolume, |state, reply| {
            if reply.has_effect() {
                state.volumes.retain(|_, volume| volume.volume_id != request.volume_id);
            }
            state.deleted.push(request);
        });
        reply.send(v1::DeleteVolumeResponse {}).await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<v1::ControllerPublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerPublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let (reply, ()) = self.call(Method::ControllerPublishVolume, |state, _| state.published.push(request));
        let (key, value) = PUBLISH_CONTEXT;
        let publish_context = HashMap::from([(key.to_owned(), value.to_owned())]);
        reply.send(v1::ControllerPublishVolumeResponse { publish_context }).await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<v1::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let (reply, ()) = self.call(Method::ControllerUnpublishVolume, |state, _| state.unpublished.push(request));
        reply.send(v1::ControllerUnpublishVolumeResponse {}).await
    }
}

#[tonic::async_trait]
impl node_server::Node for ScriptedDriver {
    async fn node_get_info(
        &self,
        _: Request<v1::NodeGetInfoRequest>,
    ) -> Result<Response<v1::NodeGetInfoResponse>, Status> {
        let segments = |zone: &str| HashMap::from([(ZONE_KEY.to_owned(), zone.to_owned())]);
        Ok(Response::new(v1::NodeGetInfoResponse {
            node_id: "scripted".to_owned(),
            accessible_topology: self.zone.map(|zone| v1::Topology { segments: segments(zone) }),
            ..Default::default()
        }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<v1::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<v1::NodeGetCapabilitiesResponse>, Status> {
        let rpc = node_capability::Rpc { r#type: node_capability::rpc::Type::StageUnstageVolume.into() };
        let stages = v1::NodeServiceCapability { r#type: Some(node_capability::Type::Rpc(rpc)) };
        Ok(Response::new(v1::NodeGetCapabilitiesResponse { capabilities: vec![stages] }))
    }

    async fn node_stage_volume(
        &self,
        request: Request<v1::NodeStageVolumeRequest>,
    ) -> Result<Response<v1::NodeStageVolumeResponse>, Status> {
        let path = request.into_inner().staging_target_path;
        self.node_call(Method::NodeStageVolume, path).send(Default::default()).await
    }

    async fn node_publish_volume(
        &self,
        request: Request<v1::NodePublishVolumeRequest>,
    ) -> Result<Response<v1::NodePublishVolumeResponse>, Status> {
        let path = request.into_inner().target_path;
        self.node_call(Method::NodePublishVolume, path).send(Default::default()).await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<v1::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<v1::NodeUnpublishVolumeResponse>, Status> {
        let path = request.into_inner().target_path;
        self.node_call(Method::NodeUnpublishVolume, path).send(Default::default()).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<v1::NodeUnstageVolumeRequest>,
    ) -> Result<Response<v1::NodeUnstageVolumeResponse>, Status> {
        let path = request.into_inner().staging_target_path;
        self.node_call(Method::NodeUnstageVolume, path).send(Default::default()).await
    }
}
