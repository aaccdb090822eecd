//! The file: what is in it, how it is made, opened and checked. Nothing else in the crate opens it.
//!
//! Two tables: `objects` (key → create revision, modify revision, value) and `meta` (`format`, `revision`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition, TableError};

use crate::{Entry, OpenError, Revision};

pub(super) const OBJECTS: TableDefinition<&str, &[u8]> = TableDefinition::new("objects");
pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub(super) const REVISION: &str = "revision";
const FORMAT: &str = "format";
const KNOWN_FORMAT: u64 = 1;
/// Small, because nothing is read from the file after it was opened; it only has to hold the tree's inner pages.
const CACHE: usize = 16 << 20;

/// What the file held when it was opened.
pub(super) struct Loaded {
    pub(super) revision: Revision,
    pub(super) objects: BTreeMap<Arc<str>, Entry>,
}

/// The bytes stored under a key.
pub(super) fn encode(created: Revision, modified: Revision, value: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(16 + value.len());
    record.extend_from_slice(&created.to_le_bytes());
    record.extend_from_slice(&modified.to_le_bytes());
    record.extend_from_slice(value);
    record
}

fn decode(key: &str, record: &[u8]) -> Option<Entry> {
    let (created, rest) = record.split_first_chunk::<8>()?;
    let (modified, value) = rest.split_first_chunk::<8>()?;
    Some(Entry {
        key: key.into(),
        value: Bytes::copy_from_slice(value),
        created: Revision::from_le_bytes(*created),
        modified: Revision::from_le_bytes(*modified),
    })
}

pub(super) fn open(path: &Path) -> Result<(Database, Loaded), OpenError> {
    match fs::metadata(path) {
        Ok(found) if found.len() == 0 => {
            return Err(OpenError::Corrupt { path: path.into(), what: "the file is empty".into() });
        }
        // A start that was cut short after placing the file leaves its other name behind.
        Ok(_) => drop(fs::remove_file(beside(path))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => make(path)?,
        Err(e) => return Err(OpenError::Io { step: "find", path: path.into(), source: Box::new(e) }),
    }
    let database = Database::builder().set_cache_size(CACHE).open(path).map_err(|e| database_error(path, "open", e))?;
    let loaded = load(path, &database)?;
    Ok((database, loaded))
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

fn load(path: &Path, database: &Database) -> Result<Loaded, OpenError> {
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
    for row in read.open_table(OBJECTS).map_err(table)?.iter().map_err(storage)? {
        let (key, record) = row.map_err(storage)?;
        let key = key.value();
        let entry = decode(key, record.value()).ok_or_else(|| corrupt(format!("the record of {key} is too short")))?;
        if entry.modified > revision || entry.created > entry.modified {
            return Err(corrupt(format!("the record of {key} has impossible revisions")));
        }
        objects.insert(entry.key.clone(), entry);
    }
    Ok(Loaded { revision, objects })
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
        let (_, loaded) = open(&dir.path().join("store.redb")).unwrap();
        assert_eq!((loaded.revision, loaded.objects.len()), (1, 0));
    }

    #[test]
    fn refuses_an_unknown_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        drop(open(&path).unwrap());
        let database = Database::open(&path).unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(META).unwrap().insert(FORMAT, 7).unwrap();
        write.commit().unwrap();
        drop(database);
        let error = open(&path).err().unwrap();
        assert!(matches!(error, OpenError::Format { found: 7, known: 1, .. }), "{error}");
    }
}
