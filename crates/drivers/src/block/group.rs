//! The GroupController service: snapshots of several volumes at one point in time.
//!
//! All mounted file systems of the volumes are frozen before the first image is copied, and thawed after the last. A
//! group is returned to the caller only when all its members are ready. If a call is interrupted, the repeated call
//! cuts all members again.
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use cleat_crash::point;
use cleat_csi::{
    v1::{self, group_controller_server::GroupController, group_controller_service_capability as capability},
    validate,
};
use tonic::{Request, Response, Status};

use super::{
    failure::Failure,
    image_copy::{self, CopyPlan, FlushTarget},
    locks::{self, LockMode},
    parameters,
    pool::Pool,
    pools::Pools,
    record::{GroupRecord, SnapshotRecord, SnapshotState, UnixTime},
    records::DeletionCrashPoints,
    request::{id_for, is_id},
    response, snapshot,
    worker::Worker,
};

const GROUP_DELETION: DeletionCrashPoints =
    DeletionCrashPoints { retired: "driver:group-deleting", image_removed: "driver:group-removed" };

pub(crate) struct GroupControllerService {
    worker: Worker,
}

impl GroupControllerService {
    pub(crate) fn new(worker: Worker) -> GroupControllerService {
        GroupControllerService { worker }
    }
}

struct Member<'a> {
    /// The CSI id of the volume.
    source: &'a str,
    pool: Arc<Pool>,
    /// The id of the volume in its pool.
    volume: &'a str,
    /// The id of the snapshot in its pool.
    id: String,
    plan: Option<CopyPlan>,
}

impl Member<'_> {
    fn csi_id(&self) -> String {
        Pools::csi_id(Pools::pool_name(self.source), &self.id)
    }
}

fn create(pools: &Pools, name: &str, sources: &BTreeSet<String>) -> Result<(String, GroupRecord), Failure> {
    let id = id_for(name);
    let mut members = Vec::new();
    for source in sources {
        let (pool, volume) = pools.resolve(source)?;
        if pool.read_record(volume)?.is_none() {
            return Err(Failure::VolumeNotFound(source.clone()));
        }
        // The slash makes the name invalid as an id, so it is hashed, and cannot equal the id of a snapshot of another
        // name.
        members.push(Member { source, pool, volume, id: id_for(&format!("{name}/{source}")), plan: None });
    }
    let default_pool = pools.by_name(None)?;
    let member_locks = members.iter().flat_map(|member| {
        let Member { pool, volume, id, .. } = member;
        [(pool.volume_lock(volume), LockMode::Exclusive), (pool.snapshot_lock(id), LockMode::Exclusive)]
    });
    let _locks = locks::acquire(member_locks.chain([(default_pool.group_lock(&id), LockMode::Exclusive)]), name)?;
    if let Some(existing) = pools.groups.read::<GroupRecord>(&id)? {
        if existing.name != name || !existing.members.keys().eq(sources) {
            return Err(Failure::GroupExists(id));
        }
        if existing.ready {
            return Ok((id, existing));
        }
    }
    let member_ids: BTreeMap<_, _> = members.iter().map(|member| (member.source.to_owned(), member.csi_id())).collect();
    let mut group = GroupRecord { name: name.to_owned(), members: member_ids, created: UnixTime::now(), ready: false };
    pools.groups.write(&id, &group)?;
    point("driver:group-recorded");
    match cut_all(&id, &mut members, &mut group) {
        Ok(()) => {
            group.ready = true;
            pools.groups.write(&id, &group)?;
            Ok((id, group))
        }
        Err(failure) => {
            for member in &members {
                let _ = member.pool.snapshots.remove(&member.id, &snapshot::SNAPSHOT_DELETION);
            }
            let _ = pools.groups.remove(&id, &GROUP_DELETION);
            Err(failure)
        }
    }
}

