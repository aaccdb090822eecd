//! All objects of one kind, kept current by a watch and shared by the components of a process.
//!
//! A cache answers reads from memory, notifies subscribers of each change and maintains the indexes that controllers add.
//! It gives read-your-writes: a component passes the server's reply to [`Cache::observe_write`], and no later read returns
//! an older state. Objects that were not read or changed for some time are packed.
//!
//! Locking: subscribers run outside the cache's lock and may read this and any other cache. The functions that extract
//! index terms run under the lock: they must be pure functions of the object and must not call a cache.

mod entry;
mod index;
mod state;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_pack::{Compressor, MaybePacked};
use kube::Resource;
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use entry::CacheEntry;
pub use index::Index;
use index::IndexTable;
use state::{CacheState, MAX_UNPACKED_OBJECTS, PackCandidate};

/// A lookup in an index that finds more objects than this unpacks them for the caller only: it must not displace the objects
/// that controllers work with.
const MAX_LOOKUP_KEPT_UNPACKED: usize = MAX_UNPACKED_OBJECTS / 8;

/// A kind that can be cached.
pub trait Cached: Resource + Serialize + DeserializeOwned + Debug + Send + Sync + 'static {}

impl<K: Resource + Serialize + DeserializeOwned + Debug + Send + Sync + 'static> Cached for K {}

/// A change of one object. An object that is missing in a relist is `Deleted` like any other.
#[derive(Debug)]
pub enum Change<K> {
    Applied { old: Option<Arc<K>>, new: Arc<K> },
    Deleted(Arc<K>),
}

impl<K> Change<K> {
    /// The object after the change, or its last state if it was deleted.
    pub fn object(&self) -> &Arc<K> {
        match self {
            Self::Applied { new, .. } => new,
            Self::Deleted(last) => last,
        }
    }
}

impl<K> Clone for Change<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Applied { old, new } => Self::Applied { old: old.clone(), new: new.clone() },
            Self::Deleted(last) => Self::Deleted(last.clone()),
        }
    }
}

type Subscriber<K> = Arc<dyn Fn(&Change<K>) + Send + Sync>;

pub struct Cache<K>(Arc<CacheInner<K>>);

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct CacheInner<K> {
    state: RwLock<CacheState<K>>,
    compressor: Mutex<Compressor>,
    synced: watch::Sender<bool>,
}

impl<K> Default for Cache<K> {
    fn default() -> Self {
        let (state, compressor) = (RwLock::new(CacheState::default()), Mutex::default());
        Self(Arc::new(CacheInner { state, compressor, synced: watch::Sender::new(false) }))
    }
}

