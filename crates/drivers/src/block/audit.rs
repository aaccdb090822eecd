//! Finds inconsistencies between records, images, loop devices and freezes, and repairs them. Drivers may serve the
//! pool at the same time, so every object is read again under its lock before it is changed.
//!
//! Must not remove user data: an image without a record is removed only if it is empty or its deletion was interrupted;
//! otherwise it is only reported. Locks need no audit: the kernel releases them when their holder dies.
use std::{fmt, path::Path, sync::Arc};

use cleat_host::loopdev;

use super::{
    failure::{Failure, PoolError},
    kernel_state::KernelState,
    locks::{self, LockMode},
    pool::Pool,
    pools::Pools,
    record::{GroupRecord, ImageContents, SnapshotRecord, SnapshotState, VolumeRecord},
    records::{DeletionCrashPoints, ImageState, RecordDir, inspect_image, io_failure, remove_file},
    request::is_id,
    snapshot, stage,
};

const AUDIT_DELETION: DeletionCrashPoints =
    DeletionCrashPoints { retired: "driver:audit-retired", image_removed: "driver:audit-removed" };

#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("the pool cannot be read: {0}")]
    Read(String),
}

/// One inconsistency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kind and the CSI id of the volume, snapshot or group: `volume pvc-1`.
    pub object: String,
    pub problem: &'static str,
    pub outcome: RepairOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairOutcome {
    /// The caller did not ask for repairs. A repair would do this.
    NotAttempted(&'static str),
    Repaired(&'static str),
    Failed(String),
    /// It needs a decision by a person; this is the advice.
    Unrepairable(&'static str),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: ", self.object, self.problem)?;
        match &self.outcome {
            RepairOutcome::NotAttempted(action) => write!(f, "--repair would {action}"),
            RepairOutcome::Repaired(action) => write!(f, "repaired ({action})"),
            RepairOutcome::Failed(error) => write!(f, "not repaired: {error}"),
            RepairOutcome::Unrepairable(advice) => f.write_str(advice),
        }
    }
}

/// Lists the inconsistencies of the default pool and the named pools below it, and repairs them if `repair` is true.
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
            let csi_id = |id: &str| Pools::csi_id(name.as_deref(), id);
            self.check_freezes(&pool, &csi_id);
            for id in ids(&pool.volumes)? {
                self.check_volume(&pool, &id, &format!("volume {}", csi_id(&id)));
            }
            for id in ids(&pool.snapshots)? {
                self.check_snapshot(pools, &pool, &id, &format!("snapshot {}", csi_id(&id)));
            }
            self.check_devices(&pool, &csi_id)?;
        }
        for id in ids(&pools.groups)? {
            self.check_group(pools, &id);
        }
        Ok(())
    }

    /// Reports an inconsistency that `repair` can repair, and runs it if the caller asked for repairs.
    fn report_repairable(
        &mut self,
        object: &str,
        problem: &'static str,
        action: &'static str,
        repair: impl FnOnce() -> Result<(), Failure>,
    ) {
        let outcome = match self.repair.then(repair) {
            None => RepairOutcome::NotAttempted(action),
            Some(Ok(())) => RepairOutcome::Repaired(action),
            Some(Err(failure)) => RepairOutcome::Failed(failure.to_string()),
        };
        self.findings.push(Finding { object: object.to_owned(), problem, outcome });
    }

    fn report_unrepairable(&mut self, object: &str, problem: &'static str, advice: &'static str) {
        let outcome = RepairOutcome::Unrepairable(advice);
        self.findings.push(Finding { object: object.to_owned(), problem, outcome });
    }

    /// Finds file systems that were left frozen: their freeze is recorded, but the volume is not locked.
    fn check_freezes(&mut self, pool: &Pool, csi_id: &dyn Fn(&str) -> String) {
        for id in pool.frozen_volumes() {
            if matches!(locks::try_acquire(pool.volume_lock(&id), &id), Ok(Some(_))) {
                let object = format!("volume {}", csi_id(&id));
                self.report_repairable(&object, "its file system was left frozen", "thaw it", || {
                    pool.lock(&id).map(drop)
                });
            }
        }
    }

    fn check_volume(&mut self, pool: &Pool, id: &str, object: &str) {
        // Read under the lock: without it, a call that is in progress may have left an incomplete state. A volume that
        // is locked is skipped.
        let Ok(Some(guard)) = locks::try_acquire(pool.volume_lock(id), id) else { return };
        let record = pool.read_record(id);
        drop(guard);
        let record = match record {
            Ok(record) => record,
            Err(_) => {
                return self.report_unrepairable(
                    object,
                    "its record is not understood",
                    "restore the record from a backup",
                );
            }
        };
        let Some(record) = record else {
            return self.check_leftovers(&pool.volumes, id, object, || pool.remove_leftovers(id));
        };
        self.check_temporary(&pool.volumes, id, object, || pool.lock(id).map(drop));
        if record.filling {
            return self.report_repairable(
                object,
                "the copy from its source was cut short",
                "remove it",
                || match pool.lock_if_exists(id)? {
                    Some((locked, record)) if record.filling => locked.remove(),
                    _ => Ok(()),
                },
            );
        }
        self.check_image(pool, id, object, &record);
        if let Some(node) = record.published.keys().find(|node| matches!(pool.nodes.find(node), Ok(None))) {
            let object = format!("{object} on node {node}");
            self.report_unrepairable(
                &object,
                "the node has never registered itself",
                "unpublish it, or start the node's driver",
            );
        }
    }

    fn check_image(&mut self, pool: &Pool, id: &str, object: &str, record: &VolumeRecord) {
        let repair = || {
            let (locked, record) = pool.lock_existing(id)?;
            locked.ensure_image(&record)
        };
        match std::fs::metadata(pool.image_path(id)) {
            Err(_) if record.contents == ImageContents::Nothing => {
                self.report_repairable(object, "its image is missing", "make it, for it was empty", repair);
            }
            Err(_) => self.report_unrepairable(
                object,
                "its image is missing",
                "the data is lost; restore a snapshot or a backup",
            ),
            Ok(metadata) if metadata.len() < record.capacity => {
                self.report_repairable(object, "its image is smaller than the volume", "enlarge it", repair);
            }
            Ok(_) => {}
        }
    }

    /// Checks the files of an id that has no record.
    fn check_leftovers(
        &mut self,
        directory: &RecordDir,
        id: &str,
        object: &str,
        remove: impl FnOnce() -> Result<(), Failure>,
    ) {
        if directory.retired_path(id).exists() {
            return self.report_repairable(object, "its deletion was cut short", "finish it", remove);
        }
        match inspect_image(&directory.image_path(id)) {
            Ok(ImageState::Data) => {
                self.report_unrepairable(
                    object,
                    "an image with data has no record",
                    "restore the record, or remove the image by hand",
                );
            }
            Ok(ImageState::Empty) => {
                self.report_repairable(object, "an empty image has no record", "remove it", remove)
            }
            Ok(ImageState::Missing) if directory.record_path(id).exists() => {
                self.report_repairable(
                    object,
                    "its record is empty",
                    "remove it, for it was never acknowledged",
                    remove,
                );
            }
            Ok(ImageState::Missing) => self.check_temporary(directory, id, object, || Ok(())),
            Err(_) => {
                self.report_unrepairable(object, "its image cannot be inspected", "see why the file system refuses")
            }
        }
    }

    /// Checks for a temporary file that an interrupted replacement of a record has left. `lock` takes and releases the
    /// lock of the id, to make sure that no replacement is in progress.
    fn check_temporary(
        &mut self,
        directory: &RecordDir,
        id: &str,
        object: &str,
        lock: impl FnOnce() -> Result<(), Failure>,
    ) {
        let path = directory.temporary_path(id);
        if path.exists() {
            self.report_repairable(object, "a half-written record is left beside the whole one", "remove it", || {
                lock()?;
                remove_file(&path).map(drop).map_err(io_failure("remove", &path))
            });
        }
    }

    fn check_snapshot(&mut self, pools: &Pools, pool: &Arc<Pool>, id: &str, object: &str) {
        let Ok(record) = pool.snapshots.read::<SnapshotRecord>(id) else {
            return self.report_unrepairable(
                object,
                "its record is not understood",
                "restore the record from a backup",
            );
        };
        if !matches!(snapshot::is_in_progress(pool, id), Ok(false)) {
            return;
        }
        let with_lock = |work: &dyn Fn(&RecordDir) -> Result<(), Failure>| {
            let _lock = locks::acquire([(pool.snapshot_lock(id), LockMode::Exclusive)], id)?;
            work(&pool.snapshots)
        };
        let Some(record) = record else {
            let remove = || with_lock(&|directory| directory.remove_leftovers(id, &AUDIT_DELETION));
            return self.check_leftovers(&pool.snapshots, id, object, remove);
        };
        match record.state {
            SnapshotState::Ready if !pool.snapshots.image_path(id).exists() => {
                self.report_unrepairable(object, "its image is missing", "delete the snapshot");
            }
            SnapshotState::Ready => {}
            SnapshotState::Lost => {
                self.report_unrepairable(object, "it was interrupted and cannot be finished", "delete the snapshot")
            }
            SnapshotState::Cutting if record.group.is_some() => {}
            SnapshotState::Cutting => {
                self.report_repairable(object, "it was cut short before its caller knew of it", "remove it", || {
                    with_lock(&|directory| directory.remove(id, &AUDIT_DELETION))
                })
            }
            SnapshotState::Copying { .. } => {
                self.report_repairable(object, "its copy was cut short", "finish it, if it can be", || {
                    snapshot::finish_interrupted(pools, pool, id, &record);
                    Ok(())
                })
            }
        }
    }

    fn check_group(&mut self, pools: &Pools, id: &str) {
        let object = format!("group snapshot {id}");
        match pools.groups.read::<GroupRecord>(id) {
            Ok(Some(group)) if !group.ready => self.report_repairable(&object, "it was cut short", "remove it", || {
                let _lock = locks::acquire([(pools.by_name(None)?.group_lock(id), LockMode::Exclusive)], id)?;
                for member in group.members.values() {
                    snapshot::delete(pools, member, Some(id))?;
                }
                pools.groups.remove(id, &AUDIT_DELETION)
            }),
            Ok(Some(group)) => {
                let missing = |csi_id: &String| {
                    let found = pools.resolve(csi_id).and_then(|(pool, id)| pool.snapshots.read::<SnapshotRecord>(id));
                    matches!(found, Ok(None))
                };
                if group.members.values().any(missing) {
                    self.report_unrepairable(&object, "its deletion was cut short", "delete it again");
                }
            }
            Ok(None) => {}
            Err(_) => {
                self.report_unrepairable(&object, "its record is not understood", "restore the record from a backup")
            }
        }
    }

    /// Finds loop devices of the pool that are not in use and whose volume is not published.
    fn check_devices(&mut self, pool: &Pool, csi_id: &dyn Fn(&str) -> String) -> Result<(), Failure> {
        for (device, file) in loopdev::attached_below(pool.root())? {
            let displayed = file.to_string_lossy();
            let (path, is_deleted) = match displayed.strip_suffix(" (deleted)") {
                Some(path) => (Path::new(path).to_owned(), true),
                None => (file.clone(), false),
            };
            let Some(id) = path.file_stem().and_then(|stem| stem.to_str()).filter(|id| is_id(id)) else { continue };
            let kernel = KernelState::of_image(&path)?;
            let is_published = matches!(pool.read_record(id), Ok(Some(record)) if !record.published.is_empty());
            if !kernel.mounts.is_empty() || (is_published && !is_deleted) {
                continue;
            }
            let object = format!("volume {} on {}", csi_id(id), device.path.display());
            self.report_repairable(
                &object,
                "a loop device is attached, but the volume is not published",
                "detach it",
                || {
                    let _lock = pool.lock(id)?;
                    if is_deleted { Ok(loopdev::detach(&device)?) } else { stage::detach_unused(id, &path) }
                },
            );
        }
        Ok(())
    }
}

/// The ids of all files in the directory, whatever their suffix.
fn ids(directory: &RecordDir) -> Result<Vec<String>, Failure> {
    let mut ids: Vec<String> = directory
        .file_names()?
        .iter()
        .filter_map(|name| name.rsplit_once('.').map(|(id, _)| id.trim_start_matches('.').to_owned()))
        .filter(|id| is_id(id))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}
