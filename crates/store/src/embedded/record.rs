//! How an object is written, in the container as in the log, and what all of them add up to.
//!
//! A record is the create revision, the modify revision and the value. The highest bit of the create revision says that the
//! value is sealed, the next one that it is packed: number of the dictionary, length, what is kept.

use super::seal::Seal;
use crate::{Entry, Kept, Revision};

/// What all records add up to, whatever their order: adding one and taking it away again leaves it as it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum(pub(super) u64);

impl Sum {
    pub(super) fn add(&mut self, other: &Self) {
        self.0 = self.0.wrapping_add(other.0);
    }

    pub(super) fn take(&mut self, other: &Self) {
        self.0 = self.0.wrapping_sub(other.0);
    }

    pub(super) fn of_record(key: &str, record: &[u8]) -> Self {
        Self::of(&[&(key.len() as u64).to_le_bytes(), key.as_bytes(), record])
    }

    pub(super) fn of_dictionary(sort: &str, id: u32, text: &[u8]) -> Self {
        Self::of(&[b"dictionary", &id.to_le_bytes(), sort.as_bytes(), b" ", text])
    }

    /// As it was before there was a log.
    pub(super) fn of_entry(entry: &Entry) -> Self {
        let length = (entry.key.len() as u64).to_le_bytes();
        let (created, modified) = (entry.created.to_le_bytes(), entry.modified.to_le_bytes());
        Self::of(&[&length, entry.key.as_bytes(), &created, &modified, &entry.value])
    }

    fn of(parts: &[&[u8]]) -> Self {
        let mut hash = ring::digest::Context::new(&ring::digest::SHA256);
        parts.iter().for_each(|part| hash.update(part));
        let hash = hash.finish();
        Self(hash.as_ref().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
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
    Some(match value.dictionary() {
        None => record(*created, *modified, &[value.bytes()]),
        Some(dictionary) => {
            let (id, length) = (dictionary.id().to_le_bytes(), value.length().to_le_bytes());
            record(created | PACKED, *modified, &[&id, &length, value.bytes()])
        }
    })
}

pub(super) fn record(created: Revision, modified: Revision, value: &[&[u8]]) -> Vec<u8> {
    let (created, modified) = (created.to_le_bytes(), modified.to_le_bytes());
    let mut record = Vec::with_capacity(16 + value.iter().map(|part| part.len()).sum::<usize>());
    for part in [&created[..], &modified].iter().chain(value) {
        record.extend_from_slice(part);
    }
    record
}

/// A record taken apart.
pub(super) struct Record<'a> {
    pub(super) created: Revision,
    pub(super) modified: Revision,
    pub(super) value: Form<'a>,
}

pub(super) enum Form<'a> {
    Plain(&'a [u8]),
    Sealed(&'a [u8]),
    Packed { dictionary: u32, length: u32, bytes: &'a [u8] },
}

pub(super) fn split(record: &[u8]) -> Option<Record<'_>> {
    let (created, rest) = record.split_first_chunk::<8>()?;
    let (modified, value) = rest.split_first_chunk::<8>()?;
    let created = Revision::from_le_bytes(*created);
    let modified = Revision::from_le_bytes(*modified);
    let value = match (created & SEALED != 0, created & PACKED != 0) {
        (false, false) => Form::Plain(value),
        (true, false) => Form::Sealed(value),
        (false, true) => {
            let (dictionary, rest) = value.split_first_chunk::<4>()?;
            let (length, bytes) = rest.split_first_chunk::<4>()?;
            Form::Packed { dictionary: u32::from_le_bytes(*dictionary), length: u32::from_le_bytes(*length), bytes }
        }
        (true, true) => return None,
    };
    Some(Record { created: created & !(SEALED | PACKED), modified, value })
}
