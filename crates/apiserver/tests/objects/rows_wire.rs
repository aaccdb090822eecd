//! The known incompatibilities that concern bytes, headers and streams, each by its number in the list of thirty. Row 1 is
//! in `wire`, 5 in `watchers`, 17 to 19 in `kubectl_apply`, 24 and 27 in `custom`, 30 in `robustness`; the rest in `rows`.

use std::collections::BTreeMap;

use cleat_apiserver::{ApiServer, Config};
use futures::future::join_all;
use serde_json::{Value, json};

use crate::talk::{Talk, map, talk, version};

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
async fn row_2_sidecars_write_their_leases_as_protobuf() {
    let talk = talk().await;
    let spec = [field(1, b"me"), vec![16, 15]].concat();
    let lease = enveloped("coordination.k8s.io/v1", "Lease", &[field(1, &field(1, b"l")), field(2, &spec)].concat());
    let accept = format!("{PROTOBUF},application/json");
    let answer = talk.raw("POST", LEASES, &[("content-type", PROTOBUF), ("accept", &accept)], &lease).await;
    assert_eq!((answer.code, answer.header("content-type")), (201, "application/json"));
    let made: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(made["spec"], json!({ "holderIdentity": "me", "leaseDurationSeconds": 15 }));
    let pod = enveloped("v1", "Pod", &field(1, &field(1, b"p")));
    let refused = talk.raw("POST", "/api/v1/namespaces/default/pods", &[("content-type", PROTOBUF)], &pod).await;
    assert_eq!(refused.code, 415, "what is not understood is refused, not misread");
    let uid = field(2, &field(1, b"another"));
    let options = enveloped("v1", "DeleteOptions", &uid);
    let kept = talk.raw("DELETE", &format!("{LEASES}/l"), &[("content-type", PROTOBUF)], &options).await;
    assert_eq!(kept.code, 409, "a precondition counts in protobuf, too");
}

#[tokio::test]
async fn row_3_every_answer_says_what_it_is() {
    let talk = talk().await;
    talk.made(MAPS, map("a")).await;
    let object = format!("{MAPS}/a");
    let nonsense = &b"{nonsense"[..];
    for (method, path, body) in [
        ("GET", object.as_str(), &b""[..]),
        ("GET", MAPS, b""),
        ("POST", MAPS, nonsense),
        ("PUT", &object, nonsense),
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
            let answer = talk.raw(method, path, &[("accept", accept)], body).await;
            let kind = answer.header("content-type");
            assert!(kind.contains('/') && !kind.contains("octet"), "{method} {path}: {} {kind:?}", answer.code);
            assert!(!answer.body.is_empty(), "{method} {path}");
        }
    }
}

#[tokio::test]
async fn row_4_everything_a_watch_sends_has_a_kind() {
    let talk = talk().await;
    let initial = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=1&timeoutSeconds=1";
    talk.made(MAPS, map("a")).await;
    let mut watch = talk.watch(&format!("{MAPS}?watch=1&{initial}")).await;
    talk.patch(&format!("{MAPS}/a"), json!({ "data": { "k": "w" } })).await;
    talk.delete(&format!("{MAPS}/a")).await;
    let mut seen = Vec::new();
    while let Some(event) = watch.next().await {
        let object = &event["object"];
        assert_eq!((&object["kind"], &object["apiVersion"]), (&json!("ConfigMap"), &json!("v1")), "{event}");
        seen.push(event["type"].as_str().unwrap().to_owned());
    }
    assert_eq!(seen, ["ADDED", "BOOKMARK", "MODIFIED", "DELETED", "BOOKMARK"]);
    // History does not survive a restart, so an old version is too old now.
    let Talk { client, server, dir } = talk;
    drop(client);
    server.close().await;
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let talk = Talk { client: server.client("system:admin"), server, dir };
    let mut watch = talk.watch(&format!("{MAPS}?watch=1&resourceVersion=2")).await;
    let error = watch.next().await.unwrap();
    assert_eq!((&error["type"], &error["object"]["code"]), (&json!("ERROR"), &json!(410)));
    assert_eq!((&error["object"]["kind"], &error["object"]["apiVersion"]), (&json!("Status"), &json!("v1")));
}

