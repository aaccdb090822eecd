//! Caches decoded objects by the revision that wrote them. Most objects are updated again within moments, and the update
//! then needs no decoding. An entry serves one update and is then removed.

use cleat_store::Revision;
use parking_lot::Mutex;

const CACHE_SLOTS: usize = 2048;
/// Objects whose encoded form is longer are not cached.
const MAX_ENCODED_BYTES: usize = 8 << 10;

type Slot<V> = Mutex<Option<(Revision, V)>>;

/// The revision identifies the object and its kind, because every write has a revision of its own. A newer entry replaces
/// the older one in its slot.
pub struct DecodedObjectCache<V>(Box<[Slot<V>]>);

impl<V> Default for DecodedObjectCache<V> {
    fn default() -> Self {
        Self((0..CACHE_SLOTS).map(|_| Slot::default()).collect())
    }
}

impl<V> DecodedObjectCache<V> {
    fn slot(&self, revision: Revision) -> &Slot<V> {
        &self.0[revision as usize % CACHE_SLOTS]
    }

    /// Caches the object as the result of the write at `revision`.
    pub fn insert(&self, revision: Revision, encoded_bytes: usize, object: V) {
        if encoded_bytes <= MAX_ENCODED_BYTES {
            *self.slot(revision).lock() = Some((revision, object));
        }
    }

    /// Removes and returns the object written at `revision`.
    pub fn take(&self, revision: Revision) -> Option<V> {
        self.slot(revision).lock().take_if(|(cached, _)| *cached == revision).map(|(_, object)| object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_serves_one_update_of_its_own_revision() {
        let cache = DecodedObjectCache::default();
        cache.insert(7, MAX_ENCODED_BYTES + 1, ());
        assert!(cache.take(7).is_none(), "too large");
        cache.insert(7, 1, ());
        assert!(cache.take(7 + CACHE_SLOTS as u64).is_none() && cache.take(8).is_none());
        assert!(cache.take(7).is_some());
        assert!(cache.take(7).is_none());
        cache.insert(7, 1, ());
        cache.insert(7 + CACHE_SLOTS as u64, 1, ());
        assert!(cache.take(7).is_none(), "replaced by a newer entry in its slot");
    }
}
