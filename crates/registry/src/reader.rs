//! Reads stored objects by their resource name, for code that needs a few fields of a few kinds.

use std::sync::Arc;

use cleat_store::{Entry, ReadError, Store};
use serde::de::DeserializeOwned;

use crate::catalog::{Catalog, Kinds};

/// The store, and the catalog that tells where in it a kind's objects are.
#[derive(Clone)]
pub struct ObjectReader {
    store: Arc<dyn Store>,
    catalog: Arc<Catalog>,
}

impl ObjectReader {
    pub fn new(store: Arc<dyn Store>, catalog: Arc<Catalog>) -> Self {
        Self { store, catalog }
    }

    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub fn kinds(&self) -> Arc<Kinds> {
        self.catalog.kinds()
    }

    /// The stored entry of an object of a v1 kind. `None` if there is no such kind or no such object.
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

    /// The object, decoded as `T`. `None` also if it cannot be read or decoded.
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
