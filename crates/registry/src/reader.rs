//! Reads single stored objects by group, resource and name, for code that needs a few fields of a few kinds.

use std::sync::Arc;

use cleat_store::{Entry, ReadError, Store};
use serde::de::DeserializeOwned;

use crate::catalog::{KindCatalog, ServedKinds};

/// The store, and the catalog that gives the storage keys of a kind.
#[derive(Clone)]
pub struct ObjectReader {
    store: Arc<dyn Store>,
    catalog: Arc<KindCatalog>,
}

impl ObjectReader {
    pub fn new(store: Arc<dyn Store>, catalog: Arc<KindCatalog>) -> Self {
        Self { store, catalog }
    }

    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub fn kinds(&self) -> Arc<ServedKinds> {
        self.catalog.kinds()
    }

    /// The stored entry of an object whose kind is served as `v1`. `None` if there is no such kind or no such object.
    pub async fn entry(
        &self,
        group: &str,
        plural: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<Entry>, ReadError> {
        let kinds = self.kinds();
        match kinds.find(group, "v1", plural) {
            Some(kind) => self.store.get(&kind.descriptor().key(namespace, name)).await,
            None => Ok(None),
        }
    }

    /// The object, decoded as `T`. Returns `None` if there is no such object, and also if reading or decoding it fails.
    pub async fn get<T: DeserializeOwned>(
        &self,
        group: &str,
        plural: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Option<T> {
        let entry = self.entry(group, plural, namespace, name).await.ok()??;
        serde_json::from_slice(&entry.value).ok()
    }
}
