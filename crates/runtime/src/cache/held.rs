//! One object of a cache: as it is while somebody works with it, packed once it has been at rest for a while. A typed
//! object takes kilobytes, most of them for fields that it does not have.

use std::collections::VecDeque;
use std::sync::Arc;

use cleat_api::Key;
use cleat_pack::{Packed, Sort};

use super::Cached;

pub(super) struct Held<K> {
    pub(super) revision: u64,
    form: Form<K>,
}

enum Form<K> {
    Warm(Arc<K>),
    Packed(Packed),
}

impl<K> Clone for Held<K> {
    fn clone(&self) -> Self {
        let form = match &self.form {
            Form::Warm(object) => Form::Warm(object.clone()),
            Form::Packed(packed) => Form::Packed(packed.clone()),
        };
        Self { revision: self.revision, form }
    }
}

impl<K: Cached> Held<K> {
    pub(super) fn new(revision: u64, object: Arc<K>) -> Self {
        Self { revision, form: Form::Warm(object) }
    }

    pub(super) fn warm(&self) -> Option<&Arc<K>> {
        match &self.form {
            Form::Warm(object) => Some(object),
            Form::Packed(_) => None,
        }
    }

    pub(super) fn object(&self) -> Arc<K> {
        match &self.form {
            Form::Warm(object) => object.clone(),
            Form::Packed(packed) => {
                let object = serde_json::from_slice(&packed.text());
                Arc::new(object.expect("what was encoded can be decoded"))
            }
        }
    }

    /// The object is worked with again.
    pub(super) fn warmed(&mut self, object: &Arc<K>) {
        self.form = Form::Warm(object.clone());
    }

    pub(super) fn packed(&mut self, packed: Packed) {
        self.form = Form::Packed(packed);
    }
}

/// The object, packed.
pub(super) fn pack<K: Cached>(sort: &mut Sort, object: &K) -> Option<Packed> {
    let text = serde_json::to_vec(object).ok()?;
    Some(sort.pack(&text, || 0))
}

/// What was worked with last, the latest at the end.
#[derive(Default)]
pub(super) struct Recent(VecDeque<(Arc<Key>, u64)>);

impl Recent {
    pub(super) fn push(&mut self, key: Arc<Key>, revision: u64) {
        self.0.push_back((key, revision));
    }

    /// The object at a revision whose turn it is to be packed, if more than `limit` are warm.
    pub(super) fn due(&mut self, limit: usize) -> Option<(Arc<Key>, u64)> {
        if self.0.len() > limit { self.0.pop_front() } else { None }
    }
}
