//! Opens a store: reads the database, replays the log, and encrypts the values that are stored in clear or with an old
//! key. Creates the store if there is none. A damaged store is refused and not changed.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use cleat_pack::{Dictionary, Packed};
use redb::{Database, ReadTransaction, ReadableDatabase, ReadableTable, StorageError, TableError};

use super::checkpoint::{Backlog, DatabaseWriter};
use super::database::{
    self, CHECKSUM, DICTIONARIES, FORMAT, LOG, META, OBJECTS, RESIDUE, REVISION, SUPPORTED_FORMAT, storage_error,
};
use super::directory::parent_dir;
use super::encryption::{DecryptError, Encryptor};
use super::frame::{Frame, FrameItem};
use super::log::{self, Log, LoggedBatches};
use super::packer::{GroupDictionary, group_of};
use super::record::{Checksum, Record, RecordValue, encode};
use super::state::EntryByKey;
use crate::entry::{Revision, StoredEntry};
use crate::error::OpenError;

/// The contents of a store that was opened.
pub(super) struct LoadedStore {
    pub(super) revision: Revision,
    pub(super) objects: BTreeSet<EntryByKey>,
    /// The dictionaries that values use.
    pub(super) dictionaries: Vec<GroupDictionary>,
    /// No dictionary in the database or in the log has this id or a higher one.
    pub(super) next_dictionary_id: u32,
    pub(super) files: StoreFiles,
}

/// The files of a store, ready for writing.
pub(super) struct StoreFiles {
    pub(super) database: DatabaseWriter,
    pub(super) log: Log,
    /// The replayed changes.
    pub(super) backlog: Backlog,
    /// The database records that a log may exist.
    pub(super) log_recorded: bool,
}

/// What must be rewritten before the store is used, because the encryption keys or the covered prefixes changed.
#[derive(Default)]
struct Reencryption {
    /// The log may hold plain values or values under an older key.
    log: bool,
    /// Free pages of the database may hold them: an earlier re-encryption was interrupted.
    residue: bool,
    /// Keys of values that are not stored as the encryptor would store them.
    objects: BTreeSet<Arc<str>>,
    /// Dictionaries of groups that are encrypted now. Dictionaries are stored without encryption.
    dictionaries: Vec<GroupDictionary>,
}

impl Reencryption {
    fn is_needed(&self) -> bool {
        self.log || self.residue || !self.objects.is_empty() || !self.dictionaries.is_empty()
    }
}

/// Opens the store at `path`, or creates it. The caller holds the store's lock.
pub(super) fn open(path: &Path, encryptor: Option<&Arc<Encryptor>>) -> Result<LoadedStore, OpenError> {
    let corrupt = |what: &str| OpenError::Corrupt { path: path.into(), what: what.into() };
    let failed = |step| {
        move |source: Box<dyn std::error::Error + Send + Sync>| OpenError::Io { step, path: path.into(), source }
    };
    let log_files = || log::find_files(path).map_err(|e| failed("find the log of")(e.into()));
    match fs::metadata(path) {
        Ok(found) if found.len() == 0 => return Err(corrupt("the file is empty")),
        Ok(_) => database::remove_unfinished(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => match parent_dir(path).is_dir() && !log_files()?.is_empty() {
            true => return Err(corrupt("the database file is missing: there is its log only")),
            false => database::create(path)?,
        },
        Err(e) => return Err(failed("find")(e.into())),
    }
    let read = || {
        let database = database::open(path)?;
        let loader = StoreLoader::read(path, &database, encryptor.map(AsRef::as_ref))?;
        Ok((database, loader))
    };
    // redb panics on some kinds of damage.
    let (mut database, mut loader) =
        catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| Err(corrupt("it cannot be read")))?;
    let mut backlog = Backlog::at(loader.revision);
    let (mut database_revision, mut log_recorded) = (loader.revision, loader.has_log);
    let mut log = Log::new(path);
    if log_recorded {
        let LoggedBatches { log: found, frames } = Log::read(path, loader.revision)?;
        if !found.has_files() {
            return Err(corrupt("its log is missing"));
        }
        log = found;
        // Also values that were deleted since, incomplete frames and frames of an earlier generation are in its files,
        // possibly without encryption.
        loader.reencryption.log = encryptor.is_some();
        loader.replay(&frames, &mut backlog)?;
    } else {
        // A stop was interrupted between recording that there is no log and removing its files.
        log_files()?.iter().try_for_each(fs::remove_file).map_err(|e| failed("remove the log of")(e.into()))?;
    }
    let (revision, next_dictionary_id, mut checksum) = (loader.revision, loader.next_dictionary_id, loader.checksum);
    let (objects, dictionaries, reencryption) = loader.finish(&mut backlog);
    if reencryption.is_needed() {
        let encryptor = encryptor.map(AsRef::as_ref);
        checksum =
            reencrypt(&database, encryptor, &objects, &backlog, &reencryption).map_err(failed("encrypt anew"))?;
        log.remove().map_err(|e| failed("remove the log of")(e.into()))?;
        clear_residue(&mut database).map_err(failed("compact"))?;
        (backlog, database_revision, log_recorded) = (Backlog::at(revision), revision, false);
    }
    let database = DatabaseWriter::new(path.into(), encryptor.cloned(), database, database_revision, checksum);
    let files = StoreFiles { database, log, backlog, log_recorded };
    Ok(LoadedStore { revision, objects, dictionaries, next_dictionary_id, files })
}

