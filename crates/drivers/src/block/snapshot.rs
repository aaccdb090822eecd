//! Snapshots of one volume: cuts them, copies them in the background where the pool cannot share blocks, and deletes
//! them.
//!
//! A snapshot contains the data of the time at which CreateSnapshot first reported it as cut. An interrupted copy is
//! repeated only if the image of the volume has not changed since. Otherwise the snapshot is lost: CreateSnapshot for
//! its name and CreateVolume from it fail with DATA_LOSS until it is deleted.
use std::{
    sync::{
        Arc,
        mpsc::{self, Sender},
    },
    thread,
    time::Duration,
};

use cleat_crash::point;

use super::{
    failure::Failure,
    image_copy::{self, CopyPlan, FlushTarget},
    locks::{self, LockMode},
    parameters,
    pool::Pool,
    pools::Pools,
    record::{SnapshotRecord, SnapshotState, UnixTime, VolumeRecord},
    records::DeletionCrashPoints,
    request::{id_for, is_id},
};

/// How long CreateSnapshot waits for a copy before it returns the snapshot with `ready_to_use: false`.
const COPY_WAIT: Duration = Duration::from_millis(250);

pub(crate) const SNAPSHOT_DELETION: DeletionCrashPoints =
    DeletionCrashPoints { retired: "driver:snapshot-deleting", image_removed: "driver:snapshot-image-removed" };

/// Idempotent by name. Returns the CSI id and the record when the snapshot is cut, whether or not it is ready.
pub(crate) fn create(pools: &Pools, name: &str, source: &str) -> Result<(String, SnapshotRecord), Failure> {
    let (pool, volume) = pools.resolve(source)?;
    let id = id_for(name);
    let csi_id = Pools::csi_id(Pools::pool_name(source), &id);
    for (_, other) in pools.all()? {
        if other.root() != pool.root() && other.snapshots.read::<SnapshotRecord>(&id)?.is_some() {
            return Err(Failure::SnapshotExists(id));
        }
    }
    if let Some(existing) = pool.snapshots.read::<SnapshotRecord>(&id)? {
        if existing.source != source || existing.name != name {
            return Err(Failure::SnapshotExists(id));
        }
        match existing.state {
            SnapshotState::Ready => return Ok((csi_id, existing)),
            SnapshotState::Lost => return Err(Failure::SnapshotLost(id)),
            SnapshotState::Copying { .. } if is_in_progress(&pool, &id)? => return Ok((csi_id, existing)),
            SnapshotState::Copying { .. } | SnapshotState::Cutting => {}
        }
    }
    let (sender, receiver) = mpsc::channel();
    let job = SnapshotJob { pool, volume: volume.to_owned(), id, name: name.to_owned(), source: source.to_owned() };
    thread::Builder::new()
        .name("snapshot".into())
        .spawn(move || {
            let result = job.run(&sender);
            // Fails if the call has returned already; the record then has the result.
            let _ = sender.send(result);
        })
        .map_err(|source| Failure::Io { step: "start a thread for", path: csi_id.clone().into(), source })?;
    let thread_died = || Failure::SnapshotLost(csi_id.clone());
    let cut = receiver.recv().map_err(|_| thread_died())??;
    if cut.state == SnapshotState::Ready {
        return Ok((csi_id, cut));
    }
    match receiver.recv_timeout(COPY_WAIT) {
        Ok(result) => Ok((csi_id, result?)),
        Err(mpsc::RecvTimeoutError::Timeout) => Ok((csi_id, cut)),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(thread_died()),
    }
}

/// Whether a process is cutting or copying the snapshot: it then holds the lock of the snapshot.
pub(crate) fn is_in_progress(pool: &Pool, id: &str) -> Result<bool, Failure> {
    Ok(locks::try_acquire(pool.snapshot_lock(id), id)?.is_none())
}

/// Cutting and copying one snapshot.
struct SnapshotJob {
    pool: Arc<Pool>,
    /// The id of the volume in its pool.
    volume: String,
    /// The id of the snapshot in its pool.
    id: String,
    name: String,
    /// The CSI id of the volume.
    source: String,
}

