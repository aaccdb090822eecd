//! The encoding of one entry in the database and in the log, and the checksum over all records.
//!
//! A record is the create revision, the modify revision and the value. The highest bit of the create revision says that
//! the value is encrypted. The next bit says that it is packed: dictionary id, uncompressed length, compressed bytes. A
//! value is never both. Integers are little-endian.

use super::encryption::Encryptor;
use crate::entry::{Revision, StoredEntry};

/// The sum of the hashes of all records and dictionaries in the database. It does not depend on their order, and is
/// updated with each record that is added or removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checksum(pub(super) u64);

impl Checksum {
    pub(super) fn add(&mut self, other: &Self) {
        self.0 = self.0.wrapping_add(other.0);
    }

    pub(super) fn subtract(&mut self, other: &Self) {
        self.0 = self.0.wrapping_sub(other.0);
    }

    pub(super) fn of_record(key: &str, record: &[u8]) -> Self {
        Self::hash(&[&(key.len() as u64).to_le_bytes(), key.as_bytes(), record])
    }

    pub(super) fn of_dictionary(group: &str, id: u32, bytes: &[u8]) -> Self {
        Self::hash(&[b"dictionary", &id.to_le_bytes(), group.as_bytes(), b" ", bytes])
    }

    fn hash(parts: &[&[u8]]) -> Self {
        let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
        parts.iter().for_each(|part| hash.update(part));
        let hash = hash.finish();
        Self(hash.as_ref().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}

/// Flags in the create revision. Revisions never grow into these bits.
const ENCRYPTED: Revision = 1 << 63;
const PACKED: Revision = 1 << 62;

/// Encodes an entry. `None` if its value must be encrypted and encryption fails.
pub(super) fn encode(encryptor: Option<&Encryptor>, entry: &StoredEntry) -> Option<Vec<u8>> {
    let StoredEntry { key, value, created, modified } = entry;
    if let Some(encryptor) = encryptor.filter(|encryptor| encryptor.covers(key)) {
        let encrypted = encryptor.encrypt(key, &value.unpack())?;
        return Some(concat(created | ENCRYPTED, *modified, &[&encrypted]));
    }
    Some(match value.dictionary() {
        None => concat(*created, *modified, &[value.stored_bytes()]),
        Some(dictionary) => {
            let (id, length) = (dictionary.id().to_le_bytes(), value.unpacked_len().to_le_bytes());
            concat(created | PACKED, *modified, &[&id, &length, value.stored_bytes()])
        }
    })
}

pub(super) fn concat(created: Revision, modified: Revision, value: &[&[u8]]) -> Vec<u8> {
    let (created, modified) = (created.to_le_bytes(), modified.to_le_bytes());
    let mut record = Vec::with_capacity(16 + value.iter().map(|part| part.len()).sum::<usize>());
    for part in [&created[..], &modified].iter().chain(value) {
        record.extend_from_slice(part);
    }
    record
}

/// A parsed record.
pub(super) struct Record<'a> {
    pub(super) created: Revision,
    pub(super) modified: Revision,
    pub(super) value: RecordValue<'a>,
}

pub(super) enum RecordValue<'a> {
    Plain(&'a [u8]),
    Encrypted(&'a [u8]),
    Packed { dictionary: u32, length: u32, bytes: &'a [u8] },
}

impl<'a> Record<'a> {
    /// `None` if the record is too short or its flags contradict each other.
    pub(super) fn parse(record: &'a [u8]) -> Option<Self> {
        let (created, rest) = record.split_first_chunk::<8>()?;
        let (modified, value) = rest.split_first_chunk::<8>()?;
        let created = Revision::from_le_bytes(*created);
        let modified = Revision::from_le_bytes(*modified);
        let value = match (created & ENCRYPTED != 0, created & PACKED != 0) {
            (false, false) => RecordValue::Plain(value),
            (true, false) => RecordValue::Encrypted(value),
            (false, true) => {
                let (dictionary, rest) = value.split_first_chunk::<4>()?;
                let (length, bytes) = rest.split_first_chunk::<4>()?;
                let (dictionary, length) = (u32::from_le_bytes(*dictionary), u32::from_le_bytes(*length));
                RecordValue::Packed { dictionary, length, bytes }
            }
            (true, true) => return None,
        };
        Some(Self { created: created & !(ENCRYPTED | PACKED), modified, value })
    }
}
