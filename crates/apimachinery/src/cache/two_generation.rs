//! A bounded cache of a pure function's results. A result that was evicted is computed again.

use std::collections::HashMap;

use parking_lot::RwLock;

/// The most that the keys and values of one generation take. A cache has two generations.
const MAX_GENERATION_BYTES: usize = 64 << 10;
/// Larger entries are not cached.
const MAX_ENTRY_BYTES: usize = 8 << 10;

/// Maps a key to the result computed for it. New entries go into the young generation. When it is full it becomes the old
/// generation, and the entries of the previous old generation that were not read meanwhile are dropped.
pub struct TwoGenerationCache<V>(RwLock<Generations<V>>);

struct Generations<V> {
    young: HashMap<Box<[u8]>, V>,
    old: HashMap<Box<[u8]>, V>,
    young_bytes: usize,
}

impl<V> Default for TwoGenerationCache<V> {
    fn default() -> Self {
        Self(RwLock::new(Generations { young: HashMap::new(), old: HashMap::new(), young_bytes: 0 }))
    }
}

impl<V: CacheWeight + Clone> TwoGenerationCache<V> {
    /// Returns the cached value. An entry of the old generation moves into the young one.
    pub fn get(&self, key: &[u8]) -> Option<V> {
        let generations = self.0.read();
        if let Some(value) = generations.young.get(key) {
            return Some(value.clone());
        }
        let value = generations.old.get(key)?.clone();
        drop(generations);
        self.insert(key, value.clone());
        Some(value)
    }

    pub fn insert(&self, key: &[u8], value: V) {
        let bytes = key.len() + value.bytes();
        if bytes > MAX_ENTRY_BYTES {
            return;
        }
        let mut generations = self.0.write();
        if generations.young_bytes + bytes > MAX_GENERATION_BYTES {
            generations.old = std::mem::take(&mut generations.young);
            generations.young_bytes = 0;
        }
        if generations.young.insert(key.into(), value).is_none() {
            generations.young_bytes += bytes;
        }
    }
}

/// How much memory a cached value takes.
pub trait CacheWeight {
    fn bytes(&self) -> usize;
}

#[cfg(test)]
mod tests {
    use super::*;

    impl CacheWeight for usize {
        fn bytes(&self) -> usize {
            *self
        }
    }

    #[test]
    fn entries_that_are_read_stay_and_others_are_evicted() {
        let cache = TwoGenerationCache::default();
        cache.insert(b"used", 10);
        cache.insert(b"unused", 10);
        for i in 0..10_000_usize {
            cache.insert(&i.to_be_bytes(), 1000);
            assert_eq!(cache.get(b"used"), Some(10), "read after {i}");
        }
        assert_eq!(cache.get(b"unused"), None);
        let generations = cache.0.read();
        for generation in [&generations.young, &generations.old] {
            let bytes: usize = generation.iter().map(|(key, value)| key.len() + value.bytes()).sum();
            assert!(bytes <= MAX_GENERATION_BYTES, "{bytes}");
        }
    }

    #[test]
    fn large_entries_are_not_cached() {
        let cache = TwoGenerationCache::default();
        cache.insert(b"large", MAX_ENTRY_BYTES);
        assert_eq!(cache.get(b"large"), None);
        cache.insert(&vec![0; MAX_ENTRY_BYTES], 1);
        assert_eq!(cache.get(&vec![0; MAX_ENTRY_BYTES]), None);
    }
}
