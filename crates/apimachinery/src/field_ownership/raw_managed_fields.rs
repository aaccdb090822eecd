//! `metadata.managedFields` in its encoded form. Most requests copy it without decoding.

use bytes::Bytes;

use super::entries::Owners;

/// The encoded list `metadata.managedFields`. Empty if the owners of the object are not recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawManagedFields(Option<Bytes>);

impl RawManagedFields {
    pub fn new(owners: Owners) -> Self {
        Self(owners.encode().map(Bytes::from))
    }

    pub fn from_bytes(json: impl Into<Bytes>) -> Self {
        Self(Some(json.into()))
    }

    pub fn bytes(&self) -> Option<&Bytes> {
        self.0.as_ref()
    }

    /// The encoded list; no bytes if there is none.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    pub fn owners(&self) -> Owners {
        self.0.as_ref().map(|json| Owners::decode(json)).unwrap_or_default()
    }

    /// Returns true if both have the same owners of the same fields.
    pub fn equals_ignoring_times(&self, other: &Self) -> bool {
        self == other || self.owners().equals_ignoring_times(&other.owners())
    }
}
