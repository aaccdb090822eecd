//! The address of one object: its kind, namespace and name.

use crate::descriptor::Descriptor;
use crate::error::ApiError;
use crate::kind::Kind;

#[derive(Clone, Copy)]
pub struct ObjectAddress<'a> {
    pub kind: &'a dyn Kind,
    pub namespace: Option<&'a str>,
    pub name: &'a str,
}

impl ObjectAddress<'_> {
    /// The object's key in the store.
    pub fn key(&self) -> String {
        self.kind.descriptor().key(self.namespace, self.name)
    }

    pub fn descriptor(&self) -> &Descriptor {
        self.kind.descriptor()
    }

    pub fn not_found(&self) -> ApiError {
        ApiError::not_found(self.descriptor(), self.name)
    }
}
