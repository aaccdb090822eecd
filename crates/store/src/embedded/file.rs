//! The file: what is in it, how it is made, opened and checked. Nothing else in the crate opens it.
//!
//! Two tables: `objects` (key → create revision, modify revision, value) and `meta` (`format`, `revision`, `sum`). The
//! highest bit of the create revision says that the value is sealed. `sum` is over all objects: it tells damage that the
//! container does not notice.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition, TableError};

use super::seal::{Seal, UnsealError};
use crate::{Entry, Event, OpenError, Revision};

pub(super) const OBJECTS: TableDefinition<&str, &[u8]> = TableDefinition::new("objects");
pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub(super) const REVISION: &str = "revision";
pub(super) const SUM: &str = "sum";
const FORMAT: &str = "format";
const KNOWN_FORMAT: u64 = 2;
/// Small, because nothing is read from the file after it was opened; it only has to hold the tree's inner pages.
const CACHE: usize = 16 << 20;

/// What the file held when it was opened.
pub(super) struct Loaded {
    pub(super) revision: Revision,
    pub(super) objects: BTreeMap<Arc<str>, Entry>,
    pub(super) sum: Sum,
}

/// What all objects add up to, whatever their order: adding one and taking it away again leaves it as it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum(pub(super) u64);

impl Sum {
    pub(super) fn after(mut self, event: &Event) -> Self {
        self.0 = self.0.wrapping_sub(event.old.as_ref().map_or(0, weight));
        self.0 = self.0.wrapping_add(event.new.as_ref().map_or(0, weight));
        self
    }

    fn with(self, entry: &Entry) -> Self {
        Self(self.0.wrapping_add(weight(entry)))
    }
}

fn weight(entry: &Entry) -> u64 {
    let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
    hash.update(&(entry.key.len() as u64).to_le_bytes());
    hash.update(entry.key.as_bytes());
    hash.update(&entry.created.to_le_bytes());
    hash.update(&entry.modified.to_le_bytes());
    hash.update(&entry.value);
    let hash = hash.finish();
    hash.as_ref().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// No history is long enough to need this bit.
const SEALED: Revision = 1 << 63;

/// The bytes stored under a key; nothing if they should be sealed and cannot be.
pub(super) fn encode(seal: Option<&Seal>, entry: &Entry) -> Option<Vec<u8>> {
    match seal.filter(|seal| seal.covers(&entry.key)) {
        None => Some(record(entry.created, entry.modified, &entry.value)),
        Some(seal) => Some(record(entry.created | SEALED, entry.modified, &seal.seal(&entry.key, &entry.value)?)),
    }
}

fn record(created: Revision, modified: Revision, value: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(16 + value.len());
    record.extend_from_slice(&created.to_le_bytes());
    record.extend_from_slice(&modified.to_le_bytes());
    record.extend_from_slice(value);
    record
}

/// A record taken apart.
struct Record<'a> {
    created: Revision,
    modified: Revision,
    value: &'a [u8],
    sealed: bool,
}

fn split(record: &[u8]) -> Option<Record<'_>> {
    let (created, rest) = record.split_first_chunk::<8>()?;
    let (modified, value) = rest.split_first_chunk::<8>()?;
    let created = Revision::from_le_bytes(*created);
    let modified = Revision::from_le_bytes(*modified);
    Some(Record { created: created & !SEALED, modified, value, sealed: created & SEALED != 0 })
}

