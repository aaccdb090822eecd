//! A stored object as a write finds it.

use std::sync::Arc;

use cleat_store::Entry;

use super::document::{Document, SplitObject};
use crate::cache::decoded_objects::DecodedObjectCache;
use crate::error::ApiError;
use crate::kind::{Kind, Object};
use crate::render::Stored;

/// Decodes a stored object, without its managedFields.
pub fn decode(kind: &dyn Kind, entry: &Entry) -> Result<Box<dyn Object>, ApiError> {
    read(kind, entry, &SplitObject::of(kind.descriptor(), &entry.value))
}

fn read(kind: &dyn Kind, entry: &Entry, divided: &SplitObject<'_>) -> Result<Box<dyn Object>, ApiError> {
    let damaged = |e| ApiError::Internal(format!("the stored object {} cannot be read: {e}", entry.key));
    divided.decode(kind).map_err(damaged)
}

pub struct Current<'a> {
    /// Without managedFields. The resourceVersion may be set.
    pub object: Arc<dyn Object>,
    pub divided: SplitObject<'a>,
    pub stored: &'a Stored,
}

impl<'a> Current<'a> {
    /// Takes the decoded object from `cache` if the cache has this revision, and decodes the stored bytes otherwise.
    pub fn of(
        cache: &DecodedObjectCache<Arc<dyn Object>>,
        kind: &dyn Kind,
        entry: &'a Entry,
        stored: &'a Stored,
    ) -> Result<Self, ApiError> {
        let divided = SplitObject::of(kind.descriptor(), &entry.value);
        let object = match cache.take(entry.modified).filter(|_| kind.is_cacheable()) {
            Some(object) => {
                debug_assert!(divided.says(&*object), "the cached object {} differs from the stored one", entry.key);
                object
            }
            None => read(kind, entry, &divided)?.into(),
        };
        Ok(Self { object, divided, stored })
    }
}

impl Current<'_> {
    /// A changed copy of the object with unchanged field owners, for changes by the server itself.
    pub fn edited(&self, edit: impl FnOnce(&mut dyn Object)) -> Document {
        let mut object = self.object.copy();
        edit(&mut *object);
        Document { object, owners: self.divided.owners.clone() }
    }
}
