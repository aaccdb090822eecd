//! Keys with their values and revisions, and changes to them.

use std::sync::Arc;

use bytes::Bytes;
use cleat_pack::Packed;

/// A point in the store's single history.
pub type Revision = u64;

/// One key with its value at some revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: Arc<str>,
    pub value: Bytes,
    /// Revision of the write that created the key. A key that was deleted and created again has a new one.
    pub created: Revision,
    /// Revision of the last write to the key.
    pub modified: Revision,
}

/// An entry as the store holds it in memory: its value may be compressed.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredEntry {
    pub key: Arc<str>,
    pub(crate) value: Packed,
    pub created: Revision,
    pub modified: Revision,
}

impl StoredEntry {
    pub(crate) fn new(entry: &Entry, value: Packed) -> Self {
        Self { key: entry.key.clone(), value, created: entry.created, modified: entry.modified }
    }

    /// Length of the uncompressed value in bytes.
    pub fn value_len(&self) -> usize {
        self.value.unpacked_len() as usize
    }

    /// Decompresses the value.
    pub fn entry(&self) -> Entry {
        let Self { key, value, created, modified } = self;
        let value = value.as_plain().map_or_else(|| value.unpack().into(), Bytes::from_owner);
        Entry { key: key.clone(), value, created: *created, modified: *modified }
    }
}

impl From<&Entry> for StoredEntry {
    fn from(entry: &Entry) -> Self {
        Self::new(entry, Packed::plain(&entry.value))
    }
}

/// One change. `new` is absent for a deletion, `old` for a creation; never both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub revision: Revision,
    pub new: Option<Entry>,
    pub old: Option<Entry>,
}

impl Event {
    pub fn key(&self) -> &str {
        match (&self.new, &self.old) {
            (Some(entry), _) | (None, Some(entry)) => &entry.key,
            (None, None) => "",
        }
    }
}