#[tokio::test]
async fn row_6_a_watch_is_one_line_per_event_whoever_asks() {
    let talk = talk().await;
    talk.made(MAPS, map("a")).await;
    let agents = [("user-agent", "curl/8.0"), ("accept", "application/json")];
    for path in [
        format!("{MAPS}?watch=1&timeoutSeconds=1&pretty=true"),
        format!("{MAPS}?watch=1&timeoutSeconds=1&resourceVersion=999999"),
    ] {
        let answer = talk.raw("GET", &path, &agents, b"").await;
        assert_eq!(answer.code, 200);
        let text = String::from_utf8(answer.body).unwrap();
        assert!(text.ends_with('\n'));
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
        assert_eq!(lines.len(), 1, "{text}");
    }
    let refused = talk.raw("GET", &format!("{MAPS}?watch=1&labelSelector=a%20b%20c"), &[], b"").await;
    assert_eq!(refused.code, 400);
    assert_eq!(refused.body.iter().filter(|b| **b == b'\n').count(), 1, "an error before the stream is one line, too");
}

#[tokio::test]
async fn row_9_a_watch_resumed_from_a_bookmark_misses_nothing() {
    let talk = talk().await;
    let (_, list) = talk.get(MAPS).await;
    let writes = async {
        for i in 0..120 {
            let name = format!("m{}", i % 10);
            let (code, _) = talk.post(MAPS, map(&name)).await;
            if code == 409 {
                talk.delete(&format!("{MAPS}/{name}")).await;
            }
            talk.made("/api/v1/namespaces", json!({ "metadata": { "generateName": "n-" } })).await;
        }
    };
    let path = |from: u64| format!("{MAPS}?watch=1&allowWatchBookmarks=1&timeoutSeconds=1&resourceVersion={from}");
    let mut seen: BTreeMap<u64, (String, String)> = BTreeMap::new();
    let mut at = version(&list);
    let mut writing = std::pin::pin!(writes);
    let mut done = false;
    // Each watch ends with a bookmark; the last begins after the last write.
    loop {
        let last = done;
        let mut watch = talk.watch(&path(at)).await;
        let reads = async {
            while let Some(event) = watch.next().await {
                at = version(&event["object"]);
                if event["type"] != "BOOKMARK" {
                    let name = event["object"]["metadata"]["name"].as_str().unwrap().to_owned();
                    let change = (event["type"].as_str().unwrap().to_owned(), name);
                    assert_eq!(seen.insert(at, change), None, "nothing twice");
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
            // This watch was cut off in the middle: the next begins where the last event or bookmark was.
            continue;
        }
        if last {
            break;
        }
    }
    let mut whole = BTreeMap::new();
    let mut watch = talk.watch(&path(version(&list))).await;
    while let Some(event) = watch.next().await {
        if event["type"] != "BOOKMARK" {
            let name = event["object"]["metadata"]["name"].as_str().unwrap().to_owned();
            whole.insert(version(&event["object"]), (event["type"].as_str().unwrap().to_owned(), name));
        }
    }
    assert_eq!(seen, whole);
    assert!(whole.len() >= 120, "{}", whole.len());
}

#[tokio::test]
async fn row_16_precise_times_keep_every_digit() {
    let talk = talk().await;
    let times = ["2026-01-02T03:04:05.123456Z", "2026-01-02T03:04:05.000000Z", "2026-01-02T03:04:05.100000Z"];
    let made = join_all(times.iter().enumerate().map(|(i, time)| {
        let spec = json!({ "holderIdentity": "me", "acquireTime": time, "renewTime": time });
        talk.made(LEASES, json!({ "metadata": { "name": format!("l{i}") }, "spec": spec }))
    }));
    for (i, (time, made)) in times.iter().zip(made.await).enumerate() {
        let text = String::from_utf8(talk.raw("GET", &format!("{LEASES}/l{i}"), &[], b"").await.body).unwrap();
        assert!(text.contains(&format!(r#""renewTime":"{time}""#)), "{text}");
        let (code, same) = talk.put(&format!("{LEASES}/l{i}"), made.clone()).await;
        assert_eq!((code, version(&same)), (200, version(&made)));
    }
}