impl SnapshotJob {
    /// Cuts and copies the snapshot, and returns its final record. If the image has to be copied, the record is also
    /// sent to `progress` when the snapshot is cut and before the copy starts.
    fn run(&self, progress: &Sender<Result<SnapshotRecord, Failure>>) -> Result<SnapshotRecord, Failure> {
        let SnapshotJob { pool, volume, id, .. } = self;
        if !is_id(volume) {
            return Err(Failure::VolumeNotFound(volume.clone()));
        }
        let required_locks =
            [(pool.volume_lock(volume), LockMode::Exclusive), (pool.snapshot_lock(id), LockMode::Exclusive)];
        let _locks = locks::acquire(required_locks, volume)?;
        match pool.snapshots.read::<SnapshotRecord>(id)? {
            Some(existing) => match existing.state {
                SnapshotState::Ready => return Ok(existing),
                SnapshotState::Lost => return Err(Failure::SnapshotLost(id.clone())),
                SnapshotState::Copying { image_modified } => return self.resume(existing, image_modified),
                SnapshotState::Cutting => {}
            },
            None => pool.snapshots.remove_leftovers(id, &SNAPSHOT_DELETION)?,
        }
        pool.thaw_leftover(volume)?;
        let record = read_copyable(pool, volume)?;
        let reflink = pool.can_reflink && !parameters::is_thick(&record.parameters);
        let plan = image_copy::plan_copy(pool, volume, &record, reflink)?;
        let mut snapshot = new_record(&self.name, &self.source, &record, None);
        pool.snapshots.write_new(id, &snapshot)?.sync()?;
        point("driver:snapshot-recorded");
        match self.cut(&mut snapshot, &plan, progress) {
            Ok(()) => Ok(snapshot),
            Err(failure) => {
                self.discard_or_mark_lost(snapshot);
                Err(failure)
            }
        }
    }

    fn cut(
        &self,
        snapshot: &mut SnapshotRecord,
        plan: &CopyPlan,
        progress: &Sender<Result<SnapshotRecord, Failure>>,
    ) -> Result<(), Failure> {
        let SnapshotJob { pool, volume, id, .. } = self;
        let image = pool.image_path(volume);
        let frozen = match plan {
            CopyPlan::Reflink { flush } => {
                flush.iter().try_for_each(FlushTarget::flush)?;
                snapshot.created = UnixTime::now();
                image_copy::copy_image(&image, &pool.snapshots.image_path(id), true)?;
                return self.mark_ready(snapshot);
            }
            CopyPlan::Freeze { at } => Some(pool.freeze(volume, at)?),
            CopyPlan::Copy => None,
        };
        snapshot.created = UnixTime::now();
        snapshot.state = SnapshotState::Copying { image_modified: image_copy::last_modified(&image)? };
        pool.snapshots.write(id, snapshot)?;
        point("driver:snapshot-copying");
        let _ = progress.send(Ok(snapshot.clone()));
        image_copy::copy_image(&image, &pool.snapshots.image_path(id), false)?;
        drop(frozen);
        self.mark_ready(snapshot)
    }

    fn mark_ready(&self, snapshot: &mut SnapshotRecord) -> Result<(), Failure> {
        point("driver:snapshot-copied");
        snapshot.state = SnapshotState::Ready;
        self.pool.snapshots.write(&self.id, snapshot)
    }

    /// Repeats an interrupted copy, if the image has not changed since the snapshot was cut.
    fn resume(&self, mut snapshot: SnapshotRecord, image_modified: UnixTime) -> Result<SnapshotRecord, Failure> {
        let SnapshotJob { pool, volume, id, .. } = self;
        let image = pool.image_path(volume);
        let frozen =
            match read_copyable(pool, volume).and_then(|record| image_copy::plan_copy(pool, volume, &record, false)) {
                Ok(CopyPlan::Freeze { at }) => Some(pool.freeze(volume, &at)?),
                Ok(_) => None,
                Err(failure) => {
                    self.mark_lost(&mut snapshot)?;
                    return Err(failure);
                }
            };
        if image_copy::last_modified(&image)? != image_modified {
            drop(frozen);
            self.mark_lost(&mut snapshot)?;
            return Err(Failure::SnapshotLost(id.clone()));
        }
        image_copy::copy_image(&image, &pool.snapshots.image_path(id), false)?;
        drop(frozen);
        self.mark_ready(&mut snapshot)?;
        Ok(snapshot)
    }

    fn mark_lost(&self, snapshot: &mut SnapshotRecord) -> Result<(), Failure> {
        snapshot.state = SnapshotState::Lost;
        self.pool.snapshots.write(&self.id, snapshot)
    }

