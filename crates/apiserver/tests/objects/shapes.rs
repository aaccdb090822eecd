//! The golden shapes on the wire, each by its number in the reference: what a client reads, field by field.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use cleat_store::embedded::HistoryLimits;
use serde_json::{Value, json};

use crate::rows_wire::enveloped;
use crate::talk::{map, talk, talk_with, version};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";

fn failure(code: u16, reason: &str, message: &str, details: Value) -> Value {
    let mut status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "details": details, "code": code,
    });
    if status["details"].is_null() {
        status.as_object_mut().unwrap().remove("details");
    }
    status
}

/// The object without what differs from run to run.
fn plain(mut object: Value) -> Value {
    let metadata = object["metadata"].as_object_mut().unwrap();
    for field in ["uid", "resourceVersion", "creationTimestamp"] {
        assert!(metadata.remove(field).is_some_and(|v| v.is_string()), "{field}");
    }
    metadata.remove("managedFields");
    object
}

#[tokio::test]
async fn shape_1_a_streaming_list_of_nothing_and_then_a_create() {
    let talk = talk().await;
    let query = "allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&sendInitialEvents=true&timeoutSeconds=421";
    let mut watch = talk.watch(&format!("{MAPS}?{query}&watch=true")).await;
    let mark = watch.next().await.unwrap();
    let metadata = json!({
        "resourceVersion": version(&mark["object"]).to_string(),
        "annotations": { "k8s.io/initial-events-end": "true" },
    });
    let object = json!({ "kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata });
    assert_eq!(mark, json!({ "type": "BOOKMARK", "object": object }));
    talk.made(MAPS, map("a")).await;
    let added = watch.next().await.unwrap();
    assert_eq!(added["type"], "ADDED");
    assert!(version(&added["object"]) > version(&mark["object"]));
    let want = json!({
        "kind": "ConfigMap", "apiVersion": "v1", "metadata": { "name": "a", "namespace": "default" },
        "data": { "k": "v" },
    });
    assert_eq!(plain(added["object"].clone()), want);
}

#[tokio::test]
async fn shape_2_a_watch_from_before_the_history() {
    let talk = talk_with(|config| config.history = HistoryLimits { events: 5, ..HistoryLimits::default() }).await;
    for i in 0..10 {
        talk.made(MAPS, map(&format!("m{i}"))).await;
    }
    let answer = talk.raw("GET", "/api/v1/pods?watch=true&resourceVersion=5", &[], b"").await;
    assert_eq!((answer.code, answer.header("content-type")), (200, "application/json"));
    let text = String::from_utf8(answer.body).unwrap();
    let mut lines = text.lines();
    let event: Value = serde_json::from_str(lines.next().unwrap()).unwrap();
    let message = event["object"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("too old resource version: 5 ("), "{message}");
    assert_eq!(event, json!({ "type": "ERROR", "object": failure(410, "Expired", &message, Value::Null) }));
    assert_eq!(lines.next(), None, "and then the stream ends");
}

#[tokio::test]
async fn shape_3_the_two_conflicts() {
    let talk = talk().await;
    let lease = json!({ "metadata": { "name": "x" } });
    let made = talk.made(LEASES, lease.clone()).await;
    let details = json!({ "name": "x", "group": "coordination.k8s.io", "kind": "leases" });
    let (_, exists) = talk.post(LEASES, lease).await;
    let message = "leases.coordination.k8s.io \"x\" already exists";
    assert_eq!(exists, failure(409, "AlreadyExists", message, details.clone()));
    let mut stale = made;
    stale["metadata"]["resourceVersion"] = "1".into();
    let (_, conflict) = talk.put(&format!("{LEASES}/x"), stale).await;
    let message = "Operation cannot be fulfilled on leases.coordination.k8s.io \"x\": the object has been modified; please \
                   apply your changes to the latest version and try again";
    assert_eq!(conflict, failure(409, "Conflict", message, details));
}

#[tokio::test]
async fn shape_4_a_field_that_is_missing() {
    let talk = talk().await;
    let claim = json!({ "metadata": { "name": "p" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } });
    let why = "Required value: at least 1 access mode is required";
    let cause = json!({ "reason": "FieldValueRequired", "message": why, "field": "spec.accessModes" });
    let details = json!({ "name": "p", "kind": "PersistentVolumeClaim", "causes": [cause] });
    let message = format!("PersistentVolumeClaim \"p\" is invalid: spec.accessModes: {why}");
    assert_eq!(talk.post(CLAIMS, claim).await, (422, failure(422, "Invalid", &message, details)));
}

#[tokio::test]
async fn shape_5_a_version_from_the_future() {
    let talk = talk().await;
    talk.made(MAPS, map("a")).await;
    let check = |status: &Value| {
        let message = status["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("Timeout: Too large resource version: 99999999, current: "), "{message}");
        let cause = json!({ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" });
        let details = json!({ "causes": [cause], "retryAfterSeconds": 1 });
        assert_eq!(*status, failure(504, "Timeout", &message, details));
    };
    for path in [format!("{MAPS}?resourceVersion=99999999"), format!("{MAPS}/a?resourceVersion=99999999")] {
        let answer = talk.raw("GET", &path, &[], b"").await;
        assert_eq!((answer.code, answer.header("retry-after")), (504, "1"));
        check(&serde_json::from_slice(&answer.body).unwrap());
    }
    let event = talk.watch(&format!("{MAPS}?watch=1&resourceVersion=99999999")).await.next().await.unwrap();
    assert_eq!(event["type"], "ERROR");
    check(&event["object"]);
}

#[tokio::test]
async fn shape_6_a_table() {
    let talk = talk().await;
    let made = talk.made(MAPS, map("a")).await;
    let table = talk.table(MAPS).await;
    assert_eq!((&table["kind"], &table["apiVersion"]), (&json!("Table"), &json!("meta.k8s.io/v1")));
    assert!(version(&table) >= version(&made));
    let columns = table["columnDefinitions"].as_array().unwrap();
    let described: Vec<_> = columns
        .iter()
        .map(|c| {
            assert!(!c["description"].as_str().unwrap().is_empty());
            assert_eq!(c.as_object().unwrap().len(), 5, "{c}");
            json!([c["name"], c["type"], c["format"], c["priority"]])
        })
        .collect();
    let want =
        [json!(["Name", "string", "name", 0]), json!(["Data", "string", "", 0]), json!(["Age", "string", "", 0])];
    assert_eq!(described, want);
    let row = &table["rows"][0];
    assert_eq!((&row["cells"][0], &row["cells"][1]), (&json!("a"), &json!(1)));
    assert!(row["cells"][2].as_str().unwrap().ends_with('s'), "{row}");
    let mut object = row["object"].clone();
    assert_eq!(version(&object), version(&made));
    object["metadata"]["managedFields"].take();
    let want = json!({
        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
        "metadata": { "name": "a", "namespace": "default" },
    });
    assert_eq!(plain(object), want);
}

#[tokio::test]
async fn shape_7_what_deletion_answers() {
    let talk = talk().await;
    let made = talk.made(MAPS, map("a")).await;
    let details = json!({ "name": "a", "kind": "configmaps", "uid": made["metadata"]["uid"] });
    let success =
        json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details });
    assert_eq!(talk.delete(&format!("{MAPS}/a")).await, (200, success));
    let spec = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    let made = talk.made(CLAIMS, json!({ "metadata": { "name": "c" }, "spec": spec })).await;
    let (code, waiting) = talk.delete(&format!("{CLAIMS}/c")).await;
    assert_eq!((code, &waiting["kind"]), (200, &json!("PersistentVolumeClaim")));
    assert_eq!(waiting["metadata"]["uid"], made["metadata"]["uid"]);
    assert!(waiting["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(waiting["metadata"]["deletionGracePeriodSeconds"], 0);
}

#[tokio::test]
async fn shape_8_a_lease_in_protobuf_byte_for_byte() {
    let talk = talk().await;
    let body = enveloped("coordination.k8s.io/v1", "Lease", b"\x0a\x03\x0a\x01x\x12\x04\x0a\x02me");
    let want = b"\x6b\x38\x73\x00\x0a\x1f\x0a\x16coordination.k8s.io/v1\x12\x05Lease\
        \x12\x0b\x0a\x03\x0a\x01x\x12\x04\x0a\x02me\x1a\x00\x22\x00";
    assert_eq!(body, want);
    let media = [("content-type", "application/vnd.kubernetes.protobuf")];
    let answer = talk.raw("POST", LEASES, &media, &body).await;
    let made: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((answer.code, &made["spec"]), (201, &json!({ "holderIdentity": "me" })));
}

#[tokio::test]
async fn shape_9_the_openapi_that_kubectl_looks_for() {
    let talk = talk().await;
    let (_, index) = talk.get("/openapi/v3").await;
    let url = index["paths"]["api/v1"]["serverRelativeURL"].as_str().unwrap();
    assert!(url.starts_with("/openapi/v3/api/v1?hash="), "{url}");
    let (_, document) = talk.get(url).await;
    assert!(document["openapi"].as_str().unwrap().starts_with("3.0"));
    let patch = &document["paths"]["/api/v1/namespaces/{namespace}/configmaps/{name}"]["patch"];
    let kind = json!({ "group": "", "version": "v1", "kind": "ConfigMap" });
    assert_eq!(patch["x-kubernetes-group-version-kind"], kind, "an object on the operation");
    let parameters = patch["parameters"].as_array().unwrap();
    assert!(parameters.iter().any(|p| p["name"] == "fieldValidation" && p["in"] == "query"));
    let content = patch["requestBody"]["content"].as_object().unwrap();
    for media in ["strategic-merge-patch+json", "merge-patch+json", "json-patch+json", "apply-patch+yaml"] {
        assert!(content.contains_key(&format!("application/{media}")), "{media}");
    }
    let schema = &document["components"]["schemas"]["io.k8s.api.core.v1.ConfigMap"];
    assert_eq!(schema["x-kubernetes-group-version-kind"], json!([kind]), "an array on the schema");
    assert!(schema["properties"]["data"].is_object());
}

#[tokio::test]
async fn shape_10_a_continue_token_and_its_end() {
    let talk = talk_with(|config| config.history = HistoryLimits { events: 5, ..HistoryLimits::default() }).await;
    talk.made(MAPS, map("a")).await;
    talk.made(MAPS, map("b")).await;
    let (_, page) = talk.get(&format!("{MAPS}?limit=1")).await;
    let decoded = |token: &Value| -> Value {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(token.as_str().unwrap()).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    };
    let token = &page["metadata"]["continue"];
    let want = json!({ "v": "meta.k8s.io/v1", "rv": version(&page), "start": "default/a\u{0}" });
    assert_eq!(decoded(token), want);
    for i in 0..10 {
        talk.made(MAPS, map(&format!("later{i}"))).await;
    }
    let (code, expired) = talk.get(&format!("{MAPS}?limit=1&continue={}", token.as_str().unwrap())).await;
    assert_eq!((code, &expired["reason"]), (410, &json!("Expired")));
    let fresh = &expired["metadata"]["continue"];
    assert_eq!(decoded(fresh), json!({ "v": "meta.k8s.io/v1", "rv": -1, "start": "default/a\u{0}" }));
    let (code, next) = talk.get(&format!("{MAPS}?limit=1&continue={}", fresh.as_str().unwrap())).await;
    assert_eq!((code, &next["items"][0]["metadata"]["name"]), (200, &json!("b")));
}

#[tokio::test]
async fn shape_11_what_a_selector_makes_of_a_change() {
    let talk = talk().await;
    let (_, list) = talk.get(MAPS).await;
    let mut watch = talk.watch(&format!("{MAPS}?watch=1&labelSelector=a%3Db&resourceVersion={}", version(&list))).await;
    let path = format!("{MAPS}/m");
    let label = |value: Value, data: &str| json!({ "metadata": { "labels": { "a": value } }, "data": { "k": data } });
    talk.made(MAPS, map("m")).await;
    let mut want = Vec::new();
    // Outside, in, inside, out, and outside again.
    for (change, seen) in [
        (label(json!("x"), "1"), None),
        (label(json!("b"), "2"), Some(("ADDED", "2"))),
        (label(json!("b"), "3"), Some(("MODIFIED", "3"))),
        (label(json!("c"), "4"), Some(("DELETED", "3"))),
        (label(json!("d"), "5"), None),
        (label(json!("b"), "6"), Some(("ADDED", "6"))),
    ] {
        let (_, now) = talk.patch(&path, change).await;
        want.extend(seen.map(|(name, data)| (name.to_owned(), data.to_owned(), version(&now))));
    }
    let (_, last) = talk.get(&path).await;
    talk.delete(&path).await;
    talk.made(MAPS, map("n")).await;
    talk.delete(&format!("{MAPS}/n")).await;
    let mut end = map("end");
    end["metadata"]["labels"] = json!({ "a": "b" });
    talk.made(MAPS, end).await;
    for (name, data, at) in want {
        let event = watch.next().await.unwrap();
        assert_eq!((event["type"].as_str().unwrap(), event["object"]["data"]["k"].as_str().unwrap()), (&*name, &*data));
        assert_eq!(version(&event["object"]), at, "at the version of the change");
    }
    let event = watch.next().await.unwrap();
    assert_eq!((&event["type"], &event["object"]["data"]["k"]), (&json!("DELETED"), &json!("6")));
    assert!(version(&event["object"]) > version(&last), "a deletion has a version of its own");
    assert_eq!(watch.next().await.unwrap()["object"]["metadata"]["name"], "end", "of the other nothing was seen");
}