/// Collects and checks the contents of a store.
struct StoreLoader<'a> {
    path: &'a Path,
    encryptor: Option<&'a Encryptor>,
    revision: Revision,
    /// The database records that a log may exist.
    has_log: bool,
    checksum: Checksum,
    dictionaries: HashMap<u32, GroupDictionary>,
    next_dictionary_id: u32,
    objects: BTreeSet<EntryByKey>,
    reencryption: Reencryption,
}

impl<'a> StoreLoader<'a> {
    /// Reads the database.
    fn read(path: &'a Path, database: &Database, encryptor: Option<&'a Encryptor>) -> Result<Self, OpenError> {
        let read = database.begin_read().map_err(|e| match e {
            redb::TransactionError::Storage(e) => storage_error(path, "read", e),
            other => OpenError::Io { step: "read", path: path.into(), source: Box::new(other) },
        })?;
        let mut loader = Self {
            path,
            encryptor,
            revision: 0,
            has_log: false,
            checksum: Checksum::default(),
            dictionaries: HashMap::new(),
            next_dictionary_id: 0,
            objects: BTreeSet::new(),
            reencryption: Reencryption::default(),
        };
        loader.read_tables(&read)?;
        Ok(loader)
    }

    fn corrupt(&self, what: String) -> OpenError {
        OpenError::Corrupt { path: self.path.into(), what }
    }

    fn read_tables(&mut self, read: &ReadTransaction) -> Result<(), OpenError> {
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
        if format != SUPPORTED_FORMAT {
            return Err(OpenError::Format { path: path.into(), found: format, expected: SUPPORTED_FORMAT });
        }
        let (revision, checksum) = (needed(REVISION)?, Checksum(needed(CHECKSUM)?));
        (self.revision, self.has_log) = (revision, number(LOG)? == Some(1));
        self.reencryption.residue = number(RESIDUE)? == Some(1);
        let mut found = Checksum::default();
        for row in read.open_table(DICTIONARIES).map_err(table)?.iter().map_err(storage)? {
            let (name, bytes) = row.map_err(storage)?;
            let (group, id) = name.value();
            found.add(&Checksum::of_dictionary(group, id, bytes.value()));
            self.add_dictionary(group, id, bytes.value());
        }
        for row in read.open_table(OBJECTS).map_err(table)?.iter().map_err(storage)? {
            let (key, record) = row.map_err(storage)?;
            found.add(&Checksum::of_record(key.value(), record.value()));
            self.add_record(key.value(), record.value(), revision)?;
        }
        if checksum != found {
            return Err(self.corrupt("its objects are not those that were stored".into()));
        }
        self.checksum = checksum;
        Ok(())
    }

    /// Returns true if the record is encoded as it would be encoded now.
    fn is_current(&self, key: &str, record: &Record<'_>) -> bool {
        match (&record.value, self.encryptor.filter(|encryptor| encryptor.covers(key))) {
            (RecordValue::Encrypted(bytes), Some(encryptor)) => encryptor.is_current(bytes),
            (RecordValue::Encrypted(_), None) | (_, Some(_)) => false,
            (RecordValue::Packed { .. }, None) => !self.must_be_plain(key),
            (RecordValue::Plain(_), None) => true,
        }
    }

    /// Returns true if the group of the key has no dictionary, because some of its values are encrypted.
    fn must_be_plain(&self, key: &str) -> bool {
        self.encryptor.is_some_and(|encryptor| encryptor.covers_some_of(group_of(key)))
    }

