//! The Node service: validates requests and runs the steps of `stage` off the async workers, with a deadline.
use std::{path::PathBuf, sync::Arc, time::Duration};

use cleat_csi::{
    InFlight,
    v1::{self, node_server::Node, node_service_capability as capability, volume_usage::Unit},
    validate,
};
use cleat_host::offload;
use tonic::{Request, Response, Status};

use super::{
    failure::{Failure, offload_status},
    health,
    pool::Pool,
    pools::Pools,
    request::{Capability, SizeRange},
    response::to_i64,
    stage::{self, PublishTarget, VolumeStats},
    topology::Accessibility,
};

/// Enough to format or check a large volume. The deadline of the caller is usually shorter.
const STAGE_DEADLINE: Duration = Duration::from_secs(1800);
const MOUNT_DEADLINE: Duration = Duration::from_secs(60);
const STATS_DEADLINE: Duration = Duration::from_secs(10);
/// PATH_MAX of Linux without the terminating NUL.
const MAX_PATH_BYTES: usize = 4095;

pub(crate) struct NodeService {
    pools: Arc<Pools>,
    node: Arc<str>,
    max_volumes: i64,
    accessibility: Accessibility,
    in_flight: InFlight,
}

impl NodeService {
    pub(crate) fn new(pools: Arc<Pools>, node_id: &str, max_volumes: i64, accessibility: Accessibility) -> NodeService {
        NodeService { pools, node: node_id.into(), max_volumes, accessibility, in_flight: InFlight::new() }
    }

    /// Runs `work` on the volume. Fails if another call with the same key is running.
    async fn run_exclusive<T: Send + 'static>(
        &self,
        deadline: Duration,
        key: String,
        id: String,
        work: impl FnOnce(&Pool, &str, &str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let guard = self.in_flight.begin(&key)?;
        let (pools, node) = (Arc::clone(&self.pools), Arc::clone(&self.node));
        offload(deadline, key, move || {
            // The thread owns the guard: after the deadline the work is still running, and must keep its key.
            let _guard = guard;
            let (pool, id) = pools.resolve(&id)?;
            work(&pool, &node, id)
        })
        .await
        .map_err(offload_status)
    }

