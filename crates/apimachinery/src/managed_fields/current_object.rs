//! The stored object that a write starts from.

use cleat_store::Entry;

use super::managed_object::{ManagedObject, SplitObject};
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
    /// Without managedFields and resourceVersion.
    pub object: Box<dyn Object>,
    pub split: SplitObject<'a>,
    pub stored: &'a StoredObject,
}

impl<'a> CurrentObject<'a> {
    pub fn of(kind: &dyn Kind, entry: &'a Entry, stored: &'a StoredObject) -> Result<Self, ApiError> {
        let split = SplitObject::of(kind.descriptor(), &entry.value);
        let object = decode_split(kind, entry, &split)?;
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
