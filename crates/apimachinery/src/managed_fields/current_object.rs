//! The stored object that a write starts from.

use std::sync::Arc;

use cleat_store::Entry;

use super::managed_object::{ManagedObject, SplitObject};
use crate::cache::decoded_objects::DecodedObjectCache;
use crate::error::ApiError;
use crate::kind::{Kind, Object};
use crate::render::StoredObject;

/// Decodes a stored object, without its managedFields.
pub fn decode(kind: &dyn Kind, entry: &Entry) -> Result<Box<dyn Object>, ApiError> {
    decode_split(kind, entry, &SplitObject::of(kind.descriptor(), &entry.value))
}

fn decode_split(kind: &dyn Kind, entry: &Entry, split: &SplitObject<'_>) -> Result<Box<dyn Object>, ApiError> {
    let undecodable = |e| ApiError::Internal(format!("the stored object {} cannot be read: {e}", entry.key));
    split.decode(kind).map_err(undecodable)
}

/// The stored object, decoded and encoded.
pub struct CurrentObject<'a> {
    /// Without managedFields. The resourceVersion may be set.
    pub object: Arc<dyn Object>,
    pub split: SplitObject<'a>,
    pub stored: &'a StoredObject,
}

impl<'a> CurrentObject<'a> {
    /// Takes the decoded object from `cache` if the cache has this revision, and decodes the stored bytes otherwise.
    pub fn of(
        cache: &DecodedObjectCache<Arc<dyn Object>>,
        kind: &dyn Kind,
        entry: &'a Entry,
        stored: &'a StoredObject,
    ) -> Result<Self, ApiError> {
        let split = SplitObject::of(kind.descriptor(), &entry.value);
        let object = match cache.take(entry.modified).filter(|_| kind.is_cacheable()) {
            Some(object) => {
                debug_assert!(
                    split.is_encoding_of(&*object),
                    "the cached object {} differs from the stored one",
                    entry.key
                );
                object
            }
            None => decode_split(kind, entry, &split)?.into(),
        };
        Ok(Self { object, split, stored })
    }
}

impl CurrentObject<'_> {
    /// A changed copy of the object with unchanged field owners, for writes by the server itself.
    pub fn edited(&self, edit: impl FnOnce(&mut dyn Object)) -> ManagedObject {
        let mut object = self.object.copy();
        edit(&mut *object);
        ManagedObject { object, owners: self.split.owners.clone() }
    }
}
