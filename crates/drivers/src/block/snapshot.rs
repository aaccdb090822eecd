//! Snapshots of one volume: cut, finished in the background where blocks have to be copied, and deleted.
//!
//! A snapshot shows the moment its caller was first told of. If the copy of it dies, it is copied again only while the
//! volume's image has not changed since; else it is lost, and says so.
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
    backend::Pool,
    cut::{self, Flush, Plan, Still},
    failure::Failure,
    locks::{self, Hold},
    parameters,
    pools::Pools,
    record::{Moment, Record, SnapshotRecord, SnapshotState},
    request::{id_for, is_id},
    shelf::Points,
};

/// How long CreateSnapshot waits for a copy before it answers that the snapshot is not ready yet.
const SOON: Duration = Duration::from_millis(250);

pub(crate) const POINTS: Points =
    Points { retired: "driver:snapshot-deleting", image_removed: "driver:snapshot-image-removed" };

/// Idempotent by name. Returns when the snapshot is cut, whether or not it is ready.
pub(crate) fn create(pools: &Pools, name: &str, source: &str) -> Result<(String, SnapshotRecord), Failure> {
    let (pool, volume) = pools.of(source)?;
    let id = id_for(name);
    let outer = Pools::outer(Pools::name_of(source), &id);
    for (_, other) in pools.all()? {
        if other.root() != pool.root() && other.snapshots.read::<SnapshotRecord>(&id)?.is_some() {
            return Err(Failure::OtherSnapshot(id));
        }
    }
    if let Some(existing) = pool.snapshots.read::<SnapshotRecord>(&id)? {
        if existing.source != source || existing.name != name {
            return Err(Failure::OtherSnapshot(id));
        }
        match existing.state {
            SnapshotState::Ready => return Ok((outer, existing)),
            SnapshotState::Lost => return Err(Failure::SnapshotLost(id)),
            SnapshotState::Copying { .. } if is_at_work(&pool, &id)? => return Ok((outer, existing)),
            SnapshotState::Copying { .. } | SnapshotState::Cutting => {}
        }
    }
    let (tell, told) = mpsc::channel();
    let job = Job { pool, volume: volume.to_owned(), id, name: name.to_owned(), source: source.to_owned() };
    thread::Builder::new()
        .name("snapshot".into())
        .spawn(move || {
            let ended = job.run(&tell);
            // Nobody may be listening any more.
            let _ = tell.send(ended);
        })
        .map_err(|source| Failure::Files { step: "start a thread for", path: outer.clone().into(), source })?;
    let gone = || Failure::SnapshotLost(outer.clone());
    let cut = told.recv().map_err(|_| gone())??;
    if cut.state == SnapshotState::Ready {
        return Ok((outer, cut));
    }
    match told.recv_timeout(SOON) {
        Ok(ended) => Ok((outer, ended?)),
        Err(mpsc::RecvTimeoutError::Timeout) => Ok((outer, cut)),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(gone()),
    }
}

/// Whether a living process is making the snapshot.
pub(crate) fn is_at_work(pool: &Pool, id: &str) -> Result<bool, Failure> {
    Ok(locks::try_take(pool.snapshot_lock(id), id)?.is_none())
}

struct Job {
    pool: Arc<Pool>,
    volume: String,
    id: String,
    name: String,
    source: String,
}

impl Job {
    /// The last state is returned; the one before it, if a caller can be told of it already, goes to `tell`.
    fn run(&self, tell: &Sender<Result<SnapshotRecord, Failure>>) -> Result<SnapshotRecord, Failure> {
        let Job { pool, volume, id, .. } = self;
        if !is_id(volume) {
            return Err(Failure::NoVolume(volume.clone()));
        }
        let wanted = [(pool.volume_lock(volume), Hold::Exclusive), (pool.snapshot_lock(id), Hold::Exclusive)];
        let _locks = locks::take(wanted, volume)?;
        match pool.snapshots.read::<SnapshotRecord>(id)? {
            Some(existing) => match existing.state {
                SnapshotState::Ready => return Ok(existing),
                SnapshotState::Lost => return Err(Failure::SnapshotLost(id.clone())),
                SnapshotState::Copying { unchanged } => return self.resume(existing, unchanged),
                SnapshotState::Cutting => {}
            },
            None => pool.snapshots.clear(id, &POINTS)?,
        }
        cut::release(pool, volume)?;
        let record = usable(pool, volume)?;
        let share = pool.clones && !parameters::is_thick(&record.parameters);
        let plan = cut::plan(pool, volume, &record, share)?;
        let mut snapshot = draft(&self.name, &self.source, &record, None);
        pool.snapshots.write_first(id, &snapshot)?.sync()?;
        point("driver:snapshot-recorded");
        match self.cut(&mut snapshot, &plan, tell) {
            Ok(()) => Ok(snapshot),
            Err(failure) => {
                self.give_up(snapshot);
                Err(failure)
            }
        }
    }

    fn cut(
        &self,
        snapshot: &mut SnapshotRecord,
        plan: &Plan,
        tell: &Sender<Result<SnapshotRecord, Failure>>,
    ) -> Result<(), Failure> {
        let Job { pool, volume, id, .. } = self;
        let image = pool.image(volume);
        let still = match plan {
            Plan::Share { flush } => {
                flush.iter().try_for_each(Flush::run)?;
                snapshot.created = Moment::now();
                cut::copy_image(&image, &pool.snapshots.image(id), true)?;
                return self.ready(snapshot);
            }
            Plan::Hold { at } => Some(Still::hold(pool, volume, at)?),
            Plan::Copy => None,
        };
        snapshot.created = Moment::now();
        snapshot.state = SnapshotState::Copying { unchanged: cut::changed(&image)? };
        pool.snapshots.write(id, snapshot)?;
        point("driver:snapshot-copying");
        let _ = tell.send(Ok(snapshot.clone()));
        cut::copy_image(&image, &pool.snapshots.image(id), false)?;
        drop(still);
        self.ready(snapshot)
    }

