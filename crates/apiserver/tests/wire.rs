//! Status objects, watch streams and tables at the HTTP interface, as clients parse them.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use futures::AsyncBufReadExt;
use futures::TryStreamExt;
use kube::Client;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(60);
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

async fn server() -> (tempfile::TempDir, ApiServer, Client) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let client = server.client("test");
    (dir, server, client)
}

fn request(method: &str, path: &str, accept: &str, media: &str, body: &Value) -> http::Request<Vec<u8>> {
    let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(body).unwrap() };
    let builder = http::Request::builder().method(method).uri(path).header("accept", accept);
    builder.header("content-type", media).body(body).unwrap()
}

/// The status code and the body, an object or a Status.
async fn send(client: &Client, request: http::Request<Vec<u8>>) -> (u16, Value) {
    let response = client.send(request.map(Into::into)).await.unwrap();
    let code = response.status().as_u16();
    assert!(response.headers().contains_key("content-type"), "every reply has a content type");
    let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    (code, serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into()))
}

async fn get(client: &Client, path: &str) -> (u16, Value) {
    send(client, request("GET", path, "application/json", "application/json", &Value::Null)).await
}

async fn write(client: &Client, method: &str, path: &str, body: Value) -> (u16, Value) {
    let media = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    send(client, request(method, path, "application/json", media, &body)).await
}

fn map(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "k": "v" } })
}

struct EventStream<S>(S);

impl<S: futures::Stream<Item = std::io::Result<String>> + Unpin> EventStream<S> {
    async fn next(&mut self) -> Option<Value> {
        let line =
            tokio::time::timeout(TIMEOUT, self.0.try_next()).await.expect("an event before the timeout").unwrap();
        line.map(|l| serde_json::from_str(&l).expect("each line is one JSON object"))
    }
}

async fn watch(
    client: &Client,
    path: &str,
    accept: &str,
) -> EventStream<impl futures::Stream<Item = std::io::Result<String>> + use<>> {
    let request = request("GET", path, accept, "application/json", &Value::Null);
    EventStream(Box::pin(client.request_stream(request).await.unwrap().lines()))
}

