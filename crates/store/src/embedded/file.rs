//! The container: what is in it, how it is made, opened and checked. Nothing else in the crate opens it.
//!
//! Three tables: `objects` (key → create revision, modify revision, value), `dictionaries` (sort of keys and number → a text
//! that values are compared with) and `meta` (`format`, `revision`, `sum`, `log`, `residue`). `sum` is over
//! all records and dictionaries: it tells damage that the container does not notice. `log` says that batches newer than
//! `revision` may be in a log beside it; without it, files of a log are what a stop left behind.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cleat_pack::{Dictionary, Packed};
use redb::{
    Database, DatabaseError, ReadTransaction, ReadableDatabase, ReadableTable, StorageError, TableDefinition,
    TableError,
};

use super::checkpoint::{Backlog, Container};
use super::frame::{Found, Item};
use super::log::{self, Log, Read};
use super::pack::{Named, sort};
use super::record::{Form, Record, Sum, encode, split};
use super::seal::{Seal, UnsealError};
use super::state::ByKey;
use crate::{Kept, OpenError, Revision};

pub(super) const OBJECTS: TableDefinition<&str, &[u8]> = TableDefinition::new("objects");
pub(super) const DICTIONARIES: TableDefinition<(&str, u32), &[u8]> = TableDefinition::new("dictionaries");
pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub(super) const REVISION: &str = "revision";
pub(super) const SUM: &str = "sum";
pub(super) const LOG: &str = "log";
/// Set while free pages may hold what must not stay.
const RESIDUE: &str = "residue";
const FORMAT: &str = "format";
const KNOWN_FORMAT: u64 = 4;
/// The same without a log, and with the sum over objects as they are read.
const UNLOGGED_FORMAT: u64 = 3;
/// That one without packed values.
const UNPACKED_FORMAT: u64 = 2;
/// Small, because nothing is read from the file after it was opened; it only has to hold the tree's inner pages.
const CACHE: usize = 16 << 20;

/// What the store held when it was opened.
pub(super) struct Loaded {
    pub(super) revision: Revision,
    pub(super) objects: BTreeSet<ByKey>,
    pub(super) dictionaries: Vec<Named>,
    /// The lowest number that no dictionary has or had, neither in the container nor in the log.
    pub(super) next_dictionary: u32,
    pub(super) disk: Opened,
}

/// What the writer goes on with.
pub(super) struct Opened {
    pub(super) container: Container,
    pub(super) log: Log,
    pub(super) backlog: Backlog,
    /// Does the container say that there is a log?
    pub(super) marked: bool,
}

/// What a start has to write before anybody else writes.
#[derive(Default)]
struct Stale {
    format: bool,
    /// May there be something in the log that must not stay in its form?
    log: bool,
    /// Was the last start cut short while it was at this?
    residue: bool,
    /// Keys of what is not stored as the seal would store it now.
    objects: BTreeSet<Arc<str>>,
    /// Dictionaries that must not be there in the clear.
    dictionaries: Vec<Named>,
}

impl Stale {
    fn is_empty(&self) -> bool {
        !self.format && !self.leaves_residue()
    }

    /// Is there something that must not stay on disk in its old form?
    fn leaves_residue(&self) -> bool {
        self.log || self.residue || !self.objects.is_empty() || !self.dictionaries.is_empty()
    }
}

