//! What a cache holds, and what of it is at rest.

use std::collections::VecDeque;
use std::sync::Arc;

use cleat_api::Key;
use cleat_pack::MaybePacked;

pub(super) struct Held<K> {
    pub(super) revision: u64,
    pub(super) maybe_packed: MaybePacked<K>,
}

impl<K> Clone for Held<K> {
    fn clone(&self) -> Self {
        Self { revision: self.revision, maybe_packed: self.maybe_packed.clone() }
    }
}

/// What was worked with last, the latest at the end.
#[derive(Default)]
pub(super) struct Recent(VecDeque<(Arc<Key>, u64)>);

impl Recent {
    pub(super) fn push(&mut self, key: Arc<Key>, revision: u64) {
        self.0.push_back((key, revision));
    }

    /// The object at a revision whose turn it is to be packed, if more than `limit` are not.
    pub(super) fn due(&mut self, limit: usize) -> Option<(Arc<Key>, u64)> {
        if self.0.len() > limit { self.0.pop_front() } else { None }
    }
}