#[tokio::test]
async fn conflicts_and_other_errors() {
    let (_dir, _server, client) = server().await;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let lease = json!({ "metadata": { "name": "x" }, "spec": { "renewTime": "2026-01-02T03:04:05.123456Z" } });
    let (code, created) = write(&client, "POST", leases, lease.clone()).await;
    assert_eq!((code, &created["spec"]["renewTime"]), (201, &json!("2026-01-02T03:04:05.123456Z")));
    let details = json!({ "name": "x", "group": "coordination.k8s.io", "kind": "leases" });
    let (code, status) = write(&client, "POST", leases, lease.clone()).await;
    assert_eq!((code, &status["reason"], &status["details"]), (409, &json!("AlreadyExists"), &details));
    assert_eq!(status["message"], r#"leases.coordination.k8s.io "x" already exists"#);
    let mut stale = created.clone();
    stale["metadata"]["resourceVersion"] = "1".into();
    let (code, status) = write(&client, "PUT", &format!("{leases}/x"), stale).await;
    assert_eq!((code, &status["reason"], &status["details"]), (409, &json!("Conflict"), &details));
    let (code, status) = write(&client, "PUT", &format!("{leases}/x"), lease).await;
    assert_eq!((code, &status["details"]["causes"][0]["field"]), (422, &json!("metadata.resourceVersion")));

    let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
    let claim = json!({ "metadata": { "name": "p" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } });
    let (code, status) = write(&client, "POST", claims, claim).await;
    assert_eq!(code, 422);
    let message = "PersistentVolumeClaim \"p\" is invalid: spec.accessModes: Required value: at least 1 access mode is \
                   required";
    assert_eq!(status["message"], message);
    let cause = json!({
        "reason": "FieldValueRequired", "message": "Required value: at least 1 access mode is required",
        "field": "spec.accessModes",
    });
    assert_eq!(status["details"], json!({ "name": "p", "kind": "PersistentVolumeClaim", "causes": [cause] }));

    for (method, path, body, code, reason) in [
        ("GET", "/api/v1/pods?resourceVersion=9999", Value::Null, 504, "Timeout"),
        ("GET", "/api/v1/gizmos", Value::Null, 404, "NotFound"),
        ("POST", "/api/v1/configmaps", map("a"), 405, "MethodNotAllowed"),
        ("GET", "/api/v1/pods?fieldSelector=spec.nonsense=1", Value::Null, 400, "BadRequest"),
        ("GET", "/api/v1/pods?resourceVersionMatch=Exact", Value::Null, 422, "Invalid"),
        ("GET", "/api/v1/pods?watch=1&sendInitialEvents=true", Value::Null, 422, "Invalid"),
        ("POST", MAPS, json!({ "apiVersion": "v2", "metadata": { "name": "a" } }), 400, "BadRequest"),
        ("POST", MAPS, json!({ "metadata": { "name": "a", "namespace": "other" } }), 400, "BadRequest"),
    ] {
        let (got, status) = write(&client, method, path, body).await;
        assert_eq!((got, &status["reason"]), (code, &json!(reason)), "{method} {path}: {status}");
        assert_eq!(status["kind"], "Status");
    }
    let unknown = request("PATCH", &format!("{MAPS}/a"), "*/*", "application/unheard-of+json", &map("a"));
    assert_eq!(send(&client, unknown).await.0, 415);
}

#[tokio::test]
async fn deletion_returns_the_object_or_a_status() {
    let (_dir, _server, client) = server().await;
    let (_, created) = write(&client, "POST", MAPS, map("a")).await;
    let (code, status) = write(&client, "DELETE", &format!("{MAPS}/a"), Value::Null).await;
    let details = json!({ "name": "a", "kind": "configmaps", "uid": created["metadata"]["uid"] });
    assert_eq!((code, &status["status"], &status["details"]), (200, &json!("Success"), &details));
    let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
    let spec = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    write(&client, "POST", claims, json!({ "metadata": { "name": "c" }, "spec": spec })).await;
    let (code, claim) = write(&client, "DELETE", &format!("{claims}/c"), Value::Null).await;
    assert_eq!((code, &claim["kind"]), (200, &json!("PersistentVolumeClaim")));
    assert!(claim["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(claim["metadata"]["deletionGracePeriodSeconds"], 0);
}

#[tokio::test]
async fn a_streaming_list_without_objects_ends_with_its_bookmark() {
    let (_dir, _server, client) = server().await;
    let path =
        format!("{MAPS}?watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan");
    let mut lines = watch(&client, &path, "application/json").await;
    let mark = lines.next().await.unwrap();
    let version = mark["object"]["metadata"]["resourceVersion"].clone();
    assert_eq!(
        mark,
        json!({ "type": "BOOKMARK", "object": { "kind": "ConfigMap", "apiVersion": "v1", "metadata": {
            "resourceVersion": version, "annotations": { "k8s.io/initial-events-end": "true" },
        } } })
    );
    write(&client, "POST", MAPS, map("a")).await;
    let event = lines.next().await.unwrap();
    assert_eq!((&event["type"], &event["object"]["kind"]), (&json!("ADDED"), &json!("ConfigMap")));
    assert!(number(&event["object"]) > version.as_str().unwrap().parse::<u64>().unwrap());
}

fn number(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_watch_ends_at_its_deadline_with_a_bookmark() {
    let (_dir, _server, client) = server().await;
    write(&client, "POST", MAPS, map("a")).await;
    let mut lines =
        watch(&client, &format!("{MAPS}?watch=1&allowWatchBookmarks=1&timeoutSeconds=1"), "application/json").await;
    assert_eq!(lines.next().await.unwrap()["type"], "ADDED", "without a version the state comes first");
    // Writes to other resources advance the bookmark.
    let (_, pod) = write(&client, "POST", "/api/v1/namespaces", json!({ "metadata": { "name": "n" } })).await;
    let mark = lines.next().await.unwrap();
    assert_eq!(mark["type"], "BOOKMARK");
    assert!(number(&mark["object"]) >= number(&pod));
    assert!(lines.next().await.is_none(), "a deadline is no error");
    let mut quiet = watch(&client, &format!("{MAPS}?watch=1&resourceVersion=1000000"), "application/json").await;
    assert_eq!(quiet.next().await.unwrap()["object"]["code"], 504);
}

#[tokio::test]
async fn lists_are_tables_or_metadata_on_request() {
    let (_dir, _server, client) = server().await;
    write(&client, "POST", MAPS, map("a")).await;
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let (_, list) = send(&client, request("GET", MAPS, table, "", &Value::Null)).await;
    assert_eq!((&list["kind"], &list["rows"][0]["cells"][1]), (&json!("Table"), &json!(1)));
    assert_eq!(list["columnDefinitions"][0]["format"], "name");
    assert_eq!(list["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    assert!(list["metadata"]["resourceVersion"].is_string());
    let mut lines = watch(&client, &format!("{MAPS}?watch=1"), table).await;
    let first = lines.next().await.unwrap();
    assert_eq!(first["object"]["columnDefinitions"].as_array().unwrap().len(), 3);
    write(&client, "POST", MAPS, map("b")).await;
    assert!(lines.next().await.unwrap()["object"]["columnDefinitions"].as_array().unwrap().is_empty());
    let partial = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json";
    let (_, list) = send(&client, request("GET", MAPS, partial, "", &Value::Null)).await;
    assert_eq!(list["kind"], "PartialObjectMetadataList");
    assert_eq!(list["items"][1]["metadata"]["name"], "b");
    assert!(list["items"][1].get("data").is_none());
}

#[tokio::test]
async fn every_kind_lists_as_json_table_and_metadata_even_when_empty() {
    let (_dir, _server, client) = server().await;
    for version in ["/api/v1", "/apis/storage.k8s.io/v1", "/apis/coordination.k8s.io/v1"] {
        let (_, resources) = get(&client, version).await;
        for resource in resources["resources"].as_array().unwrap() {
            let name = resource["name"].as_str().unwrap();
            if name.contains('/') {
                continue;
            }
            let path = format!("{version}/{name}");
            let (code, list) = get(&client, &path).await;
            assert_eq!(code, 200, "{path}");
            assert_eq!(list["kind"], format!("{}List", resource["kind"].as_str().unwrap()));
            assert!(list["items"].is_array() && number(&list) > 0, "{path}");
            let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
            let (_, list) = send(&client, request("GET", &path, table, "", &Value::Null)).await;
            assert!(list["columnDefinitions"].as_array().is_some_and(|c| c.len() > 1), "{path}");
        }
    }
}

#[tokio::test]
async fn dry_runs_leave_nothing_behind() {
    let (_dir, _server, client) = server().await;
    let (_, before) = get(&client, MAPS).await;
    let (code, created) = write(&client, "POST", &format!("{MAPS}?dryRun=All"), map("a")).await;
    assert_eq!(code, 201);
    assert!(created["metadata"]["uid"].is_string() && created["metadata"].get("resourceVersion").is_none());
    // The server still writes its initial objects, so the revision may differ. Only the items are compared.
    assert_eq!(get(&client, MAPS).await.1["items"], before["items"]);
    let warned = request("POST", MAPS, "*/*", "", &json!({ "metadata": { "name": "b" }, "extra": 1 }));
    let response = client.send(warned.map(Into::into)).await.unwrap();
    assert_eq!(response.headers()["warning"], r#"299 - "unknown field \"extra\"""#);
}
