//! Indexes: the objects of a cache by terms that are extracted from them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use cleat_api::Key;

use super::{Cache, Cached};

type ExtractTerms<K> = Box<dyn Fn(&K) -> Vec<String> + Send + Sync>;

/// A handle for lookups in one index of a cache.
pub struct Index<K> {
    pub(super) cache: Cache<K>,
    pub(super) position: usize,
}

impl<K> Clone for Index<K> {
    fn clone(&self) -> Self {
        Self { cache: self.cache.clone(), position: self.position }
    }
}

impl<K: Cached> Index<K> {
    pub fn get(&self, term: &str) -> Vec<Arc<K>> {
        self.cache.indexed(self.position, term)
    }

    /// The keys only. Nothing is unpacked.
    pub fn keys(&self, term: &str) -> Vec<Arc<Key>> {
        self.cache.keys_indexed(self.position, term)
    }

    pub fn has(&self, term: &str) -> bool {
        self.cache.is_indexed(self.position, term)
    }
}

/// The keys of the objects that have each term.
pub(super) struct IndexTable<K> {
    extract: ExtractTerms<K>,
    keys: HashMap<Box<str>, KeySet>,
}

/// Most terms belong to one object, which then needs no set.
enum KeySet {
    One(Arc<Key>),
    Many(HashSet<Arc<Key>>),
}

impl KeySet {
    fn insert(&mut self, key: &Arc<Key>) {
        match self {
            Self::One(only) if only == key => {}
            Self::One(only) => *self = Self::Many([only.clone(), key.clone()].into()),
            Self::Many(keys) => {
                keys.insert(key.clone());
            }
        }
    }

    /// Returns true if no key is left.
    fn remove(&mut self, key: &Key) -> bool {
        match self {
            Self::One(only) => **only == *key,
            Self::Many(keys) => {
                keys.remove(key);
                keys.is_empty()
            }
        }
    }
}

impl<K> IndexTable<K> {
    pub(super) fn new(extract: impl Fn(&K) -> Vec<String> + Send + Sync + 'static) -> Self {
        Self { extract: Box::new(extract), keys: HashMap::new() }
    }

    pub(super) fn insert(&mut self, key: &Arc<Key>, object: &K) {
        for term in (self.extract)(object) {
            match self.keys.get_mut(&*term) {
                Some(keys) => keys.insert(key),
                None => {
                    self.keys.insert(term.into(), KeySet::One(key.clone()));
                }
            }
        }
    }

    pub(super) fn remove(&mut self, key: &Key, object: &K) {
        for term in (self.extract)(object) {
            if self.keys.get_mut(&*term).is_some_and(|keys| keys.remove(key)) {
                self.keys.remove(&*term);
            }
        }
    }

    /// Updates the terms of a changed object. Nothing is written if they are the same.
    pub(super) fn replace(&mut self, key: &Arc<Key>, old: &K, new: &K) {
        if (self.extract)(old) != (self.extract)(new) {
            self.remove(key, old);
            self.insert(key, new);
        }
    }

    pub(super) fn get(&self, term: &str) -> Vec<Arc<Key>> {
        match self.keys.get(term) {
            None => Vec::new(),
            Some(KeySet::One(key)) => vec![key.clone()],
            Some(KeySet::Many(keys)) => keys.iter().cloned().collect(),
        }
    }

    pub(super) fn has(&self, term: &str) -> bool {
        self.keys.contains_key(term)
    }
}
