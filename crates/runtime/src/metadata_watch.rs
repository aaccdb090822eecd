//! Watches the metadata of one kind that garbage collection needs: names, uids, finalizers, owner references.
//!
//! The rest of an object is skipped without decoding, however deep it is nested.

use std::borrow::Cow;

use cleat_api::transport::Transport;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::decode;
use crate::list_watch::{self, ListPage, ListWatchHandler, WatchProgress};

/// Receives the objects of a kind and their changes.
pub trait MetadataHandler: Send {
    /// A list starts. It may start again before it is completed.
    fn list_started(&mut self);
    fn listed(&mut self, object: PartialObjectMetadata<'_>);
    /// All objects were listed: one that was not passed to `listed` since the list started does not exist.
    fn list_completed(&mut self);
    fn applied(&mut self, object: PartialObjectMetadata<'_>);
    fn deleted(&mut self, object: PartialObjectMetadata<'_>);
}

/// The identity of an object and what decides about its deletion.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartialObjectMetadata<'a> {
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
    finalizers: Option<Vec<BorrowedString<'a>>>,
    #[serde(borrow)]
    owner_references: Option<Vec<OwnerRef<'a>>>,
}

#[derive(Debug, Deserialize)]
struct BorrowedString<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnerRef<'a> {
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

impl PartialObjectMetadata<'_> {
    pub fn is_deleting(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    pub fn has_finalizer(&self, name: &str) -> bool {
        self.finalizers.iter().flatten().any(|finalizer| finalizer.0 == name)
    }

    pub fn owners(&self) -> &[OwnerRef<'_>] {
        self.owner_references.as_deref().unwrap_or_default()
    }
}

/// Lists and watches the kind at this path until dropped.
pub async fn watch_metadata(client: &dyn Transport, path: &str, handler: &mut dyn MetadataHandler) {
    list_watch::run(client, path, &mut MetadataDecoder(handler)).await;
}

struct MetadataDecoder<'a>(&'a mut dyn MetadataHandler);

#[derive(Deserialize)]
struct PartialObject<'a> {
    #[serde(borrow, default)]
    metadata: PartialObjectMetadata<'a>,
}

#[derive(Deserialize)]
struct PartialList<'a> {
    #[serde(borrow, default)]
    metadata: ListMeta<'a>,
    #[serde(borrow, default)]
    items: Vec<PartialObject<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta<'a> {
    #[serde(borrow, rename = "continue")]
    continue_token: Option<Cow<'a, str>>,
    #[serde(borrow)]
    resource_version: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct PartialEvent<'a> {
    #[serde(borrow, rename = "type")]
    event_type: Cow<'a, str>,
    #[serde(borrow)]
    object: PartialObject<'a>,
}

impl ListWatchHandler for MetadataDecoder<'_> {
    fn list_started(&mut self) {
        self.0.list_started();
    }

    fn list_page(&mut self, json: &[u8]) -> serde_json::Result<ListPage> {
        let PartialList { metadata, items } = serde_json::from_slice(json)?;
        items.into_iter().for_each(|object| self.0.listed(object.metadata));
        let revision = metadata.resource_version.unwrap_or_default().into_owned();
        Ok(ListPage { continue_token: metadata.continue_token.map(Cow::into_owned), revision })
    }

    fn list_completed(&mut self, _: &str) {
        self.0.list_completed();
    }

    fn watch_event(&mut self, json: &[u8]) -> serde_json::Result<WatchProgress> {
        let PartialEvent { event_type, object } = serde_json::from_slice(json)?;
        let mut metadata = object.metadata;
        let revision = metadata.resource_version.take();
        match &*event_type {
            "ADDED" | "MODIFIED" => self.0.applied(metadata),
            "DELETED" => self.0.deleted(metadata),
            "ERROR" => return decode::event_object(json).map(WatchProgress::ServerError),
            _ => {}
        }
        Ok(revision.map_or(WatchProgress::None, |revision| WatchProgress::Reached(revision.into_owned())))
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
    struct RecordingHandler(Vec<String>);

    impl RecordingHandler {
        fn record(&mut self, what: &str, object: &PartialObjectMetadata<'_>) {
            let mut entry = format!("{what} {}", object.name.as_deref().unwrap_or_default());
            if object.is_deleting() {
                entry.push_str(" deleting");
            }
            if object.has_finalizer("orphan") {
                entry.push_str(" orphan");
            }
            object.owners().iter().for_each(|owner| entry.push_str(&format!(" of {} {}", owner.kind, owner.uid)));
            self.0.push(entry);
        }
    }

    impl MetadataHandler for RecordingHandler {
        fn list_started(&mut self) {
            self.0.push("begun".to_owned());
        }
        fn listed(&mut self, object: PartialObjectMetadata<'_>) {
            self.record("listed", &object);
        }
        fn list_completed(&mut self) {
            self.0.push("complete".to_owned());
        }
        fn applied(&mut self, object: PartialObjectMetadata<'_>) {
            self.record("applied", &object);
        }
        fn deleted(&mut self, object: PartialObjectMetadata<'_>) {
            self.record("deleted", &object);
        }
    }

    /// A server that sends these replies in order and records the query of each request.
    fn scripted_server(replies: &[(u16, String)]) -> (crate::Client, Arc<Mutex<Vec<String>>>) {
        let replies: VecDeque<_> = replies.iter().cloned().collect();
        let (replies, queries) = (Arc::new(Mutex::new(replies)), Arc::new(Mutex::new(Vec::new())));
        let recorded = queries.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            recorded.lock().push(request.uri().query().unwrap_or_default().to_owned());
            let next = replies.lock().pop_front();
            async move {
                // After the last reply, requests hang.
                let Some((code, body)) = next else { return std::future::pending().await };
                let mut response = http::Response::new(http_body_util::Full::new(Bytes::from(body)));
                *response.status_mut() = http::StatusCode::from_u16(code).unwrap_or_default();
                Ok::<_, std::convert::Infallible>(response)
            }
        });
        (kube::Client::new(service, "default").into(), queries)
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_is_listed_and_watched_and_listed_again_when_its_revision_expired() {
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
        let (client, queries) = scripted_server(&[
            (200, pages[0].to_owned()),
            (200, pages[1].to_owned()),
            (200, format!("{}\n", changes.join("\n"))),
            (500, "not now".to_owned()),
            (200, format!("{gone}\n")),
            (200, r#"{"metadata":{"resourceVersion":"20"},"items":[]}"#.to_owned()),
        ]);
        let mut handler = RecordingHandler::default();
        let watching = watch_metadata(&client, "/api/v1/things", &mut handler);
        assert!(tokio::time::timeout(Duration::from_secs(60), watching).await.is_err(), "it never ends");
        assert_eq!(
            handler.0,
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
        let queries = queries.lock();
        let revision = |query: &str| {
            let found = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
            found.unwrap_or_default().to_owned()
        };
        let watches: Vec<String> = queries.iter().filter(|q| q.contains("watch=")).map(|q| revision(q)).collect();
        assert_eq!(watches, ["5", "9", "9", "20"], "{queries:?}");
    }
}