/// Opens the container, makes it if it is not there, and repeats what is in its log.
pub(super) fn open(path: &Path, seal: Option<&Arc<Seal>>) -> Result<Loaded, OpenError> {
    let corrupt = |what: &str| OpenError::Corrupt { path: path.into(), what: what.into() };
    let failed = |step| {
        move |source: Box<dyn std::error::Error + Send + Sync>| OpenError::Io { step, path: path.into(), source }
    };
    let logs = || log::names(path).map_err(|e| failed("find the log of")(e.into()));
    match fs::metadata(path) {
        Ok(found) if found.len() == 0 => return Err(corrupt("the file is empty")),
        // A start that was cut short after placing the file leaves its other name behind.
        Ok(_) => drop(fs::remove_file(beside(path))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => match parent(path).is_dir() && !logs()?.is_empty() {
            true => return Err(corrupt("there is its log only")),
            false => make(path)?,
        },
        Err(e) => return Err(failed("find")(e.into())),
    }
    let read = || {
        let database = open_container(path)?;
        let contents = Contents::read(path, &database, seal.map(AsRef::as_ref))?;
        Ok((database, contents))
    };
    // The container meets some damage by panicking.
    let (mut database, mut contents) =
        catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| Err(corrupt("it cannot be read")))?;
    let mut backlog = Backlog { revision: contents.revision, ..Backlog::default() };
    let (mut at, mut marked) = (contents.revision, contents.has_log);
    let mut log = Log::new(path);
    if marked {
        let Read { log: found, frames } = Log::read(path, contents.revision)?;
        if found.is_absent() {
            return Err(corrupt("its log is missing"));
        }
        log = found;
        // Whatever was deleted, or half written, or is left of an earlier use of its files, is there as it was written.
        contents.stale.log = seal.is_some();
        contents.replay(&frames, &mut backlog)?;
    } else {
        // It has nothing that the container has not: it was on its way out.
        logs()?.iter().try_for_each(fs::remove_file).map_err(|e| failed("remove the log of")(e.into()))?;
    }
    let (revision, next_dictionary, mut sum) = (contents.revision, contents.next_dictionary, contents.sum);
    let (objects, dictionaries, stale) = contents.sorted_out(&mut backlog);
    if !stale.is_empty() {
        sum = refresh(&mut database, seal.map(AsRef::as_ref), &objects, &backlog, &stale).map_err(failed("refresh"))?;
        log.remove().map_err(|e| failed("remove the log of")(e.into()))?;
        if stale.leaves_residue() {
            clear_residue(&mut database).map_err(failed("compact"))?;
        }
        (backlog, at, marked) = (Backlog { revision, ..Backlog::default() }, revision, false);
    }
    let container = Container::new(path.into(), seal.cloned(), database, at, sum);
    Ok(Loaded { revision, objects, dictionaries, next_dictionary, disk: Opened { container, log, backlog, marked } })
}

fn open_container(path: &Path) -> Result<Database, OpenError> {
    Database::builder().set_cache_size(CACHE).open(path).map_err(|e| database_error(path, "open", e))
}

/// The container of a store that is running, with the revision and the sum it is at.
pub(super) fn reopen(path: &Path) -> Result<(Database, Revision, Sum), OpenError> {
    let database = open_container(path)?;
    let failed = |e: redb::Error| OpenError::Io { step: "read", path: path.into(), source: Box::new(e) };
    let read = |name: &str| -> Result<Option<u64>, redb::Error> {
        Ok(database.begin_read()?.open_table(META)?.get(name)?.map(|found| found.value()))
    };
    let number = |name: &str| {
        let missing = || OpenError::Corrupt { path: path.into(), what: format!("it has no {name}") };
        read(name).map_err(failed)?.ok_or_else(missing)
    };
    let (revision, sum) = (number(REVISION)?, Sum(number(SUM)?));
    Ok((database, revision, sum))
}

/// Notes that the container is whole without a log.
pub(super) fn expect_no_log(database: &Database) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    write.open_table(META)?.insert(LOG, 0)?;
    write.commit()?;
    Ok(())
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
        write.open_table(DICTIONARIES)?;
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
    sync_parent(path).map_err(|e| io("sync the directory of", e))
}

/// Makes durable that there is a file of this name.
pub(super) fn sync_parent(path: &Path) -> io::Result<()> {
    fs::File::open(parent(path))?.sync_all()
}

pub(super) fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// What has been read so far.
struct Contents<'a> {
    path: &'a Path,
    seal: Option<&'a Seal>,
    revision: Revision,
    has_log: bool,
    sum: Sum,
    dictionaries: HashMap<u32, Named>,
    next_dictionary: u32,
    objects: BTreeSet<ByKey>,
    stale: Stale,
}

impl<'a> Contents<'a> {
    /// What is in the container.
    fn read(path: &'a Path, database: &Database, seal: Option<&'a Seal>) -> Result<Self, OpenError> {
        let read = database.begin_read().map_err(|e| match e {
            redb::TransactionError::Storage(e) => storage_error(path, "read", e),
            other => OpenError::Io { step: "read", path: path.into(), source: Box::new(other) },
        })?;
        let mut contents = Self {
            path,
            seal,
            revision: 0,
            has_log: false,
            sum: Sum::default(),
            dictionaries: HashMap::new(),
            next_dictionary: 0,
            objects: BTreeSet::new(),
            stale: Stale::default(),
        };
        contents.fill(&read)?;
        Ok(contents)
    }