pub(super) fn open(path: &Path, seal: Option<&Seal>) -> Result<(Database, Loaded), OpenError> {
    match fs::metadata(path) {
        Ok(found) if found.len() == 0 => {
            return Err(OpenError::Corrupt { path: path.into(), what: "the file is empty".into() });
        }
        // A start that was cut short after placing the file leaves its other name behind.
        Ok(_) => drop(fs::remove_file(beside(path))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => make(path)?,
        Err(e) => return Err(OpenError::Io { step: "find", path: path.into(), source: Box::new(e) }),
    }
    let mut database =
        Database::builder().set_cache_size(CACHE).open(path).map_err(|e| database_error(path, "open", e))?;
    let (loaded, stale) = load(path, &database, seal)?;
    reseal(path, &mut database, seal, &loaded, &stale)?;
    Ok((database, loaded))
}

/// The file of a store that is running, and the revision it is at.
pub(super) fn reopen(path: &Path) -> Result<(Database, Revision), OpenError> {
    let database = Database::builder().set_cache_size(CACHE).open(path).map_err(|e| database_error(path, "open", e))?;
    let failed = |e: redb::Error| OpenError::Io { step: "read", path: path.into(), source: Box::new(e) };
    let read = || -> Result<Option<Revision>, redb::Error> {
        Ok(database.begin_read()?.open_table(META)?.get(REVISION)?.map(|found| found.value()))
    };
    let missing = || OpenError::Corrupt { path: path.into(), what: "it has no revision".into() };
    let revision = read().map_err(failed)?.ok_or_else(missing)?;
    Ok((database, revision))
}

fn beside(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.new", path.display()))
}

/// Makes a complete file beside the path and links it into place, so that a file of that name is never half made: an
/// empty or partial one is damage, and is refused instead of being started afresh.
fn make(path: &Path) -> Result<(), OpenError> {
    let io = |step, e: io::Error| OpenError::Io { step, path: path.into(), source: Box::new(e) };
    let new = beside(path);
    let fresh = match Database::builder().create(&new) {
        Err(DatabaseError::DatabaseAlreadyOpen) => return Err(OpenError::Locked { path: path.into() }),
        // Left half made by a start that was cut short; nothing was ever stored in it.
        Err(_) if new.exists() => fs::remove_file(&new)
            .map_err(|e| io("clear the way for", e))
            .and_then(|()| Database::builder().create(&new).map_err(|e| database_error(&new, "create", e)))?,
        made => made.map_err(|e| database_error(&new, "create", e))?,
    };
    let fill = || -> Result<(), redb::Error> {
        let write = fresh.begin_write()?;
        write.open_table(OBJECTS)?;
        let mut meta = write.open_table(META)?;
        meta.insert(FORMAT, KNOWN_FORMAT)?;
        meta.insert(REVISION, 1)?;
        meta.insert(SUM, Sum::default().0)?;
        drop(meta);
        write.commit()?;
        Ok(())
    };
    // The file holds Secrets.
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).map_err(|e| io("protect", e))?;
    fill().map_err(|e| OpenError::Io { step: "initialise", path: path.into(), source: Box::new(e) })?;
    drop(fresh);
    match fs::hard_link(&new, path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io("place", e)),
        _ => {}
    }
    fs::remove_file(&new).map_err(|e| io("tidy up beside", e))?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::File::open(parent).and_then(|dir| dir.sync_all()).map_err(|e| io("sync the directory of", e))
}

