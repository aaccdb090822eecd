//! Field ownership and server-side apply: the owners after each kind of write, conflicts, and refused applies.

use serde_json::{Value, json};

use crate::test_api::{send, start_with_component_client};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const APPLY: &str = "application/apply-patch+yaml";
const MERGE: &str = "application/merge-patch+json";
const JSON: &str = "application/json";

fn map(data: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a" }, "data": data })
}

/// The fields that a manager owns; null if it owns none.
fn owned(object: &Value, manager: &str) -> Value {
    let entries = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    entries.into_iter().find(|e| e["manager"] == manager).map_or(Value::Null, |e| e["fieldsV1"].clone())
}

#[tokio::test]
async fn apply_creates_shares_conflicts_and_removes() {
    let (_dir, _server, client) = start_with_component_client().await;
    let apply = async |manager: &str, data: Value| {
        send(&client, "PATCH", &format!("{MAPS}/a?fieldManager={manager}"), APPLY, map(data)).await
    };
    let (code, created) = apply("one", json!({ "k": "v", "x": "1" })).await;
    assert_eq!(code, 201, "{created}");
    assert_eq!(owned(&created, "one"), json!({ "f:data": { "f:k": {}, "f:x": {} } }));

    let (code, again) = apply("one", json!({ "k": "v", "x": "1" })).await;
    assert_eq!((code, &again), (200, &created), "nothing changes, not even the version");

    let (code, shared) = apply("two", json!({ "k": "v" })).await;
    assert_eq!(code, 200, "{shared}");
    assert_eq!(owned(&shared, "two"), json!({ "f:data": { "f:k": {} } }));

    let (code, refused) = apply("two", json!({ "k": "w" })).await;
    assert_eq!((code, &refused["reason"]), (409, &json!("Conflict")));
    let cause = json!({ "reason": "FieldManagerConflict", "message": "conflict with \"one\"", "field": ".data.k" });
    assert_eq!(refused["details"], json!({ "causes": [cause] }));
    assert_eq!(refused["message"], "Apply failed with 1 conflict: conflict with \"one\": .data.k");

    let (_, forced) = apply("two&force=true", json!({ "k": "w" })).await;
    assert_eq!(forced["data"], json!({ "k": "w", "x": "1" }));
    assert_eq!(owned(&forced, "one"), json!({ "f:data": { "f:x": {} } }));

    let (_, without) = apply("one", json!({})).await;
    assert_eq!(without["data"], json!({ "k": "w" }), "a field that its only owner drops is removed");
}

#[tokio::test]
async fn every_write_is_recorded_for_its_field_manager() {
    let (_dir, _server, client) = start_with_component_client().await;
    let (_, created) =
        send(&client, "POST", &format!("{MAPS}?fieldManager=maker"), JSON, map(json!({ "k": "v" }))).await;
    assert_eq!(owned(&created, "maker"), json!({ "f:data": { ".": {}, "f:k": {} } }));
    let entry = &created["metadata"]["managedFields"][0];
    assert_eq!((&entry["operation"], &entry["apiVersion"]), (&json!("Update"), &json!("v1")));
    assert_eq!((&entry["fieldsType"], &entry["time"]), (&json!("FieldsV1"), &created["metadata"]["creationTimestamp"]));

    let patch = json!({ "data": { "x": "1" } });
    let (_, patched) = send(&client, "PATCH", &format!("{MAPS}/a"), MERGE, patch).await;
    assert_eq!(owned(&patched, "component"), json!({ "f:data": { "f:x": {} } }), "named after the client itself");

    let nothing = json!({ "data": { "x": "1" } });
    let (_, same) = send(&client, "PATCH", &format!("{MAPS}/a?fieldManager=idle"), MERGE, nothing).await;
    assert_eq!(same, patched, "a write that changes nothing owns nothing");

    let (_, put) =
        send(&client, "PUT", &format!("{MAPS}/a?fieldManager=putter"), JSON, map(json!({ "only": "put" }))).await;
    assert_eq!(owned(&put, "putter"), json!({ "f:data": { "f:only": {} } }));
    assert_eq!(owned(&put, "maker"), json!({ "f:data": {} }), "the map itself is still owned by its creator");
    assert_eq!(owned(&put, "component"), Value::Null);

    let invalid_owners = json!({ "metadata": { "managedFields": [{ "manager": "x", "operation": "Guess" }] } });
    let (code, unchanged) = send(&client, "PATCH", &format!("{MAPS}/a"), MERGE, invalid_owners).await;
    assert_eq!((code, &unchanged), (200, &put), "invalid managedFields are ignored");

    let reset = json!({ "metadata": { "managedFields": [{}] } });
    let (_, reset) = send(&client, "PATCH", &format!("{MAPS}/a"), MERGE, reset).await;
    assert_eq!(reset["metadata"].get("managedFields"), None);
    let (_, applied) =
        send(&client, "PATCH", &format!("{MAPS}/a?fieldManager=late"), APPLY, map(json!({ "only": "put" }))).await;
    assert_eq!(owned(&applied, "before-first-apply"), json!({ "f:data": { ".": {}, "f:only": {} } }));
    assert_eq!(owned(&applied, "late"), json!({ "f:data": { "f:only": {} } }));
}

