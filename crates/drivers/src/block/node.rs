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
    failure::{Failure, offloaded},
    request::Capability,
    stage::{self, Stats, Target},
};

/// A format or a check of a large volume; the caller's own deadline is usually shorter.
const STAGE_DEADLINE: Duration = Duration::from_secs(1800);
const MOUNT_DEADLINE: Duration = Duration::from_secs(60);
const STATS_DEADLINE: Duration = Duration::from_secs(10);

/// Loop devices cost little; this keeps a runaway scheduler from finding out how little.
const MAX_VOLUMES: i64 = 256;

pub(crate) struct Service {
    pool: Arc<Pool>,
    node: Arc<str>,
    in_flight: InFlight,
}

impl Service {
    pub(crate) fn new(pool: Arc<Pool>, node_id: String) -> Service {
        Service { pool, node: node_id.into(), in_flight: InFlight::new() }
    }

    /// Runs `work` off the async workers; a second call with the same key is refused until it ends.
    async fn alone(
        &self,
        deadline: Duration,
        key: String,
        work: impl FnOnce(&Pool, &str) -> Result<(), Failure> + Send + 'static,
    ) -> Result<(), Status> {
        let guard = self.in_flight.begin(&key)?;
        let (pool, node) = (Arc::clone(&self.pool), Arc::clone(&self.node));
        offload(deadline, key, move || {
            // Moved in: a caller that gives up must not let a second one in.
            let _guard = guard;
            work(&pool, &node)
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
        self.alone(STAGE_DEADLINE, id.clone(), move |pool, node| stage::stage(pool, node, &id, &at, &capability))
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
        self.alone(MOUNT_DEADLINE, id.clone(), move |pool, node| stage::unstage(pool, node, &id, &at)).await?;
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
        self.alone(MOUNT_DEADLINE, at_target(&id, &request.target_path), move |pool, node| {
            let target = Target { staging: &staging, path: &target, read_only: request.readonly };
            stage::publish(pool, node, &id, &target, &capability)
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
        self.alone(MOUNT_DEADLINE, at_target(&id, &request.target_path), move |pool, _| {
            stage::unpublish(pool, &id, &target)
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
        let pool = Arc::clone(&self.pool);
        let stats = offload(STATS_DEADLINE, format!("stats of {id}"), move || stage::stats(&pool, &id, &at))
            .await
            .map_err(offloaded)?;
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
        Ok(Response::new(v1::NodeGetVolumeStatsResponse { usage, volume_condition: None }))
    }

    async fn node_expand_volume(
        &self,
        _: Request<v1::NodeExpandVolumeRequest>,
    ) -> Result<Response<v1::NodeExpandVolumeResponse>, Status> {
        Err(Status::unimplemented("NodeExpandVolume is not among the driver's capabilities"))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<v1::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<v1::NodeGetCapabilitiesResponse>, Status> {
        use capability::rpc::Type;
        let capabilities = [Type::StageUnstageVolume, Type::GetVolumeStats, Type::SingleNodeMultiWriter]
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
            max_volumes_per_node: MAX_VOLUMES,
            accessible_topology: None,
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

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
