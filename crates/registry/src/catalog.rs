//! The kinds that are served at the moment: the built-in ones, and those that CustomResourceDefinitions add and remove.

use std::sync::Arc;

use cleat_apimachinery::kind::Kind;
use cleat_apimachinery::names;
use tokio::sync::watch;

use crate::strategy;

/// The set of served kinds. Readers take a snapshot with [`Catalog::kinds`].
pub struct Catalog(watch::Sender<Arc<Kinds>>);

impl Catalog {
    pub fn builtin() -> Self {
        Self(watch::Sender::new(Arc::new(Kinds { builtin: strategy::all(), custom: Vec::new() })))
    }

    /// The kinds served at this moment.
    pub fn kinds(&self) -> Arc<Kinds> {
        self.0.borrow().clone()
    }

    /// Serves exactly these kinds for the definition of this name; none to serve it no longer.
    pub fn define(&self, definition: &str, kinds: Vec<Arc<dyn Kind>>) {
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
pub struct Kinds {
    builtin: Vec<Arc<dyn Kind>>,
    /// With the name of the definition each is from.
    custom: Vec<(String, Arc<dyn Kind>)>,
}

impl Kinds {
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<dyn Kind>> {
        self.iter().find(|kind| {
            let d = kind.descriptor();
            d.plural == plural && d.group == group && d.version == version
        })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Kind>> {
        self.builtin.iter().chain(self.custom.iter().map(|(_, kind)| kind))
    }

    /// Groups with their versions, each once, the core group first.
    pub fn groups(&self) -> Vec<(&str, Vec<&str>)> {
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
            versions.sort_by_key(|version| std::cmp::Reverse(names::version_rank(version)));
        }
        groups
    }

    pub fn in_version<'a>(&'a self, group: &'a str, version: &'a str) -> impl Iterator<Item = &'a Arc<dyn Kind>> {
        self.iter().filter(move |kind| kind.descriptor().group == group && kind.descriptor().version == version)
    }
}
