//! Who owns whom, of one kind: of each object only what tells that is read.

use std::borrow::Cow;

use kube::Client;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::watch::{self, Page, Reader, Taken};
use crate::wire;

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
    watch::keep(client, path, &mut Following(follower)).await;
}

struct Following<'a>(&'a mut dyn Follower);

#[derive(Deserialize)]
struct Object<'a> {
    #[serde(borrow, default)]
    metadata: Metadata<'a>,
}

#[derive(Deserialize)]
struct List<'a> {
    #[serde(borrow, default)]
    metadata: Beside<'a>,
    #[serde(borrow, default)]
    items: Vec<Object<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Beside<'a> {
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

impl Reader for Following<'_> {
    fn begun(&mut self) {
        self.0.begun();
    }

    fn page(&mut self, text: &[u8]) -> serde_json::Result<Page> {
        let List { metadata, items } = serde_json::from_slice(text)?;
        items.into_iter().for_each(|object| self.0.listed(object.metadata));
        let revision = metadata.resource_version.unwrap_or_default().into_owned();
        Ok(Page { more: metadata.more.map(Cow::into_owned), revision })
    }

    fn complete(&mut self, _: &str) {
        self.0.complete();
    }

    fn line(&mut self, line: &[u8]) -> serde_json::Result<Taken> {
        let Line { verb, object } = serde_json::from_slice(line)?;
        let mut metadata = object.metadata;
        let newest = metadata.resource_version.take();
        match &*verb {
            "ADDED" | "MODIFIED" => self.0.applied(metadata),
            "DELETED" => self.0.deleted(metadata),
            "ERROR" => return wire::object(line).map(Taken::End),
            _ => {}
        }
        Ok(newest.map_or(Taken::Nothing, |newest| Taken::Upto(newest.into_owned())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use parking_lot::Mutex;
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Duration;

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
