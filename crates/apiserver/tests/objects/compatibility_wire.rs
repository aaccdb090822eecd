//! Encodings, headers and streams that clients depend on and that incompatible API servers often get wrong.

use std::collections::BTreeMap;

use cleat_apiserver::{ApiServer, Config};
use futures::future::join_all;
use serde_json::{Value, json};

use crate::test_api::{TestApi, map, start, version};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2, u8::try_from(bytes.len()).unwrap()];
    out.extend_from_slice(bytes);
    out
}

/// The envelope that client-go sends: magic, type, message, and two empty strings.
pub(crate) fn enveloped(version: &str, kind: &str, message: &[u8]) -> Vec<u8> {
    let head = [field(1, version.as_bytes()), field(2, kind.as_bytes())].concat();
    [b"k8s\0".to_vec(), field(1, &head), field(2, message), field(3, b""), field(4, b"")].concat()
}

#[tokio::test]
async fn sidecars_write_their_leases_as_protobuf() {
    let api = start().await;
    let spec = [field(1, b"me"), vec![16, 15]].concat();
    let lease = enveloped("coordination.k8s.io/v1", "Lease", &[field(1, &field(1, b"l")), field(2, &spec)].concat());
    let accept = format!("{PROTOBUF},application/json");
    let reply = api.send_raw("POST", LEASES, &[("content-type", PROTOBUF), ("accept", &accept)], &lease).await;
    assert_eq!((reply.code, reply.header("content-type")), (201, "application/json"));
    let created: Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(created["spec"], json!({ "holderIdentity": "me", "leaseDurationSeconds": 15 }));
    let pod = enveloped("v1", "Pod", &field(1, &field(1, b"p")));
    let refused = api.send_raw("POST", "/api/v1/namespaces/default/pods", &[("content-type", PROTOBUF)], &pod).await;
    assert_eq!(refused.code, 415, "other kinds are refused as protobuf");
    let uid = field(2, &field(1, b"another"));
    let options = enveloped("v1", "DeleteOptions", &uid);
    let conflict = api.send_raw("DELETE", &format!("{LEASES}/l"), &[("content-type", PROTOBUF)], &options).await;
    assert_eq!(conflict.code, 409, "preconditions work in protobuf");
}

#[tokio::test]
async fn every_reply_has_a_content_type() {
    let api = start().await;
    api.create(MAPS, map("a")).await;
    let object = format!("{MAPS}/a");
    let malformed = &b"{nonsense"[..];
    for (method, path, body) in [
        ("GET", object.as_str(), &b""[..]),
        ("GET", MAPS, b""),
        ("POST", MAPS, malformed),
        ("PUT", &object, malformed),
        ("PATCH", &object, b"{}"),
        ("GET", "/api/v1/namespaces/default/configmaps/none", b""),
        ("GET", "/api/v1/gizmos", b""),
        ("GET", "/nowhere", b""),
        ("POST", "/api/v1/configmaps", b"{}"),
        ("GET", "/api", b""),
        ("GET", "/apis", b""),
        ("GET", "/version", b""),
        ("GET", "/healthz", b""),
        ("GET", "/metrics", b""),
        ("GET", "/openapi/v2", b""),
        ("GET", "/openapi/v3", b""),
        ("DELETE", &object, b""),
        ("DELETE", MAPS, b""),
    ] {
        for accept in ["application/json", "*/*"] {
            let reply = api.send_raw(method, path, &[("accept", accept)], body).await;
            let kind = reply.header("content-type");
            assert!(kind.contains('/') && !kind.contains("octet"), "{method} {path}: {} {kind:?}", reply.code);
            assert!(!reply.body.is_empty(), "{method} {path}");
        }
    }
}

#[tokio::test]
async fn every_object_in_a_watch_has_a_kind() {
    let api = start().await;
    let initial = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=1&timeoutSeconds=1";
    api.create(MAPS, map("a")).await;
    let mut watch = api.watch(&format!("{MAPS}?watch=1&{initial}")).await;
    api.patch(&format!("{MAPS}/a"), json!({ "data": { "k": "w" } })).await;
    api.delete(&format!("{MAPS}/a")).await;
    let mut types = Vec::new();
    while let Some(event) = watch.next().await {
        let object = &event["object"];
        assert_eq!((&object["kind"], &object["apiVersion"]), (&json!("ConfigMap"), &json!("v1")), "{event}");
        types.push(event["type"].as_str().unwrap().to_owned());
    }
    assert_eq!(types, ["ADDED", "BOOKMARK", "MODIFIED", "DELETED", "BOOKMARK"]);
    // The history of changes does not survive a restart: the old version has expired.
    let TestApi { client, server, dir } = api;
    drop(client);
    server.close().await;
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let api = TestApi { client: server.client("system:admin"), server, dir };
    let mut watch = api.watch(&format!("{MAPS}?watch=1&resourceVersion=2")).await;
    let error = watch.next().await.unwrap();
    assert_eq!((&error["type"], &error["object"]["code"]), (&json!("ERROR"), &json!(410)));
    assert_eq!((&error["object"]["kind"], &error["object"]["apiVersion"]), (&json!("Status"), &json!("v1")));
}

