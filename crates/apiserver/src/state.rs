//! The state that all requests and background tasks of one server share.

use std::sync::Arc;

use cleat_store::Store;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::limits::Limits;
use crate::security::Security;
use cleat_apimachinery::kind::Kind;
use cleat_apimachinery::kind_store::KindStore;
use cleat_registry::catalog::{KindCatalog, ServedKinds};

/// Shared by all requests, whether they come over the socket or from the process itself.
pub(crate) struct ServerState {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) catalog: Arc<KindCatalog>,
    pub(crate) security: Security,
    pub(crate) limits: Limits,
    /// Cancelled when the server closes.
    pub(crate) closing: CancellationToken,
    /// Must stay the last field: `ApiServer::close` waits until it is dropped, and the store must be closed by then.
    pub(crate) _dropped_last: watch::Sender<()>,
}

impl ServerState {
    /// The kinds that are served now; definitions add and remove kinds.
    pub(crate) fn kinds(&self) -> Arc<ServedKinds> {
        self.catalog.kinds()
    }

    /// The store with the kind's conversion between its stored and its served version.
    pub(crate) fn store_of(&self, kind: &dyn Kind) -> KindStore<'_> {
        KindStore::new(&*self.store, kind.conversion())
    }
}
