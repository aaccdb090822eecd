//! Controller service: checks requests and hands them to the pool. Knows nothing of nodes but their ids.
use std::{collections::HashMap, sync::Arc, time::Duration};

use cleat_csi::{
    InFlight,
    v1::{self, controller_server::Controller, controller_service_capability as capability},
    validate,
};
use cleat_host::offload;
use tonic::{Request, Response, Status};

use super::{
    backend::Pool,
    failure::{Failure, offloaded},
    record::Record,
    request::{Capability, Wanted, id_for},
    stage,
};

/// File operations only; a disk that needs longer is in trouble.
const DEADLINE: Duration = Duration::from_secs(60);

/// What ListVolumes answers at most when the caller sets no limit.
const PAGE: usize = 1000;

/// Marks a token as ours; the rest is the last id given out, so volumes that come and go do not disturb the listing.
const TOKEN: &str = "after:";

pub(crate) struct Service {
    pool: Arc<Pool>,
    in_flight: InFlight,
}

impl Service {
    pub(crate) fn new(pool: Arc<Pool>) -> Service {
        Service { pool, in_flight: InFlight::new() }
    }

    /// Runs `work` off the async workers, alone on its volume.
    async fn alone<T: Send + 'static>(
        &self,
        what: &'static str,
        id: &str,
        work: impl FnOnce(&Pool, &str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let guard = self.in_flight.begin(id)?;
        let (pool, id) = (Arc::clone(&self.pool), id.to_owned());
        offload(DEADLINE, format!("{what} {id}"), move || {
            // Moved in: a caller that gives up must not let a second one in.
            let _guard = guard;
            work(&pool, &id)
        })
        .await
        .map_err(offloaded)
    }

    async fn read<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Pool) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Status> {
        let pool = Arc::clone(&self.pool);
        offload(DEADLINE, what, move || work(&pool)).await.map_err(offloaded)
    }
}