#[tokio::test]
async fn a_watch_sends_one_line_per_event_to_every_user_agent() {
    let api = start().await;
    api.create(MAPS, map("a")).await;
    let agents = [("user-agent", "curl/8.0"), ("accept", "application/json")];
    for path in [
        format!("{MAPS}?watch=1&timeoutSeconds=1&pretty=true"),
        format!("{MAPS}?watch=1&timeoutSeconds=1&resourceVersion=999999"),
    ] {
        let reply = api.send_raw("GET", &path, &agents, b"").await;
        assert_eq!(reply.code, 200);
        let text = String::from_utf8(reply.body).unwrap();
        assert!(text.ends_with('\n'));
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
        assert_eq!(lines.len(), 1, "{text}");
    }
    let refused = api.send_raw("GET", &format!("{MAPS}?watch=1&labelSelector=a%20b%20c"), &[], b"").await;
    assert_eq!(refused.code, 400);
    assert_eq!(refused.body.iter().filter(|b| **b == b'\n').count(), 1, "an error before the stream is one line");
}

#[tokio::test]
async fn a_watch_resumed_from_a_bookmark_misses_no_event() {
    let api = start().await;
    let (_, list) = api.get(MAPS).await;
    let writes = async {
        for i in 0..120 {
            let name = format!("m{}", i % 10);
            let (code, _) = api.post(MAPS, map(&name)).await;
            if code == 409 {
                api.delete(&format!("{MAPS}/{name}")).await;
            }
            api.create("/api/v1/namespaces", json!({ "metadata": { "generateName": "n-" } })).await;
        }
    };
    let path = |from: u64| format!("{MAPS}?watch=1&allowWatchBookmarks=1&timeoutSeconds=1&resourceVersion={from}");
    let mut observed: BTreeMap<u64, (String, String)> = BTreeMap::new();
    let mut at = version(&list);
    let mut writing = std::pin::pin!(writes);
    let mut done = false;
    // Each watch ends with a bookmark; the last one starts after the last write.
    loop {
        let last = done;
        let mut watch = api.watch(&path(at)).await;
        let reads = async {
            while let Some(event) = watch.next().await {
                at = version(&event["object"]);
                if event["type"] != "BOOKMARK" {
                    let name = event["object"]["metadata"]["name"].as_str().unwrap().to_owned();
                    let change = (event["type"].as_str().unwrap().to_owned(), name);
                    assert_eq!(observed.insert(at, change), None, "no event is sent twice");
                }
            }
        };
        if done {
            reads.await;
        } else {
            tokio::select! {
                () = &mut writing => done = true,
                () = reads => continue,
            }
            // The writes ended in the middle of this watch. The next one starts at the last event or bookmark.
            continue;
        }
        if last {
            break;
        }
    }
    let mut all = BTreeMap::new();
    let mut watch = api.watch(&path(version(&list))).await;
    while let Some(event) = watch.next().await {
        if event["type"] != "BOOKMARK" {
            let name = event["object"]["metadata"]["name"].as_str().unwrap().to_owned();
            all.insert(version(&event["object"]), (event["type"].as_str().unwrap().to_owned(), name));
        }
    }
    assert_eq!(observed, all);
    assert!(all.len() >= 120, "{}", all.len());
}

#[tokio::test]
async fn micro_times_keep_every_digit() {
    let api = start().await;
    let times = ["2026-01-02T03:04:05.123456Z", "2026-01-02T03:04:05.000000Z", "2026-01-02T03:04:05.100000Z"];
    let created = join_all(times.iter().enumerate().map(|(i, time)| {
        let spec = json!({ "holderIdentity": "me", "acquireTime": time, "renewTime": time });
        api.create(LEASES, json!({ "metadata": { "name": format!("l{i}") }, "spec": spec }))
    }));
    for (i, (time, created)) in times.iter().zip(created.await).enumerate() {
        let text = String::from_utf8(api.send_raw("GET", &format!("{LEASES}/l{i}"), &[], b"").await.body).unwrap();
        assert!(text.contains(&format!(r#""renewTime":"{time}""#)), "{text}");
        let (code, same) = api.put(&format!("{LEASES}/l{i}"), created.clone()).await;
        assert_eq!((code, version(&same)), (200, version(&created)));
    }
}