    fn add_dictionary(&mut self, group: &str, id: u32, bytes: &[u8]) -> GroupDictionary {
        let dictionary = GroupDictionary { group: group.into(), dictionary: Dictionary::new(id, bytes) };
        self.dictionaries.insert(id, dictionary.clone());
        self.next_dictionary_id = self.next_dictionary_id.max(id + 1);
        dictionary
    }

    /// Adds an entry, in place of an older one with the same key. `revision` is the newest revision that the record may
    /// have.
    fn add_record(&mut self, key: &str, record: &[u8], revision: Revision) -> Result<StoredEntry, OpenError> {
        let record = Record::parse(record).ok_or_else(|| self.corrupt(format!("the record of {key} is cut off")))?;
        let Record { created, modified, .. } = record;
        if modified > revision || created > modified {
            return Err(self.corrupt(format!("the record of {key} has impossible revisions")));
        }
        let is_current = self.is_current(key, &record);
        let must_be_plain = self.must_be_plain(key);
        let value = match (record.value, self.encryptor) {
            (RecordValue::Plain(bytes), _) => Packed::plain(bytes),
            (RecordValue::Packed { dictionary, length, bytes }, _) => {
                let missing = || self.corrupt(format!("{key}: its dictionary is missing"));
                let GroupDictionary { dictionary, .. } = self.dictionaries.get(&dictionary).ok_or_else(missing)?;
                let (packed, plain) = Packed::from_stored(dictionary, length, bytes)
                    .ok_or_else(|| self.corrupt(format!("{key}: it cannot be unpacked")))?;
                if must_be_plain { Packed::plain(&plain) } else { packed }
            }
            (RecordValue::Encrypted(_), None) => {
                return Err(OpenError::Encrypted { path: self.path.into(), key: key.to_owned() });
            }
            (RecordValue::Encrypted(bytes), Some(encryptor)) => match encryptor.decrypt(key, bytes) {
                Ok(plain) => Packed::plain(&plain),
                Err(DecryptError::UnknownKey) => {
                    return Err(OpenError::WrongKey { path: self.path.into(), key: key.to_owned() });
                }
                Err(error @ DecryptError::Damaged) => return Err(self.corrupt(format!("{key}: {error}"))),
            },
        };
        let entry = StoredEntry { key: key.into(), value, created, modified };
        if is_current {
            self.reencryption.objects.remove(key);
        } else {
            self.reencryption.objects.insert(entry.key.clone());
        }
        self.objects.replace(EntryByKey(entry.clone()));
        Ok(entry)
    }

    /// Applies the batches of the log. Only the last record of each key is decoded: earlier ones may be encrypted with
    /// a key that no longer exists.
    fn replay(&mut self, frames: &[Frame], backlog: &mut Backlog) -> Result<(), OpenError> {
        let mut last: HashMap<&str, Option<&[u8]>> = HashMap::new();
        for item in frames.iter().flat_map(Frame::items) {
            match item.ok_or_else(|| self.corrupt("its log cannot be read".into()))? {
                FrameItem::Dictionary { group, id, bytes } => {
                    backlog.dictionaries.push(self.add_dictionary(group, id, bytes));
                }
                FrameItem::Stored { key, record } => drop(last.insert(key, Some(record))),
                FrameItem::Removed { key } => drop(last.insert(key, None)),
            }
        }
        let revision = frames.last().map_or(self.revision, |frame| frame.last);
        for (key, record) in last {
            let entry = match record {
                Some(record) => Some(self.add_record(key, record, revision)?),
                None => {
                    self.objects.take(key);
                    self.reencryption.objects.remove(key);
                    None
                }
            };
            backlog.objects.insert(key.into(), entry);
        }
        (self.revision, backlog.revision) = (revision, revision);
        Ok(())
    }

    /// Returns the objects, the dictionaries that they use, and what must be encrypted again. Unused dictionaries go to
    /// the backlog; the next checkpoint removes them.
    fn finish(self, backlog: &mut Backlog) -> (BTreeSet<EntryByKey>, Vec<GroupDictionary>, Reencryption) {
        let Self { dictionaries, objects, mut reencryption, encryptor, .. } = self;
        let used: HashSet<u32> =
            objects.iter().filter_map(|found| found.0.value.dictionary()).map(|used| used.id()).collect();
        let mut used_dictionaries = Vec::new();
        for dictionary in dictionaries.into_values() {
            let is_secret = encryptor.is_some_and(|encryptor| encryptor.covers_some_of(&dictionary.group));
            let destination = match is_secret {
                true => &mut reencryption.dictionaries,
                false if used.contains(&dictionary.dictionary.id()) => &mut used_dictionaries,
                false => &mut backlog.unused_dictionaries,
            };
            destination.push(dictionary);
        }
        (objects, used_dictionaries, reencryption)
    }
}