#[tonic::async_trait]
impl Controller for Service {
    async fn create_volume(
        &self,
        request: Request<v1::CreateVolumeRequest>,
    ) -> Result<Response<v1::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let name = validate::text("name", &request.name)?.to_owned();
        let wanted = Wanted::parse(request.capacity_range.as_ref(), &request.volume_capabilities, &request.parameters)?;
        if request.volume_content_source.is_some() {
            return Err(Status::invalid_argument("volume_content_source is not supported"));
        }
        if !request.mutable_parameters.is_empty() {
            return Err(Status::invalid_argument("mutable_parameters are not supported"));
        }
        let capacity = wanted.range.choose(wanted.file_system)?;
        let (id, record) =
            self.alone("create", &id_for(&name), move |pool, _| pool.create(&name, &wanted, capacity)).await?;
        Ok(Response::new(v1::CreateVolumeResponse { volume: Some(volume(id, &record)) }))
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Result<Response<v1::DeleteVolumeResponse>, Status> {
        let id = validate::text("volume_id", &request.get_ref().volume_id)?;
        self.alone("delete", id, |pool, id| {
            let Some((locked, record)) = pool.existing(id)? else { return pool.sweep(id) };
            if !record.published.is_empty() {
                let nodes = record.published.into_keys().collect();
                return Err(Failure::Published { id: id.to_owned(), nodes });
            }
            stage::release(id, &locked.image())?;
            locked.remove()
        })
        .await?;
        Ok(Response::new(v1::DeleteVolumeResponse {}))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<v1::ControllerPublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerPublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?;
        let node = validate::bounded("node_id", &request.node_id, validate::MAX_NODE_ID)?.to_owned();
        let capability = validate::present("volume_capability", &request.volume_capability)?;
        let wanted = Capability::parse("volume_capability", capability)?.publication(request.readonly);
        self.alone("publish", id, move |pool, id| {
            let (locked, record) = pool.must_exist(id)?;
            locked.publish(record, &node, wanted)
        })
        .await?;
        let access = if wanted.read_only { "ro" } else { "rw" };
        let publish_context = HashMap::from([("access".to_owned(), access.to_owned())]);
        Ok(Response::new(v1::ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<v1::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?;
        // The spec reads an absent node as all nodes.
        let node = Some(request.node_id).filter(|node| !node.is_empty());
        self.alone("unpublish", id, move |pool, id| match pool.existing(id)? {
            Some((locked, record)) => locked.unpublish(record, node.as_deref()),
            None => Ok(()),
        })
        .await?;
        Ok(Response::new(v1::ControllerUnpublishVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<v1::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<v1::ValidateVolumeCapabilitiesResponse>, Status> {
        use v1::validate_volume_capabilities_response::Confirmed;
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        validate::not_empty("volume_capabilities", &request.volume_capabilities)?;
        self.read("validate", move |pool| pool.peek(&id)?.ok_or(Failure::NoVolume(id))).await?;
        let wanted = Wanted::parse(None, &request.volume_capabilities, &request.parameters);
        let response = match wanted {
            Ok(_) => v1::ValidateVolumeCapabilitiesResponse {
                confirmed: Some(Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                }),
                message: String::new(),
            },
            Err(status) => {
                v1::ValidateVolumeCapabilitiesResponse { confirmed: None, message: status.message().to_owned() }
            }
        };
        Ok(Response::new(response))
    }

    async fn list_volumes(
        &self,
        request: Request<v1::ListVolumesRequest>,
    ) -> Result<Response<v1::ListVolumesResponse>, Status> {
        use v1::list_volumes_response::{Entry, VolumeStatus};
        let request = request.into_inner();
        let limit = match usize::try_from(request.max_entries) {
            Ok(0) => PAGE,
            Ok(limit) => limit,
            Err(_) => return Err(Status::invalid_argument("max_entries is negative")),
        };
        let after = match request.starting_token.strip_prefix(TOKEN) {
            Some(id) => id.to_owned(),
            None if request.starting_token.is_empty() => String::new(),
            None => return Err(Status::aborted("starting_token is not one of ours")),
        };
        let (entries, next_token) = self
            .read("list", move |pool| {
                let ids = pool.list(&after)?;
                let next = if ids.len() > limit { ids.get(limit - 1).map(|id| format!("{TOKEN}{id}")) } else { None };
                let mut entries = Vec::new();
                for id in ids.into_iter().take(limit) {
                    // Deleted in the meantime is not an error.
                    let Some(record) = pool.peek(&id)? else { continue };
                    let published_node_ids = record.published.keys().cloned().collect();
                    let status = Some(VolumeStatus { published_node_ids, volume_condition: None });
                    entries.push(Entry { volume: Some(volume(id, &record)), status });
                }
                Ok((entries, next.unwrap_or_default()))
            })
            .await?;
        Ok(Response::new(v1::ListVolumesResponse { entries, next_token }))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<v1::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<v1::ControllerGetCapabilitiesResponse>, Status> {
        use capability::rpc::Type;
        let capabilities = [
            Type::CreateDeleteVolume,
            Type::PublishUnpublishVolume,
            Type::PublishReadonly,
            Type::ListVolumes,
            Type::ListVolumesPublishedNodes,
            Type::SingleNodeMultiWriter,
        ]
        .into_iter()
        .map(|rpc| v1::ControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: rpc.into() })),
        })
        .collect();
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn get_capacity(
        &self,
        _: Request<v1::GetCapacityRequest>,
    ) -> Result<Response<v1::GetCapacityResponse>, Status> {
        Err(not_offered("GetCapacity"))
    }

    async fn create_snapshot(
        &self,
        _: Request<v1::CreateSnapshotRequest>,
    ) -> Result<Response<v1::CreateSnapshotResponse>, Status> {
        Err(not_offered("CreateSnapshot"))
    }

    async fn delete_snapshot(
        &self,
        _: Request<v1::DeleteSnapshotRequest>,
    ) -> Result<Response<v1::DeleteSnapshotResponse>, Status> {
        Err(not_offered("DeleteSnapshot"))
    }

    async fn list_snapshots(
        &self,
        _: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        Err(not_offered("ListSnapshots"))
    }

    async fn get_snapshot(
        &self,
        _: Request<v1::GetSnapshotRequest>,
    ) -> Result<Response<v1::GetSnapshotResponse>, Status> {
        Err(not_offered("GetSnapshot"))
    }

    async fn controller_expand_volume(
        &self,
        _: Request<v1::ControllerExpandVolumeRequest>,
    ) -> Result<Response<v1::ControllerExpandVolumeResponse>, Status> {
        Err(not_offered("ControllerExpandVolume"))
    }

    async fn controller_get_volume(
        &self,
        _: Request<v1::ControllerGetVolumeRequest>,
    ) -> Result<Response<v1::ControllerGetVolumeResponse>, Status> {
        Err(not_offered("ControllerGetVolume"))
    }

    async fn controller_modify_volume(
        &self,
        _: Request<v1::ControllerModifyVolumeRequest>,
    ) -> Result<Response<v1::ControllerModifyVolumeResponse>, Status> {
        Err(not_offered("ControllerModifyVolume"))
    }
}

fn volume(id: String, record: &Record) -> v1::Volume {
    v1::Volume {
        capacity_bytes: i64::try_from(record.capacity).unwrap_or(i64::MAX),
        volume_id: id,
        volume_context: record.parameters.clone().into_iter().collect(),
        content_source: None,
        // Every node reaches the pool.
        accessible_topology: Vec::new(),
    }
}

fn not_offered(method: &str) -> Status {
    Status::unimplemented(format!("{method} is not among the driver's capabilities"))
}
