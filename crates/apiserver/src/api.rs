//! The server's core, shared by the socket and the in-process clients: the store and the kinds it serves.

use std::sync::Arc;

use cleat_store::Store;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::endpoint::lines::Lines;
use crate::kind::Kind;
use crate::limits::Limits;
use crate::recent::Recent;
use crate::security::Security;
use crate::strategy;
use crate::view::View;

pub(crate) struct Api {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) catalog: Catalog,
    pub(crate) lines: Arc<Lines>,
    pub(crate) recent: Recent,
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
        self.catalog.0.borrow().clone()
    }

    /// The store as the kind sees it.
    pub(crate) fn of(&self, kind: &dyn Kind) -> View<'_> {
        View::new(&*self.store, kind.conversion())
    }
}

/// Which kinds are served; definitions of custom ones come and go.
pub(crate) struct Catalog(watch::Sender<Arc<Kinds>>);

impl Catalog {
    pub(crate) fn builtin() -> Self {
        Self(watch::Sender::new(Arc::new(Kinds { builtin: strategy::all(), custom: Vec::new() })))
    }

    /// Serves exactly these kinds for the definition of this name; none to serve it no longer.
    pub(crate) fn define(&self, definition: &str, kinds: Vec<Arc<dyn Kind>>) {
        self.0.send_modify(|current| {
            let mut custom: Vec<_> = current.custom.iter().filter(|(name, _)| name != definition).cloned().collect();
            for (_, gone) in current.custom.iter().filter(|(name, _)| name == definition) {
                gone.retire();
            }
            custom.extend(kinds.into_iter().map(|kind| (definition.to_owned(), kind)));
            custom.sort_by(|(a, _), (b, _)| a.cmp(b));
            *current = Arc::new(Kinds { builtin: current.builtin.clone(), custom });
        });
    }
}

/// The kinds served, in the order discovery shows them.
pub(crate) struct Kinds {
    builtin: Vec<Arc<dyn Kind>>,
    /// With the name of the definition each is from.
    custom: Vec<(String, Arc<dyn Kind>)>,
}

impl Kinds {
    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<dyn Kind>> {
        self.iter().find(|kind| {
            let d = kind.descriptor();
            d.plural == plural && d.group == group && d.version == version
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Kind>> {
        self.builtin.iter().chain(self.custom.iter().map(|(_, kind)| kind))
    }

    /// Groups with their versions, each once, the core group first.
    pub(crate) fn groups(&self) -> Vec<(&str, Vec<&str>)> {
        let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
        for kind in self.iter() {
            let d = kind.descriptor();
            match groups.iter_mut().find(|(group, _)| *group == d.group) {
                Some((_, versions)) if versions.contains(&d.version.as_str()) => {}
                Some((_, versions)) => versions.push(&d.version),
                None => groups.push((&d.group, vec![&d.version])),
            }
        }
        for (_, versions) in &mut groups {
            versions.sort_by_key(|version| std::cmp::Reverse(crate::names::version_rank(version)));
        }
        groups
    }

    pub(crate) fn in_version<'a>(
        &'a self,
        group: &'a str,
        version: &'a str,
    ) -> impl Iterator<Item = &'a Arc<dyn Kind>> {
        self.iter().filter(move |kind| kind.descriptor().group == group && kind.descriptor().version == version)
    }
}
