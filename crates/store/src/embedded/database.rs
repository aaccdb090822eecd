//! The database: a redb file with the state as of the last checkpoint. Defines its tables, creates and opens the file.
//! No other module opens it.
//!
//! Three tables: `objects` (key to record, see `record`), `dictionaries` (group of keys and id to the dictionary's
//! bytes) and `meta` (`format`, `revision`, `sum`, `log`, `residue`). `sum` is the checksum over all records and
//! dictionaries; it reveals damage that redb does not notice. `log` is 1 if batches newer than `revision` may be in the
//! log beside the database; otherwise files of a log are left over from a stop and are removed. `residue` is described
//! at [`RESIDUE`].

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use redb::{Database, DatabaseError, StorageError, TableDefinition};

use super::directory::sync_parent_dir;
use super::record::Checksum;
use crate::entry::Revision;
use crate::error::OpenError;

pub(super) const OBJECTS: TableDefinition<&str, &[u8]> = TableDefinition::new("objects");
pub(super) const DICTIONARIES: TableDefinition<(&str, u32), &[u8]> = TableDefinition::new("dictionaries");
pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub(super) const FORMAT: &str = "format";
pub(super) const REVISION: &str = "revision";
pub(super) const CHECKSUM: &str = "sum";
pub(super) const LOG: &str = "log";
/// 1 while free pages of the file may hold plain values that are encrypted now.
pub(super) const RESIDUE: &str = "residue";
/// The only format that this version opens.
pub(super) const SUPPORTED_FORMAT: u64 = 4;
/// Small, because reads are served from memory: it only has to hold the inner pages of the trees.
const CACHE_BYTES: usize = 16 << 20;

pub(super) fn open(path: &Path) -> Result<Database, OpenError> {
    Database::builder().set_cache_size(CACHE_BYTES).open(path).map_err(|e| database_error(path, "open", e))
}

/// Opens the database of a running store again. Returns it with the revision and the checksum of its contents.
pub(super) fn reopen(path: &Path) -> Result<(Database, Revision, Checksum), OpenError> {
    use redb::ReadableDatabase as _;
    let database = open(path)?;
    let failed = |e: redb::Error| OpenError::Io { step: "read", path: path.into(), source: Box::new(e) };
    let read = |name: &str| -> Result<Option<u64>, redb::Error> {
        Ok(database.begin_read()?.open_table(META)?.get(name)?.map(|found| found.value()))
    };
    let number = |name: &str| {
        let missing = || OpenError::Corrupt { path: path.into(), what: format!("it has no {name}") };
        read(name).map_err(failed)?.ok_or_else(missing)
    };
    let (revision, checksum) = (number(REVISION)?, Checksum(number(CHECKSUM)?));
    Ok((database, revision, checksum))
}

/// Records that the database is complete without a log.
pub(super) fn expect_no_log(database: &Database) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    write.open_table(META)?.insert(LOG, 0)?;
    write.commit()?;
    Ok(())
}

/// Creates an empty database. It is complete before it is linked to `path`: a file of that name is never partly
/// initialised, so that an empty or partial one is damage and is refused.
pub(super) fn create(path: &Path) -> Result<(), OpenError> {
    let io = |step, e: io::Error| OpenError::Io { step, path: path.into(), source: Box::new(e) };
    let new = unfinished_path(path);
    let database = match Database::builder().create(&new) {
        Err(DatabaseError::DatabaseAlreadyOpen) => return Err(OpenError::Locked { path: path.into() }),
        // An interrupted start left a partly written file. Nothing was ever stored in it.
        Err(_) if new.exists() => fs::remove_file(&new)
            .map_err(|e| io("remove a leftover file of", e))
            .and_then(|()| Database::builder().create(&new).map_err(|e| database_error(&new, "create", e)))?,
        created => created.map_err(|e| database_error(&new, "create", e))?,
    };
    let initialise = || -> Result<(), redb::Error> {
        let write = database.begin_write()?;
        write.open_table(OBJECTS)?;
        write.open_table(DICTIONARIES)?;
        let mut meta = write.open_table(META)?;
        meta.insert(FORMAT, SUPPORTED_FORMAT)?;
        meta.insert(REVISION, 1)?;
        meta.insert(CHECKSUM, Checksum::default().0)?;
        drop(meta);
        write.commit()?;
        Ok(())
    };
    // The file holds Secrets.
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).map_err(|e| io("set the permissions of", e))?;
    initialise().map_err(|e| OpenError::Io { step: "initialise", path: path.into(), source: Box::new(e) })?;
    drop(database);
    match fs::hard_link(&new, path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io("link", e)),
        _ => {}
    }
    fs::remove_file(&new).map_err(|e| io("remove the temporary file of", e))?;
    sync_parent_dir(path).map_err(|e| io("sync the directory of", e))
}

/// Removes what a start left behind that was interrupted after it linked the file to its path.
pub(super) fn remove_unfinished(path: &Path) {
    drop(fs::remove_file(unfinished_path(path)));
}

fn unfinished_path(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.new", path.display()))
}

fn database_error(path: &Path, step: &'static str, error: DatabaseError) -> OpenError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => OpenError::Locked { path: path.into() },
        DatabaseError::Storage(e) => storage_error(path, step, e),
        DatabaseError::UpgradeRequired(found) => {
            OpenError::Corrupt { path: path.into(), what: format!("redb's file format {found} is too old") }
        }
        other => OpenError::Io { step, path: path.into(), source: Box::new(other) },
    }
}

pub(super) fn storage_error(path: &Path, step: &'static str, error: StorageError) -> OpenError {
    match error {
        StorageError::Corrupted(what) => OpenError::Corrupt { path: path.into(), what },
        StorageError::Io(e) if matches!(e.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {
            OpenError::Corrupt { path: path.into(), what: e.to_string() }
        }
        other => OpenError::Io { step, path: path.into(), source: Box::new(other) },
    }
}
