//! An object: as it is while somebody works with it, packed while nobody does. A typed Kubernetes object takes kilobytes,
//! most of them for fields that it does not have.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Compressor, Packed};

/// What can be packed and unpacked.
pub trait Packable: Serialize + DeserializeOwned {}

impl<K: Serialize + DeserializeOwned> Packable for K {}

pub enum MaybePacked<K> {
    Unpacked(Arc<K>),
    Packed(Packed),
}

impl<K> MaybePacked<K> {
    pub fn is_unpacked(&self) -> bool {
        matches!(self, Self::Unpacked(_))
    }
}

impl<K: Packable> MaybePacked<K> {
    pub fn object(&self) -> Arc<K> {
        match self {
            Self::Unpacked(object) => object.clone(),
            Self::Packed(packed) => {
                let object = serde_json::from_slice(&packed.text());
                Arc::new(object.expect("what was encoded can be decoded"))
            }
        }
    }

    /// The same, packed. What cannot be encoded stays as it is.
    pub fn packed(self, sort: &mut Compressor) -> Self {
        match &self {
            Self::Packed(_) => self,
            Self::Unpacked(object) => match serde_json::to_vec(&**object) {
                Ok(text) => Self::Packed(sort.pack(&text, || 0)),
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
            Self::Packed(packed) => f.write_str(&String::from_utf8_lossy(&packed.text())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_the_same_object() {
        let mut sort = Compressor::default();
        for n in 0..100 {
            let object: Vec<String> = (0..50).map(|word| format!("{n} and {}", word * 7919 % 997)).collect();
            let maybe_packed = MaybePacked::Unpacked(Arc::new(object.clone()));
            assert!(maybe_packed.is_unpacked());
            let maybe_packed = maybe_packed.packed(&mut sort);
            assert!(!maybe_packed.is_unpacked());
            assert_eq!(*maybe_packed.object(), object);
            assert_eq!(*maybe_packed.clone().packed(&mut sort).object(), object);
        }
    }

    #[test]
    fn what_cannot_be_encoded_stays_as_it_is() {
        let keyed: std::collections::BTreeMap<Vec<u8>, u8> = [(vec![1], 1)].into();
        assert!(MaybePacked::Unpacked(Arc::new(keyed)).packed(&mut Compressor::default()).is_unpacked());
    }
}
