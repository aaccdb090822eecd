//! CreateVolume: chooses the pool, the size and the file system, finds the source, and creates the record and the
//! image.
//!
//! The record decides whether the volume exists. A volume with a source is recorded as `filling` until its copy is
//! complete.
use cleat_crash::point;
use cleat_csi::Status;
use cleat_host::filesystem::Format;

use super::{
    failure::Failure,
    image_copy::{self, CopySource},
    locks::LockMode,
    parameters,
    pool::{LockedVolume, Pool, VOLUME_DELETION},
    pools::Pools,
    record::{ContentSource, SnapshotRecord, SnapshotState, VolumeRecord},
    request::{VolumeRequirements, id_for},
    snapshot,
};

/// The properties of the volume to create, except its name.
struct NewVolume<'a> {
    requirements: &'a VolumeRequirements,
    capacity: u64,
    file_system: Option<String>,
    source: Option<ContentSource>,
    /// The source as it was found. `None` also if the volume is complete already: its source is then not needed.
    copy_source: Option<&'a CopySource>,
}

/// Idempotent by name. Returns the CSI id of the volume and its record.
pub(crate) fn create_volume(
    pools: &Pools,
    name: &str,
    requirements: &VolumeRequirements,
    source: Option<ContentSource>,
) -> Result<(String, VolumeRecord), Failure> {
    let pool_name = parameters::pool(&requirements.parameters);
    let pool = pools.by_name(pool_name)?;
    let id = id_for(name);
    for (_, other) in pools.all()? {
        if other.root() != pool.root() && other.read_record(&id)?.is_some() {
            return Err(Failure::VolumeExists(id));
        }
    }
    let complete = pool.read_record(&id)?.filter(|record| !record.filling);
    // A complete volume does not need its source any more, which may have been deleted.
    let copy_source = match (&source, &complete) {
        (Some(source), None) => Some(find_source(pools, source)?),
        _ => None,
    };
    let source_file_system = copy_source
        .as_ref()
        .map(|copy_source| copy_source.file_system.clone())
        .or(complete.as_ref().filter(|_| source.is_some()).map(|complete| complete.file_system.clone()))
        .flatten();
    let file_system = match (requirements.file_system, source_file_system.as_deref().and_then(Format::from_name)) {
        (Some(_), Some(found)) if !requirements.file_system_requested => Some(found),
        (Some(requested), Some(found)) if requested != found && copy_source.is_some() => {
            let (requested, found) = (requested.name(), found.name());
            let why = format!("volume_content_source holds {found}, and {requested} is asked for");
            return Err(Failure::Refused(Status::invalid_argument(why)));
        }
        (requested, _) => requested,
    };
    let source_size = copy_source.as_ref().map(|copy_source| copy_source.size);
    let source_size = source_size.or(complete.as_ref().filter(|_| source.is_some()).map(|complete| complete.capacity));
    let capacity = requirements.size.choose(file_system, source_size).map_err(Failure::Refused)?;
    let new_volume = NewVolume {
        requirements,
        capacity,
        file_system: file_system.map(|format| format.name().to_owned()),
        source,
        copy_source: copy_source.as_ref(),
    };
    let record = create_in_pool(&pool, name, &id, &new_volume)?;
    Ok((Pools::csi_id(pool_name, &id), record))
}

fn find_source(pools: &Pools, source: &ContentSource) -> Result<CopySource, Failure> {
    let (pool, id) = pools.resolve(source.id())?;
    match source {
        ContentSource::Volume(csi_id) => {
            let record = snapshot::read_copyable(&pool, id).map_err(|failure| match failure {
                Failure::VolumeNotFound(_) => Failure::VolumeNotFound(csi_id.clone()),
                other => other,
            })?;
            Ok(CopySource {
                image: pool.image_path(id),
                lock: (pool.volume_lock(id), LockMode::Exclusive),
                size: record.capacity,
                is_thick: parameters::is_thick(&record.parameters),
                file_system: record.file_system,
                contents: record.contents,
                pool_root: pool.root().to_owned(),
                volume: Some((pool, id.to_owned())),
            })
        }
        ContentSource::Snapshot(csi_id) => {
            let missing = || Failure::SnapshotNotFound(csi_id.clone());
            let record = pool.snapshots.read::<SnapshotRecord>(id)?.ok_or_else(missing)?;
            match record.state {
                SnapshotState::Ready => {}
                SnapshotState::Lost => return Err(Failure::SnapshotLost(csi_id.clone())),
                SnapshotState::Cutting | SnapshotState::Copying { .. } => {
                    return Err(Failure::SnapshotNotReady(csi_id.clone()));
                }
            }
            Ok(CopySource {
                image: pool.snapshots.image_path(id),
                lock: (pool.snapshot_lock(id), LockMode::Shared),
                size: record.size,
                is_thick: false,
                file_system: record.file_system,
                contents: record.contents,
                pool_root: pool.root().to_owned(),
                volume: None,
            })
        }
    }
}

