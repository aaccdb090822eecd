//! Reads and writes over both transports.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use cleat_api::transport::{ReplyBody, RequestBody, TransportError, WatchChunks};
use futures::future::BoxFuture;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;

use super::*;
use crate::client::Client;

/// A server with one ConfigMap. A PUT returns its body; any other name is not found.
fn respond(request: &Request<Bytes>) -> (StatusCode, Bytes) {
    let map = r#"{"metadata":{"name":"m","namespace":"s","resourceVersion":"7","managedFields":[{"manager":"x"}]}}"#;
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/api/v1/namespaces/s/configmaps/m") => (StatusCode::OK, Bytes::from_static(map.as_bytes())),
        (&Method::PUT, _) => (StatusCode::OK, request.body().clone()),
        (&Method::POST, _) => {
            let status = br#"{"kind":"Status","status":"Failure","reason":"AlreadyExists","code":409}"#;
            (StatusCode::CONFLICT, Bytes::from_static(status))
        }
        _ => (StatusCode::NOT_FOUND, Bytes::from_static(b"no such thing")),
    }
}

fn kube_client() -> kube::Client {
    let service = tower::service_fn(|request: Request<Body>| async {
        let (parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let (code, body) = respond(&Request::from_parts(parts, body));
        let mut response = http::Response::new(http_body_util::Full::new(body));
        *response.status_mut() = code;
        Ok::<_, kube::Error>(response)
    });
    kube::Client::new(service, "default")
}

/// A transport in the process, whose handler gets the encoded body of every request.
struct TestTransport<F>(F);

impl<F: Fn(Request<Bytes>) -> (StatusCode, Bytes) + Send + Sync> Transport for TestTransport<F> {
    fn call(&self, request: Request<RequestBody>) -> BoxFuture<'_, Result<Response<ReplyBody>, TransportError>> {
        let (parts, body) = request.into_parts();
        let accepted = body.accepted_reply();
        let (bytes, object) = match body {
            RequestBody::Encoded(bytes, _) => (bytes, None),
            RequestBody::Object(object) => (object.encode().unwrap().into(), object.take::<ConfigMap>()),
        };
        let (code, bytes) = (self.0)(Request::from_parts(parts, bytes));
        let typed = object.filter(|_| code.is_success()).and_then(|map| accepted.reply(Arc::new(*map)));
        let body = typed.map_or(ReplyBody::Encoded(bytes), ReplyBody::Object);
        let reply = Response::builder().status(code).body(body).unwrap();
        Box::pin(async {
            tokio::task::consume_budget().await;
            Ok(reply)
        })
    }

    fn watch(&self, _request: Request<()>) -> BoxFuture<'_, Result<Response<WatchChunks>, TransportError>> {
        unreachable!("these tests do not watch")
    }

    fn accepts_objects(&self) -> bool {
        true
    }
}

/// A client of the same server in the process, with typed bodies and replies.
fn in_process_client() -> Client {
    Client::in_process(Arc::new(TestTransport(|request| respond(&request))), kube_client())
}

#[tokio::test]
async fn both_transports_return_the_same_replies() {
    let remote = Client::from(kube_client());
    for (case, client) in [("HTTP", &remote), ("in process", &in_process_client())] {
        let map: ConfigMap = get_live(client, &Key::namespaced("s", "m")).await.unwrap().expect(case);
        assert_eq!((map.metadata.resource_version.as_deref(), &map.metadata.managed_fields), (Some("7"), &None));
        let absent = get_live::<ConfigMap>(client, &Key::namespaced("s", "other")).await.unwrap();
        assert!(absent.is_none(), "{case}");
        assert_eq!(*replace(client, Part::Whole, &map).await.unwrap(), map, "{case}");
        let refused = create(client, &map).await.unwrap_err();
        assert!(refused.already_exists() && !refused.is_conflict(), "{case}: {refused}");
    }
}

#[tokio::test]
async fn an_object_is_left_only_if_finalizers_or_grace_hold_it() {
    let held = r#""deletionTimestamp":"2026-01-01T00:00:00Z","#;
    for (case, metadata, is_held) in [
        ("without a deletion timestamp", String::new(), false),
        ("with a deletion timestamp", format!("{held}\"deletionGracePeriodSeconds\":0,"), false),
        ("held by a finalizer", format!("{held}\"finalizers\":[\"a/b\"],"), true),
        ("within its grace period", format!("{held}\"deletionGracePeriodSeconds\":30,"), true),
    ] {
        let text = format!(r#"{{"kind":"ConfigMap","metadata":{{{metadata}"name":"m","namespace":"s"}}}}"#);
        let map: ConfigMap = serde_json::from_str(&text).unwrap();
        let handle = move |_: Request<Bytes>| (StatusCode::OK, Bytes::from(text.clone()));
        let client = Client::in_process(Arc::new(TestTransport(handle)), kube_client());
        let left = delete(&client, &map).await.unwrap();
        assert_eq!(left.is_some(), is_held, "{case}");
    }
}

#[tokio::test]
async fn a_caller_in_a_loop_lets_other_tasks_run() {
    static SENT: AtomicUsize = AtomicUsize::new(0);
    const REQUESTS: usize = 10_000;
    let caller = tokio::spawn(async {
        let client = in_process_client();
        for _ in 0..REQUESTS {
            get_live::<ConfigMap>(&client, &Key::namespaced("s", "m")).await.unwrap();
            SENT.fetch_add(1, Ordering::Relaxed);
        }
    });
    tokio::task::yield_now().await;
    let sent = SENT.load(Ordering::Relaxed);
    assert!(0 < sent && sent < REQUESTS, "{sent} of {REQUESTS} before another task ran");
    caller.await.unwrap();
}
