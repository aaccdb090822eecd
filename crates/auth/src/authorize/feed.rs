//! A picture of some objects, kept true by watches that are drained when somebody looks, so that a change which was
//! acknowledged is always part of the picture.

use std::task::{Context, Poll, Waker};

use cleat_store::{Entry, Range, Store, WatchError, Watcher};
use parking_lot::{Mutex, RwLock};

/// What can be kept by a feed.
pub(super) trait Picture: Default + Send + Sync {
    /// The key prefixes it is made of.
    const PREFIXES: &'static [&'static str];

    /// The object at the key changed, or went.
    fn apply(&mut self, key: &str, object: Option<&Entry>);
}

#[derive(Default)]
pub(super) struct Feed<P> {
    picture: RwLock<P>,
    /// Empty until the first look and after a watch ended.
    watches: Mutex<Vec<Box<dyn Watcher>>>,
}

impl<P: Picture> Feed<P> {
    pub(super) fn read<T>(&self, look: impl FnOnce(&P) -> T) -> T {
        look(&self.picture.read())
    }

    /// Brings the picture up to what the store has acknowledged.
    pub(super) async fn follow(&self, store: &dyn Store) {
        if self.drain() {
            return;
        }
        match start::<P>(store).await {
            Ok((picture, watches)) => {
                // Both under one lock: the watches continue exactly where the picture ends.
                let mut current = self.watches.lock();
                *self.picture.write() = picture;
                *current = watches;
            }
            Err(error) => tracing::error!(%error, "the picture of roles cannot be renewed"),
        }
    }

    fn drain(&self) -> bool {
        let mut watches = self.watches.lock();
        let mut cx = Context::from_waker(Waker::noop());
        for i in 0..watches.len() {
            loop {
                match watches[i].poll_next(&mut cx) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(event)) => self.picture.write().apply(event.key(), event.new.as_ref()),
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

async fn start<P: Picture>(store: &dyn Store) -> Result<(P, Vec<Box<dyn Watcher>>), WatchError> {
    let mut picture = P::default();
    let mut watches = Vec::new();
    for prefix in P::PREFIXES {
        let listed = store.list(Range { prefix, ..Range::default() }).await;
        let snapshot = listed.map_err(|_| WatchError::Closed)?;
        for entry in snapshot.entries() {
            picture.apply(&entry.key, Some(&entry));
        }
        watches.push(store.watch(prefix, snapshot.revision).await?);
    }
    Ok((picture, watches))
}
