//! The client of a driver: one method per RPC. It does not retry and makes no decisions.
use std::time::Duration;

use tokio::time::Instant;

use crate::{
    Endpoint,
    call::{CallError, Transport},
    v1,
};

/// The default of the Kubernetes sidecars.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(15);

/// Cheap to clone; clones share one connection. It connects at the first call, and reconnects after the driver has
/// restarted.
#[derive(Clone, Debug)]
pub struct Client {
    transport: Transport,
}

impl Client {
    pub fn new(endpoint: Endpoint) -> Client {
        Client { transport: Transport::new(endpoint, DEFAULT_DEADLINE) }
    }

    /// Sets the deadline of every call through the returned client.
    pub fn with_deadline(self, deadline: Duration) -> Client {
        Client { transport: self.transport.with_deadline(deadline) }
    }

    pub(crate) fn transport(&self) -> &Transport {
        &self.transport
    }

    pub fn endpoint(&self) -> &Endpoint {
        self.transport.endpoint()
    }

    pub async fn probe(&self) -> Result<v1::ProbeResponse, CallError> {
        self.send_probe(v1::ProbeRequest {}).await
    }

    pub async fn get_plugin_info(&self) -> Result<v1::GetPluginInfoResponse, CallError> {
        self.send_get_plugin_info(v1::GetPluginInfoRequest {}).await
    }

    pub async fn get_plugin_capabilities(&self) -> Result<v1::GetPluginCapabilitiesResponse, CallError> {
        self.send_get_plugin_capabilities(v1::GetPluginCapabilitiesRequest {}).await
    }

    pub async fn controller_get_capabilities(&self) -> Result<v1::ControllerGetCapabilitiesResponse, CallError> {
        self.send_controller_get_capabilities(v1::ControllerGetCapabilitiesRequest {}).await
    }

    pub async fn group_controller_get_capabilities(
        &self,
    ) -> Result<v1::GroupControllerGetCapabilitiesResponse, CallError> {
        self.send_group_controller_get_capabilities(v1::GroupControllerGetCapabilitiesRequest {}).await
    }

    pub async fn node_get_capabilities(&self) -> Result<v1::NodeGetCapabilitiesResponse, CallError> {
        self.send_node_get_capabilities(v1::NodeGetCapabilitiesRequest {}).await
    }

    pub async fn node_get_info(&self) -> Result<v1::NodeGetInfoResponse, CallError> {
        self.send_node_get_info(v1::NodeGetInfoRequest {}).await
    }

