//! Access to the store for one kind. Most kinds are stored in the form in which they are served. A kind that shares its
//! storage with another version or group has a [`Conversion`]; all reads and writes apply it here, and only here.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use cleat_store::{
    Entry, Event, ListError, Range, ReadError, Revision, Snapshot, Store, WatchError, Watcher, WriteError,
};

/// Converts between the stored and the served form of a kind.
pub trait Conversion: Send + Sync {
    /// Converts a stored object into the form that clients get.
    fn to_served(&self, stored: &Bytes) -> Bytes;

    /// Converts an object in the served form into the form that is stored.
    fn to_stored(&self, served: Bytes) -> Bytes;
}

/// The store with the conversion of one kind.
pub struct KindStore<'a> {
    store: &'a dyn Store,
    conversion: Option<Arc<dyn Conversion>>,
}

impl<'a> KindStore<'a> {
    pub fn new(store: &'a dyn Store, conversion: Option<Arc<dyn Conversion>>) -> Self {
        Self { store, conversion }
    }

    fn to_stored(&self, served: Bytes) -> Bytes {
        match &self.conversion {
            Some(conversion) => conversion.to_stored(served),
            None => served,
        }
    }

    fn to_served(&self, entry: Entry) -> Entry {
        match &self.conversion {
            Some(conversion) => convert_entry(&**conversion, &entry),
            None => entry,
        }
    }

    fn convert_error(&self, error: WriteError) -> WriteError {
        match error {
            WriteError::Exists { key, current } => WriteError::Exists { key, current: self.to_served(current) },
            other => other,
        }
    }

    pub async fn create(&self, key: &str, value: Bytes) -> Result<Revision, WriteError> {
        self.store.create(key, self.to_stored(value)).await.map_err(|e| self.convert_error(e))
    }

    pub async fn update(&self, key: &str, expected: Revision, value: Bytes) -> Result<Revision, WriteError> {
        self.store.update(key, expected, self.to_stored(value)).await
    }

    pub async fn delete(&self, key: &str, expected: Revision) -> Result<Revision, WriteError> {
        self.store.delete(key, expected).await
    }

    pub async fn get(&self, key: &str) -> Result<Option<Entry>, ReadError> {
        Ok(self.store.get(key).await?.map(|entry| self.to_served(entry)))
    }

    pub async fn list(&self, range: Range<'_>) -> Result<Snapshot, ListError> {
        let mut snapshot = self.store.list(range).await?;
        if let Some(conversion) = &self.conversion {
            for kept in &mut snapshot.stored {
                let entry = kept.entry();
                let shown = convert_entry(&**conversion, &entry);
                // An entry that the conversion does not change stays compressed.
                if shown.value != entry.value {
                    *kept = (&shown).into();
                }
            }
        }
        Ok(snapshot)
    }

    pub async fn watch(&self, prefix: &str, after: Revision) -> Result<Box<dyn Watcher>, WatchError> {
        let inner = self.store.watch(prefix, after).await?;
        Ok(match self.conversion.clone() {
            Some(conversion) => Box::new(ConvertingWatcher { inner, conversion }),
            None => inner,
        })
    }
}

fn convert_entry(conversion: &dyn Conversion, entry: &Entry) -> Entry {
    Entry { value: conversion.to_served(&entry.value), ..entry.clone() }
}

struct ConvertingWatcher {
    inner: Box<dyn Watcher>,
    conversion: Arc<dyn Conversion>,
}

impl Watcher for ConvertingWatcher {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Arc<Event>, WatchError>> {
        self.inner.poll_next(cx).map_ok(|event| {
            let show = |entry: &Option<Entry>| entry.as_ref().map(|e| convert_entry(&*self.conversion, e));
            Arc::new(Event { revision: event.revision, new: show(&event.new), old: show(&event.old) })
        })
    }

    fn progress(&mut self) -> Revision {
        self.inner.progress()
    }
}