    /// After a failure: removes a snapshot that no caller knows, and marks one that was returned to a caller as lost.
    fn discard_or_mark_lost(&self, mut snapshot: SnapshotRecord) {
        let discarded = match snapshot.state {
            SnapshotState::Cutting => self.pool.snapshots.remove(&self.id, &SNAPSHOT_DELETION),
            _ => self.mark_lost(&mut snapshot),
        };
        if let Err(error) = discarded {
            tracing::warn!(
                id = self.id,
                error = &error as &dyn std::error::Error,
                "could not discard an incomplete snapshot"
            );
        }
    }
}

/// The record of a volume that can be copied: it is complete and its image exists.
pub(crate) fn read_copyable(pool: &Pool, volume: &str) -> Result<VolumeRecord, Failure> {
    let record = pool.read_record(volume)?.ok_or_else(|| Failure::VolumeNotFound(volume.to_owned()))?;
    if record.filling {
        return Err(Failure::VolumeIncomplete(volume.to_owned()));
    }
    if !pool.image_path(volume).exists() {
        return Err(Failure::ImageLost(volume.to_owned()));
    }
    Ok(record)
}

/// The record of a snapshot that is about to be cut.
pub(crate) fn new_record(name: &str, source: &str, record: &VolumeRecord, group: Option<&str>) -> SnapshotRecord {
    SnapshotRecord {
        name: name.to_owned(),
        source: source.to_owned(),
        size: record.capacity,
        file_system: record.file_system.clone(),
        contents: record.contents,
        state: SnapshotState::Cutting,
        created: UnixTime::now(),
        group: group.map(str::to_owned),
    }
}

/// Idempotent. A member of a group can only be deleted with its group, whose id is then `group`.
pub(crate) fn delete(pools: &Pools, csi_id: &str, group: Option<&str>) -> Result<(), Failure> {
    let (pool, id) = pools.resolve(csi_id)?;
    if !is_id(id) || pool.snapshots.is_absent(id)? {
        return Ok(());
    }
    let _lock = locks::acquire([(pool.snapshot_lock(id), LockMode::Exclusive)], id)?;
    match pool.snapshots.read::<SnapshotRecord>(id)? {
        Some(record) if record.group.as_deref() != group => {
            Err(Failure::SnapshotInGroup { id: csi_id.to_owned(), group: record.group.unwrap_or_default() })
        }
        Some(_) => pool.snapshots.remove(id, &SNAPSHOT_DELETION),
        None => pool.snapshots.remove_leftovers(id, &SNAPSHOT_DELETION),
    }
}

/// Called when the driver starts: repeats the interrupted copies that can be repeated, and thaws file systems that a
/// process which died has left frozen.
pub(crate) fn recover(pools: &Pools) -> Result<(), Failure> {
    for (_, pool) in pools.all()? {
        for id in pool.snapshots.list("")? {
            let Some(record) = pool.snapshots.read::<SnapshotRecord>(&id)? else { continue };
            if matches!(record.state, SnapshotState::Copying { .. }) && !is_in_progress(&pool, &id)? {
                finish_interrupted(pools, &pool, &id, &record);
            }
        }
        for id in pool.frozen_volumes() {
            if let Err(error) = pool.lock(&id) {
                tracing::warn!(
                    id,
                    error = &error as &dyn std::error::Error,
                    "could not thaw a frozen file system; the next call for the volume retries"
                );
            }
        }
    }
    Ok(())
}

/// Repeats an interrupted copy. The result is recorded and logged.
pub(crate) fn finish_interrupted(pools: &Pools, pool: &Arc<Pool>, id: &str, record: &SnapshotRecord) {
    let Ok((_, volume)) = pools.resolve(&record.source) else { return };
    let job = SnapshotJob {
        pool: Arc::clone(pool),
        volume: volume.to_owned(),
        id: id.to_owned(),
        name: record.name.clone(),
        source: record.source.clone(),
    };
    let (progress, _) = mpsc::channel();
    match job.run(&progress) {
        Ok(_) => tracing::info!(id, "finished an interrupted snapshot"),
        Err(error) => {
            tracing::warn!(id, error = &error as &dyn std::error::Error, "could not finish an interrupted snapshot")
        }
    }
}