/// Stores the values that were plain or under an older key again, together with the changes of the log, in one
/// transaction. Returns the new checksum. Afterwards the log's files are no longer needed.
fn reencrypt(
    database: &Database,
    encryptor: Option<&Encryptor>,
    objects: &BTreeSet<EntryByKey>,
    backlog: &Backlog,
    reencryption: &Reencryption,
) -> Result<Checksum, Box<dyn std::error::Error + Send + Sync>> {
    let mut checksum = Checksum::default();
    let write = database.begin_write()?;
    {
        let mut stored = write.open_table(OBJECTS)?;
        for key in backlog.objects.keys().chain(&reencryption.objects) {
            match objects.get(&**key) {
                Some(entry) => {
                    let record = encode(encryptor, &entry.0).ok_or("no random bytes")?;
                    stored.insert(&**key, record.as_slice())?;
                }
                None => drop(stored.remove(&**key)?),
            }
        }
        let mut dictionaries = write.open_table(DICTIONARIES)?;
        for GroupDictionary { group, dictionary } in &backlog.dictionaries {
            dictionaries.insert((&**group, dictionary.id()), dictionary.bytes())?;
        }
        for GroupDictionary { group, dictionary } in
            reencryption.dictionaries.iter().chain(&backlog.unused_dictionaries)
        {
            dictionaries.remove((&**group, dictionary.id()))?;
        }
        for row in stored.iter()? {
            let (key, record) = row?;
            checksum.add(&Checksum::of_record(key.value(), record.value()));
        }
        for row in dictionaries.iter()? {
            let (name, bytes) = row?;
            let (group, id) = name.value();
            checksum.add(&Checksum::of_dictionary(group, id, bytes.value()));
        }
        let mut meta = write.open_table(META)?;
        meta.insert(CHECKSUM, checksum.0)?;
        meta.insert(REVISION, backlog.revision)?;
        meta.insert(LOG, 0)?;
        meta.insert(RESIDUE, 1)?;
    }
    write.commit()?;
    cleat_crash::point("store:refreshed");
    Ok(checksum)
}

/// Gives the free pages of the database back to the file system: they still contain the values as they were before.
fn clear_residue(database: &mut Database) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    database.compact()?;
    let write = database.begin_write()?;
    write.open_table(META)?.remove(RESIDUE)?;
    write.commit()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded::record::concat;

    #[test]
    fn a_first_start_that_was_interrupted_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("store.redb.new"), b"half made").unwrap();
        let loaded = open(&dir.path().join("store.redb"), None).unwrap();
        assert_eq!((loaded.revision, loaded.objects.len()), (1, 0));
    }

    #[test]
    fn a_record_that_does_not_match_the_checksum_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        drop(open(&path, None).unwrap());
        let record = |value: &[u8]| concat(2, 3, &[value]);
        let write_record = |value: &[u8], checksum: Option<Checksum>| {
            let database = Database::open(&path).unwrap();
            let write = database.begin_write().unwrap();
            write.open_table(OBJECTS).unwrap().insert("/k/1", record(value).as_slice()).unwrap();
            let mut meta = write.open_table(META).unwrap();
            meta.insert(REVISION, 3).unwrap();
            if let Some(checksum) = checksum {
                meta.insert(CHECKSUM, checksum.0).unwrap();
            }
            drop(meta);
            write.commit().unwrap();
        };
        write_record(b"value", Some(Checksum::of_record("/k/1", &record(b"value"))));
        assert_eq!(open(&path, None).unwrap().objects.len(), 1);
        write_record(b"other", None);
        let error = open(&path, None).err().unwrap();
        assert!(matches!(error, OpenError::Corrupt { .. }), "{error}");
    }

    #[test]
    fn refuses_other_formats() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        drop(open(&path, None).unwrap());
        for format in [2, 3, 7] {
            let database = Database::open(&path).unwrap();
            let write = database.begin_write().unwrap();
            write.open_table(META).unwrap().insert(FORMAT, format).unwrap();
            write.commit().unwrap();
            drop(database);
            let error = open(&path, None).err().unwrap();
            assert!(matches!(error, OpenError::Format { found, expected: 4, .. } if found == format), "{error}");
            assert!(error.to_string().contains(&format!("has format {format}; ")), "{error}");
        }
    }
}
