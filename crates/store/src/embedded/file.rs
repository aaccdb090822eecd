//! The file: what is in it, how it is made, opened and checked. Nothing else in the crate opens it.
//!
//! Three tables: `objects` (key → create revision, modify revision, value), `samples` (sort of keys and number → a text
//! that values are compared with) and `meta` (`format`, `revision`, `sum`). The highest bit of the create revision says
//! that the value is sealed, the next one that it is packed: number of the sample, length, what is kept. `sum` is over
//! all objects as they are read: it tells damage that the container does not notice.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cleat_pack::{Packed, Sample};
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition, TableError};

use super::pack::{Named, sort};
use super::seal::{Seal, UnsealError};
use super::state::ByKey;
use crate::{Entry, Event, Kept, OpenError, Revision};

pub(super) const OBJECTS: TableDefinition<&str, &[u8]> = TableDefinition::new("objects");
pub(super) const SAMPLES: TableDefinition<(&str, u32), &[u8]> = TableDefinition::new("samples");
pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub(super) const REVISION: &str = "revision";
pub(super) const SUM: &str = "sum";
const FORMAT: &str = "format";
const KNOWN_FORMAT: u64 = 3;
/// The same without packed values.
const UNPACKED_FORMAT: u64 = 2;
/// Small, because nothing is read from the file after it was opened; it only has to hold the tree's inner pages.
const CACHE: usize = 16 << 20;

/// What the file held when it was opened.
pub(super) struct Loaded {
    pub(super) revision: Revision,
    pub(super) objects: BTreeSet<ByKey>,
    pub(super) samples: Vec<Named>,
    pub(super) sum: Sum,
}

/// What a start has to write before anybody else writes.
#[derive(Default)]
struct Stale {
    format: bool,
    /// Keys of what is not stored as the seal would store it now.
    objects: Vec<Arc<str>>,
    /// Samples that nothing is packed with, or that must not be there in the clear.
    samples: Vec<Named>,
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

/// No history is long enough to need these bits.
const SEALED: Revision = 1 << 63;
const PACKED: Revision = 1 << 62;

/// The bytes stored under a key; nothing if they should be sealed and cannot be.
pub(super) fn encode(seal: Option<&Seal>, kept: &Kept) -> Option<Vec<u8>> {
    let Kept { key, value, created, modified } = kept;
    if let Some(seal) = seal.filter(|seal| seal.covers(key)) {
        return Some(record(created | SEALED, *modified, &[&seal.seal(key, &value.text())?]));
    }
    Some(match value.sample() {
        None => record(*created, *modified, &[value.bytes()]),
        Some(sample) => {
            let (id, length) = (sample.id().to_le_bytes(), value.length().to_le_bytes());
            record(created | PACKED, *modified, &[&id, &length, value.bytes()])
        }
    })
}

fn record(created: Revision, modified: Revision, value: &[&[u8]]) -> Vec<u8> {
    let (created, modified) = (created.to_le_bytes(), modified.to_le_bytes());
    let mut record = Vec::with_capacity(16 + value.iter().map(|part| part.len()).sum::<usize>());
    for part in [&created[..], &modified].iter().chain(value) {
        record.extend_from_slice(part);
    }
    record
}

/// A record taken apart.
struct Record<'a> {
    created: Revision,
    modified: Revision,
    value: Form<'a>,
}