    fn ready(&self, snapshot: &mut SnapshotRecord) -> Result<(), Failure> {
        point("driver:snapshot-copied");
        snapshot.state = SnapshotState::Ready;
        self.pool.snapshots.write(&self.id, snapshot)
    }

    /// What died while it copied.
    fn resume(&self, mut snapshot: SnapshotRecord, unchanged: Moment) -> Result<SnapshotRecord, Failure> {
        let Job { pool, volume, id, .. } = self;
        let image = pool.image(volume);
        let still = match usable(pool, volume).and_then(|record| cut::plan(pool, volume, &record, false)) {
            Ok(Plan::Hold { at }) => Some(Still::hold(pool, volume, &at)?),
            Ok(_) => None,
            Err(failure) => {
                self.lose(&mut snapshot)?;
                return Err(failure);
            }
        };
        if cut::changed(&image)? != unchanged {
            drop(still);
            self.lose(&mut snapshot)?;
            return Err(Failure::SnapshotLost(id.clone()));
        }
        cut::copy_image(&image, &pool.snapshots.image(id), false)?;
        drop(still);
        self.ready(&mut snapshot)?;
        Ok(snapshot)
    }

    fn lose(&self, snapshot: &mut SnapshotRecord) -> Result<(), Failure> {
        snapshot.state = SnapshotState::Lost;
        self.pool.snapshots.write(&self.id, snapshot)
    }

    /// A snapshot that nobody knows of goes; one that was told of stays, as lost.
    fn give_up(&self, mut snapshot: SnapshotRecord) {
        let undone = match snapshot.state {
            SnapshotState::Cutting => self.pool.snapshots.remove(&self.id, &POINTS),
            _ => self.lose(&mut snapshot),
        };
        if let Err(error) = undone {
            tracing::warn!(
                id = self.id,
                error = &error as &dyn std::error::Error,
                "a snapshot half made is left behind"
            );
        }
    }
}

/// The volume's record, if the volume can be copied.
pub(crate) fn usable(pool: &Pool, volume: &str) -> Result<Record, Failure> {
    let record = pool.peek(volume)?.ok_or_else(|| Failure::NoVolume(volume.to_owned()))?;
    if record.filling {
        return Err(Failure::Unfilled(volume.to_owned()));
    }
    if !pool.image(volume).exists() {
        return Err(Failure::ImageLost(volume.to_owned()));
    }
    Ok(record)
}

pub(crate) fn draft(name: &str, source: &str, record: &Record, group: Option<&str>) -> SnapshotRecord {
    SnapshotRecord {
        name: name.to_owned(),
        source: source.to_owned(),
        size: record.capacity,
        file_system: record.file_system.clone(),
        contents: record.contents,
        state: SnapshotState::Cutting,
        created: Moment::now(),
        group: group.map(str::to_owned),
    }
}

/// Idempotent. A member of a group goes only with its group.
pub(crate) fn delete(pools: &Pools, outer: &str, group: Option<&str>) -> Result<(), Failure> {
    let (pool, id) = pools.of(outer)?;
    if !is_id(id) || pool.snapshots.is_gone(id)? {
        return Ok(());
    }
    let _lock = locks::take([(pool.snapshot_lock(id), Hold::Exclusive)], id)?;
    match pool.snapshots.read::<SnapshotRecord>(id)? {
        Some(record) if record.group.as_deref() != group => {
            Err(Failure::InGroup { id: outer.to_owned(), group: record.group.unwrap_or_default() })
        }
        Some(_) => pool.snapshots.remove(id, &POINTS),
        None => pool.snapshots.clear(id, &POINTS),
    }
}

/// After a restart: finishes the copies that can be finished, and thaws what nobody holds any more.
pub(crate) fn recover(pools: &Pools) -> Result<(), Failure> {
    for (_, pool) in pools.all()? {
        for id in pool.snapshots.list("")? {
            let Some(record) = pool.snapshots.read::<SnapshotRecord>(&id)? else { continue };
            if matches!(record.state, SnapshotState::Copying { .. }) && !is_at_work(&pool, &id)? {
                finish(pools, &pool, &id, &record);
            }
        }
        for id in held(&pool) {
            if let Err(error) = pool.lock(&id) {
                tracing::warn!(id, error = &error as &dyn std::error::Error, "a frozen file system is left for later");
            }
        }
    }
    Ok(())
}

pub(crate) fn finish(pools: &Pools, pool: &Arc<Pool>, id: &str, record: &SnapshotRecord) {
    let Ok((_, volume)) = pools.of(&record.source) else { return };
    let job = Job {
        pool: Arc::clone(pool),
        volume: volume.to_owned(),
        id: id.to_owned(),
        name: record.name.clone(),
        source: record.source.clone(),
    };
    let (tell, _) = mpsc::channel();
    match job.run(&tell) {
        Ok(_) => tracing::info!(id, "an interrupted snapshot is finished"),
        Err(error) => {
            tracing::warn!(id, error = &error as &dyn std::error::Error, "an interrupted snapshot is not finished")
        }
    }
}

/// Volumes that are noted as frozen.
pub(crate) fn held(pool: &Pool) -> Vec<String> {
    let entries = std::fs::read_dir(pool.held_directory()).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|id| is_id(id)).collect()
}
