//! Keeps one cache current: a list, then a watch from its revision, then again from wherever the watch ended.
//!
//! kube's own watcher is not used because it does not tell at which revision its list was taken, and without that a
//! cache cannot know whether an object the list does not show is gone or was written after it.

use std::collections::HashSet;
use std::time::Duration;

use cleat_api::Key;
use kube::api::{ListParams, ObjectList, Request, WatchParams};
use kube::core::Status;
use kube::{Client, Resource};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::cache::{Cache, Cached};
use crate::wire::{self, Headline, Lines};

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
    /// Go on from this revision, after a pause; a short one if the watch had worked.
    Failed { error: String, at: String, worked: bool },
}

pub(crate) async fn reflect<K>(client: Client, cache: Cache<K>, kind: &'static str, stop: CancellationToken)
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    tokio::select! {
        () = stop.cancelled() => {}
        () = follow(&client, &cache, kind) => {}
    }
}

async fn follow<K>(client: &Client, cache: &Cache<K>, kind: &'static str)
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    let mut from: Option<String> = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let failure = match from.take() {
            None => match list(client, cache).await {
                Ok(revision) => {
                    debug!(kind, objects = cache.len(), "cache synced");
                    from = Some(revision);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Some(revision) => match watch(client, cache, revision).await {
                End::Resume(revision) => {
                    from = Some(revision);
                    None
                }
                End::TooOld => None,
                End::Failed { error, at, worked } => {
                    if worked {
                        pause = FIRST_PAUSE;
                    }
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
async fn list<K>(client: &Client, cache: &Cache<K>) -> kube::Result<String>
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    let mut shown = HashSet::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let request = Request::new(K::url_path(&(), None)).list(&page).map_err(kube::Error::BuildRequest)?;
        let part: ObjectList<K> = wire::fetch(client, request).await?;
        for object in part.items {
            shown.insert(Key::of(object.meta()));
            cache.arrived(object);
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

async fn watch<K>(client: &Client, cache: &Cache<K>, mut revision: String) -> End
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    let parameters = WatchParams::default().timeout(WATCH_SECONDS);
    let opened = async {
        let request = Request::new(K::url_path(&(), None)).watch(&parameters, &revision);
        Lines::open(client, request.map_err(kube::Error::BuildRequest)?).await
    };
    let mut lines = match opened.await {
        Ok(lines) => lines,
        Err(kube::Error::Api(status)) if status.code == 410 => return End::TooOld,
        Err(error) => return End::Failed { error: error.to_string(), at: revision, worked: false },
    };
    let mut worked = false;
    loop {
        let line = match tokio::time::timeout(SILENCE, lines.next()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => return End::Resume(revision),
            Ok(Err(error)) => return End::Failed { error: error.to_string(), at: revision, worked },
            Err(_) => return End::Failed { error: "the server is silent".to_owned(), at: revision, worked },
        };
        match take(cache, &line) {
            Ok(Taken::Upto(newest)) => {
                revision = newest;
                worked = true;
            }
            Ok(Taken::Nothing) => {}
            Ok(Taken::End(status)) if status.code == 410 => return End::TooOld,
            Ok(Taken::End(status)) => return End::Failed { error: status.to_string(), at: revision, worked },
            Err(error) => return End::Failed { error: error.to_string(), at: revision, worked: false },
        }
    }
}

/// What a line of a watch came to.
enum Taken {
    /// Everything up to this revision is known now.
    Upto(String),
    Nothing,
    /// The server ends the watch.
    End(Box<Status>),
}

/// Takes one change in. The object is decoded only if it is news: most changes are writes of our own.
fn take<K>(cache: &Cache<K>, line: &[u8]) -> serde_json::Result<Taken>
where
    K: Cached + Resource<DynamicType = ()>,
{
    if line.trim_ascii().is_empty() {
        return Ok(Taken::Nothing);
    }
    let Headline { verb, object } = serde_json::from_slice(line)?;
    let metadata = object.metadata;
    let newest = metadata.resource_version.as_deref().map(number).unwrap_or_default();
    let key = || Key {
        namespace: metadata.namespace.as_deref().map(ToOwned::to_owned),
        name: metadata.name.as_deref().unwrap_or_default().to_owned(),
    };
    match &*verb {
        "ADDED" | "MODIFIED" => {
            if !cache.is_known(&key(), newest) {
                cache.arrived(wire::object(line)?);
            }
        }
        "DELETED" => cache.departed(&key(), newest),
        "BOOKMARK" => cache.passed(newest),
        "ERROR" => return wire::object(line).map(Taken::End),
        _ => return Ok(Taken::Nothing),
    }
    Ok(metadata.resource_version.map_or(Taken::Nothing, |text| Taken::Upto(text.into_owned())))
}

fn number(revision: &str) -> u64 {
    revision.parse().unwrap_or(0)
}