    /// Runs `work`, which must not change anything, beside other calls.
    async fn inspect<T: Send + 'static>(
        &self,
        id: String,
        work: impl FnOnce(&Pool, &str, &str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let (pools, node) = (Arc::clone(&self.pools), Arc::clone(&self.node));
        offload(STATS_DEADLINE, format!("inspect {id}"), move || {
            let (pool, id) = pools.resolve(&id)?;
            work(&pool, &node, id)
        })
        .await
        .map_err(offload_status)
    }
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<v1::NodeStageVolumeRequest>,
    ) -> Result<Response<v1::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let at = path("staging_target_path", &request.staging_target_path)?;
        let capability = parse_capability(&request.volume_capability)?;
        self.run_exclusive(STAGE_DEADLINE, id.clone(), id, move |pool, node, id| {
            stage::stage(pool, node, id, &at, &capability)
        })
        .await?;
        Ok(Response::new(v1::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<v1::NodeUnstageVolumeRequest>,
    ) -> Result<Response<v1::NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let at = path("staging_target_path", &request.staging_target_path)?;
        self.run_exclusive(MOUNT_DEADLINE, id.clone(), id, move |pool, node, id| stage::unstage(pool, node, id, &at))
            .await?;
        Ok(Response::new(v1::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<v1::NodePublishVolumeRequest>,
    ) -> Result<Response<v1::NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let target = path("target_path", &request.target_path)?;
        let capability = parse_capability(&request.volume_capability)?;
        let staging = path("staging_target_path", &request.staging_target_path)?;
        // The key includes the target: several pods on a node may publish the same volume at the same time.
        self.run_exclusive(MOUNT_DEADLINE, target_key(&id, &request.target_path), id, move |pool, node, id| {
            let target = PublishTarget { staging: &staging, path: &target, read_only: request.readonly };
            stage::publish(pool, node, id, &target, &capability)
        })
        .await?;
        Ok(Response::new(v1::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<v1::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<v1::NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let target = path("target_path", &request.target_path)?;
        self.run_exclusive(MOUNT_DEADLINE, target_key(&id, &request.target_path), id, move |pool, _, id| {
            stage::unpublish(pool, id, &target)
        })
        .await?;
        Ok(Response::new(v1::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<v1::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<v1::NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        // Not validated as a target path: NOT_FOUND is returned for every path at which the volume is not mounted.
        let at = PathBuf::from(validate::bounded("volume_path", &request.volume_path, MAX_PATH_BYTES)?);
        let (stats, problems) = self.inspect(id, move |pool, node, id| stage::stats(pool, node, id, &at)).await?;
        let usage = |unit: Unit, available, total, used| v1::VolumeUsage {
            available: to_i64(available),
            total: to_i64(total),
            used: to_i64(used),
            unit: unit.into(),
        };
        let usage = match stats {
            VolumeStats::Device { size } => vec![usage(Unit::Bytes, 0, size, 0)],
            VolumeStats::FileSystem(found) => vec![
                usage(Unit::Bytes, found.available_bytes, found.total_bytes, found.used_bytes),
                usage(Unit::Inodes, found.free_inodes, found.total_inodes, found.used_inodes),
            ],
        };
        let volume_condition = Some(health::condition(&problems));
        Ok(Response::new(v1::NodeGetVolumeStatsResponse { usage, volume_condition }))
    }

    async fn node_expand_volume(
        &self,
        request: Request<v1::NodeExpandVolumeRequest>,
    ) -> Result<Response<v1::NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let at = PathBuf::from(validate::bounded("volume_path", &request.volume_path, MAX_PATH_BYTES)?);
        let range = SizeRange::parse(request.capacity_range.as_ref())?;
        let capacity = self
            .run_exclusive(STAGE_DEADLINE, id.clone(), id, move |pool, _, id| stage::expand(pool, id, &at, range))
            .await?;
        Ok(Response::new(v1::NodeExpandVolumeResponse { capacity_bytes: to_i64(capacity) }))
    }

    async fn node_get_volume_health(
        &self,
        request: Request<v1::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<v1::NodeGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let at = [request.volume_publish_path, request.staging_target_path];
        let at = at.into_iter().find(|path| !path.is_empty()).map(PathBuf::from);
        let problems = self
            .inspect(id.clone(), move |pool, node, id| stage::health_problems(pool, node, id, at.as_deref()))
            .await?;
        let volume_health = Some(health::to_message(id, problems));
        Ok(Response::new(v1::NodeGetVolumeHealthResponse { volume_health }))
    }

    async fn node_get_storage_health(
        &self,
        _: Request<v1::NodeGetStorageHealthRequest>,
    ) -> Result<Response<v1::NodeGetStorageHealthResponse>, Status> {
        use v1::node_get_storage_health_response::StorageBackendHealth;
        let root = self.pools.root().to_owned();
        let usage = offload(STATS_DEADLINE, "inspect the pool", move || cleat_host::filesystem::statfs(&root)).await;
        let unreachable = |message: String| StorageBackendHealth {
            status: v1::StorageHealthErrorType::StorageUnreachable.into(),
            reason: "PoolUnreachable".to_owned(),
            message,
            volume_capability: None,
        };
        let backend_health = usage.err().map(|error| unreachable(error.to_string())).into_iter().collect();
        Ok(Response::new(v1::NodeGetStorageHealthResponse { backend_health }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<v1::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<v1::NodeGetCapabilitiesResponse>, Status> {
        use capability::rpc::Type;
        let capabilities = [
            Type::StageUnstageVolume,
            Type::GetVolumeStats,
            Type::ExpandVolume,
            Type::VolumeCondition,
            Type::SingleNodeMultiWriter,
            Type::GetVolumeHealth,
            Type::GetStorageHealth,
        ]
        .into_iter()
        .map(|rpc| v1::NodeServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: rpc.into() })),
        })
        .collect();
        Ok(Response::new(v1::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _: Request<v1::NodeGetInfoRequest>,
    ) -> Result<Response<v1::NodeGetInfoResponse>, Status> {
        Ok(Response::new(v1::NodeGetInfoResponse {
            node_id: self.node.to_string(),
            max_volumes_per_node: self.max_volumes,
            accessible_topology: self.accessibility.topology(),
        }))
    }
}

fn path(field: &'static str, value: &str) -> Result<PathBuf, Status> {
    validate::path(field, value).map(PathBuf::from)
}

fn parse_capability(capability: &Option<v1::VolumeCapability>) -> Result<Capability, Status> {
    Capability::parse("volume_capability", validate::present("volume_capability", capability)?)
}

fn target_key(id: &str, target: &str) -> String {
    format!("{id} at {target}")
}
