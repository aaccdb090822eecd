//! The kinds that the API server serves: the built-in ones, and those of CustomResourceDefinitions, which come and go.

use std::sync::Arc;

use cleat_apimachinery::kind::Kind;
use cleat_apimachinery::names;
use tokio::sync::watch;

use crate::strategy;

/// The served kinds. Readers take a snapshot with [`KindCatalog::kinds`].
pub struct KindCatalog(watch::Sender<Arc<ServedKinds>>);

impl KindCatalog {
    /// A catalog of the built-in kinds only.
    pub fn builtin() -> Self {
        Self(watch::Sender::new(Arc::new(ServedKinds { builtin: strategy::builtin_kinds(), custom: Vec::new() })))
    }

    /// A snapshot of the served kinds.
    pub fn kinds(&self) -> Arc<ServedKinds> {
        self.0.borrow().clone()
    }

    /// Replaces the kinds of the definition with this name. The old ones are retired, which ends their watches. An empty
    /// `kinds` removes the definition.
    pub fn set_custom_kinds(&self, definition: &str, kinds: Vec<Arc<dyn Kind>>) {
        self.0.send_modify(|current| {
            let mut custom: Vec<_> = current.custom.iter().filter(|(name, _)| name != definition).cloned().collect();
            for (_, old) in current.custom.iter().filter(|(name, _)| name == definition) {
                old.retire();
            }
            custom.extend(kinds.into_iter().map(|kind| (definition.to_owned(), kind)));
            custom.sort_by(|(a, _), (b, _)| a.cmp(b));
            *current = Arc::new(ServedKinds { builtin: current.builtin.clone(), custom });
        });
    }
}

/// A snapshot of the served kinds, in the order of discovery documents.
pub struct ServedKinds {
    builtin: Vec<Arc<dyn Kind>>,
    /// Each with the name of its definition; sorted by that name.
    custom: Vec<(String, Arc<dyn Kind>)>,
}

impl ServedKinds {
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<dyn Kind>> {
        self.iter().find(|kind| {
            let d = kind.descriptor();
            d.plural == plural && d.group == group && d.version == version
        })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Kind>> {
        self.builtin.iter().chain(self.custom.iter().map(|(_, kind)| kind))
    }

    /// The groups, each once and the core group first, with their versions in descending priority.
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

    /// The kinds of one group and version.
    pub fn in_group_version<'a>(&'a self, group: &'a str, version: &'a str) -> impl Iterator<Item = &'a Arc<dyn Kind>> {
        self.iter().filter(move |kind| kind.descriptor().group == group && kind.descriptor().version == version)
    }
}