#[tokio::test]
async fn a_write_to_status_owns_only_the_status() {
    let (_dir, _server, client) = start_with_component_client().await;
    let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "c" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
        "status": { "phase": "Bound" },
    });
    let (_, created) = send(&client, "PATCH", &format!("{claims}/c?fieldManager=user"), APPLY, &claim).await;
    assert_eq!(created["status"]["phase"], "Pending");
    let spec = json!({ "f:accessModes": {}, "f:resources": { "f:requests": { "f:storage": {} } } });
    assert_eq!(owned(&created, "user"), json!({ "f:spec": spec }));
    let status = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "c" },
        "spec": { "volumeName": "no" },
        "status": { "phase": "Bound", "conditions": [{ "type": "Resizing", "status": "True" }] },
    });
    let (code, bound) = send(&client, "PATCH", &format!("{claims}/c/status?fieldManager=ctl"), APPLY, &status).await;
    assert_eq!(code, 200, "{bound}");
    assert_eq!((&bound["status"]["phase"], bound["spec"].get("volumeName")), (&json!("Bound"), None));
    let condition = json!({ ".": {}, "f:status": {}, "f:type": {} });
    let status = json!({ "f:phase": {}, "f:conditions": { "k:{\"type\":\"Resizing\"}": condition } });
    assert_eq!(owned(&bound, "ctl"), json!({ "f:status": status }));
    let entry = bound["metadata"]["managedFields"].as_array().unwrap().iter().find(|e| e["manager"] == "ctl").unwrap();
    assert_eq!(entry["subresource"], "status");
    let missing = send(&client, "PATCH", &format!("{claims}/none/status?fieldManager=ctl"), APPLY, &claim).await;
    assert_eq!(missing.0, 404, "a status is never created alone");
}

#[tokio::test]
async fn invalid_applies_are_refused() {
    let (_dir, _server, client) = start_with_component_client().await;
    let good = map(json!({ "k": "v" }));
    let with = |key: &str, value: Value| {
        let mut changed = good.clone();
        changed[key] = value;
        changed
    };
    let owners = json!({ "name": "a", "managedFields": [] });
    for (case, query, body, code, text) in [
        ("no manager", "", good.clone(), 422, "fieldManager: Required value: is required for apply patch"),
        ("another version", "?fieldManager=m", with("apiVersion", "v2".into()), 400, "Incorrect version specified"),
        ("another kind", "?fieldManager=m", with("kind", "Secret".into()), 400, "Incorrect kind specified"),
        ("another name", "?fieldManager=m", with("metadata", json!({ "name": "b" })), 400, "does not match the name"),
        ("owners in the body", "?fieldManager=m", with("metadata", owners), 400, "metadata.managedFields must be nil"),
        ("an unknown field", "?fieldManager=m", with("bogus", 1.into()), 500, ".bogus: field not declared in schema"),
        ("no object", "?fieldManager=m", json!(["x"]), 400, "error decoding YAML"),
        ("too deep", "?fieldManager=m", Value::Null, 400, "error decoding YAML"),
    ] {
        let body = if body.is_null() { "- ".repeat(5000) } else { body.to_string() };
        let (got, status) = send(&client, "PATCH", &format!("{MAPS}/a{query}"), APPLY, body).await;
        let message = status["message"].as_str().unwrap();
        assert!(got == code && message.contains(text), "{case}: {got} {message}");
    }
    let forced = send(&client, "PATCH", &format!("{MAPS}/a?force=true"), MERGE, "{}").await;
    assert_eq!(forced.0, 422, "only an apply can be forced");
    let long = send(&client, "POST", &format!("{MAPS}?fieldManager={}", "m".repeat(129)), JSON, &good).await;
    assert_eq!(long.0, 422);
}

#[tokio::test]
async fn an_apply_may_be_yaml_and_a_dry_run() {
    let (_dir, _server, client) = start_with_component_client().await;
    let yaml =
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\ndata:\n  # a comment\n  k: |\n    two\n    lines\n";
    let dry = send(&client, "PATCH", &format!("{MAPS}/a?fieldManager=m&dryRun=All"), APPLY, yaml).await;
    assert_eq!((dry.0, &dry.1["data"]["k"]), (201, &json!("two\nlines\n")));
    assert_eq!(send(&client, "GET", &format!("{MAPS}/a"), JSON, "").await.0, 404);
    let (code, created) = send(&client, "PATCH", &format!("{MAPS}/a?fieldManager=m"), APPLY, yaml).await;
    assert_eq!(code, 201);
    let (_, dry) =
        send(&client, "PATCH", &format!("{MAPS}/a?fieldManager=m&dryRun=All"), APPLY, map(json!({ "k": "new" }))).await;
    assert_eq!(
        (&dry["data"]["k"], &dry["metadata"]["resourceVersion"]),
        (&json!("new"), &created["metadata"]["resourceVersion"])
    );
    let (_, now) = send(&client, "GET", &format!("{MAPS}/a"), JSON, "").await;
    assert_eq!(now, created);
}