impl<K: Cached> Cache<K> {
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        let (key, entry) = {
            let state = self.0.state.read();
            let (key, entry) = state.objects.get_key_value(key)?;
            if let MaybePacked::Unpacked(object) = &entry.stored {
                return Some(object.clone());
            }
            (key.clone(), entry.clone())
        };
        Some(self.unpack(key, &entry))
    }

    /// Returns the entry's object and keeps it unpacked in the cache.
    fn unpack(&self, key: Arc<Key>, entry: &CacheEntry<K>) -> Arc<K> {
        let object = entry.stored.object();
        if entry.stored.is_unpacked() {
            return object;
        }
        let candidate = {
            let mut state = self.0.state.write();
            state.keep_unpacked(key, entry.revision, &object);
            state.next_to_pack()
        };
        self.pack_idle(candidate);
        object
    }

    /// A cluster-scoped object by name.
    pub fn named(&self, name: &str) -> Option<Arc<K>> {
        self.get(&Key::cluster(name))
    }

    pub fn all(&self) -> Vec<Arc<K>> {
        self.each().collect()
    }

    /// Iterates over the objects that are cached at the time of the call. Packed objects are unpacked one at a time and stay
    /// packed in the cache.
    pub fn each(&self) -> impl Iterator<Item = Arc<K>> + use<K> {
        let entries: Vec<CacheEntry<K>> = self.0.state.read().objects.values().cloned().collect();
        entries.into_iter().map(|entry| entry.stored.object())
    }

    pub fn len(&self) -> usize {
        self.0.state.read().objects.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until the first complete list has arrived.
    pub async fn synced(&self) {
        let mut synced = self.0.synced.subscribe();
        // The sender lives in `self`: the channel cannot be closed meanwhile.
        let _ = synced.wait_for(|s| *s).await;
    }

    pub fn is_synced(&self) -> bool {
        *self.0.synced.borrow()
    }

    /// Calls `subscriber` with every cached object (as `Applied` without `old`), then with every change.
    ///
    /// It is called without the cache's lock, on the task that brought the change. It may read this and other caches and take
    /// locks of its own. It must not block: it should only record what to do, for example add a key to a queue. Changes of
    /// one object may be delivered out of order, because a watch event and the reply to an own write come from different
    /// tasks; a subscriber that needs the current state reads the cache.
    pub fn subscribe(&self, subscriber: impl Fn(&Change<K>) + Send + Sync + 'static) {
        let subscriber: Subscriber<K> = Arc::new(subscriber);
        let entries: Vec<CacheEntry<K>> = {
            let mut state = self.0.state.write();
            state.subscribers.push(subscriber.clone());
            state.objects.values().cloned().collect()
        };
        for entry in entries {
            subscriber(&Change::Applied { old: None, new: entry.stored.object() });
        }
    }

    /// Adds an index over the terms that `extract` returns for each object. `extract` runs under the cache's lock: it must
    /// depend on nothing but the object and must not call a cache.
    pub fn index(&self, extract: impl Fn(&K) -> Vec<String> + Send + Sync + 'static) -> Index<K> {
        let mut state = self.0.state.write();
        let mut index = IndexTable::new(extract);
        for (key, entry) in &state.objects {
            index.insert(key, &entry.stored.object());
        }
        state.indexes.push(index);
        Index { cache: self.clone(), position: state.indexes.len() - 1 }
    }

    fn indexed(&self, position: usize, term: &str) -> Vec<Arc<K>> {
        let found: Vec<(Arc<Key>, CacheEntry<K>)> = {
            let state = self.0.state.read();
            let keys = state.indexes[position].get(term).into_iter();
            keys.filter_map(|key| state.objects.get(&*key).cloned().map(|entry| (key, entry))).collect()
        };
        let keep_unpacked = found.len() <= MAX_LOOKUP_KEPT_UNPACKED;
        let object = |(key, entry): (Arc<Key>, CacheEntry<K>)| match keep_unpacked {
            true => self.unpack(key, &entry),
            false => entry.stored.object(),
        };
        found.into_iter().map(object).collect()
    }

    fn keys_indexed(&self, position: usize, term: &str) -> Vec<Arc<Key>> {
        self.0.state.read().indexes[position].get(term)
    }

    fn is_indexed(&self, position: usize, term: &str) -> bool {
        self.0.state.read().indexes[position].has(term)
    }

    /// Stores the server's reply to an own write before the watch delivers it. A reply that the watch has overtaken is
    /// ignored, so that a deleted object does not reappear.
    pub fn observe_write(&self, object: impl Into<Arc<K>>) {
        let object = object.into();
        let revision = object.meta().revision();
        self.change(|state| if revision > state.watched_revision { state.apply(object) } else { Vec::new() });
    }

    /// Stores an object from a list or a watch event.
    pub(crate) fn apply_event(&self, object: K) {
        self.change(|state| {
            state.advance_watched_revision(object.meta().revision());
            state.apply(Arc::new(object))
        });
    }

    /// Returns true if the cache has the object at exactly this revision, as it has after an own write. The watch event for
    /// it then needs no decoding and notifies no subscriber.
    pub(crate) fn confirm_own_write(&self, key: &Key, revision: u64) -> bool {
        let mut state = self.0.state.write();
        let is_cached = state.objects.get(key).is_some_and(|entry| entry.revision == revision);
        if is_cached {
            state.advance_watched_revision(revision);
        }
        is_cached
    }

    /// Removes an object that was deleted at this revision, unless the cached one is newer.
    pub(crate) fn apply_deletion(&self, key: &Key, revision: u64) {
        self.change(|state| {
            state.advance_watched_revision(revision);
            state.remove_up_to(key, revision)
        });
    }

    /// A complete list at `revision` contained these keys: all other objects that are not newer than the list are removed.
    pub(crate) fn complete_list(&self, listed: &HashSet<Key>, revision: u64) {
        // Before anything else: from now on, a reply at or below the list's revision is outdated and must not be stored.
        self.advance_to(revision);
        let unlisted: Vec<Arc<Key>> =
            self.0.state.read().objects.keys().filter(|k| !listed.contains(&***k)).cloned().collect();
        for key in unlisted {
            self.change(|state| state.remove_up_to(&key, revision));
        }
        self.0.synced.send_replace(true);
    }

    /// The watch has delivered everything up to `revision`: replies up to it are outdated.
    pub(crate) fn advance_to(&self, revision: u64) {
        self.0.state.write().advance_watched_revision(revision);
    }

    /// Changes the state under the lock, then notifies the subscribers without it.
    fn change(&self, change: impl FnOnce(&mut CacheState<K>) -> Vec<Change<K>>) {
        let (changes, subscribers, candidate) = {
            let mut state = self.0.state.write();
            let changes = change(&mut state);
            if changes.is_empty() {
                return;
            }
            (changes, state.subscribers.clone(), state.next_to_pack())
        };
        for change in &changes {
            for subscriber in &subscribers {
                subscriber(change);
            }
        }
        self.pack_idle(candidate);
    }

    /// Packs this object and all others that are due. The state's lock is not held while an object is compressed; one that
    /// changes meanwhile keeps its newer state.
    fn pack_idle(&self, mut candidate: Option<PackCandidate<K>>) {
        while let Some(PackCandidate { key, revision, object }) = candidate {
            let packed = MaybePacked::Unpacked(object).into_packed(&mut self.0.compressor.lock());
            let mut state = self.0.state.write();
            if let Some(entry) = state.entry_at(&key, revision) {
                entry.stored = packed;
            }
            candidate = state.next_to_pack();
        }
    }
}
