//! Complete replies and watch events, compared field by field with those of Kubernetes.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use cleat_store::embedded::HistoryLimits;
use serde_json::{Value, json};

use crate::compatibility_wire::enveloped;
use crate::test_api::{map, start, start_with, version};

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

/// The object without the fields that differ between runs.
fn stable_fields(mut object: Value) -> Value {
    let metadata = object["metadata"].as_object_mut().unwrap();
    for field in ["uid", "resourceVersion", "creationTimestamp"] {
        assert!(metadata.remove(field).is_some_and(|v| v.is_string()), "{field}");
    }
    metadata.remove("managedFields");
    object
}

#[tokio::test]
async fn a_streaming_list_without_objects_sends_its_bookmark_and_then_events() {
    let api = start().await;
    let query = "allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&sendInitialEvents=true&timeoutSeconds=421";
    let mut watch = api.watch(&format!("{MAPS}?{query}&watch=true")).await;
    let mark = watch.next().await.unwrap();
    let metadata = json!({
        "resourceVersion": version(&mark["object"]).to_string(),
        "annotations": { "k8s.io/initial-events-end": "true" },
    });
    let object = json!({ "kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata });
    assert_eq!(mark, json!({ "type": "BOOKMARK", "object": object }));
    api.create(MAPS, map("a")).await;
    let added = watch.next().await.unwrap();
    assert_eq!(added["type"], "ADDED");
    assert!(version(&added["object"]) > version(&mark["object"]));
    let want = json!({
        "kind": "ConfigMap", "apiVersion": "v1", "metadata": { "name": "a", "namespace": "default" },
        "data": { "k": "v" },
    });
    assert_eq!(stable_fields(added["object"].clone()), want);
}

#[tokio::test]
async fn a_watch_from_an_expired_version_sends_one_error_event() {
    let api = start_with(|config| config.history = HistoryLimits { events: 5, ..HistoryLimits::default() }).await;
    for i in 0..10 {
        api.create(MAPS, map(&format!("m{i}"))).await;
    }
    let reply = api.send_raw("GET", "/api/v1/pods?watch=true&resourceVersion=5", &[], b"").await;
    assert_eq!((reply.code, reply.header("content-type")), (200, "application/json"));
    let text = String::from_utf8(reply.body).unwrap();
    let mut lines = text.lines();
    let event: Value = serde_json::from_str(lines.next().unwrap()).unwrap();
    let message = event["object"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("too old resource version: 5 ("), "{message}");
    assert_eq!(event, json!({ "type": "ERROR", "object": failure(410, "Expired", &message, Value::Null) }));
    assert_eq!(lines.next(), None, "the stream ends after the error");
}

#[tokio::test]
async fn already_exists_and_conflict() {
    let api = start().await;
    let lease = json!({ "metadata": { "name": "x" } });
    let created = api.create(LEASES, lease.clone()).await;
    let details = json!({ "name": "x", "group": "coordination.k8s.io", "kind": "leases" });
    let (_, exists) = api.post(LEASES, lease).await;
    let message = "leases.coordination.k8s.io \"x\" already exists";
    assert_eq!(exists, failure(409, "AlreadyExists", message, details.clone()));
    let mut stale = created;
    stale["metadata"]["resourceVersion"] = "1".into();
    let (_, conflict) = api.put(&format!("{LEASES}/x"), stale).await;
    let message = "Operation cannot be fulfilled on leases.coordination.k8s.io \"x\": the object has been modified; please \
                   apply your changes to the latest version and try again";
    assert_eq!(conflict, failure(409, "Conflict", message, details));
}

#[tokio::test]
async fn a_missing_required_field() {
    let api = start().await;
    let claim = json!({ "metadata": { "name": "p" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } });
    let why = "Required value: at least 1 access mode is required";
    let cause = json!({ "reason": "FieldValueRequired", "message": why, "field": "spec.accessModes" });
    let details = json!({ "name": "p", "kind": "PersistentVolumeClaim", "causes": [cause] });
    let message = format!("PersistentVolumeClaim \"p\" is invalid: spec.accessModes: {why}");
    assert_eq!(api.post(CLAIMS, claim).await, (422, failure(422, "Invalid", &message, details)));
}

#[tokio::test]
async fn a_resource_version_from_the_future() {
    let api = start().await;
    api.create(MAPS, map("a")).await;
    let check = |status: &Value| {
        let message = status["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("Timeout: Too large resource version: 99999999, current: "), "{message}");
        let cause = json!({ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" });
        let details = json!({ "causes": [cause], "retryAfterSeconds": 1 });
        assert_eq!(*status, failure(504, "Timeout", &message, details));
    };
    for path in [format!("{MAPS}?resourceVersion=99999999"), format!("{MAPS}/a?resourceVersion=99999999")] {
        let reply = api.send_raw("GET", &path, &[], b"").await;
        assert_eq!((reply.code, reply.header("retry-after")), (504, "1"));
        check(&serde_json::from_slice(&reply.body).unwrap());
    }
    let event = api.watch(&format!("{MAPS}?watch=1&resourceVersion=99999999")).await.next().await.unwrap();
    assert_eq!(event["type"], "ERROR");
    check(&event["object"]);
}

#[tokio::test]
async fn a_list_as_a_table() {
    let api = start().await;
    let created = api.create(MAPS, map("a")).await;
    let table = api.table(MAPS).await;
    assert_eq!((&table["kind"], &table["apiVersion"]), (&json!("Table"), &json!("meta.k8s.io/v1")));
    assert!(version(&table) >= version(&created));
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
    assert_eq!(version(&object), version(&created));
    object["metadata"]["managedFields"].take();
    let want = json!({
        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
        "metadata": { "name": "a", "namespace": "default" },
    });
    assert_eq!(stable_fields(object), want);
}

#[tokio::test]
async fn replies_to_deletion() {
    let api = start().await;
    let created = api.create(MAPS, map("a")).await;
    let details = json!({ "name": "a", "kind": "configmaps", "uid": created["metadata"]["uid"] });
    let success =
        json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details });
    assert_eq!(api.delete(&format!("{MAPS}/a")).await, (200, success));
    let spec = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    let created = api.create(CLAIMS, json!({ "metadata": { "name": "c" }, "spec": spec })).await;
    let (code, waiting) = api.delete(&format!("{CLAIMS}/c")).await;
    assert_eq!((code, &waiting["kind"]), (200, &json!("PersistentVolumeClaim")));
    assert_eq!(waiting["metadata"]["uid"], created["metadata"]["uid"]);
    assert!(waiting["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(waiting["metadata"]["deletionGracePeriodSeconds"], 0);
}

#[tokio::test]
async fn a_lease_in_protobuf_byte_for_byte() {
    let api = start().await;
    let body = enveloped("coordination.k8s.io/v1", "Lease", b"\x0a\x03\x0a\x01x\x12\x04\x0a\x02me");
    let want = b"\x6b\x38\x73\x00\x0a\x1f\x0a\x16coordination.k8s.io/v1\x12\x05Lease\
        \x12\x0b\x0a\x03\x0a\x01x\x12\x04\x0a\x02me\x1a\x00\x22\x00";
    assert_eq!(body, want);
    let media = [("content-type", "application/vnd.kubernetes.protobuf")];
    let reply = api.send_raw("POST", LEASES, &media, &body).await;
    let created: Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!((reply.code, &created["spec"]), (201, &json!({ "holderIdentity": "me" })));
}

#[tokio::test]
async fn openapi_v3_has_what_kubectl_reads() {
    let api = start().await;
    let (_, index) = api.get("/openapi/v3").await;
    let url = index["paths"]["api/v1"]["serverRelativeURL"].as_str().unwrap();
    assert!(url.starts_with("/openapi/v3/api/v1?hash="), "{url}");
    let (_, document) = api.get(url).await;
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
async fn a_continue_token_and_its_expiry() {
    let api = start_with(|config| config.history = HistoryLimits { events: 5, ..HistoryLimits::default() }).await;
    api.create(MAPS, map("a")).await;
    api.create(MAPS, map("b")).await;
    let (_, page) = api.get(&format!("{MAPS}?limit=1")).await;
    let decoded = |token: &Value| -> Value {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(token.as_str().unwrap()).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    };
    let token = &page["metadata"]["continue"];
    let want = json!({ "v": "meta.k8s.io/v1", "rv": version(&page), "start": "default/a\u{0}" });
    assert_eq!(decoded(token), want);
    for i in 0..10 {
        api.create(MAPS, map(&format!("later{i}"))).await;
    }
    let (code, expired) = api.get(&format!("{MAPS}?limit=1&continue={}", token.as_str().unwrap())).await;
    assert_eq!((code, &expired["reason"]), (410, &json!("Expired")));
    let fresh = &expired["metadata"]["continue"];
    assert_eq!(decoded(fresh), json!({ "v": "meta.k8s.io/v1", "rv": -1, "start": "default/a\u{0}" }));
    let (code, next) = api.get(&format!("{MAPS}?limit=1&continue={}", fresh.as_str().unwrap())).await;
    assert_eq!((code, &next["items"][0]["metadata"]["name"]), (200, &json!("b")));
}

#[tokio::test]
async fn events_of_a_watch_with_a_selector() {
    let api = start().await;
    let (_, list) = api.get(MAPS).await;
    let mut watch = api.watch(&format!("{MAPS}?watch=1&labelSelector=a%3Db&resourceVersion={}", version(&list))).await;
    let path = format!("{MAPS}/m");
    let label = |value: Value, data: &str| json!({ "metadata": { "labels": { "a": value } }, "data": { "k": data } });
    api.create(MAPS, map("m")).await;
    let mut want = Vec::new();
    // Not matching, starts to match, matching, stops to match, not matching, starts to match.
    for (change, expected) in [
        (label(json!("x"), "1"), None),
        (label(json!("b"), "2"), Some(("ADDED", "2"))),
        (label(json!("b"), "3"), Some(("MODIFIED", "3"))),
        (label(json!("c"), "4"), Some(("DELETED", "3"))),
        (label(json!("d"), "5"), None),
        (label(json!("b"), "6"), Some(("ADDED", "6"))),
    ] {
        let (_, now) = api.patch(&path, change).await;
        want.extend(expected.map(|(name, data)| (name.to_owned(), data.to_owned(), version(&now))));
    }
    let (_, last) = api.get(&path).await;
    api.delete(&path).await;
    api.create(MAPS, map("n")).await;
    api.delete(&format!("{MAPS}/n")).await;
    let mut end = map("end");
    end["metadata"]["labels"] = json!({ "a": "b" });
    api.create(MAPS, end).await;
    for (name, data, at) in want {
        let event = watch.next().await.unwrap();
        assert_eq!((event["type"].as_str().unwrap(), event["object"]["data"]["k"].as_str().unwrap()), (&*name, &*data));
        assert_eq!(version(&event["object"]), at, "at the version of the change");
    }
    let event = watch.next().await.unwrap();
    assert_eq!((&event["type"], &event["object"]["data"]["k"]), (&json!("DELETED"), &json!("6")));
    assert!(version(&event["object"]) > version(&last), "a deletion has a version of its own");
    assert_eq!(watch.next().await.unwrap()["object"]["metadata"]["name"], "end", "the other object never matched");
}