#[tokio::test]
async fn kubectl_takes_over_fields_of_client_side_apply_and_updates_its_annotation() {
    let (_dir, _server, client) = start_with_component_client().await;
    let annotation = "kubectl.kubernetes.io/last-applied-configuration";
    let mut first = map(json!({ "k": "v" }));
    first["metadata"]["annotations"] = json!({ annotation: map(json!({ "k": "v" })).to_string() });
    send(&client, "POST", &format!("{MAPS}?fieldManager=kubectl-client-side-apply"), JSON, &first).await;
    let other = send(&client, "PATCH", &format!("{MAPS}/a?fieldManager=other"), APPLY, map(json!({ "k": "w" }))).await;
    assert_eq!(other.0, 409);
    let (code, applied) =
        send(&client, "PATCH", &format!("{MAPS}/a?fieldManager=kubectl"), APPLY, map(json!({ "k": "w" }))).await;
    assert_eq!((code, &applied["data"]["k"]), (200, &json!("w")));
    let now: Value = serde_json::from_str(applied["metadata"]["annotations"][annotation].as_str().unwrap()).unwrap();
    assert_eq!(now["data"]["k"], "w");
}

#[tokio::test]
async fn unknown_and_duplicate_fields_give_warnings_or_errors() {
    let (_dir, _server, client) = start_with_component_client().await;
    let body = r#"{"metadata":{"name":"NAME","bogus":1},"data":{"x":"1","x":"2"},"extra":1}"#;
    let post = async |name: &str, validation: &str| {
        let request = http::Request::post(format!("{MAPS}{validation}")).header("content-type", JSON);
        let body = body.replace("NAME", name).into_bytes();
        let response = client.send(request.body(body.into()).unwrap()).await.unwrap();
        let warnings: Vec<String> =
            response.headers().get_all("warning").iter().map(|w| w.to_str().unwrap().to_owned()).collect();
        let code = response.status().as_u16();
        let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
        (code, warnings, serde_json::from_slice::<Value>(&bytes).unwrap())
    };
    let want = [
        r#"299 - "unknown field \"metadata.bogus\"""#,
        r#"299 - "duplicate field \"data.x\"""#,
        r#"299 - "unknown field \"extra\"""#,
    ];
    let (code, warnings, created) = post("a", "").await;
    assert_eq!((code, warnings, &created["data"]["x"]), (201, want.map(String::from).to_vec(), &json!("2")));
    let (code, warnings, _) = post("b", "?fieldValidation=Warn").await;
    assert_eq!((code, warnings.len()), (201, 3));
    let (code, warnings, _) = post("c", "?fieldValidation=Ignore").await;
    assert_eq!((code, warnings.len()), (201, 0));
    let (code, warnings, refused) = post("d", "?fieldValidation=Strict").await;
    assert_eq!((code, warnings.len()), (400, 0));
    assert_eq!(
        refused["message"],
        "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: strict decoding error: unknown field \
         \"metadata.bogus\", duplicate field \"data.x\", unknown field \"extra\""
    );
    let twice = r#"{"data":{"y":"1","y":"2"}}"#;
    let strict = send(&client, "PATCH", &format!("{MAPS}/a?fieldValidation=Strict"), MERGE, twice).await;
    assert_eq!(strict.0, 422);
    let message = strict.1["message"].as_str().unwrap();
    assert!(message.contains("strict decoding error: duplicate field \"data.y\""), "{message}");
}

#[tokio::test]
async fn deeply_nested_bodies_are_refused() {
    let (_dir, _server, client) = start_with_component_client().await;
    send(&client, "POST", MAPS, JSON, map(json!({}))).await;
    let nested = |levels: usize| format!("{}1{}", "{\"data\":".repeat(levels), "}".repeat(levels));
    for levels in [100, 126, 5000] {
        for media in [MERGE, "application/strategic-merge-patch+json", APPLY] {
            let path = format!("{MAPS}/a?fieldManager=m&fieldValidation=Strict");
            let (code, _) = send(&client, "PATCH", &path, media, nested(levels)).await;
            assert!((400..=500).contains(&code), "{media} {levels}: {code}");
        }
    }
    assert_eq!(send(&client, "GET", &format!("{MAPS}/a"), JSON, "").await.0, 200);
}
