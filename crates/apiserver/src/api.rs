//! The server's core, shared by the socket and the in-process clients: the store and the kinds it serves.

use std::sync::Arc;

use cleat_store::Store;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::limits::Limits;
use crate::security::Security;
use cleat_apimachinery::cache::decoded_objects::DecodedObjectCache;
use cleat_apimachinery::cache::watch_frames::WatchFrameCache;
use cleat_apimachinery::kind::{Kind, Object};
use cleat_apimachinery::view::View;
use cleat_registry::catalog::{Catalog, Kinds};

pub(crate) struct Api {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) watch_frames: Arc<WatchFrameCache>,
    pub(crate) decoded_objects: DecodedObjectCache<Arc<dyn Object>>,
    pub(crate) security: Security,
    pub(crate) limits: Limits,
    /// Cancelled when the server goes away.
    pub(crate) closing: CancellationToken,
    /// Last, so that whoever waits for it to be dropped finds the store already released.
    pub(crate) _release: watch::Sender<()>,
}

impl Api {
    /// The kinds served at this moment.
    pub(crate) fn kinds(&self) -> Arc<Kinds> {
        self.catalog.kinds()
    }

    /// The store as the kind sees it.
    pub(crate) fn of(&self, kind: &dyn Kind) -> View<'_> {
        View::new(&*self.store, kind.conversion())
    }
}
