//! An object: as it is while somebody works with it, packed while nobody does. A typed Kubernetes object takes kilobytes,
//! most of them for fields that it does not have.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Packed, Sort};

/// What can be packed and unpacked.
pub trait Packable: Serialize + DeserializeOwned {}

impl<K: Serialize + DeserializeOwned> Packable for K {}

pub enum Parcel<K> {
    Open(Arc<K>),
    Packed(Packed),
}

impl<K> Parcel<K> {
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open(_))
    }
}

impl<K: Packable> Parcel<K> {
    pub fn object(&self) -> Arc<K> {
        match self {
            Self::Open(object) => object.clone(),
            Self::Packed(packed) => {
                let object = serde_json::from_slice(&packed.text());
                Arc::new(object.expect("what was encoded can be decoded"))
            }
        }
    }

    /// The same, packed. What cannot be encoded stays as it is.
    pub fn packed(self, sort: &mut Sort) -> Self {
        match &self {
            Self::Packed(_) => self,
            Self::Open(object) => match serde_json::to_vec(&**object) {
                Ok(text) => Self::Packed(sort.pack(&text, || 0)),
                Err(_) => self,
            },
        }
    }
}

impl<K> Clone for Parcel<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Open(object) => Self::Open(object.clone()),
            Self::Packed(packed) => Self::Packed(packed.clone()),
        }
    }
}

impl<K: fmt::Debug> fmt::Debug for Parcel<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(object) => object.fmt(f),
            Self::Packed(packed) => f.write_str(&String::from_utf8_lossy(&packed.text())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_the_same_object() {
        let mut sort = Sort::default();
        for n in 0..100 {
            let object: Vec<String> = (0..50).map(|word| format!("{n} and {}", word * 7919 % 997)).collect();
            let parcel = Parcel::Open(Arc::new(object.clone()));
            assert!(parcel.is_open());
            let parcel = parcel.packed(&mut sort);
            assert!(!parcel.is_open());
            assert_eq!(*parcel.object(), object);
            assert_eq!(*parcel.clone().packed(&mut sort).object(), object);
        }
    }

    #[test]
    fn what_cannot_be_encoded_stays_as_it_is() {
        let keyed: std::collections::BTreeMap<Vec<u8>, u8> = [(vec![1], 1)].into();
        assert!(Parcel::Open(Arc::new(keyed)).packed(&mut Sort::default()).is_open());
    }
}