    fn corrupt(&self, what: String) -> OpenError {
        OpenError::Corrupt { path: self.path.into(), what }
    }

    fn fill(&mut self, read: &ReadTransaction) -> Result<(), OpenError> {
        let path = self.path;
        let storage = |e: StorageError| storage_error(path, "read", e);
        let table = |e: TableError| match e {
            TableError::Storage(e) => storage_error(path, "read", e),
            other => OpenError::Corrupt { path: path.into(), what: other.to_string() },
        };
        let meta = read.open_table(META).map_err(table)?;
        let number = |name: &str| meta.get(name).map_err(storage).map(|found| found.map(|found| found.value()));
        let needed = |name: &str| number(name)?.ok_or_else(|| self.corrupt(format!("it has no {name}")));
        let format = needed(FORMAT)?;
        if !matches!(format, KNOWN_FORMAT | UNLOGGED_FORMAT | UNPACKED_FORMAT) {
            return Err(OpenError::Format { path: path.into(), found: format, known: KNOWN_FORMAT });
        }
        let (revision, sum) = (needed(REVISION)?, Sum(needed(SUM)?));
        (self.revision, self.has_log) = (revision, number(LOG)? == Some(1));
        self.stale.format = format != KNOWN_FORMAT;
        self.stale.residue = number(RESIDUE)? == Some(1);
        let mut found = Sum::default();
        if format != UNPACKED_FORMAT {
            for row in read.open_table(DICTIONARIES).map_err(table)?.iter().map_err(storage)? {
                let (name, text) = row.map_err(storage)?;
                let (sort, id) = name.value();
                if format == KNOWN_FORMAT {
                    found.add(&Sum::of_dictionary(sort, id, text.value()));
                }
                self.learn(sort, id, text.value());
            }
        }
        for row in read.open_table(OBJECTS).map_err(table)?.iter().map_err(storage)? {
            let (key, record) = row.map_err(storage)?;
            let kept = self.take(key.value(), record.value(), revision)?;
            found.add(&match format {
                KNOWN_FORMAT => Sum::of_record(key.value(), record.value()),
                _ => Sum::of_entry(&kept.entry()),
            });
        }
        if sum != found {
            return Err(self.corrupt("its objects are not those that were stored".into()));
        }
        self.sum = sum;
        Ok(())
    }

    /// Is the record as it would be stored now?
    fn is_current(&self, key: &str, record: &Record<'_>) -> bool {
        match (&record.value, self.seal.filter(|seal| seal.covers(key))) {
            (Form::Sealed(bytes), Some(seal)) => seal.is_current(bytes),
            (Form::Sealed(_), None) | (_, Some(_)) => false,
            (Form::Packed { .. }, None) => !self.is_unpackable(key),
            (Form::Plain(_), None) => true,
        }
    }

    /// Where values are sealed there are no dictionaries in the clear, and so nothing is packed.
    fn is_unpackable(&self, key: &str) -> bool {
        self.seal.is_some_and(|seal| seal.touches(sort(key)))
    }

    fn learn(&mut self, sort: &str, id: u32, text: &[u8]) -> Named {
        let named: Named = (sort.into(), Dictionary::known(id, text));
        self.dictionaries.insert(id, named.clone());
        self.next_dictionary = self.next_dictionary.max(id + 1);
        named
    }

