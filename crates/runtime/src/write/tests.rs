//! Reads and writes over both transports.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use cleat_api::TypedBody;
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

/// A client of the same server by direct calls, with typed bodies and replies.
fn in_process_client() -> Client {
    let handle = |request: Request<Bytes>| {
        let (code, body) = respond(&request);
        let typed = request.extensions().get::<TypedBody>().filter(|_| code.is_success());
        let object = typed.and_then(TypedBody::take::<ConfigMap>);
        let response = Response::builder().status(code);
        match object.and_then(|map| typed?.reply(Arc::new(*map))) {
            Some(reply) => response.extension(reply).body(Bytes::new()).unwrap(),
            None => response.body(body).unwrap(),
        }
    };
    Client::in_process(kube_client(), Arc::new(move |request| Box::pin(std::future::ready(handle(request)))))
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
    let deleting = r#""deletionTimestamp":"2026-01-01T00:00:00Z","#;
    for (case, metadata, is_held) in [
        ("without a deletion timestamp", String::new(), false),
        ("with a deletion timestamp", format!("{deleting}\"deletionGracePeriodSeconds\":0,"), false),
        ("held by a finalizer", format!("{deleting}\"finalizers\":[\"a/b\"],"), true),
        ("within its grace period", format!("{deleting}\"deletionGracePeriodSeconds\":30,"), true),
    ] {
        let json = format!(r#"{{"kind":"ConfigMap","metadata":{{{metadata}"name":"m","namespace":"s"}}}}"#);
        let map: ConfigMap = serde_json::from_str(&json).unwrap();
        let handle = move |_: Request<Bytes>| Response::new(Bytes::from(json.clone()));
        let client = Client::in_process(kube_client(), Arc::new(move |r| Box::pin(std::future::ready(handle(r)))));
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
