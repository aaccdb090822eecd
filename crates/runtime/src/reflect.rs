//! Keeps one cache current: a list, then a watch from its revision, then again from wherever the watch ended.
//!
//! kube's own watcher is not used because it does not tell at which revision its list was taken, and without that a
//! cache cannot know whether an object the list does not show is gone or was written after it.

use std::collections::HashSet;
use std::fmt::Debug;
use std::time::Duration;

use cleat_api::Key;
use futures::StreamExt as _;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::cache::Cache;

const PAGE: u32 = 500;
/// The server ends a watch after this many seconds; one that is silent for longer has lost its connection.
const WATCH_SECONDS: u32 = 290;
const SILENCE: Duration = Duration::from_secs(300);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Why a watch came to an end.
enum End {
    /// Go on from this revision.
    Resume(String),
    /// The history from there on is gone.
    TooOld,
    /// Go on from this revision, after a pause.
    Failed { error: String, at: String },
}

pub(crate) async fn reflect<K>(api: Api<K>, cache: Cache<K>, kind: &'static str, stop: CancellationToken)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    tokio::select! {
        () = stop.cancelled() => {}
        () = follow(&api, &cache, kind) => {}
    }
}

async fn follow<K>(api: &Api<K>, cache: &Cache<K>, kind: &'static str)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let mut from: Option<String> = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let failure = match from.take() {
            None => match list(api, cache).await {
                Ok(revision) => {
                    debug!(kind, objects = cache.len(), "cache synced");
                    from = Some(revision);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Some(revision) => match watch(api, cache, revision).await {
                End::Resume(revision) => {
                    from = Some(revision);
                    None
                }
                End::TooOld => None,
                End::Failed { error, at } => {
                    from = Some(at);
                    Some(error)
                }
            },
        };
        match failure {
            None => pause = FIRST_PAUSE,
            Some(error) => {
                warn!(kind, error, "watch interrupted; it will be resumed");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Takes a complete list, page by page, and returns its revision.
async fn list<K>(api: &Api<K>, cache: &Cache<K>) -> kube::Result<String>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let mut shown = HashSet::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let part = api.list(&page).await?;
        for object in part.items {
            shown.insert(Key::of(object.meta()));
            cache.arrived(trimmed(object));
        }
        match part.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => {
                let revision = part.metadata.resource_version.unwrap_or_default();
                cache.listed(&shown, number(&revision));
                return Ok(revision);
            }
        }
    }
}

async fn watch<K>(api: &Api<K>, cache: &Cache<K>, mut revision: String) -> End
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let parameters = WatchParams::default().timeout(WATCH_SECONDS);
    let mut events = match api.watch(&parameters, &revision).await {
        Ok(events) => events.boxed(),
        Err(kube::Error::Api(status)) if status.code == 410 => return End::TooOld,
        Err(error) => return End::Failed { error: error.to_string(), at: revision },
    };
    loop {
        let event = match tokio::time::timeout(SILENCE, events.next()).await {
            Ok(Some(event)) => event,
            Ok(None) => return End::Resume(revision),
            Err(_) => return End::Failed { error: "the server is silent".to_owned(), at: revision },
        };
        let newest = |object: &K, before: String| object.meta().resource_version.clone().unwrap_or(before);
        match event {
            Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                revision = newest(&object, revision);
                cache.arrived(trimmed(object));
            }
            Ok(WatchEvent::Deleted(object)) => {
                revision = newest(&object, revision);
                cache.departed(&object);
            }
            Ok(WatchEvent::Bookmark(mark)) => {
                revision = mark.metadata.resource_version;
                cache.passed(number(&revision));
            }
            Ok(WatchEvent::Error(status)) if status.code == 410 => return End::TooOld,
            Ok(WatchEvent::Error(status)) => return End::Failed { error: status.to_string(), at: revision },
            Err(error) => return End::Failed { error: error.to_string(), at: revision },
        }
    }
}

/// Nobody reads the managed fields, and they outweigh the rest of the object.
fn trimmed<K: Resource>(mut object: K) -> K {
    object.meta_mut().managed_fields = None;
    object
}

fn number(revision: &str) -> u64 {
    revision.parse().unwrap_or(0)
}
