//! Node service: checks requests and hands them to the steps in `stage`, off the async workers and with a deadline.
use std::{path::PathBuf, sync::Arc, time::Duration};

use cleat_csi::{
    InFlight,
    v1::{self, node_server::Node, node_service_capability as capability, volume_usage::Unit},
    validate,
};
use cleat_host::offload;
use tonic::{Request, Response, Status};

use super::{
    backend::Pool,
    controller::signed,
    failure::{Failure, offloaded},
    health,
    pools::Pools,
    request::{Capability, Range},
    stage::{self, Stats, Target},
    topology::Reach,
};

/// A format or a check of a large volume; the caller's own deadline is usually shorter.
const STAGE_DEADLINE: Duration = Duration::from_secs(1800);
const MOUNT_DEADLINE: Duration = Duration::from_secs(60);
const STATS_DEADLINE: Duration = Duration::from_secs(10);

pub(crate) struct Service {
    pools: Arc<Pools>,
    node: Arc<str>,
    max_volumes: i64,
    reach: Reach,
    in_flight: InFlight,
}

impl Service {
    pub(crate) fn new(pools: Arc<Pools>, node_id: &str, max_volumes: i64, reach: Reach) -> Service {
        Service { pools, node: node_id.into(), max_volumes, reach, in_flight: InFlight::new() }
    }

    /// Runs `work` on the volume off the async workers; a second call with the same key is refused until it ends.
    async fn alone<T: Send + 'static>(
        &self,
        deadline: Duration,
        key: String,
        id: String,
        work: impl FnOnce(&Pool, &str, &str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let guard = self.in_flight.begin(&key)?;
        let (pools, node) = (Arc::clone(&self.pools), Arc::clone(&self.node));
        offload(deadline, key, move || {
            // Moved in: a caller that gives up must not let a second one in.
            let _guard = guard;
            let (pool, id) = pools.of(&id)?;
            work(&pool, &node, id)
        })
        .await
        .map_err(offloaded)
    }

    async fn look<T: Send + 'static>(
        &self,
        id: String,
        work: impl FnOnce(&Pool, &str, &str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let (pools, node) = (Arc::clone(&self.pools), Arc::clone(&self.node));
        offload(STATS_DEADLINE, format!("look at {id}"), move || {
            let (pool, id) = pools.of(&id)?;
            work(&pool, &node, id)
        })
        .await
        .map_err(offloaded)
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_stage_volume(
        &self,
        request: Request<v1::NodeStageVolumeRequest>,
    ) -> Result<Response<v1::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let at = path("staging_target_path", &request.staging_target_path)?;
        let capability = parse(&request.volume_capability)?;
        self.alone(STAGE_DEADLINE, id.clone(), id, move |pool, node, id| {
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
        self.alone(MOUNT_DEADLINE, id.clone(), id, move |pool, node, id| stage::unstage(pool, node, id, &at)).await?;
        Ok(Response::new(v1::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<v1::NodePublishVolumeRequest>,
    ) -> Result<Response<v1::NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let target = path("target_path", &request.target_path)?;
        let capability = parse(&request.volume_capability)?;
        let staging = path("staging_target_path", &request.staging_target_path)?;
        // Pods on one node publish the same volume at the same time, each at its own target.
        self.alone(MOUNT_DEADLINE, at_target(&id, &request.target_path), id, move |pool, node, id| {
            let target = Target { staging: &staging, path: &target, read_only: request.readonly };
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
        self.alone(MOUNT_DEADLINE, at_target(&id, &request.target_path), id, move |pool, _, id| {
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
        // Any path may be asked about; where the volume is not, it is not found.
        let at = PathBuf::from(validate::bounded("volume_path", &request.volume_path, 4095)?);
        let (stats, complaints) = self.look(id, move |pool, node, id| stage::stats(pool, node, id, &at)).await?;
        let usage = |unit: Unit, available, total, used| v1::VolumeUsage {
            available: signed(available),
            total: signed(total),
            used: signed(used),
            unit: unit.into(),
        };
        let usage = match stats {
            Stats::Device { size } => vec![usage(Unit::Bytes, 0, size, 0)],
            Stats::FileSystem(found) => vec![
                usage(Unit::Bytes, found.available_bytes, found.total_bytes, found.used_bytes),
                usage(Unit::Inodes, found.free_inodes, found.total_inodes, found.used_inodes),
            ],
        };
        let volume_condition = Some(health::condition(&complaints));
        Ok(Response::new(v1::NodeGetVolumeStatsResponse { usage, volume_condition }))
    }

    async fn node_expand_volume(
        &self,
        request: Request<v1::NodeExpandVolumeRequest>,
    ) -> Result<Response<v1::NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let at = PathBuf::from(validate::bounded("volume_path", &request.volume_path, 4095)?);
        let range = Range::parse(request.capacity_range.as_ref())?;
        let capacity =
            self.alone(STAGE_DEADLINE, id.clone(), id, move |pool, _, id| stage::expand(pool, id, &at, range)).await?;
        Ok(Response::new(v1::NodeExpandVolumeResponse { capacity_bytes: signed(capacity) }))
    }

    async fn node_get_volume_health(
        &self,
        request: Request<v1::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<v1::NodeGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let at = [request.volume_publish_path, request.staging_target_path];
        let at = at.into_iter().find(|path| !path.is_empty()).map(PathBuf::from);
        let complaints =
            self.look(id.clone(), move |pool, node, id| stage::complaints(pool, node, id, at.as_deref())).await?;
        let volume_health = Some(health::message(id, complaints));
        Ok(Response::new(v1::NodeGetVolumeHealthResponse { volume_health }))
    }

    async fn node_get_storage_health(
        &self,
        _: Request<v1::NodeGetStorageHealthRequest>,
    ) -> Result<Response<v1::NodeGetStorageHealthResponse>, Status> {
        use v1::node_get_storage_health_response::StorageBackendHealth;
        let root = self.pools.root().to_owned();
        let reached = offload(STATS_DEADLINE, "look at the pool", move || cleat_host::filesystem::statfs(&root)).await;
        let unreachable = |message: String| StorageBackendHealth {
            status: v1::StorageHealthErrorType::StorageUnreachable.into(),
            reason: "PoolUnreachable".to_owned(),
            message,
            volume_capability: None,
        };
        let backend_health = reached.err().map(|error| unreachable(error.to_string())).into_iter().collect();
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
            accessible_topology: self.reach.topology(),
        }))
    }
}

fn path(field: &'static str, value: &str) -> Result<PathBuf, Status> {
    validate::path(field, value).map(PathBuf::from)
}

fn parse(capability: &Option<v1::VolumeCapability>) -> Result<Capability, Status> {
    Capability::parse("volume_capability", validate::present("volume_capability", capability)?)
}

fn at_target(id: &str, target: &str) -> String {
    format!("{id} at {target}")
}