    /// Takes a record up, in the place of an older one of that key.
    fn take(&mut self, key: &str, record: &[u8], revision: Revision) -> Result<Kept, OpenError> {
        let record = split(record).ok_or_else(|| self.corrupt(format!("the record of {key} is cut off")))?;
        let Record { created, modified, .. } = record;
        if modified > revision || created > modified {
            return Err(self.corrupt(format!("the record of {key} has impossible revisions")));
        }
        let is_current = self.is_current(key, &record);
        let unpackable = self.is_unpackable(key);
        let packed = match (record.value, self.seal) {
            (Form::Plain(bytes), _) => Packed::plain(bytes),
            (Form::Packed { dictionary, length, bytes }, _) => {
                let (_, dictionary) = self
                    .dictionaries
                    .get(&dictionary)
                    .ok_or_else(|| self.corrupt(format!("{key}: its dictionary is missing")))?;
                let (packed, text) = Packed::read(dictionary, length, bytes)
                    .ok_or_else(|| self.corrupt(format!("{key}: it cannot be unpacked")))?;
                if unpackable { Packed::plain(&text) } else { packed }
            }
            (Form::Sealed(_), None) => {
                return Err(OpenError::Encrypted { path: self.path.into(), key: key.to_owned() });
            }
            (Form::Sealed(bytes), Some(seal)) => match seal.open(key, bytes) {
                Ok(plain) => Packed::plain(&plain),
                Err(UnsealError::UnknownKey) => {
                    return Err(OpenError::WrongKey { path: self.path.into(), key: key.to_owned() });
                }
                Err(error @ UnsealError::Damaged) => return Err(self.corrupt(format!("{key}: {error}"))),
            },
        };
        let kept = Kept { key: key.into(), value: packed, created, modified };
        if is_current {
            self.stale.objects.remove(key);
        } else {
            self.stale.objects.insert(kept.key.clone());
        }
        self.objects.replace(ByKey(kept.clone()));
        Ok(kept)
    }

    /// Repeats what the log says. Of each key only the last word counts: what came before may need a key to be opened
    /// that nobody has any more.
    fn replay(&mut self, frames: &[Found], backlog: &mut Backlog) -> Result<(), OpenError> {
        let mut last: HashMap<&str, Option<&[u8]>> = HashMap::new();
        for item in frames.iter().flat_map(Found::items) {
            match item.ok_or_else(|| self.corrupt("its log cannot be read".into()))? {
                Item::Dictionary { sort, id, text } => backlog.dictionaries.push(self.learn(sort, id, text)),
                Item::Stored { key, record } => drop(last.insert(key, Some(record))),
                Item::Removed { key } => drop(last.insert(key, None)),
            }
        }
        let revision = frames.last().map_or(self.revision, |frame| frame.last);
        for (key, record) in last {
            let kept = match record {
                Some(record) => Some(self.take(key, record, revision)?),
                None => {
                    self.objects.take(key);
                    self.stale.objects.remove(key);
                    None
                }
            };
            backlog.objects.insert(key.into(), kept);
        }
        (self.revision, backlog.revision) = (revision, revision);
        Ok(())
    }

    /// The objects, the dictionaries that serve them, and what has to be stored anew. Dictionaries that serve nothing go at the
    /// next opportunity.
    fn sorted_out(self, backlog: &mut Backlog) -> (BTreeSet<ByKey>, Vec<Named>, Stale) {
        let Self { dictionaries, objects, mut stale, seal, .. } = self;
        let used: HashSet<u32> =
            objects.iter().filter_map(|found| found.0.value.dictionary()).map(|s| s.id()).collect();
        let mut serving = Vec::new();
        for (sort, dictionary) in dictionaries.into_values() {
            let is_secret = seal.is_some_and(|seal| seal.touches(&sort));
            let place = match is_secret {
                true => &mut stale.dictionaries,
                false if used.contains(&dictionary.id()) => &mut serving,
                false => &mut backlog.useless,
            };
            place.push((sort, dictionary));
        }
        (objects, serving, stale)
    }
}

/// Stores again what was stored in the clear, under an older key or in an older format, and with it what the log has.
fn refresh(
    database: &mut Database,
    seal: Option<&Seal>,
    objects: &BTreeSet<ByKey>,
    backlog: &Backlog,
    stale: &Stale,
) -> Result<Sum, Box<dyn std::error::Error + Send + Sync>> {
    let mut sum = Sum::default();
    let write = database.begin_write()?;
    {
        let mut stored = write.open_table(OBJECTS)?;
        for key in backlog.objects.keys().chain(&stale.objects) {
            match objects.get(&**key) {
                Some(kept) => {
                    let record = encode(seal, &kept.0).ok_or("no random bytes")?;
                    stored.insert(&**key, record.as_slice())?;
                }
                None => drop(stored.remove(&**key)?),
            }
        }
        let mut dictionaries = write.open_table(DICTIONARIES)?;
        for (sort, dictionary) in &backlog.dictionaries {
            dictionaries.insert((&**sort, dictionary.id()), dictionary.text())?;
        }
        for (sort, dictionary) in stale.dictionaries.iter().chain(&backlog.useless) {
            dictionaries.remove((&**sort, dictionary.id()))?;
        }
        for row in stored.iter()? {
            let (key, record) = row?;
            sum.add(&Sum::of_record(key.value(), record.value()));
        }
        for row in dictionaries.iter()? {
            let (name, text) = row?;
            let (sort, id) = name.value();
            sum.add(&Sum::of_dictionary(sort, id, text.value()));
        }
        let mut meta = write.open_table(META)?;
        meta.insert(FORMAT, KNOWN_FORMAT)?;
        meta.insert(SUM, sum.0)?;
        meta.insert(REVISION, backlog.revision)?;
        // From here on the log is rubbish.
        meta.insert(LOG, 0)?;
        meta.insert(RESIDUE, u64::from(stale.leaves_residue()))?;
    }
    write.commit()?;
    cleat_crash::point("store:refreshed");
    Ok(sum)
}