    /// Repeats Probe until the driver is ready. Returns the last error after `timeout`.
    pub async fn wait_ready(&self, timeout: Duration) -> Result<(), CallError> {
        let until = Instant::now() + timeout;
        let mut pause = Duration::from_millis(2);
        loop {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let probe = self.clone().with_deadline(left.min(self.transport.deadline())).probe().await;
            let error = match probe {
                // By the specification, an absent `ready` means ready.
                Ok(response) if response.ready.unwrap_or(true) => return Ok(()),
                Ok(_) => CallError {
                    method: "Probe",
                    code: tonic::Code::FailedPrecondition,
                    message: "the driver says it is not ready".to_owned(),
                },
                Err(error) => error,
            };
            if Instant::now() + pause >= until {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }
}

macro_rules! calls {
    ($($module:ident :: $service:ident { $($visibility:vis $function:ident $(as $rpc:ident)?: $method:ident($request:ident) -> $response:ident;)* })*) => {
        impl Client {
            $($(
                $visibility async fn $function(&self, request: v1::$request) -> Result<v1::$response, CallError> {
                    let send = |channel, request| async move {
                        calls!(@send v1::$module::$service::new(channel), request, $function $($rpc)?)
                    };
                    // Boxed because the generated futures are large and callers hold many of them.
                    Box::pin(self.transport.call(stringify!($method), request, send)).await
                }
            )*)*
        }
    };
    (@send $client:expr, $request:ident, $function:ident) => { $client.$function($request).await };
    (@send $client:expr, $request:ident, $function:ident $rpc:ident) => { $client.$rpc($request).await };
}

calls! {
    identity_client::IdentityClient {
        send_probe as probe: Probe(ProbeRequest) -> ProbeResponse;
        send_get_plugin_info as get_plugin_info: GetPluginInfo(GetPluginInfoRequest) -> GetPluginInfoResponse;
        send_get_plugin_capabilities as get_plugin_capabilities: GetPluginCapabilities(GetPluginCapabilitiesRequest) -> GetPluginCapabilitiesResponse;
    }
    controller_client::ControllerClient {
        pub create_volume: CreateVolume(CreateVolumeRequest) -> CreateVolumeResponse;
        pub delete_volume: DeleteVolume(DeleteVolumeRequest) -> DeleteVolumeResponse;
        pub controller_publish_volume: ControllerPublishVolume(ControllerPublishVolumeRequest) -> ControllerPublishVolumeResponse;
        pub controller_unpublish_volume: ControllerUnpublishVolume(ControllerUnpublishVolumeRequest) -> ControllerUnpublishVolumeResponse;
        pub validate_volume_capabilities: ValidateVolumeCapabilities(ValidateVolumeCapabilitiesRequest) -> ValidateVolumeCapabilitiesResponse;
        pub list_volumes: ListVolumes(ListVolumesRequest) -> ListVolumesResponse;
        pub get_capacity: GetCapacity(GetCapacityRequest) -> GetCapacityResponse;
        send_controller_get_capabilities as controller_get_capabilities: ControllerGetCapabilities(ControllerGetCapabilitiesRequest) -> ControllerGetCapabilitiesResponse;
        pub create_snapshot: CreateSnapshot(CreateSnapshotRequest) -> CreateSnapshotResponse;
        pub delete_snapshot: DeleteSnapshot(DeleteSnapshotRequest) -> DeleteSnapshotResponse;
        pub list_snapshots: ListSnapshots(ListSnapshotsRequest) -> ListSnapshotsResponse;
        pub get_snapshot: GetSnapshot(GetSnapshotRequest) -> GetSnapshotResponse;
        pub controller_expand_volume: ControllerExpandVolume(ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse;
        pub controller_get_volume: ControllerGetVolume(ControllerGetVolumeRequest) -> ControllerGetVolumeResponse;
        pub controller_modify_volume: ControllerModifyVolume(ControllerModifyVolumeRequest) -> ControllerModifyVolumeResponse;
        pub controller_get_volume_health: ControllerGetVolumeHealth(ControllerGetVolumeHealthRequest) -> ControllerGetVolumeHealthResponse;
        pub controller_list_volume_health: ControllerListVolumeHealth(ControllerListVolumeHealthRequest) -> ControllerListVolumeHealthResponse;
    }
    group_controller_client::GroupControllerClient {
        send_group_controller_get_capabilities as group_controller_get_capabilities: GroupControllerGetCapabilities(GroupControllerGetCapabilitiesRequest) -> GroupControllerGetCapabilitiesResponse;
        pub create_volume_group_snapshot: CreateVolumeGroupSnapshot(CreateVolumeGroupSnapshotRequest) -> CreateVolumeGroupSnapshotResponse;
        pub delete_volume_group_snapshot: DeleteVolumeGroupSnapshot(DeleteVolumeGroupSnapshotRequest) -> DeleteVolumeGroupSnapshotResponse;
        pub get_volume_group_snapshot: GetVolumeGroupSnapshot(GetVolumeGroupSnapshotRequest) -> GetVolumeGroupSnapshotResponse;
    }
    node_client::NodeClient {
        pub node_stage_volume: NodeStageVolume(NodeStageVolumeRequest) -> NodeStageVolumeResponse;
        pub node_unstage_volume: NodeUnstageVolume(NodeUnstageVolumeRequest) -> NodeUnstageVolumeResponse;
        pub node_publish_volume: NodePublishVolume(NodePublishVolumeRequest) -> NodePublishVolumeResponse;
        pub node_unpublish_volume: NodeUnpublishVolume(NodeUnpublishVolumeRequest) -> NodeUnpublishVolumeResponse;
        pub node_get_volume_stats: NodeGetVolumeStats(NodeGetVolumeStatsRequest) -> NodeGetVolumeStatsResponse;
        pub node_expand_volume: NodeExpandVolume(NodeExpandVolumeRequest) -> NodeExpandVolumeResponse;
        send_node_get_capabilities as node_get_capabilities: NodeGetCapabilities(NodeGetCapabilitiesRequest) -> NodeGetCapabilitiesResponse;
        pub node_get_volume_health: NodeGetVolumeHealth(NodeGetVolumeHealthRequest) -> NodeGetVolumeHealthResponse;
        pub node_get_storage_health: NodeGetStorageHealth(NodeGetStorageHealthRequest) -> NodeGetStorageHealthResponse;
        send_node_get_info as node_get_info: NodeGetInfo(NodeGetInfoRequest) -> NodeGetInfoResponse;
    }
}
