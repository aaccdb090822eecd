//! `metadata.managedFields` as it is stored.

use bytes::Bytes;

use super::entries::Owners;

/// `metadata.managedFields` as it is written; none if ownership of the object is not recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawManagedFields(Option<Bytes>);

impl RawManagedFields {
    pub fn new(owners: Owners) -> Self {
        Self(owners.encode().map(Bytes::from))
    }

    pub fn from_bytes(text: impl Into<Bytes>) -> Self {
        Self(Some(text.into()))
    }

    pub fn bytes(&self) -> Option<&Bytes> {
        self.0.as_ref()
    }

    /// Empty if there is none.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    pub fn owners(&self) -> Owners {
        self.0.as_ref().map(|text| Owners::decode(text)).unwrap_or_default()
    }

    /// Do the two differ in nothing but times?
    pub fn equals_ignoring_times(&self, other: &Self) -> bool {
        self == other || self.owners().equals_ignoring_times(&other.owners())
    }
}
