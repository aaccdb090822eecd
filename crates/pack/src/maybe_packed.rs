//! A typed object that is held decoded while components use it, and as compressed JSON otherwise.
//!
//! A decoded Kubernetes object takes kilobytes of memory, most of them for fields that are not set.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::compressor::Compressor;
use crate::packed::Packed;

/// A type whose values can be encoded to JSON and decoded again.
pub trait Packable: Serialize + DeserializeOwned {}

impl<K: Serialize + DeserializeOwned> Packable for K {}

pub enum MaybePacked<K> {
    Unpacked(Arc<K>),
    /// The object's JSON.
    Packed(Packed),
}

impl<K> MaybePacked<K> {
    pub fn is_unpacked(&self) -> bool {
        matches!(self, Self::Unpacked(_))
    }
}

impl<K: Packable> MaybePacked<K> {
    /// Returns the object. Decodes it on every call while it is packed.
    pub fn object(&self) -> Arc<K> {
        match self {
            Self::Unpacked(object) => object.clone(),
            Self::Packed(packed) => {
                let object = serde_json::from_slice(&packed.unpack());
                Arc::new(object.expect("JSON that was encoded from the type decodes to it"))
            }
        }
    }

    /// Packs the object. An object that cannot be encoded to JSON stays unpacked.
    pub fn into_packed(self, compressor: &mut Compressor) -> Self {
        match &self {
            Self::Packed(_) => self,
            Self::Unpacked(object) => match serde_json::to_vec(&**object) {
                // The ids of dictionaries matter only to values on disk.
                Ok(json) => Self::Packed(compressor.pack(&json, || 0)),
                Err(_) => self,
            },
        }
    }
}

impl<K> Clone for MaybePacked<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Unpacked(object) => Self::Unpacked(object.clone()),
            Self::Packed(packed) => Self::Packed(packed.clone()),
        }
    }
}

impl<K: fmt::Debug> fmt::Debug for MaybePacked<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unpacked(object) => object.fmt(f),
            Self::Packed(packed) => f.write_str(&String::from_utf8_lossy(&packed.unpack())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_object_equals_the_original() {
        let mut compressor = Compressor::default();
        for n in 0..100 {
            let object: Vec<String> = (0..50).map(|word| format!("{n} and {}", word * 7919 % 997)).collect();
            let maybe_packed = MaybePacked::Unpacked(Arc::new(object.clone()));
            assert!(maybe_packed.is_unpacked());
            let maybe_packed = maybe_packed.into_packed(&mut compressor);
            assert!(!maybe_packed.is_unpacked());
            assert_eq!(*maybe_packed.object(), object);
            assert_eq!(*maybe_packed.clone().into_packed(&mut compressor).object(), object);
        }
    }

    #[test]
    fn an_object_that_cannot_be_encoded_stays_unpacked() {
        let keyed: std::collections::BTreeMap<Vec<u8>, u8> = [(vec![1], 1)].into();
        assert!(MaybePacked::Unpacked(Arc::new(keyed)).into_packed(&mut Compressor::default()).is_unpacked());
    }
}
