//! What does not match between records, images, devices and freezes, and its repair. Looks at one pool directory from
//! outside; drivers may go on serving it meanwhile, so everything is judged again under its lock before it is changed.
//!
//! Never removes data that somebody may miss: an image without a record is reported, and removed only if it is empty or was
//! being deleted. A lock is never stale: it dies with its holder.
use std::{fmt, path::Path, sync::Arc};

use cleat_host::loopdev;

use super::{
    backend::{Pool, PoolError},
    failure::Failure,
    locks::{self, Hold},
    pools::Pools,
    record::{Contents, GroupRecord, Record, SnapshotRecord, SnapshotState},
    request::is_id,
    seen::Seen,
    shelf::{Found, Points, Shelf, look},
    snapshot, stage,
};

const POINTS: Points = Points { retired: "driver:audit-retired", image_removed: "driver:audit-removed" };

#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("the pool cannot be read: {0}")]
    Read(String),
}

/// One thing that does not match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The volume, snapshot or group it concerns, with its sort: `volume pvc-1`.
    pub what: String,
    pub problem: &'static str,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A repair was not asked for, and would do this.
    Would(&'static str),
    Repaired(&'static str),
    Failed(String),
    /// Only a person can decide.
    Unrepairable(&'static str),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: ", self.what, self.problem)?;
        match &self.outcome {
            Outcome::Would(cure) => write!(f, "--repair would {cure}"),
            Outcome::Repaired(cure) => write!(f, "repaired ({cure})"),
            Outcome::Failed(error) => write!(f, "not repaired: {error}"),
            Outcome::Unrepairable(advice) => f.write_str(advice),
        }
    }
}

/// Lists what does not match in the pool and those below it, and repairs it if told to.
pub fn audit(pool: &Path, repair: bool) -> Result<Vec<Finding>, AuditError> {
    let pools = Pools::open(pool)?;
    let mut audit = Audit { repair, findings: Vec::new() };
    audit.run(&pools).map_err(|failure| AuditError::Read(failure.to_string()))?;
    Ok(audit.findings)
}

struct Audit {
    repair: bool,
    findings: Vec<Finding>,
}

impl Audit {
    fn run(&mut self, pools: &Pools) -> Result<(), Failure> {
        for (name, pool) in pools.all()? {
            let outer = |id: &str| Pools::outer(name.as_deref(), id);
            self.held(&pool, &outer);
            for id in ids(&pool.volumes)? {
                self.volume(&pool, &id, &format!("volume {}", outer(&id)));
            }
            for id in ids(&pool.snapshots)? {
                self.snapshot(pools, &pool, &id, &format!("snapshot {}", outer(&id)));
            }
            self.devices(&pool, &outer)?;
        }
        for id in ids(&pools.groups)? {
            self.group(pools, &id);
        }
        Ok(())
    }

    fn found(
        &mut self,
        what: &str,
        problem: &'static str,
        cure: &'static str,
        repair: impl FnOnce() -> Result<(), Failure>,
    ) {
        let outcome = match self.repair.then(repair) {
            None => Outcome::Would(cure),
            Some(Ok(())) => Outcome::Repaired(cure),
            Some(Err(failure)) => Outcome::Failed(failure.to_string()),
        };
        self.findings.push(Finding { what: what.to_owned(), problem, outcome });
    }

    fn hopeless(&mut self, what: &str, problem: &'static str, advice: &'static str) {
        let outcome = Outcome::Unrepairable(advice);
        self.findings.push(Finding { what: what.to_owned(), problem, outcome });
    }

    /// Freezes that nobody holds any more.
    fn held(&mut self, pool: &Pool, outer: &dyn Fn(&str) -> String) {
        for id in snapshot::held(pool) {
            if matches!(locks::try_take(pool.volume_lock(&id), &id), Ok(Some(_))) {
                let what = format!("volume {}", outer(&id));
                self.found(&what, "its file system was left frozen", "thaw it", || pool.lock(&id).map(drop));
            }
        }
    }

    fn volume(&mut self, pool: &Pool, id: &str, what: &str) {
        // Looked at while nobody is at work on it, or it may be half made.
        let Ok(Some(alone)) = locks::try_take(pool.volume_lock(id), id) else { return };
        let record = pool.peek(id);
        drop(alone);
        let record = match record {
            Ok(record) => record,
            Err(_) => return self.hopeless(what, "its record is not understood", "restore the record from a backup"),
        };
        let Some(record) = record else { return self.remains(&pool.volumes, id, what, || pool.sweep(id)) };
        self.temporary(&pool.volumes, id, what, || pool.lock(id).map(drop));
        if record.filling {
            return self.found(what, "the copy from its source was cut short", "remove it", || {
                match pool.existing(id)? {
                    Some((locked, record)) if record.filling => locked.remove(),
                    _ => Ok(()),
                }
            });
        }
        self.image(pool, id, what, &record);
        if let Some(node) = record.published.keys().find(|node| matches!(pool.nodes.find(node), Ok(None))) {
            let what = format!("{what} on node {node}");
            self.hopeless(&what, "the node has never announced itself", "unpublish it, or start the node's driver");
        }
    }

    fn image(&mut self, pool: &Pool, id: &str, what: &str, record: &Record) {
        let repair = || {
            let (locked, record) = pool.must_exist(id)?;
            locked.ensure_image(&record)
        };
        match std::fs::metadata(pool.image(id)) {
            Err(_) if record.contents == Contents::Nothing => {
                self.found(what, "its image is missing", "make it, for it was empty", repair);
            }
            Err(_) => self.hopeless(what, "its image is missing", "the data is lost; restore a snapshot or a backup"),
            Ok(found) if found.len() < record.capacity => {
                self.found(what, "its image is smaller than the volume", "enlarge it", repair);
            }
            Ok(_) => {}
        }
    }

    /// Files of an id that has no record.
    fn remains(&mut self, shelf: &Shelf, id: &str, what: &str, sweep: impl FnOnce() -> Result<(), Failure>) {
        if shelf.gone(id).exists() {
            return self.found(what, "its deletion was cut short", "finish it", sweep);
        }
        match look(&shelf.image(id)) {
            Ok(Found::Data) => {
                self.hopeless(
                    what,
                    "an image with data has no record",
                    "restore the record, or remove the image by hand",
                );
            }
            Ok(Found::Empty) => self.found(what, "an empty image has no record", "remove it", sweep),
            Ok(Found::Nothing) if shelf.record(id).exists() => {
                self.found(what, "its record is empty", "remove it, for it was never acknowledged", sweep);
            }
            Ok(Found::Nothing) => self.temporary(shelf, id, what, || Ok(())),
            Err(_) => self.hopeless(what, "its image cannot be looked at", "see why the file system refuses"),
        }
    }

    /// What a record that was being replaced may leave. `lock` says that nobody is at it.
    fn temporary(&mut self, shelf: &Shelf, id: &str, what: &str, lock: impl FnOnce() -> Result<(), Failure>) {
        let path = shelf.temporary(id);
        if path.exists() {
            self.found(what, "a half-written record is left beside the whole one", "remove it", || {
                lock()?;
                super::shelf::remove_file(&path).map(drop).map_err(super::shelf::failed("remove", &path))
            });
        }
    }

    fn snapshot(&mut self, pools: &Pools, pool: &Arc<Pool>, id: &str, what: &str) {
        let Ok(record) = pool.snapshots.read::<SnapshotRecord>(id) else {
            return self.hopeless(what, "its record is not understood", "restore the record from a backup");
        };
        if !matches!(snapshot::is_at_work(pool, id), Ok(false)) {
            return;
        }
        let locked = |work: &dyn Fn(&Shelf) -> Result<(), Failure>| {
            let _lock = locks::take([(pool.snapshot_lock(id), Hold::Exclusive)], id)?;
            work(&pool.snapshots)
        };
        let Some(record) = record else {
            let sweep = || locked(&|shelf| shelf.clear(id, &POINTS));
            return self.remains(&pool.snapshots, id, what, sweep);
        };
        match record.state {
            SnapshotState::Ready if !pool.snapshots.image(id).exists() => {
                self.hopeless(what, "its image is missing", "delete the snapshot");
            }
            SnapshotState::Ready => {}
            SnapshotState::Lost => {
                self.hopeless(what, "it was interrupted and cannot be finished", "delete the snapshot")
            }
            SnapshotState::Cutting if record.group.is_some() => {}
            SnapshotState::Cutting => {
                self.found(what, "it was cut short before anybody knew of it", "remove it", || {
                    locked(&|shelf| shelf.remove(id, &POINTS))
                })
            }
            SnapshotState::Copying { .. } => {
                self.found(what, "its copy was cut short", "finish it, if it can be", || {
                    snapshot::finish(pools, pool, id, &record);
                    Ok(())
                })
            }
        }
    }

    fn group(&mut self, pools: &Pools, id: &str) {
        let what = format!("group snapshot {id}");
        match pools.groups.read::<GroupRecord>(id) {
            Ok(Some(group)) if !group.ready => self.found(&what, "it was cut short", "remove it", || {
                let _lock = locks::take([(pools.named(None)?.group_lock(id), Hold::Exclusive)], id)?;
                for member in group.members.values() {
                    snapshot::delete(pools, member, Some(id))?;
                }
                pools.groups.remove(id, &POINTS)
            }),
            Ok(Some(group)) => {
                let missing = |outer: &String| {
                    let found = pools.of(outer).and_then(|(pool, id)| pool.snapshots.read::<SnapshotRecord>(id));
                    matches!(found, Ok(None))
                };
                if group.members.values().any(missing) {
                    self.hopeless(&what, "its deletion was cut short", "delete it again");
                }
            }
            Ok(None) => {}
            Err(_) => self.hopeless(&what, "its record is not understood", "restore the record from a backup"),
        }
    }

    /// Loop devices of this pool that nothing uses and no node here is to have.
    fn devices(&mut self, pool: &Pool, outer: &dyn Fn(&str) -> String) -> Result<(), Failure> {
        for (device, file) in loopdev::attached_below(pool.root())? {
            let shown = file.to_string_lossy();
            let (path, deleted) = match shown.strip_suffix(" (deleted)") {
                Some(path) => (Path::new(path).to_owned(), true),
                None => (file.clone(), false),
            };
            let Some(id) = path.file_stem().and_then(|stem| stem.to_str()).filter(|id| is_id(id)) else { continue };
            let seen = Seen::of_image(&path)?;
            let published = matches!(pool.peek(id), Ok(Some(record)) if !record.published.is_empty());
            if !seen.uses.is_empty() || (published && !deleted) {
                continue;
            }
            let what = format!("volume {} on {}", outer(id), device.path.display());
            self.found(&what, "a loop device is attached that nobody is to have", "detach it", || {
                let _lock = pool.lock(id)?;
                if deleted { Ok(loopdev::detach(&device)?) } else { stage::release(id, &path) }
            });
        }
        Ok(())
    }
}

/// Every id that any file names.
fn ids(shelf: &Shelf) -> Result<Vec<String>, Failure> {
    let mut ids: Vec<String> = shelf
        .names()?
        .iter()
        .filter_map(|name| name.rsplit_once('.').map(|(id, _)| id.trim_start_matches('.').to_owned()))
        .filter(|id| is_id(id))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
