//! Follows one kind: a list, then a watch from its revision, then again from wherever the watch ended. What is made of the
//! text is up to the follower.

use std::borrow::Cow;
use std::time::Duration;

use kube::Client;
use kube::api::{ListParams, Request, WatchParams};
use kube::core::Status;
use serde::Deserialize;
use serde::de::IgnoredAny;
use tracing::warn;

use crate::wire::{self, Lines};

const PAGE: u32 = 500;
/// The server ends a watch after this many seconds; one that is silent for longer has lost its connection.
const WATCH_SECONDS: u32 = 290;
const SILENCE: Duration = Duration::from_secs(300);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Who is told of what a kind's objects are, and of each change.
pub trait Follower: Send {
    /// A list begins: what it does not show is gone.
    fn begun(&mut self);
    fn listed(&mut self, object: Metadata<'_>);
    /// Everything there is was listed.
    fn complete(&mut self);
    fn applied(&mut self, object: Metadata<'_>);
    fn deleted(&mut self, object: Metadata<'_>);
}

/// What owning and being owned is about. Everything else of an object is passed over unread, however deep it is.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata<'a> {
    #[serde(borrow)]
    pub namespace: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub name: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pub uid: Option<Cow<'a, str>>,
    #[serde(borrow)]
    resource_version: Option<Cow<'a, str>>,
    deletion_timestamp: Option<IgnoredAny>,
    #[serde(borrow)]
    finalizers: Option<Vec<Text<'a>>>,
    #[serde(borrow)]
    owner_references: Option<Vec<Owner<'a>>>,
}

#[derive(Debug, Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owner<'a> {
    #[serde(borrow, default)]
    pub api_version: Cow<'a, str>,
    #[serde(borrow, default)]
    pub kind: Cow<'a, str>,
    #[serde(borrow, default)]
    pub name: Cow<'a, str>,
    #[serde(borrow, default)]
    pub uid: Cow<'a, str>,
    pub controller: Option<bool>,
    pub block_owner_deletion: Option<bool>,
}

impl Metadata<'_> {
    pub fn is_deleting(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    pub fn has_finalizer(&self, name: &str) -> bool {
        self.finalizers.iter().flatten().any(|finalizer| finalizer.0 == name)
    }

    pub fn owners(&self) -> &[Owner<'_>] {
        self.owner_references.as_deref().unwrap_or_default()
    }
}

/// Follows the kind at this path until dropped.
pub async fn follow(client: &Client, path: &str, follower: &mut dyn Follower) {
    let requests = Request::new(path);
    let mut from: Option<String> = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let failure = match from.take() {
            None => match list(client, &requests, follower).await {
                Ok(revision) => {
                    from = Some(revision);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Some(revision) => match watch(client, &requests, revision, follower).await {
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
                warn!(path, error, "watch interrupted; it will be resumed");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

#[derive(Deserialize)]
struct Object<'a> {
    #[serde(borrow, default)]
    metadata: Metadata<'a>,
}

#[derive(Deserialize)]
struct List<'a> {
    #[serde(borrow, default)]
    metadata: Page<'a>,
    #[serde(borrow, default)]
    items: Vec<Object<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Page<'a> {
    #[serde(borrow, rename = "continue")]
    more: Option<Cow<'a, str>>,
    #[serde(borrow)]
    resource_version: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow, rename = "type")]
    verb: Cow<'a, str>,
    #[serde(borrow)]
    object: Object<'a>,
}

/// Takes a complete list, page by page, and returns its revision.
async fn list(client: &Client, requests: &Request, follower: &mut dyn Follower) -> kube::Result<String> {
    let mut page = ListParams::default().limit(PAGE);
    follower.begun();
    loop {
        let request = requests.list(&page).map_err(kube::Error::BuildRequest)?;
        let text = wire::text(client, request).await?;
        let List { metadata, items } = serde_json::from_slice(&text).map_err(kube::Error::SerdeError)?;
        items.into_iter().for_each(|object| follower.listed(object.metadata));
        match metadata.more.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => {
                follower.complete();
                return Ok(metadata.resource_version.unwrap_or_default().into_owned());
            }
        }
    }
}

/// Why a watch came to an end.
enum End {
    /// Go on from this revision.
    Resume(String),
    /// The history from there on is gone.
    TooOld,
    /// Go on from this revision, after a pause; a short one if the watch had worked.
    Failed { error: String, at: String, worked: bool },
}

async fn watch(client: &Client, requests: &Request, mut revision: String, follower: &mut dyn Follower) -> End {
    let parameters = WatchParams::default().timeout(WATCH_SECONDS);
    let opened = async {
        let request = requests.watch(&parameters, &revision).map_err(kube::Error::BuildRequest)?;
        Lines::open(client, request).await
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
        match take(&line, &mut revision, follower) {
            Ok(None) => worked = true,
            Ok(Some(status)) if status.code == 410 => return End::TooOld,
            Ok(Some(status)) => return End::Failed { error: status.to_string(), at: revision, worked },
            Err(error) => return End::Failed { error: error.to_string(), at: revision, worked: false },
        }
    }
}

/// Takes one change in. Returns what the server ends the watch with, if that is what the line says.
fn take(line: &[u8], revision: &mut String, follower: &mut dyn Follower) -> serde_json::Result<Option<Box<Status>>> {
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let Line { verb, object } = serde_json::from_slice(line)?;
    let mut metadata = object.metadata;
    if verb == "ERROR" {
        return wire::object(line).map(Some);
    }
    if let Some(newest) = metadata.resource_version.take() {
        revision.clear();
        revision.push_str(&newest);
    }
    match &*verb {
        "ADDED" | "MODIFIED" => follower.applied(metadata),
        "DELETED" => follower.deleted(metadata),
        _ => {}
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use parking_lot::Mutex;
    use std::collections::VecDeque;
    use std::sync::Arc;

    #[derive(Default)]
    struct Told(Vec<String>);

    impl Told {
        fn tell(&mut self, what: &str, object: &Metadata<'_>) {
            let mut text = format!("{what} {}", object.name.as_deref().unwrap_or_default());
            if object.is_deleting() {
                text.push_str(" deleting");
            }
            if object.has_finalizer("orphan") {
                text.push_str(" orphan");
            }
            object.owners().iter().for_each(|owner| text.push_str(&format!(" of {} {}", owner.kind, owner.uid)));
            self.0.push(text);
        }
    }

    impl Follower for Told {
        fn begun(&mut self) {
            self.0.push("begun".to_owned());
        }
        fn listed(&mut self, object: Metadata<'_>) {
            self.tell("listed", &object);
        }
        fn complete(&mut self) {
            self.0.push("complete".to_owned());
        }
        fn applied(&mut self, object: Metadata<'_>) {
            self.tell("applied", &object);
        }
        fn deleted(&mut self, object: Metadata<'_>) {
            self.tell("deleted", &object);
        }
    }

    /// A server that answers one request after the other with these, and notes what it was asked.
    fn script(answers: &[(u16, String)]) -> (Client, Arc<Mutex<Vec<String>>>) {
        let answers: VecDeque<_> = answers.iter().cloned().collect();
        let (answers, asked) = (Arc::new(Mutex::new(answers)), Arc::new(Mutex::new(Vec::new())));
        let noted = asked.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            noted.lock().push(request.uri().query().unwrap_or_default().to_owned());
            let next = answers.lock().pop_front();
            async move {
                // At the end of the script nothing is answered any more.
                let Some((code, body)) = next else { return std::future::pending().await };
                let mut response = http::Response::new(http_body_util::Full::new(Bytes::from(body)));
                *response.status_mut() = http::StatusCode::from_u16(code).unwrap_or_default();
                Ok::<_, std::convert::Infallible>(response)
            }
        });
        (Client::new(service, "default"), asked)
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_is_listed_watched_and_listed_again_when_its_past_is_gone() {
        let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
        let pages = [
            r#"{"metadata":{"continue":"next","resourceVersion":"5"},"items":[{"metadata":{"name":"a","uid":"1"},"spec":[[]]}]}"#,
            r#"{"metadata":{"resourceVersion":"5"},"items":[{"metadata":{"name":"b","ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"p","uid":"u"}]}}]}"#,
        ];
        let changes = [
            format!(r#"{{"type":"ADDED","object":{{"spec":{deep},"metadata":{{"name":"c","resourceVersion":"6"}}}}}}"#),
            r#"{"type":"MODIFIED","object":{"metadata":{"name":"c","resourceVersion":"7","deletionTimestamp":"2026-01-01T00:00:00Z","finalizers":["x","orphan"]}}}"#.to_owned(),
            r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"8"}}}"#.to_owned(),
            r#"{"type":"DELETED","object":{"metadata":{"name":"c","resourceVersion":"9","deletionTimestamp":null}}}"#.to_owned(),
        ];
        let gone = r#"{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}"#;
        let (client, asked) = script(&[
            (200, pages[0].to_owned()),
            (200, pages[1].to_owned()),
            (200, format!("{}\n", changes.join("\n"))),
            (500, "not now".to_owned()),
            (200, format!("{gone}\n")),
            (200, r#"{"metadata":{"resourceVersion":"20"},"items":[]}"#.to_owned()),
        ]);
        let mut told = Told::default();
        let following = follow(&client, "/api/v1/things", &mut told);
        assert!(tokio::time::timeout(Duration::from_secs(60), following).await.is_err(), "it never ends");
        assert_eq!(
            told.0,
            [
                "begun",
                "listed a",
                "listed b of Pod u",
                "complete",
                "applied c",
                "applied c deleting orphan",
                "deleted c",
                "begun",
                "complete"
            ]
        );
        let asked = asked.lock();
        let from = |query: &str| {
            let found = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
            found.unwrap_or_default().to_owned()
        };
        let watches: Vec<String> = asked.iter().filter(|q| q.contains("watch=")).map(|q| from(q)).collect();
        assert_eq!(watches, ["5", "9", "9", "20"], "{asked:?}");
    }
}
