//! A cache of stored objects that is current at every read: `refresh` applies the pending events of the cache's watches
//! before the caller reads, so that a write which the store has acknowledged is always part of what is read.

use std::task::{Context, Poll, Waker};

use cleat_store::{Entry, Range, Store, WatchError, Watcher};
use parking_lot::{Mutex, RwLock};

/// What a [`StoreCache`] holds: a view computed from the objects under some key prefixes.
pub(super) trait CachedView: Default + Send + Sync {
    /// The key prefixes of the objects that the view is computed from.
    const PREFIXES: &'static [&'static str];

    /// Applies one change. `object` is the new entry at `key`, or `None` if the object was deleted.
    fn apply(&mut self, key: &str, object: Option<&Entry>);
}

#[derive(Default)]
pub(super) struct StoreCache<V> {
    view: RwLock<V>,
    /// One watch per prefix. Empty before the first refresh and after a watch has failed.
    watches: Mutex<Vec<Box<dyn Watcher>>>,
}

impl<V: CachedView> StoreCache<V> {
    /// Reads the view as of the last refresh.
    pub(super) fn read<T>(&self, read: impl FnOnce(&V) -> T) -> T {
        read(&self.view.read())
    }

    /// Applies every change that the store has acknowledged. If the objects have to be listed again and the store
    /// fails, the view stays as it was and the next refresh lists again.
    pub(super) async fn refresh(&self, store: &dyn Store) {
        if self.apply_pending_events() {
            return;
        }
        match list_and_watch::<V>(store).await {
            Ok((view, watches)) => {
                // Both are replaced under the lock of the watches: these continue at the revision of the view.
                let mut current = self.watches.lock();
                if current.is_empty() {
                    *self.view.write() = view;
                    *current = watches;
                    return;
                }
                // A concurrent refresh came first, and the view may be older than this list.
                drop(current);
                self.apply_pending_events();
            }
            Err(error) => {
                tracing::error!(%error, prefixes = ?V::PREFIXES, "cannot list the objects of an authorization cache");
            }
        }
    }

    /// Returns false if there are no watches, or one has failed: the objects must be listed again.
    fn apply_pending_events(&self) -> bool {
        let mut watches = self.watches.lock();
        let mut cx = Context::from_waker(Waker::noop());
        for i in 0..watches.len() {
            loop {
                match watches[i].poll_next(&mut cx) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(event)) => self.view.write().apply(event.key(), event.new.as_ref()),
                    Poll::Ready(Err(_)) => {
                        watches.clear();
                        return false;
                    }
                }
            }
        }
        !watches.is_empty()
    }
}

async fn list_and_watch<V: CachedView>(store: &dyn Store) -> Result<(V, Vec<Box<dyn Watcher>>), WatchError> {
    let mut view = V::default();
    let mut watches = Vec::new();
    for prefix in V::PREFIXES {
        let listed = store.list(Range { prefix, ..Range::default() }).await;
        let snapshot = listed.map_err(|_| WatchError::Closed)?;
        for entry in snapshot.entries() {
            view.apply(&entry.key, Some(&entry));
        }
        watches.push(store.watch(prefix, snapshot.revision).await?);
    }
    Ok((view, watches))
}