/// Cuts the snapshots of all members at one point in time.
fn cut_all(id: &str, members: &mut [Member<'_>], group: &mut GroupRecord) -> Result<(), Failure> {
    let mut records = Vec::new();
    for member in members.iter_mut() {
        member.pool.thaw_leftover(member.volume)?;
        let record = snapshot::read_copyable(&member.pool, member.volume)?;
        let reflink = member.pool.can_reflink && !parameters::is_thick(&record.parameters);
        member.plan = Some(image_copy::plan_copy(&member.pool, member.volume, &record, reflink)?);
        let snapshot = snapshot::new_record(&member.id, member.source, &record, Some(id));
        member.pool.snapshots.write(&member.id, &snapshot)?;
        records.push((reflink, snapshot));
    }
    let mut frozen = Vec::new();
    for member in members.iter() {
        match &member.plan {
            Some(CopyPlan::Freeze { at } | CopyPlan::Reflink { flush: Some(FlushTarget::FileSystem(at)) }) => {
                frozen.push(member.pool.freeze(member.volume, at)?);
            }
            Some(CopyPlan::Reflink { flush: Some(device) }) => device.flush()?,
            _ => {}
        }
    }
    group.created = UnixTime::now();
    for (member, (reflink, _)) in members.iter().zip(&records) {
        let (from, to) = (member.pool.image_path(member.volume), member.pool.snapshots.image_path(&member.id));
        image_copy::copy_image(&from, &to, *reflink)?;
    }
    drop(frozen);
    point("driver:group-copied");
    for (member, (_, mut snapshot)) in members.iter().zip(records) {
        snapshot.created = group.created;
        snapshot.state = SnapshotState::Ready;
        member.pool.snapshots.write(&member.id, &snapshot)?;
    }
    Ok(())
}

fn delete(pools: &Pools, id: &str, snapshots: &BTreeSet<String>) -> Result<(), Failure> {
    if !is_id(id) || pools.groups.is_absent(id)? {
        return Ok(());
    }
    let _lock = locks::acquire([(pools.by_name(None)?.group_lock(id), LockMode::Exclusive)], id)?;
    let Some(group) = pools.groups.read::<GroupRecord>(id)? else {
        return pools.groups.remove_leftovers(id, &GROUP_DELETION);
    };
    check_members(id, &group, snapshots)?;
    for member in group.members.values() {
        snapshot::delete(pools, member, Some(id))?;
        point("driver:group-member-deleted");
    }
    pools.groups.remove(id, &GROUP_DELETION)
}

fn check_members(id: &str, group: &GroupRecord, snapshots: &BTreeSet<String>) -> Result<(), Failure> {
    let members: BTreeSet<&String> = group.members.values().collect();
    if snapshots.is_empty() || snapshots.iter().collect::<BTreeSet<_>>() == members {
        Ok(())
    } else {
        Err(Failure::GroupMembersDiffer(id.to_owned()))
    }
}

fn to_message(pools: &Pools, id: String, group: &GroupRecord) -> Result<v1::VolumeGroupSnapshot, Failure> {
    let mut snapshots = Vec::new();
    for csi_id in group.members.values() {
        let (pool, inner) = pools.resolve(csi_id)?;
        if let Some(record) = pool.snapshots.read::<SnapshotRecord>(inner)? {
            snapshots.push(response::snapshot(csi_id.clone(), &record));
        }
    }
    let creation_time = Some(response::timestamp(group.created));
    Ok(v1::VolumeGroupSnapshot { group_snapshot_id: id, snapshots, creation_time, ready_to_use: group.ready })
}

#[tonic::async_trait]
impl GroupController for GroupControllerService {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<v1::GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<v1::GroupControllerGetCapabilitiesResponse>, Status> {
        let rpc = capability::Rpc { r#type: capability::rpc::Type::CreateDeleteGetVolumeGroupSnapshot.into() };
        let capabilities = vec![v1::GroupControllerServiceCapability { r#type: Some(capability::Type::Rpc(rpc)) }];
        Ok(Response::new(v1::GroupControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<v1::CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<v1::CreateVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let name = validate::text("name", &request.name)?.to_owned();
        for id in validate::not_empty("source_volume_ids", &request.source_volume_ids)? {
            validate::text("source_volume_ids", id)?;
        }
        parameters::check_snapshot(&request.parameters)?;
        let sources: BTreeSet<String> = request.source_volume_ids.into_iter().collect();
        let group_snapshot = self
            .worker
            .run_exclusive("group snapshot", &format!("group {name}"), move |pools| {
                let (id, group) = create(pools, &name, &sources)?;
                to_message(pools, id, &group)
            })
            .await?;
        Ok(Response::new(v1::CreateVolumeGroupSnapshotResponse { group_snapshot: Some(group_snapshot) }))
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<v1::DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<v1::DeleteVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("group_snapshot_id", &request.group_snapshot_id)?.to_owned();
        let snapshots = request.snapshot_ids.into_iter().collect();
        self.worker
            .run_exclusive("delete group snapshot", &format!("group {id}"), move |pools| delete(pools, &id, &snapshots))
            .await?;
        Ok(Response::new(v1::DeleteVolumeGroupSnapshotResponse {}))
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<v1::GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<v1::GetVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let id = validate::text("group_snapshot_id", &request.group_snapshot_id)?.to_owned();
        let snapshots: BTreeSet<String> = request.snapshot_ids.into_iter().collect();
        let group_snapshot = self
            .worker
            .run("get group snapshot", move |pools| {
                let group =
                    pools.groups.read::<GroupRecord>(&id)?.ok_or_else(|| Failure::SnapshotNotFound(id.clone()))?;
                check_members(&id, &group, &snapshots)?;
                to_message(pools, id, &group)
            })
            .await?;
        Ok(Response::new(v1::GetVolumeGroupSnapshotResponse { group_snapshot: Some(group_snapshot) }))
    }
}