/// The pages that held the old form are free now, but their bytes are still there.
fn clear_residue(database: &mut Database) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    database.compact()?;
    let write = database.begin_write()?;
    write.open_table(META)?.remove(RESIDUE)?;
    write.commit()?;
    Ok(())
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
    use crate::Entry;
    use crate::embedded::record::record;

    #[test]
    fn a_first_start_that_was_cut_short_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("store.redb.new"), b"half made").unwrap();
        let loaded = open(&dir.path().join("store.redb"), None).unwrap();
        assert_eq!((loaded.revision, loaded.objects.len()), (1, 0));
    }

    fn set_format(path: &Path, format: u64) {
        let database = Database::open(path).unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(META).unwrap().insert(FORMAT, format).unwrap();
        write.commit().unwrap();
    }

    /// A file as it was before there was a log, with one object.
    fn older(path: &Path, format: u64) {
        drop(open(path, None).unwrap());
        let database = Database::open(path).unwrap();
        let write = database.begin_write().unwrap();
        {
            let entry = Entry { key: "/k/1".into(), value: "value".into(), created: 2, modified: 3 };
            let record = record(2, 3, &[b"value"]);
            write.open_table(OBJECTS).unwrap().insert("/k/1", record.as_slice()).unwrap();
            let mut meta = write.open_table(META).unwrap();
            meta.insert(FORMAT, format).unwrap();
            meta.insert(REVISION, 3).unwrap();
            meta.insert(SUM, Sum::of_entry(&entry).0).unwrap();
            meta.remove(LOG).unwrap();
        }
        if format == UNPACKED_FORMAT {
            write.delete_table(DICTIONARIES).unwrap();
        }
        write.commit().unwrap();
    }

    #[test]
    fn older_files_are_taken_over() {
        for format in [UNPACKED_FORMAT, UNLOGGED_FORMAT] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("store.redb");
            older(&path, format);
            for start in ["first", "second"] {
                let loaded = open(&path, None).unwrap_or_else(|e| panic!("format {format}, {start} start: {e}"));
                let found: Vec<Entry> = loaded.objects.iter().map(|found| found.0.entry()).collect();
                assert_eq!((loaded.revision, found.len()), (3, 1), "format {format}, {start} start");
                assert_eq!((&*found[0].key, &found[0].value[..]), ("/k/1", &b"value"[..]));
            }
            let database = Database::open(&path).unwrap();
            let read = database.begin_read().unwrap();
            assert_eq!(read.open_table(META).unwrap().get(FORMAT).unwrap().unwrap().value(), KNOWN_FORMAT);
            assert!(read.open_table(DICTIONARIES).is_ok());
        }
    }

    #[test]
    fn an_older_file_that_was_damaged_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        older(&path, UNLOGGED_FORMAT);
        let database = Database::open(&path).unwrap();
        let write = database.begin_write().unwrap();
        let record = record(2, 3, &[b"other"]);
        write.open_table(OBJECTS).unwrap().insert("/k/1", record.as_slice()).unwrap();
        write.commit().unwrap();
        drop(database);
        let error = open(&path, None).err().unwrap();
        assert!(matches!(error, OpenError::Corrupt { .. }), "{error}");
    }

    #[test]
    fn refuses_an_unknown_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        drop(open(&path, None).unwrap());
        set_format(&path, 7);
        let error = open(&path, None).err().unwrap();
        assert!(matches!(error, OpenError::Format { found: 7, known: 4, .. }), "{error}");
    }
}
