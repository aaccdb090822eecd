//! Controller service: checks requests and hands them on. Knows nothing of nodes but what they announced.
use std::collections::HashMap;

use cleat_csi::{
    v1::{self, controller_server::Controller, controller_service_capability as capability},
    validate,
};
use cleat_host::{filesystem, loopdev};
use prost_types::Timestamp;
use tonic::{Request, Response, Status};

use super::{
    create,
    failure::Failure,
    health, parameters,
    pools::Pools,
    record::{Moment, Record, SnapshotRecord, SnapshotState, Source},
    request::{self, Capability, MAX_SIZE, Range, Wanted, id_for},
    seen::Seen,
    snapshot, stage,
    topology::Reach,
    worker::Worker,
};

/// What a listing answers at most when the caller sets no limit.
const PAGE: usize = 1000;

/// Marks a token as ours; the rest is the last id given out, so what comes and goes does not disturb the listing.
const TOKEN: &str = "after:";

pub(crate) struct Service {
    worker: Worker,
    reach: Reach,
}

impl Service {
    pub(crate) fn new(worker: Worker, reach: Reach) -> Service {
        Service { worker, reach }
    }

    fn volume(&self, volume_id: String, record: &Record) -> v1::Volume {
        v1::Volume {
            capacity_bytes: signed(record.capacity),
            volume_id,
            volume_context: record.parameters.clone().into_iter().collect(),
            content_source: record.source.as_ref().map(content_source),
            accessible_topology: self.reach.topology().into_iter().collect(),
        }
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
        let wanted = Wanted::parse(
            request.capacity_range.as_ref(),
            &request.volume_capabilities,
            &request.parameters,
            &request.mutable_parameters,
        )?;
        let source = request::source(request.volume_content_source.as_ref())?;
        self.reach.admit(request.accessibility_requirements.as_ref())?;
        let key = Pools::outer(parameters::pool(&wanted.parameters), &id_for(&name));
        let (id, record) =
            self.worker.alone("create", &key, move |pools| create::create(pools, &name, &wanted, source)).await?;
        Ok(Response::new(v1::CreateVolumeResponse { volume: Some(self.volume(id, &record)) }))
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Result<Response<v1::DeleteVolumeResponse>, Status> {
        let id = validate::text("volume_id", &request.get_ref().volume_id)?.to_owned();
        self.worker
            .alone("delete", &id.clone(), move |pools| {
                let (pool, id) = pools.of(&id)?;
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
        let outer = validate::text("volume_id", &request.volume_id)?.to_owned();
        let node = validate::bounded("node_id", &request.node_id, validate::MAX_NODE_ID_BYTES)?.to_owned();
        let capability = validate::present("volume_capability", &request.volume_capability)?;
        let wanted = Capability::parse("volume_capability", capability)?.publication(request.readonly);
        let read_only = self
            .worker
            .alone("publish", &outer.clone(), move |pools| {
                let (pool, id) = pools.of(&outer)?;
                let (locked, record) = pool.must_exist(id)?;
                let announced = pools.nodes.find(&node)?.ok_or_else(|| Failure::NoNode(node.clone()))?;
                let mut wanted = wanted;
                wanted.read_only |= parameters::is_read_only(&record.mutable);
                if record.published.contains_key(&node) {
                    locked.publish(record, &node, wanted)?;
                } else {
                    pools.nodes.admit(&announced, &outer, || pools.publications())?;
                    locked.publish(record, &node, wanted).inspect_err(|_| pools.nodes.release(Some(&node), &outer))?;
                }
                Ok(wanted.read_only)
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
        let outer = validate::text("volume_id", &request.volume_id)?.to_owned();
        // The spec reads an absent node as all nodes.
        let node = Some(request.node_id).filter(|node| !node.is_empty());
        self.worker
            .alone("unpublish", &outer.clone(), move |pools| {
                let (pool, id) = pools.of(&outer)?;
                if let Some((locked, record)) = pool.existing(id)? {
                    locked.unpublish(record, node.as_deref())?;
                }
                pools.nodes.release(node.as_deref(), &outer);
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
            .read("validate", move |pools| {
                let (pool, inner) = pools.of(&id)?;
                pool.peek(inner)?.ok_or(Failure::NoVolume(id))
            })
            .await?;
        let wanted =
            Wanted::parse(None, &request.volume_capabilities, &request.parameters, &request.mutable_parameters);
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
        let (limit, after) = page(request.max_entries, &request.starting_token)?;
        let (found, next_token) = self.worker.read("list", move |pools| volumes(pools, limit, &after)).await?;
        let entry = |(id, record, complaints): Listed| {
            let published_node_ids = record.published.keys().cloned().collect();
            let volume_condition = Some(health::condition(&complaints));
            let status = Some(VolumeStatus { published_node_ids, volume_condition });
            Entry { volume: Some(self.volume(id, &record)), status }
        };
        let entries = found.into_iter().map(entry).collect();
        Ok(Response::new(v1::ListVolumesResponse { entries, next_token }))
    }

    async fn controller_get_volume(
        &self,
        request: Request<v1::ControllerGetVolumeRequest>,
    ) -> Result<Response<v1::ControllerGetVolumeResponse>, Status> {
        let id = validate::text("volume_id", &request.get_ref().volume_id)?.to_owned();
        let (id, record, complaints) = self.worker.read("get", move |pools| volume(pools, id)).await?;
        let status = v1::controller_get_volume_response::VolumeStatus {
            published_node_ids: record.published.keys().cloned().collect(),
            volume_condition: Some(health::condition(&complaints)),
        };
        let volume = Some(self.volume(id, &record));
        Ok(Response::new(v1::ControllerGetVolumeResponse { volume, status: Some(status) }))
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<v1::ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<v1::ControllerGetVolumeHealthResponse>, Status> {
        let id = validate::text("volume_id", &request.get_ref().volume_id)?.to_owned();
        let (id, _, complaints) = self.worker.read("health", move |pools| volume(pools, id)).await?;
        let volume_health = Some(health::message(id, complaints));
        Ok(Response::new(v1::ControllerGetVolumeHealthResponse { volume_health }))
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<v1::ControllerListVolumeHealthRequest>,
    ) -> Result<Response<v1::ControllerListVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        let (limit, after) = page(request.max_entries, &request.starting_token)?;
        let (found, next_token) = self.worker.read("list health", move |pools| volumes(pools, limit, &after)).await?;
        let entries = found.into_iter().map(|(id, _, complaints)| health::message(id, complaints)).collect();
        Ok(Response::new(v1::ControllerListVolumeHealthResponse { entries, next_token }))
    }

    async fn get_capacity(
        &self,
        request: Request<v1::GetCapacityRequest>,
    ) -> Result<Response<v1::GetCapacityResponse>, Status> {
        let request = request.into_inner();
        let parameters = parameters::check(&request.parameters)?;
        let wanted = Wanted::parse(None, &request.volume_capabilities, &request.parameters, &HashMap::new());
        let possible = request.volume_capabilities.is_empty() || wanted.is_ok();
        let reached = request.accessible_topology.as_ref().is_none_or(|place| self.reach.is_in(place));
        if !possible || !reached {
            return Ok(Response::new(v1::GetCapacityResponse::default()));
        }
        let file_system = wanted.ok().and_then(|wanted| wanted.file_system);
        let thick = parameters::is_thick(&parameters);
        let available = self
            .worker
            .read("capacity", move |pools| {
                let pool = pools.named(parameters::pool(&parameters))?;
                Ok(filesystem::statfs(pool.volumes.directory())?.available_bytes)
            })
            .await?;
        // A thin volume may be larger than what is left: that is what thin means.
        let largest = if thick { available.min(MAX_SIZE) } else { MAX_SIZE };
        Ok(Response::new(v1::GetCapacityResponse {
            available_capacity: signed(available),
            maximum_volume_size: Some(signed(largest)),
            minimum_volume_size: Some(signed(request::minimum(file_system))),
        }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<v1::ControllerExpandVolumeRequest>,
    ) -> Result<Response<v1::ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("volume_id", &request.volume_id)?.to_owned();
        let range = Range::parse(Some(validate::present("capacity_range", &request.capacity_range)?))?;
        let record = self
            .worker
            .alone("expand", &id.clone(), move |pools| {
                let (pool, id) = pools.of(&id)?;
                let (locked, mut record) = pool.must_exist(id)?;
                let capacity = range.grow(record.capacity).map_err(Failure::Refused)?;
                locked.expand(&mut record, capacity)?;
                Ok(record)
            })
            .await?;
        // The device of an attached raw volume has to be told too.
        let node_expansion_required = record.file_system.is_some() || !record.published.is_empty();
        let capacity_bytes = signed(record.capacity);
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
            .alone("modify", &id.clone(), move |pools| {
                let (pool, id) = pools.of(&id)?;
                let (locked, mut record) = pool.must_exist(id)?;
                let before = record.mutable.clone();
                record.mutable.extend(mutable.map_err(Failure::Refused)?);
                if record.mutable != before {
                    locked.write(&record)?;
                }
                // Where the volume is staged on this machine it applies at once; elsewhere, with the next stage.
                if let Some(depth) = parameters::queue_depth(&record.mutable) {
                    for device in Seen::of_image(&locked.image())?.devices {
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
        self.reach.admit(request.accessibility_requirements.as_ref())?;
        let (id, record) = self
            .worker
            .alone("snapshot", &format!("snapshot {name}"), move |pools| snapshot::create(pools, &name, &source))
            .await?;
        Ok(Response::new(v1::CreateSnapshotResponse { snapshot: Some(snapshot_message(id, &record)) }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<v1::DeleteSnapshotRequest>,
    ) -> Result<Response<v1::DeleteSnapshotResponse>, Status> {
        let id = validate::text("snapshot_id", &request.get_ref().snapshot_id)?.to_owned();
        self.worker
            .alone("delete snapshot", &format!("snapshot {id}"), move |pools| snapshot::delete(pools, &id, None))
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
            .read("get snapshot", move |pools| {
                let (pool, inner) = pools.of(&id)?;
                let found = pool.snapshots.read::<SnapshotRecord>(inner)?;
                found.map(|record| (id.clone(), record)).ok_or(Failure::NoSnapshot(id))
            })
            .await?;
        Ok(Response::new(v1::GetSnapshotResponse { snapshot: Some(snapshot_message(id, &record)) }))
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        let (limit, after) = page(request.max_entries, &request.starting_token)?;
        let (found, next_token) = self
            .worker
            .read("list snapshots", move |pools| {
                let ids = match request.snapshot_id.as_str() {
                    "" => pools.list(&after, |pool| pool.snapshots.list(""))?,
                    one => vec![one.to_owned()],
                };
                let mut found = Vec::new();
                for id in ids {
                    if found.len() > limit {
                        break;
                    }
                    let (pool, inner) = pools.of(&id)?;
                    let record = pool.snapshots.read::<SnapshotRecord>(inner)?;
                    let of_volume = |record: &SnapshotRecord| {
                        request.source_volume_id.is_empty() || record.source == request.source_volume_id
                    };
                    found.extend(record.filter(of_volume).map(|record| (id, record)));
                }
                let next = next_page(&mut found, limit, |(id, _)| id);
                Ok((found, next))
            })
            .await?;
        let entry = |(id, record): (String, SnapshotRecord)| v1::list_snapshots_response::Entry {
            snapshot: Some(snapshot_message(id, &record)),
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

type Listed = (String, Record, Vec<health::Complaint>);

fn volume(pools: &Pools, outer: String) -> Result<Listed, Failure> {
    let (pool, id) = pools.of(&outer)?;
    let record = pool.peek(id)?.ok_or_else(|| Failure::NoVolume(outer.clone()))?;
    let complaints = health::of_image(&pool, id, &record);
    Ok((outer, record, complaints))
}

fn volumes(pools: &Pools, limit: usize, after: &str) -> Result<(Vec<Listed>, String), Failure> {
    let mut found = Vec::new();
    for id in pools.list(after, |pool| pool.list(""))? {
        if found.len() > limit {
            break;
        }
        match volume(pools, id) {
            // Nobody was told of it yet.
            Ok((_, record, _)) if record.filling => {}
            Ok(listed) => found.push(listed),
            // Deleted in the meantime is not an error.
            Err(Failure::NoVolume(_)) => {}
            Err(failure) => return Err(failure),
        }
    }
    let next = next_page(&mut found, limit, |(id, _, _)| id);
    Ok((found, next))
}

fn page(max_entries: i32, token: &str) -> Result<(usize, String), Status> {
    let limit = match usize::try_from(max_entries) {
        Ok(0) => PAGE,
        Ok(limit) => limit,
        Err(_) => return Err(Status::invalid_argument("max_entries is negative")),
    };
    match token.strip_prefix(TOKEN) {
        Some(id) => Ok((limit, id.to_owned())),
        None if token.is_empty() => Ok((limit, String::new())),
        None => Err(Status::aborted("starting_token is not one of ours")),
    }
}

/// Cuts what was found to a page, and says where the next one begins.
fn next_page<T>(found: &mut Vec<T>, limit: usize, id: impl Fn(&T) -> &String) -> String {
    if found.len() <= limit {
        return String::new();
    }
    found.truncate(limit);
    found.last().map(|last| format!("{TOKEN}{}", id(last))).unwrap_or_default()
}

fn content_source(source: &Source) -> v1::VolumeContentSource {
    use v1::volume_content_source::{SnapshotSource, Type, VolumeSource};
    let r#type = match source {
        Source::Volume(id) => Type::Volume(VolumeSource { volume_id: id.clone() }),
        Source::Snapshot(id) => Type::Snapshot(SnapshotSource { snapshot_id: id.clone() }),
    };
    v1::VolumeContentSource { r#type: Some(r#type) }
}

pub(crate) fn snapshot_message(id: String, record: &SnapshotRecord) -> v1::Snapshot {
    v1::Snapshot {
        size_bytes: signed(record.size),
        snapshot_id: id,
        source_volume_id: record.source.clone(),
        creation_time: Some(timestamp(record.created)),
        ready_to_use: record.state == SnapshotState::Ready,
        group_snapshot_id: record.group.clone().unwrap_or_default(),
        // Optional, and csi-sanity takes every topology that it did not build itself for a wrong one. A restore that
        // wants to be elsewhere is refused by CreateVolume.
        accessible_topology: Vec::new(),
    }
}

pub(crate) fn timestamp(moment: Moment) -> Timestamp {
    Timestamp { seconds: moment.0, nanos: moment.1 }
}

pub(crate) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
