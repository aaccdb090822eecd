//! Keeps one cache current.

use std::collections::HashSet;

use cleat_api::Key;
use kube::api::ObjectList;
use kube::{Client, Resource};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::cache::{Cache, Cached};
use crate::watch::{self, Page, Reader, Taken};
use crate::wire::{self, Headline};

pub(crate) async fn reflect<K>(client: Client, cache: Cache<K>, kind: &'static str, stop: CancellationToken)
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    let mut reflector = Reflector { cache, kind, shown: HashSet::new() };
    let path = K::url_path(&(), None);
    stop.run_until_cancelled(watch::keep(&client, &path, &mut reflector)).await;
}

struct Reflector<K> {
    cache: Cache<K>,
    kind: &'static str,
    /// What the list has shown so far.
    shown: HashSet<Key>,
}

impl<K> Reader for Reflector<K>
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    fn begun(&mut self) {
        self.shown.clear();
    }

    fn page(&mut self, text: &[u8]) -> serde_json::Result<Page> {
        let list: ObjectList<K> = serde_json::from_slice(&wire::slim(text))?;
        for object in list.items {
            self.shown.insert(Key::of(object.meta()));
            self.cache.arrived(object);
        }
        Ok(Page { more: list.metadata.continue_, revision: list.metadata.resource_version.unwrap_or_default() })
    }

    fn complete(&mut self, revision: &str) {
        self.cache.listed(&std::mem::take(&mut self.shown), number(revision));
        debug!(self.kind, objects = self.cache.len(), "cache synced");
    }

    /// The object is decoded only if it is news: most changes are writes of our own.
    fn line(&mut self, line: &[u8]) -> serde_json::Result<Taken> {
        let Headline { verb, object } = serde_json::from_slice(line)?;
        let metadata = object.metadata;
        let newest = metadata.resource_version.as_deref().map(number).unwrap_or_default();
        let key = || Key {
            namespace: metadata.namespace.as_deref().map(ToOwned::to_owned),
            name: metadata.name.as_deref().unwrap_or_default().to_owned(),
        };
        match &*verb {
            "ADDED" | "MODIFIED" => {
                if !self.cache.is_known(&key(), newest) {
                    self.cache.arrived(wire::object(line)?);
                }
            }
            "DELETED" => self.cache.departed(&key(), newest),
            "BOOKMARK" => self.cache.passed(newest),
            "ERROR" => return wire::object(line).map(Taken::End),
            _ => return Ok(Taken::Nothing),
        }
        Ok(metadata.resource_version.map_or(Taken::Nothing, |text| Taken::Upto(text.into_owned())))
    }
}

fn number(revision: &str) -> u64 {
    revision.parse().unwrap_or(0)
}