/// What the file holds, and the keys of what is not stored as `seal` would store it now.
fn load(path: &Path, database: &Database, seal: Option<&Seal>) -> Result<(Loaded, Vec<Arc<str>>), OpenError> {
    let corrupt = |what: String| OpenError::Corrupt { path: path.into(), what };
    let storage = |e: StorageError| storage_error(path, "read", e);
    let table = |e: TableError| match e {
        TableError::Storage(e) => storage_error(path, "read", e),
        other => corrupt(other.to_string()),
    };
    let read = database.begin_read().map_err(|e| match e {
        redb::TransactionError::Storage(e) => storage(e),
        other => OpenError::Io { step: "read", path: path.into(), source: Box::new(other) },
    })?;
    let meta = read.open_table(META).map_err(table)?;
    let number = |name: &str| -> Result<u64, OpenError> {
        let found = meta.get(name).map_err(storage)?.ok_or_else(|| corrupt(format!("it has no {name}")))?;
        Ok(found.value())
    };
    let found = number(FORMAT)?;
    if found != KNOWN_FORMAT {
        return Err(OpenError::Format { path: path.into(), found, known: KNOWN_FORMAT });
    }
    let revision = number(REVISION)?;
    let mut objects = BTreeMap::new();
    let mut sum = Sum::default();
    let mut stale = Vec::new();
    for row in read.open_table(OBJECTS).map_err(table)?.iter().map_err(storage)? {
        let (key, found) = row.map_err(storage)?;
        let key: Arc<str> = key.value().into();
        let found = found.value();
        let record = split(found).ok_or_else(|| corrupt(format!("the record of {key} is too short")))?;
        let Record { created, modified, .. } = record;
        if modified > revision || created > modified {
            return Err(corrupt(format!("the record of {key} has impossible revisions")));
        }
        let value = match (record.sealed, seal) {
            (false, _) => Bytes::copy_from_slice(record.value),
            (true, None) => return Err(OpenError::Encrypted { path: path.into(), key: key.to_string() }),
            (true, Some(seal)) => match seal.open(&key, record.value) {
                Ok(plain) => plain.into(),
                Err(UnsealError::UnknownKey) => {
                    return Err(OpenError::WrongKey { path: path.into(), key: key.to_string() });
                }
                Err(error @ UnsealError::Damaged) => return Err(corrupt(format!("{key}: {error}"))),
            },
        };
        let is_current = match seal.filter(|seal| seal.covers(&key)) {
            Some(seal) => record.sealed && seal.is_current(record.value),
            None => !record.sealed,
        };
        if !is_current {
            stale.push(key.clone());
        }
        let entry = Entry { key, value, created, modified };
        sum = sum.with(&entry);
        objects.insert(entry.key.clone(), entry);
    }
    if number(SUM)? != sum.0 {
        return Err(corrupt("its objects are not those that were stored".into()));
    }
    Ok((Loaded { revision, objects, sum }, stale))
}

/// Stores again what was stored in the clear or under an older key.
fn reseal(
    path: &Path,
    database: &mut Database,
    seal: Option<&Seal>,
    loaded: &Loaded,
    stale: &[Arc<str>],
) -> Result<(), OpenError> {
    if stale.is_empty() {
        return Ok(());
    }
    let failed = |source| OpenError::Io { step: "encrypt", path: path.into(), source };
    let mut rewrite = || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let write = database.begin_write()?;
        {
            let mut objects = write.open_table(OBJECTS)?;
            for entry in stale.iter().filter_map(|key| loaded.objects.get(key)) {
                let record = encode(seal, entry).ok_or("no random bytes")?;
                objects.insert(&*entry.key, record.as_slice())?;
            }
        }
        write.commit()?;
        // The pages that held the old form are free now, but their bytes are still there.
        database.compact()?;
        Ok(())
    };
    rewrite().map_err(failed)
}

fn database_error(path: &Path, step: &'static str, error: DatabaseError) -> OpenError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => OpenError::Locked { path: path.into() },
        DatabaseError::Storage(e) => storage_error(path, step, e),
        DatabaseError::UpgradeRequired(found) => {
            OpenError::Corrupt { path: path.into(), what: format!("file format {found} of its container is too old") }
        }
        other => OpenError::Io { step, path: path.into(), source: Box::new(other) },
    }
}

fn storage_error(path: &Path, step: &'static str, error: StorageError) -> OpenError {
    match error {
        StorageError::Corrupted(what) => OpenError::Corrupt { path: path.into(), what },
        StorageError::Io(e) if matches!(e.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {
            OpenError::Corrupt { path: path.into(), what: e.to_string() }
        }
        other => OpenError::Io { step, path: path.into(), source: Box::new(other) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_start_that_was_cut_short_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("store.redb.new"), b"half made").unwrap();
        let (_, loaded) = open(&dir.path().join("store.redb"), None).unwrap();
        assert_eq!((loaded.revision, loaded.objects.len()), (1, 0));
    }

    #[test]
    fn refuses_an_unknown_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        drop(open(&path, None).unwrap());
        let database = Database::open(&path).unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(META).unwrap().insert(FORMAT, 7).unwrap();
        write.commit().unwrap();
        drop(database);
        let error = open(&path, None).err().unwrap();
        assert!(matches!(error, OpenError::Format { found: 7, known: 2, .. }), "{error}");
    }
}
