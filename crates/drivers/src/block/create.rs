//! CreateVolume: which pool, how large, what is in it. Finds the source and hands the rest to the pool.
use super::{
    backend::Blueprint,
    cut::Origin,
    failure::Failure,
    locks::Hold,
    parameters,
    pools::Pools,
    record::{Record, SnapshotRecord, SnapshotState, Source},
    request::{Wanted, id_for},
    snapshot,
};
use cleat_csi::Status;
use cleat_host::filesystem::Format;

/// Idempotent by name. Returns the id that callers know.
pub(crate) fn create(
    pools: &Pools,
    name: &str,
    wanted: &Wanted,
    source: Option<Source>,
) -> Result<(String, Record), Failure> {
    let pool_name = parameters::pool(&wanted.parameters);
    let pool = pools.named(pool_name)?;
    let id = id_for(name);
    for (_, other) in pools.all()? {
        if other.root() != pool.root() && other.peek(&id)?.is_some() {
            return Err(Failure::Incompatible(id));
        }
    }
    let settled = pool.peek(&id)?.filter(|record| !record.filling);
    // A complete volume no longer needs its source, which may be gone by now.
    let origin = match (&source, &settled) {
        (Some(source), None) => Some(find(pools, source)?),
        _ => None,
    };
    let of_source = origin
        .as_ref()
        .map(|origin| origin.file_system.clone())
        .or(settled.as_ref().filter(|_| source.is_some()).map(|settled| settled.file_system.clone()))
        .flatten();
    let file_system = match (wanted.file_system, of_source.as_deref().and_then(Format::from_name)) {
        (Some(_), Some(found)) if !wanted.chosen => Some(found),
        (Some(asked), Some(found)) if asked != found && origin.is_some() => {
            let (asked, found) = (asked.name(), found.name());
            let why = format!("volume_content_source holds {found}, and {asked} is asked for");
            return Err(Failure::Refused(Status::invalid_argument(why)));
        }
        (asked, _) => asked,
    };
    let copied = origin.as_ref().map(|origin| origin.size);
    let copied = copied.or(settled.as_ref().filter(|_| source.is_some()).map(|settled| settled.capacity));
    let capacity = wanted.range.choose(file_system, copied).map_err(Failure::Refused)?;
    let blueprint = Blueprint {
        wanted,
        capacity,
        file_system: file_system.map(|format| format.name().to_owned()),
        source,
        origin: origin.as_ref(),
    };
    let (id, record) = pool.create(name, &blueprint)?;
    Ok((Pools::outer(pool_name, &id), record))
}

fn find(pools: &Pools, source: &Source) -> Result<Origin, Failure> {
    let (pool, id) = pools.of(source.id())?;
    match source {
        Source::Volume(outer) => {
            let record = snapshot::usable(&pool, id).map_err(|failure| match failure {
                Failure::NoVolume(_) => Failure::NoVolume(outer.clone()),
                other => other,
            })?;
            Ok(Origin {
                image: pool.image(id),
                lock: (pool.volume_lock(id), Hold::Exclusive),
                size: record.capacity,
                thick: parameters::is_thick(&record.parameters),
                file_system: record.file_system,
                contents: record.contents,
                root: pool.root().to_owned(),
                volume: Some((pool, id.to_owned())),
            })
        }
        Source::Snapshot(outer) => {
            let missing = || Failure::NoSnapshot(outer.clone());
            let record = pool.snapshots.read::<SnapshotRecord>(id)?.ok_or_else(missing)?;
            match record.state {
                SnapshotState::Ready => {}
                SnapshotState::Lost => return Err(Failure::SnapshotLost(outer.clone())),
                SnapshotState::Cutting | SnapshotState::Copying { .. } => {
                    return Err(Failure::SnapshotUnready(outer.clone()));
                }
            }
            Ok(Origin {
                image: pool.snapshots.image(id),
                lock: (pool.snapshot_lock(id), Hold::Shared),
                size: record.size,
                thick: false,
                file_system: record.file_system,
                contents: record.contents,
                root: pool.root().to_owned(),
                volume: None,
            })
        }
    }
}
