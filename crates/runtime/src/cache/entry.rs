//! A cached object, packed or not, and the order in which unpacked objects are packed.

use std::collections::VecDeque;
use std::sync::Arc;

use cleat_api::Key;
use cleat_pack::MaybePacked;

pub(super) struct CacheEntry<K> {
    pub(super) revision: u64,
    pub(super) stored: MaybePacked<K>,
}

impl<K> Clone for CacheEntry<K> {
    fn clone(&self) -> Self {
        Self { revision: self.revision, stored: self.stored.clone() }
    }
}

/// Unpacked objects by their last change or unpacking, the oldest first. An object that has changed since has more than one
/// element here; those with an older revision no longer refer to an entry.
#[derive(Default)]
pub(super) struct UnpackedQueue(VecDeque<(Arc<Key>, u64)>);

impl UnpackedQueue {
    pub(super) fn push(&mut self, key: Arc<Key>, revision: u64) {
        self.0.push_back((key, revision));
    }

    /// Removes the oldest element if there are more than `limit`.
    pub(super) fn pop_over(&mut self, limit: usize) -> Option<(Arc<Key>, u64)> {
        if self.0.len() > limit { self.0.pop_front() } else { None }
    }
}
