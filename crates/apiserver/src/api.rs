//! The server's core, shared by the socket and the in-process clients: the store and the kinds it serves.

use std::sync::Arc;

use cleat_store::Store;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::kind::Kind;
use crate::strategy;

pub(crate) struct Api {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) kinds: Kinds,
    /// Cancelled when the server goes away.
    pub(crate) closing: CancellationToken,
    /// Last, so that whoever waits for it to be dropped finds the store already released.
    pub(crate) _release: watch::Sender<()>,
}

/// The kinds served, in the order discovery shows them.
pub(crate) struct Kinds(Vec<Arc<dyn Kind>>);

impl Kinds {
    pub(crate) fn builtin() -> Self {
        Self(strategy::all())
    }

    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<dyn Kind>> {
        self.0.iter().find(|kind| {
            let d = kind.descriptor();
            d.plural == plural && d.group == group && d.version == version
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Kind>> {
        self.0.iter()
    }

    /// Groups with their versions, each once, the core group first.
    pub(crate) fn groups(&self) -> Vec<(&str, Vec<&str>)> {
        let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
        for kind in &self.0 {
            let d = kind.descriptor();
            match groups.iter_mut().find(|(group, _)| *group == d.group) {
                Some((_, versions)) if versions.contains(&d.version.as_str()) => {}
                Some((_, versions)) => versions.push(&d.version),
                None => groups.push((&d.group, vec![&d.version])),
            }
        }
        groups
    }

    pub(crate) fn in_version<'a>(
        &'a self,
        group: &'a str,
        version: &'a str,
    ) -> impl Iterator<Item = &'a Arc<dyn Kind>> {
        self.0.iter().filter(move |kind| kind.descriptor().group == group && kind.descriptor().version == version)
    }
}
