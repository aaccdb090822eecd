//! The content of a cache: objects, indexes, subscribers. Every method runs under the cache's lock, so that none may call a
//! subscriber.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_pack::MaybePacked;

use super::entry::{CacheEntry, UnpackedQueue};
use super::index::IndexTable;
use super::{Cached, Change, Subscriber};

/// Only this many objects, the last that were changed or read, stay unpacked.
pub(super) const MAX_UNPACKED_OBJECTS: usize = 4096;

pub(super) struct CacheState<K> {
    pub(super) objects: HashMap<Arc<Key>, CacheEntry<K>>,
    pub(super) unpacked: UnpackedQueue,
    /// The highest revision that the watch or a list has delivered. The reply to a write at or below it is outdated.
    pub(super) watched_revision: u64,
    pub(super) indexes: Vec<IndexTable<K>>,
    pub(super) subscribers: Vec<Subscriber<K>>,
}

impl<K> Default for CacheState<K> {
    fn default() -> Self {
        Self {
            objects: HashMap::new(),
            unpacked: UnpackedQueue::default(),
            watched_revision: 0,
            indexes: Vec::new(),
            subscribers: Vec::new(),
        }
    }
}

/// An object to pack, as it was when it was chosen.
pub(super) struct PackCandidate<K> {
    pub(super) key: Arc<Key>,
    pub(super) revision: u64,
    pub(super) object: Arc<K>,
}

impl<K: Cached> CacheState<K> {
    pub(super) fn advance_watched_revision(&mut self, revision: u64) {
        self.watched_revision = self.watched_revision.max(revision);
    }

    /// Stores the object unless the cached one is as new: the reply to an own write may be ahead of the watch. If another
    /// object (another uid) had the same key, the changes are a deletion and a creation: a relist does not show the deletion.
    pub(super) fn apply(&mut self, new: Arc<K>) -> Vec<Change<K>> {
        let revision = new.meta().revision();
        let key = Key::of(new.meta());
        let found = self.objects.get_key_value(&key);
        if found.is_some_and(|(_, entry)| revision != 0 && entry.revision >= revision) {
            return Vec::new();
        }
        let (key, mut old) = match found {
            Some((key, entry)) => (key.clone(), Some(entry.stored.object())),
            None => (Arc::new(key), None),
        };
        let mut changes = Vec::new();
        if old.as_ref().is_some_and(|old| old.meta().uid() != new.meta().uid()) {
            changes.extend(self.remove(&key));
            old = None;
        }
        self.objects.insert(key.clone(), CacheEntry { revision, stored: MaybePacked::Unpacked(new.clone()) });
        for index in &mut self.indexes {
            match &old {
                Some(old) => index.replace(&key, old, &new),
                None => index.insert(&key, &new),
            }
        }
        self.unpacked.push(key, revision);
        changes.push(Change::Applied { old, new });
        changes
    }

    /// Replaces a packed entry with its unpacked object, unless the entry has changed meanwhile.
    pub(super) fn keep_unpacked(&mut self, key: Arc<Key>, revision: u64, object: &Arc<K>) {
        if let Some(entry) = self.entry_at(&key, revision).filter(|entry| !entry.stored.is_unpacked()) {
            entry.stored = MaybePacked::Unpacked(object.clone());
            self.unpacked.push(key, revision);
        }
    }

    pub(super) fn entry_at(&mut self, key: &Key, revision: u64) -> Option<&mut CacheEntry<K>> {
        self.objects.get_mut(key).filter(|entry| entry.revision == revision)
    }

    /// The next object to pack, if more than [`MAX_UNPACKED_OBJECTS`] are unpacked.
    pub(super) fn next_to_pack(&mut self) -> Option<PackCandidate<K>> {
        while let Some((key, revision)) = self.unpacked.pop_over(MAX_UNPACKED_OBJECTS) {
            if let Some(MaybePacked::Unpacked(object)) = self.entry_at(&key, revision).map(|entry| &entry.stored) {
                let object = object.clone();
                return Some(PackCandidate { key, revision, object });
            }
        }
        None
    }

    /// Removes the object unless the cached one is newer than `revision`.
    pub(super) fn remove_up_to(&mut self, key: &Key, revision: u64) -> Vec<Change<K>> {
        match self.objects.get(key) {
            Some(entry) if entry.revision <= revision => self.remove(key).into_iter().collect(),
            Some(_) | None => Vec::new(),
        }
    }

    fn remove(&mut self, key: &Key) -> Option<Change<K>> {
        let old = self.objects.remove(key)?.stored.object();
        for index in &mut self.indexes {
            index.remove(key, &old);
        }
        Some(Change::Deleted(old))
    }
}