enum Form<'a> {
    Plain(&'a [u8]),
    Sealed(&'a [u8]),
    Packed { sample: u32, length: u32, bytes: &'a [u8] },
}

fn split(record: &[u8]) -> Option<Record<'_>> {
    let (created, rest) = record.split_first_chunk::<8>()?;
    let (modified, value) = rest.split_first_chunk::<8>()?;
    let created = Revision::from_le_bytes(*created);
    let modified = Revision::from_le_bytes(*modified);
    let value = match (created & SEALED != 0, created & PACKED != 0) {
        (false, false) => Form::Plain(value),
        (true, false) => Form::Sealed(value),
        (false, true) => {
            let (sample, rest) = value.split_first_chunk::<4>()?;
            let (length, bytes) = rest.split_first_chunk::<4>()?;
            Form::Packed { sample: u32::from_le_bytes(*sample), length: u32::from_le_bytes(*length), bytes }
        }
        (true, true) => return None,
    };
    Some(Record { created: created & !(SEALED | PACKED), modified, value })
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
    refresh(path, &mut database, seal, &loaded, &stale)?;
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
        write.open_table(SAMPLES)?;
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

/// What the file holds, and what of it is not as it would be stored now.
fn load(path: &Path, database: &Database, seal: Option<&Seal>) -> Result<(Loaded, Stale), OpenError> {
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
    if !matches!(found, KNOWN_FORMAT | UNPACKED_FORMAT) {
        return Err(OpenError::Format { path: path.into(), found, known: KNOWN_FORMAT });
    }
    let mut stale = Stale { format: found != KNOWN_FORMAT, ..Stale::default() };
    let mut samples: HashMap<u32, Named> = HashMap::new();
    if !stale.format {
        for row in read.open_table(SAMPLES).map_err(table)?.iter().map_err(storage)? {
            let (name, text) = row.map_err(storage)?;
            let (sort, id) = name.value();
            samples.insert(id, (sort.into(), Sample::known(id, text.value())));
        }
    }
    let mut used = HashSet::new();
    let revision = number(REVISION)?;
    let mut objects = BTreeSet::new();
    let mut sum = Sum::default();
    for row in read.open_table(OBJECTS).map_err(table)?.iter().map_err(storage)? {
        let (key, found) = row.map_err(storage)?;
        let key: Arc<str> = key.value().into();
        let found = found.value();
        let record = split(found).ok_or_else(|| corrupt(format!("the record of {key} is cut off")))?;
        let Record { created, modified, .. } = record;
        if modified > revision || created > modified {
            return Err(corrupt(format!("the record of {key} has impossible revisions")));
        }
        let covering = seal.filter(|seal| seal.covers(&key));
        // Where values are sealed there are no samples in the clear, and so nothing is packed.
        let unpackable = seal.is_some_and(|seal| seal.touches(sort(&key)));
        let is_current = match (&record.value, covering) {
            (Form::Sealed(bytes), Some(seal)) => seal.is_current(bytes),
            (Form::Sealed(_), None) | (_, Some(_)) => false,
            (Form::Packed { .. }, None) => !unpackable,
            (Form::Plain(_), None) => true,
        };
        let (packed, text) = match (record.value, seal) {
            (Form::Plain(bytes), _) => (Packed::plain(bytes), bytes.to_vec()),
            (Form::Packed { sample, length, bytes }, _) => {
                used.insert(sample);
                let (_, sample) =
                    samples.get(&sample).ok_or_else(|| corrupt(format!("{key}: its sample is missing")))?;
                Packed::read(sample, length, bytes).ok_or_else(|| corrupt(format!("{key}: it cannot be unpacked")))?
            }
            (Form::Sealed(_), None) => {
                return Err(OpenError::Encrypted { path: path.into(), key: key.to_string() });
            }
            (Form::Sealed(bytes), Some(seal)) => match seal.open(&key, bytes) {
                Ok(plain) => (Packed::plain(&plain), plain),
                Err(UnsealError::UnknownKey) => {
                    return Err(OpenError::WrongKey { path: path.into(), key: key.to_string() });
                }
                Err(error @ UnsealError::Damaged) => return Err(corrupt(format!("{key}: {error}"))),
            },
        };
        if !is_current {
            stale.objects.push(key.clone());
        }
        let packed = if unpackable { Packed::plain(&text) } else { packed };
        let entry = Entry { key, value: text.into(), created, modified };
        sum = sum.with(&entry);
        objects.insert(ByKey(Kept::new(&entry, packed)));
    }
    if number(SUM)? != sum.0 {
        return Err(corrupt("its objects are not those that were stored".into()));
    }
    let stays = |(sort, sample): &Named| used.contains(&sample.id()) && !seal.is_some_and(|seal| seal.touches(sort));
    let (samples, gone) = samples.into_values().partition(stays);
    stale.samples = gone;
    Ok((Loaded { revision, objects, samples, sum }, stale))
}

/// Stores again what was stored in the clear, under an older key or in an older format.
fn refresh(
    path: &Path,
    database: &mut Database,
    seal: Option<&Seal>,
    loaded: &Loaded,
    stale: &Stale,
) -> Result<(), OpenError> {
    if !stale.format && stale.objects.is_empty() && stale.samples.is_empty() {
        return Ok(());
    }
    let failed = |source| OpenError::Io { step: "refresh", path: path.into(), source };
    let mut rewrite = || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let write = database.begin_write()?;
        {
            let mut objects = write.open_table(OBJECTS)?;
            for kept in stale.objects.iter().filter_map(|key| loaded.objects.get(&**key)) {
                let record = encode(seal, &kept.0).ok_or("no random bytes")?;
                objects.insert(&*kept.0.key, record.as_slice())?;
            }
            let mut samples = write.open_table(SAMPLES)?;
            for (sort, sample) in &stale.samples {
                samples.remove((&**sort, sample.id()))?;
            }
            write.open_table(META)?.insert(FORMAT, KNOWN_FORMAT)?;
        }
        write.commit()?;
        if !stale.objects.is_empty() || !stale.samples.is_empty() {
            // The pages that held the old form are free now, but their bytes are still there.
            database.compact()?;
        }
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

    fn set_format(path: &Path, format: u64) {
        let database = Database::open(path).unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(META).unwrap().insert(FORMAT, format).unwrap();
        if format < KNOWN_FORMAT {
            write.delete_table(SAMPLES).unwrap();
        }
        write.commit().unwrap();
    }

    #[test]
    fn a_file_without_samples_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        drop(open(&path, None).unwrap());
        set_format(&path, UNPACKED_FORMAT);
        drop(open(&path, None).unwrap());
        let database = Database::open(&path).unwrap();
        let read = database.begin_read().unwrap();
        assert_eq!(read.open_table(META).unwrap().get(FORMAT).unwrap().unwrap().value(), KNOWN_FORMAT);
        assert!(read.open_table(SAMPLES).is_ok());
    }

    #[test]
    fn refuses_an_unknown_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        drop(open(&path, None).unwrap());
        set_format(&path, 7);
        let error = open(&path, None).err().unwrap();
        assert!(matches!(error, OpenError::Format { found: 7, known: 3, .. }), "{error}");
    }
}