/// Creates the volume, completes it if an earlier call was interrupted, or returns it if it exists and is compatible.
fn create_in_pool(pool: &Pool, name: &str, id: &str, new_volume: &NewVolume<'_>) -> Result<VolumeRecord, Failure> {
    let NewVolume { requirements, capacity, file_system, source, copy_source } = new_volume;
    let volume = pool.lock_with(id, copy_source.iter().map(|copy_source| copy_source.lock.clone()))?;
    if let Some(existing) = pool.read_record(id)? {
        let is_compatible = existing.name == name
            && requirements.size.admits(existing.capacity)
            && existing.parameters == requirements.parameters
            && existing.file_system == *file_system
            && existing.source == *source;
        return match (is_compatible, existing.filling, copy_source) {
            (false, _, _) => Err(Failure::VolumeExists(id.to_owned())),
            (true, true, Some(copy_source)) => fill_or_remove(&volume, existing, copy_source),
            (true, _, _) => {
                volume.ensure_image(&existing)?;
                pool.volumes.open_unsynced(id)?.sync()?;
                Ok(existing)
            }
        };
    }
    if source.is_some() && copy_source.is_none() {
        // The volume was complete when it was read without the lock, and has been deleted since.
        return Err(Failure::Busy(id.to_owned()));
    }
    let mut record = VolumeRecord {
        name: name.to_owned(),
        capacity: *capacity,
        parameters: requirements.parameters.clone(),
        mutable_parameters: requirements.mutable_parameters.clone(),
        file_system: file_system.clone(),
        source: source.clone(),
        filling: copy_source.is_some(),
        ..VolumeRecord::default()
    };
    match copy_source {
        Some(copy_source) => {
            pool.volumes.remove_leftovers(id, &VOLUME_DELETION)?;
            let unsynced = pool.volumes.write_new(id, &record).inspect_err(|_| volume.remove_incomplete())?;
            point("driver:recorded");
            unsynced.sync()?;
            record = fill_or_remove(&volume, record, copy_source)?;
        }
        None => {
            let image = pool.volumes.create_image(id, &VOLUME_DELETION)?;
            point("driver:image-begun");
            // If the pool is full, the files are removed at once: the caller may choose another pool and never repeat
            // the call.
            let unsynced = pool.volumes.write_new(id, &record).inspect_err(|_| volume.remove_incomplete())?;
            point("driver:recorded");
            let resize = || volume.resize_image(&image, 0, &record).inspect_err(|_| volume.remove_incomplete());
            if parameters::is_thick(&record.parameters) {
                // The record must be durable first: allocated blocks without a record would count as data whose record
                // was lost.
                unsynced.sync()?;
                resize()?;
            } else {
                // One wait for the disk. Most file systems commit the image together with the record; where one does
                // not, `ensure_image` creates the image again.
                resize()?;
                unsynced.sync()?;
            }
        }
    }
    point("driver:image-created");
    Ok(record)
}

fn fill_or_remove(
    volume: &LockedVolume<'_>,
    record: VolumeRecord,
    copy_source: &CopySource,
) -> Result<VolumeRecord, Failure> {
    fill(volume, record, copy_source).inspect_err(|_| volume.remove_incomplete())
}

/// Copies the source to the image, and records the volume as complete.
fn fill(
    volume: &LockedVolume<'_>,
    mut record: VolumeRecord,
    copy_source: &CopySource,
) -> Result<VolumeRecord, Failure> {
    let is_thin = !parameters::is_thick(&record.parameters);
    image_copy::copy_from_source(copy_source, volume.pool, &volume.image_path(), is_thin)?;
    record.contents = copy_source.contents;
    record.needs_grow = record.capacity > copy_source.size && record.file_system.is_some();
    volume.ensure_image(&record)?;
    point("driver:filled");
    record.filling = false;
    volume.write(&record)?;
    Ok(record)
}
