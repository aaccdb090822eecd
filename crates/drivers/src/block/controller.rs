//! The Controller service: validates requests and runs them on the worker. Must not attach or mount anything.
use std::collections::HashMap;

use cleat_csi::{
    v1::{self, controller_server::Controller, controller_service_capability as capability},
    validate,
};
use cleat_host::{filesystem, loopdev};
use tonic::{Request, Response, Status};

use super::{
    create,
    failure::Failure,
    health,
    kernel_state::KernelState,
    paging::{parse_page, truncate_page},
    parameters,
    pools::Pools,
    record::{SnapshotRecord, VolumeRecord},
    request::{self, Capability, MAX_VOLUME_BYTES, SizeRange, VolumeRequirements, id_for},
    response::{self, to_i64},
    snapshot, stage,
    topology::Accessibility,
    worker::Worker,
};

pub(crate) struct ControllerService {
    worker: Worker,
    accessibility: Accessibility,
}

impl ControllerService {
    pub(crate) fn new(worker: Worker, accessibility: Accessibility) -> ControllerService {
        ControllerService { worker, accessibility }
    }

    fn volume_message(&self, csi_id: String, record: &VolumeRecord) -> v1::Volume {
        response::volume(csi_id, record, self.accessibility.topology())
    }
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<v1::CreateVolumeRequest>,
    ) -> Result<Response<v1::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let name = validate::text("name", &request.name)?.to_owned();
        let requirements = VolumeRequirements::parse(
            request.capacity_range.as_ref(),
            &request.volume_capabilities,
            &request.parameters,
            &request.mutable_parameters,
        )?;
        let source = request::parse_source(request.volume_content_source.as_ref())?;
        self.accessibility.check(request.accessibility_requirements.as_ref())?;
        let key = Pools::csi_id(parameters::pool(&requirements.parameters), &id_for(&name));
        let (id, record) = self
            .worker
            .run_exclusive("create", &key, move |pools| create::create_volume(pools, &name, &requirements, source))
            .await?;
        Ok(Response::new(v1::CreateVolumeResponse { volume: Some(self.volume_message(id, &record)) }))
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Result<Response<v1::DeleteVolumeResponse>, Status> {
        let id = validate::text("volume_id", &request.get_ref().volume_id)?.to_owned();
        self.worker
            .run_exclusive("delete", &id.clone(), move |pools| {
                let (pool, id) = pools.resolve(&id)?;
                let Some((locked, record)) = pool.lock_if_exists(id)? else { return pool.remove_leftovers(id) };
                if !record.published.is_empty() {
                    let nodes = record.published.into_keys().collect();
                    return Err(Failure::Published { id: id.to_owned(), nodes });
                }
                stage::detach_unused(id, &locked.image_path())?;
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
        let csi_id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let node = validate::bounded("node_id", &request.node_id, validate::MAX_NODE_ID_BYTES)?.to_owned();
        let capability = validate::present("volume_capability", &request.volume_capability)?;
        let publication = Capability::parse("volume_capability", capability)?.publication(request.readonly);
        let read_only = self
            .worker
            .run_exclusive("publish", &csi_id.clone(), move |pools| {
                let (pool, id) = pools.resolve(&csi_id)?;
                let (locked, record) = pool.lock_existing(id)?;
                let registered = pools.nodes.find(&node)?.ok_or_else(|| Failure::NodeNotRegistered(node.clone()))?;
                let mut publication = publication;
                publication.read_only |= parameters::is_read_only(&record.mutable_parameters);
                if record.published.contains_key(&node) {
                    locked.publish(record, &node, publication)?;
                } else {
                    pools.nodes.reserve(&registered, &csi_id, || pools.volumes_by_node())?;
                    locked
                        .publish(record, &node, publication)
                        .inspect_err(|_| pools.nodes.release(Some(&node), &csi_id))?;
                }
                Ok(publication.read_only)
            })
            .await?;
        let access = if read_only { "ro" } else { "rw" };
        let publish_context = HashMap::from([("access".to_owned(), access.to_owned())]);
        Ok(Response::new(v1::ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<v1::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let csi_id = validate::text("volume_id", &request.volume_id)?.to_owned();
        // An empty node_id means all nodes (CSI spec, ControllerUnpublishVolume).
        let node = Some(request.node_id).filter(|node| !node.is_empty());
        self.worker
            .run_exclusive("unpublish", &csi_id.clone(), move |pools| {
                let (pool, id) = pools.resolve(&csi_id)?;
                if let Some((locked, record)) = pool.lock_if_exists(id)? {
                    locked.unpublish(record, node.as_deref())?;
                }
                pools.nodes.release(node.as_deref(), &csi_id);
                Ok(())
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
        self.worker
            .run("validate", move |pools| {
                let (pool, inner) = pools.resolve(&id)?;
                pool.read_record(inner)?.ok_or(Failure::VolumeNotFound(id))
            })
            .await?;
        let requirements = VolumeRequirements::parse(
            None,
            &request.volume_capabilities,
            &request.parameters,
            &request.mutable_parameters,
        );
        let response = match requirements {
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
        let (limit, after) = parse_page(request.max_entries, &request.starting_token)?;
        let (found, next_token) = self.worker.run("list", move |pools| list_volumes(pools, limit, &after)).await?;
        let entry = |(id, record, problems): VolumeWithHealth| {
            let published_node_ids = record.published.keys().cloned().collect();
            let volume_condition = Some(health::condition(&problems));
            let status = Some(VolumeStatus { published_node_ids, volume_condition });
            Entry { volume: Some(self.volume_message(id, &record)), status }
        };
        let entries = found.into_iter().map(entry).collect();
        Ok(Response::new(v1::ListVolumesResponse { entries, next_token }))
    }

    async fn controller_get_volume(
        &self,
        request: Request<v1::ControllerGetVolumeRequest>,
    ) -> Result<Response<v1::ControllerGetVolumeResponse>, Status> {
        let id = validate::text("volume_id", &request.get_ref().volume_id)?.to_owned();
        let (id, record, problems) = self.worker.run("get", move |pools| read_volume(pools, id)).await?;
        let status = v1::controller_get_volume_response::VolumeStatus {
            published_node_ids: record.published.keys().cloned().collect(),
            volume_condition: Some(health::condition(&problems)),
        };
        let volume = Some(self.volume_message(id, &record));
        Ok(Response::new(v1::ControllerGetVolumeResponse { volume, status: Some(status) }))
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<v1::ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<v1::ControllerGetVolumeHealthResponse>, Status> {
        let id = validate::text("volume_id", &request.get_ref().volume_id)?.to_owned();
        let (id, _, problems) = self.worker.run("health", move |pools| read_volume(pools, id)).await?;
        let volume_health = Some(health::to_message(id, problems));
        Ok(Response::new(v1::ControllerGetVolumeHealthResponse { volume_health }))
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<v1::ControllerListVolumeHealthRequest>,
    ) -> Result<Response<v1::ControllerListVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        let (limit, after) = parse_page(request.max_entries, &request.starting_token)?;
        let (found, next_token) =
            self.worker.run("list health", move |pools| list_volumes(pools, limit, &after)).await?;
        let entries = found.into_iter().map(|(id, _, problems)| health::to_message(id, problems)).collect();
        Ok(Response::new(v1::ControllerListVolumeHealthResponse { entries, next_token }))
    }

    async fn get_capacity(
        &self,
        request: Request<v1::GetCapacityRequest>,
    ) -> Result<Response<v1::GetCapacityResponse>, Status> {
        let request = request.into_inner();
        let parameters = parameters::check(&request.parameters)?;
        let requirements =
            VolumeRequirements::parse(None, &request.volume_capabilities, &request.parameters, &HashMap::new());
        let is_possible = request.volume_capabilities.is_empty() || requirements.is_ok();
        let is_accessible =
            request.accessible_topology.as_ref().is_none_or(|topology| self.accessibility.satisfies(topology));
        if !is_possible || !is_accessible {
            return Ok(Response::new(v1::GetCapacityResponse::default()));
        }
        let file_system = requirements.ok().and_then(|requirements| requirements.file_system);
        let thick = parameters::is_thick(&parameters);
        let available = self
            .worker
            .run("capacity", move |pools| {
                let pool = pools.by_name(parameters::pool(&parameters))?;
                Ok(filesystem::statfs(pool.volumes.directory())?.available_bytes)
            })
            .await?;
        // A thin volume may be larger than the available space.
        let maximum = if thick { available.min(MAX_VOLUME_BYTES) } else { MAX_VOLUME_BYTES };
        Ok(Response::new(v1::GetCapacityResponse {
            available_capacity: to_i64(available),
            maximum_volume_size: Some(to_i64(maximum)),
            minimum_volume_size: Some(to_i64(request::min_volume_bytes(file_system))),
        }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<v1::ControllerExpandVolumeRequest>,
    ) -> Result<Response<v1::ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let range = SizeRange::parse(Some(validate::present("capacity_range", &request.capacity_range)?))?;
        let record = self
            .worker
            .run_exclusive("expand", &id.clone(), move |pools| {
                let (pool, id) = pools.resolve(&id)?;
                let (locked, mut record) = pool.lock_existing(id)?;
                let capacity = range.choose_expanded(record.capacity).map_err(Failure::Refused)?;
                locked.expand(&mut record, capacity)?;
                Ok(record)
            })
            .await?;
        // For a raw volume too, if it is published: its loop device must be resized.
        let node_expansion_required = record.file_system.is_some() || !record.published.is_empty();
        let capacity_bytes = to_i64(record.capacity);
        Ok(Response::new(v1::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required }))
    }

    async fn controller_modify_volume(
        &self,
        request: Request<v1::ControllerModifyVolumeRequest>,
    ) -> Result<Response<v1::ControllerModifyVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let mutable = parameters::check_mutable(&request.mutable_parameters);
        self.worker
            .run_exclusive("modify", &id.clone(), move |pools| {
                let (pool, id) = pools.resolve(&id)?;
                let (locked, mut record) = pool.lock_existing(id)?;
                let before = record.mutable_parameters.clone();
                record.mutable_parameters.extend(mutable.map_err(Failure::Refused)?);
                if record.mutable_parameters != before {
                    locked.write(&record)?;
                }
                // Applied at once to devices on this machine; on other machines by the next stage.
                if let Some(depth) = parameters::queue_depth(&record.mutable_parameters) {
                    for device in KernelState::of_image(&locked.image_path())?.devices {
                        loopdev::set_queue_depth(&device, depth)?;
                    }
                }
                Ok(())
            })
            .await?;
        Ok(Response::new(v1::ControllerModifyVolumeResponse {}))
    }

    async fn create_snapshot(
        &self,
        request: Request<v1::CreateSnapshotRequest>,
    ) -> Result<Response<v1::CreateSnapshotResponse>, Status> {
        let request = request.into_inner();
        let source = validate::text("source_volume_id", &request.source_volume_id)?.to_owned();
        let name = validate::text("name", &request.name)?.to_owned();
        parameters::check_snapshot(&request.parameters)?;
        self.accessibility.check(request.accessibility_requirements.as_ref())?;
        let (id, record) = self
            .worker
            .run_exclusive("snapshot", &format!("snapshot {name}"), move |pools| {
                snapshot::create(pools, &name, &source)
            })
            .await?;
        Ok(Response::new(v1::CreateSnapshotResponse { snapshot: Some(response::snapshot(id, &record)) }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<v1::DeleteSnapshotRequest>,
    ) -> Result<Response<v1::DeleteSnapshotResponse>, Status> {
        let id = validate::text("snapshot_id", &request.get_ref().snapshot_id)?.to_owned();
        self.worker
            .run_exclusive("delete snapshot", &format!("snapshot {id}"), move |pools| {
                snapshot::delete(pools, &id, None)
            })
            .await?;
        Ok(Response::new(v1::DeleteSnapshotResponse {}))
    }

    async fn get_snapshot(
        &self,
        request: Request<v1::GetSnapshotRequest>,
    ) -> Result<Response<v1::GetSnapshotResponse>, Status> {
        let id = validate::text("snapshot_id", &request.get_ref().snapshot_id)?.to_owned();
        let (id, record) = self
            .worker
            .run("get snapshot", move |pools| {
                let (pool, inner) = pools.resolve(&id)?;
                let found = pool.snapshots.read::<SnapshotRecord>(inner)?;
                found.map(|record| (id.clone(), record)).ok_or(Failure::SnapshotNotFound(id))
            })
            .await?;
        Ok(Response::new(v1::GetSnapshotResponse { snapshot: Some(response::snapshot(id, &record)) }))
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        let (limit, after) = parse_page(request.max_entries, &request.starting_token)?;
        let (found, next_token) = self
            .worker
            .run("list snapshots", move |pools| {
                let ids = match request.snapshot_id.as_str() {
                    "" => pools.list_ids(&after, |pool| pool.snapshots.list(""))?,
                    one => vec![one.to_owned()],
                };
                let mut found = Vec::new();
                for id in ids {
                    if found.len() > limit {
                        break;
                    }
                    let (pool, inner) = pools.resolve(&id)?;
                    let record = pool.snapshots.read::<SnapshotRecord>(inner)?;
                    let of_volume = |record: &SnapshotRecord| {
                        request.source_volume_id.is_empty() || record.source == request.source_volume_id
                    };
                    found.extend(record.filter(of_volume).map(|record| (id, record)));
                }
                let next = truncate_page(&mut found, limit, |(id, _)| id);
                Ok((found, next))
            })
            .await?;
        let entry = |(id, record): (String, SnapshotRecord)| v1::list_snapshots_response::Entry {
            snapshot: Some(response::snapshot(id, &record)),
        };
        let entries = found.into_iter().map(entry).collect();
        Ok(Response::new(v1::ListSnapshotsResponse { entries, next_token }))
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
            Type::GetCapacity,
            Type::CreateDeleteSnapshot,
            Type::ListSnapshots,
            Type::GetSnapshot,
            Type::CloneVolume,
            Type::ExpandVolume,
            Type::GetVolume,
            Type::VolumeCondition,
            Type::ModifyVolume,
            Type::SingleNodeMultiWriter,
            Type::GetVolumeHealth,
            Type::ListVolumeHealth,
        ]
        .into_iter()
        .map(|rpc| v1::ControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: rpc.into() })),
        })
        .collect();
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities }))
    }
}

/// The CSI id of a volume, its record and its problems.
type VolumeWithHealth = (String, VolumeRecord, Vec<health::HealthProblem>);

fn read_volume(pools: &Pools, csi_id: String) -> Result<VolumeWithHealth, Failure> {
    let (pool, id) = pools.resolve(&csi_id)?;
    let record = pool.read_record(id)?.ok_or_else(|| Failure::VolumeNotFound(csi_id.clone()))?;
    let problems = health::check_image(&pool, id, &record);
    Ok((csi_id, record, problems))
}

fn list_volumes(pools: &Pools, limit: usize, after: &str) -> Result<(Vec<VolumeWithHealth>, String), Failure> {
    let mut found = Vec::new();
    for id in pools.list_ids(after, |pool| pool.list(""))? {
        if found.len() > limit {
            break;
        }
        match read_volume(pools, id) {
            // CreateVolume has not returned it yet.
            Ok((_, record, _)) if record.filling => {}
            Ok(volume) => found.push(volume),
            // Deleted after the ids were listed.
            Err(Failure::VolumeNotFound(_)) => {}
            Err(failure) => return Err(failure),
        }
    }
    let next = truncate_page(&mut found, limit, |(id, _, _)| id);
    Ok((found, next))
}
