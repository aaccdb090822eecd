//! Group controller service: snapshots of several volumes that all show one moment.
//!
//! Every mounted file system among the volumes is frozen before the first is copied, and thawed after the last. Nobody is
//! told of a group before all its members are ready; one that was cut short is cut anew by the repeated call.
use std::collections::{BTreeMap, BTreeSet};

use cleat_crash::point;
use cleat_csi::{
    v1::{self, group_controller_server::GroupController, group_controller_service_capability as capability},
    validate,
};
use tonic::{Request, Response, Status};

use super::{
    backend::Pool,
    controller::{snapshot_message, timestamp},
    cut::{self, Flush, Plan, Still},
    failure::Failure,
    locks::{self, Hold},
    parameters,
    pools::Pools,
    record::{GroupRecord, Moment, SnapshotRecord, SnapshotState},
    request::{id_for, is_id},
    shelf::Points,
    snapshot,
    worker::Worker,
};

const POINTS: Points = Points { retired: "driver:group-deleting", image_removed: "driver:group-removed" };

pub(crate) struct Service {
    worker: Worker,
}

impl Service {
    pub(crate) fn new(worker: Worker) -> Service {
        Service { worker }
    }
}

struct Member<'a> {
    source: &'a str,
    pool: std::sync::Arc<Pool>,
    volume: &'a str,
    id: String,
    plan: Option<Plan>,
}

impl Member<'_> {
    fn outer(&self) -> String {
        Pools::outer(Pools::name_of(self.source), &self.id)
    }
}

fn create(pools: &Pools, name: &str, sources: &BTreeSet<String>) -> Result<(String, GroupRecord), Failure> {
    let id = id_for(name);
    let mut members = Vec::new();
    for source in sources {
        let (pool, volume) = pools.of(source)?;
        if pool.peek(volume)?.is_none() {
            return Err(Failure::NoVolume(source.clone()));
        }
        // The slash makes it a name that no caller's name gives the same id as.
        members.push(Member { source, pool, volume, id: id_for(&format!("{name}/{source}")), plan: None });
    }
    let own = pools.named(None)?;
    let wanted = members.iter().flat_map(|member| {
        let Member { pool, volume, id, .. } = member;
        [(pool.volume_lock(volume), Hold::Exclusive), (pool.snapshot_lock(id), Hold::Exclusive)]
    });
    let _locks = locks::take(wanted.chain([(own.group_lock(&id), Hold::Exclusive)]), name)?;
    if let Some(existing) = pools.groups.read::<GroupRecord>(&id)? {
        if existing.name != name || !existing.members.keys().eq(sources) {
            return Err(Failure::OtherGroup(id));
        }
        if existing.ready {
            return Ok((id, existing));
        }
    }
    let of_members: BTreeMap<_, _> = members.iter().map(|member| (member.source.to_owned(), member.outer())).collect();
    let mut group = GroupRecord { name: name.to_owned(), members: of_members, created: Moment::now(), ready: false };
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
                let _ = member.pool.snapshots.remove(&member.id, &snapshot::POINTS);
            }
            let _ = pools.groups.remove(&id, &POINTS);
            Err(failure)
        }
    }
}

fn cut_all(id: &str, members: &mut [Member<'_>], group: &mut GroupRecord) -> Result<(), Failure> {
    let mut records = Vec::new();
    for member in members.iter_mut() {
        cut::release(&member.pool, member.volume)?;
        let record = snapshot::usable(&member.pool, member.volume)?;
        let share = member.pool.clones && !parameters::is_thick(&record.parameters);
        member.plan = Some(cut::plan(&member.pool, member.volume, &record, share)?);
        let snapshot = snapshot::draft(&member.id, member.source, &record, Some(id));
        member.pool.snapshots.write(&member.id, &snapshot)?;
        records.push((share, snapshot));
    }
    let mut still = Vec::new();
    for member in members.iter() {
        match &member.plan {
            Some(Plan::Hold { at } | Plan::Share { flush: Some(Flush::FileSystem(at)) }) => {
                still.push(Still::hold(&member.pool, member.volume, at)?);
            }
            Some(Plan::Share { flush: Some(device) }) => device.run()?,
            _ => {}
        }
    }
    group.created = Moment::now();
    for (member, (share, _)) in members.iter().zip(&records) {
        let (from, to) = (member.pool.image(member.volume), member.pool.snapshots.image(&member.id));
        cut::copy_image(&from, &to, *share)?;
    }
    drop(still);
    point("driver:group-copied");
    for (member, (_, mut snapshot)) in members.iter().zip(records) {
        snapshot.created = group.created;
        snapshot.state = SnapshotState::Ready;
        member.pool.snapshots.write(&member.id, &snapshot)?;
    }
    Ok(())
}

fn delete(pools: &Pools, id: &str, snapshots: &BTreeSet<String>) -> Result<(), Failure> {
    if !is_id(id) || pools.groups.is_gone(id)? {
        return Ok(());
    }
    let _lock = locks::take([(pools.named(None)?.group_lock(id), Hold::Exclusive)], id)?;
    let Some(group) = pools.groups.read::<GroupRecord>(id)? else {
        return pools.groups.clear(id, &POINTS);
    };
    same_members(id, &group, snapshots)?;
    for member in group.members.values() {
        snapshot::delete(pools, member, Some(id))?;
        point("driver:group-member-deleted");
    }
    pools.groups.remove(id, &POINTS)
}

fn same_members(id: &str, group: &GroupRecord, snapshots: &BTreeSet<String>) -> Result<(), Failure> {
    let members: BTreeSet<&String> = group.members.values().collect();
    if snapshots.is_empty() || snapshots.iter().collect::<BTreeSet<_>>() == members {
        Ok(())
    } else {
        Err(Failure::OtherMembers(id.to_owned()))
    }
}

fn message(pools: &Pools, id: String, group: &GroupRecord) -> Result<v1::VolumeGroupSnapshot, Failure> {
    let mut snapshots = Vec::new();
    for outer in group.members.values() {
        let (pool, inner) = pools.of(outer)?;
        if let Some(record) = pool.snapshots.read::<SnapshotRecord>(inner)? {
            snapshots.push(snapshot_message(outer.clone(), &record));
        }
    }
    let creation_time = Some(timestamp(group.created));
    Ok(v1::VolumeGroupSnapshot { group_snapshot_id: id, snapshots, creation_time, ready_to_use: group.ready })
}

#[tonic::async_trait]
impl GroupController for Service {
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
            .alone("group snapshot", &format!("group {name}"), move |pools| {
                let (id, group) = create(pools, &name, &sources)?;
                message(pools, id, &group)
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
            .alone("delete group snapshot", &format!("group {id}"), move |pools| delete(pools, &id, &snapshots))
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
            .read("get group snapshot", move |pools| {
                let group = pools.groups.read::<GroupRecord>(&id)?.ok_or_else(|| Failure::NoSnapshot(id.clone()))?;
                same_members(&id, &group, &snapshots)?;
                message(pools, id, &group)
            })
            .await?;
        Ok(Response::new(v1::GetVolumeGroupSnapshotResponse { group_snapshot: Some(group_snapshot) }))
    }
}
