//! Keeps one cache current with the list and watch of its kind.

use std::collections::HashSet;

use cleat_api::Key;
use kube::Resource;
use kube::api::ObjectList;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::Client;
use crate::cache::{Cache, Cached};
use crate::decode::{self, EventHeader};
use crate::list_watch::{self, ListPage, ListWatchHandler, WatchProgress};

pub(crate) async fn reflect<K>(client: Client, cache: Cache<K>, kind: &'static str, stop: CancellationToken)
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    let mut reflector = Reflector { cache, kind, listed: HashSet::new() };
    let path = K::url_path(&(), None);
    stop.run_until_cancelled(list_watch::run(&client, &path, &mut reflector)).await;
}

struct Reflector<K> {
    cache: Cache<K>,
    kind: &'static str,
    /// The keys in the pages of the current list so far.
    listed: HashSet<Key>,
}

impl<K> ListWatchHandler for Reflector<K>
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    fn list_started(&mut self) {
        self.listed.clear();
    }

    fn list_page(&mut self, json: &[u8]) -> serde_json::Result<ListPage> {
        let list: ObjectList<K> = serde_json::from_slice(&decode::without_managed_fields(json))?;
        for object in list.items {
            self.listed.insert(Key::of(object.meta()));
            self.cache.apply_event(object);
        }
        Ok(ListPage {
            continue_token: list.metadata.continue_,
            revision: list.metadata.resource_version.unwrap_or_default(),
        })
    }

    fn list_completed(&mut self, revision: &str) {
        self.cache.complete_list(&std::mem::take(&mut self.listed), parse_revision(revision));
        debug!(self.kind, objects = self.cache.len(), "cache synced");
    }

    /// Decodes the object only if the cache does not have it yet: most events are for writes of this process.
    fn watch_event(&mut self, json: &[u8]) -> serde_json::Result<WatchProgress> {
        let EventHeader { event_type, object } = serde_json::from_slice(json)?;
        let metadata = object.metadata;
        let revision = metadata.resource_version.as_deref().map(parse_revision).unwrap_or_default();
        let key = || Key {
            namespace: metadata.namespace.as_deref().map(ToOwned::to_owned),
            name: metadata.name.as_deref().unwrap_or_default().to_owned(),
        };
        match &*event_type {
            "ADDED" | "MODIFIED" => {
                if !self.cache.confirm_own_write(&key(), revision) {
                    self.cache.apply_event(decode::event_object(json)?);
                }
            }
            "DELETED" => self.cache.apply_deletion(&key(), revision),
            "BOOKMARK" => self.cache.advance_to(revision),
            "ERROR" => return decode::event_object(json).map(WatchProgress::ServerError),
            _ => return Ok(WatchProgress::None),
        }
        Ok(metadata
            .resource_version
            .map_or(WatchProgress::None, |revision| WatchProgress::Reached(revision.into_owned())))
    }
}

/// Returns 0 if it is not a number.
fn parse_revision(revision: &str) -> u64 {
    revision.parse().unwrap_or(0)
}
