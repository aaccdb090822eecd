//! Custom resources: definition, serving, pruning, defaults, validation, versions, and removal with the definition.

use serde_json::{Value, json};

use crate::test_api::{TestApi, causes, start, version};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const THINGS: &str = "/apis/example.com/v1/namespaces/default/things";

fn definition() -> Value {
    let schema = json!({ "type": "object", "properties": {
        "spec": { "type": "object", "required": ["size"], "properties": {
            "size": { "type": "integer", "minimum": 1, "maximum": 10 },
            "mode": { "type": "string", "enum": ["a", "b"], "default": "a" },
            "free": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
            "port": { "x-kubernetes-int-or-string": true },
            "replicas": { "type": "integer" },
        } },
        "status": { "type": "object", "properties": { "phase": { "type": "string" }, "replicas": { "type": "integer" } } },
    } });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "things.example.com" },
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": { "plural": "things", "kind": "Thing", "shortNames": ["tg"], "categories": ["all"] },
            "versions": [
                { "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": schema },
                  "subresources": { "status": {}, "scale": {
                      "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas" } },
                  "selectableFields": [{ "jsonPath": ".spec.mode" }],
                  "additionalPrinterColumns": [
                      { "name": "Size", "type": "integer", "jsonPath": ".spec.size" },
                      { "name": "Phase", "type": "string", "jsonPath": ".status.phase" }] },
                { "name": "v1beta1", "served": true, "storage": false, "deprecated": true,
                  "schema": { "openAPIV3Schema": schema }, "subresources": { "status": {} } },
            ],
        },
    })
}

/// A server with the definition of `things`.
async fn start_with_definition() -> TestApi {
    let api = start().await;
    api.create(DEFINITIONS, definition()).await;
    wait_until_established(&api).await;
    api
}

async fn wait_until_established(api: &TestApi) {
    let mut watch = api.watch(&format!("{DEFINITIONS}?watch=1&resourceVersion=0")).await;
    loop {
        let event = watch.next().await.unwrap();
        let conditions = event["object"]["status"]["conditions"].as_array().cloned().unwrap_or_default();
        if conditions.iter().any(|c| c["type"] == "Established" && c["status"] == "True") {
            return;
        }
    }
}

fn thing(name: &str, spec: Value) -> Value {
    json!({ "apiVersion": "example.com/v1", "kind": "Thing", "metadata": { "name": name }, "spec": spec })
}

#[tokio::test]
async fn an_established_definition_is_served() {
    let api = start_with_definition().await;
    for i in 0..100 {
        api.create(THINGS, thing(&format!("t{i}"), json!({ "size": 1 }))).await;
    }
    let (_, resources) = api.get("/apis/example.com/v1").await;
    let names: Vec<_> = resources["resources"].as_array().unwrap().iter().map(|r| r["name"].clone()).collect();
    assert_eq!(names, ["things", "things/scale", "things/status"]);
    assert_eq!(resources["resources"][0]["shortNames"], json!(["tg"]));
    let (_, group) = api.get("/apis/example.com").await;
    assert_eq!(group["preferredVersion"]["version"], "v1", "the stable version is preferred");
    let (_, status) = api.get(&format!("{DEFINITIONS}/things.example.com")).await;
    assert_eq!(status["status"]["acceptedNames"]["listKind"], "ThingList");
    assert_eq!(status["status"]["storedVersions"], json!(["v1"]));
    assert_eq!(status["metadata"]["finalizers"], json!(["customresourcecleanup.apiextensions.k8s.io"]));
}

#[tokio::test]
async fn objects_are_pruned_defaulted_and_validated() {
    let api = start_with_definition().await;
    let spec = json!({ "size": 3, "unknown": 1, "free": { "any": [1] }, "port": "http", "mode": null });
    let created = api.create(THINGS, thing("a", spec)).await;
    assert_eq!(created["spec"], json!({ "size": 3, "mode": "a", "free": { "any": [1] }, "port": "http" }));
    assert_eq!(created["metadata"]["generation"], 1);
    let bad = thing("b", json!({ "size": 11, "mode": "c", "port": [] }));
    let (code, refused) = api.post(THINGS, bad).await;
    assert_eq!((code, refused["reason"].as_str()), (422, Some("Invalid")));
    let mut fields = causes(&refused);
    fields.sort();
    assert_eq!(fields, ["spec.mode", "spec.port", "spec.size"], "every error is reported");
    let (code, refused) = api.post(THINGS, thing("b", json!({}))).await;
    assert_eq!((code, causes(&refused)), (422, vec!["spec.size".into()]));
    let strict = format!("{THINGS}?fieldValidation=Strict");
    let (code, refused) = api.post(&strict, thing("b", json!({ "size": 1, "odd": 1 }))).await;
    assert_eq!(code, 400);
    assert!(refused["message"].as_str().unwrap().contains(r#"unknown field "spec.odd""#), "{refused}");
}

#[tokio::test]
async fn status_and_spec_are_written_separately() {
    let api = start_with_definition().await;
    let mut with_status = thing("a", json!({ "size": 3 }));
    with_status["status"] = json!({ "phase": "Sneaked" });
    let created = api.create(THINGS, with_status).await;
    assert!(created.get("status").is_none(), "a new object has no status: {created}");
    let path = format!("{THINGS}/a");
    let change =
        json!({ "status": { "phase": "Ready" }, "spec": { "size": 9 }, "metadata": { "labels": { "x": "y" } } });
    let (_, after) = api.patch(&format!("{path}/status"), change).await;
    assert_eq!(after["status"]["phase"], "Ready");
    assert_eq!((&after["spec"]["size"], &after["metadata"]["labels"]), (&json!(3), &Value::Null));
    assert_eq!(after["metadata"]["generation"], 1, "a status is no new generation");
    let (_, after) = api.patch(&path, json!({ "spec": { "size": 4 }, "status": { "phase": "Lost" } })).await;
    assert_eq!((&after["status"]["phase"], &after["metadata"]["generation"]), (&json!("Ready"), &json!(2)));
    let (_, scale) = api.get(&format!("{path}/scale")).await;
    assert_eq!((scale["kind"].as_str(), &scale["status"]["replicas"]), (Some("Scale"), &json!(0)));
    let (code, scale) = api.patch(&format!("{path}/scale"), json!({ "spec": { "replicas": 5 } })).await;
    assert_eq!((code, &scale["spec"]["replicas"]), (200, &json!(5)), "{scale}");
    assert_eq!(api.get(&path).await.1["spec"]["replicas"], 5);
}

#[tokio::test]
async fn writes_follow_the_rules_of_custom_resources() {
    let api = start_with_definition().await;
    let created = api.create(THINGS, thing("a", json!({ "size": 3 }))).await;
    let path = format!("{THINGS}/a");
    let (code, refused) = api.put(&path, thing("a", json!({ "size": 4 }))).await;
    assert_eq!((code, causes(&refused)), (422, vec!["metadata.resourceVersion".into()]));
    let (code, same) = api.put(&path, created.clone()).await;
    assert_eq!((code, version(&same)), (200, version(&created)), "nothing changed");
    let media = "application/strategic-merge-patch+json";
    let (code, _) = api.send("PATCH", &path, media, "application/json", &json!({ "spec": { "size": 5 } })).await;
    assert_eq!(code, 415, "custom resources have no strategic merge");
    let (code, status) = api.delete(&path).await;
    assert_eq!((code, &status["details"]["uid"]), (200, &created["metadata"]["uid"]));
    assert_eq!(api.get("/apis/example.com/v1/things/a").await.0, 404, "namespaced objects are not at the root");
}

#[tokio::test]
async fn lists_support_tables_and_selectors() {
    let api = start_with_definition().await;
    api.create(THINGS, thing("a", json!({ "size": 3 }))).await;
    api.create(THINGS, thing("b", json!({ "size": 4, "mode": "b" }))).await;
    let (_, list) = api.get(&format!("{THINGS}?fieldSelector=spec.mode%3Db")).await;
    assert_eq!((list["kind"].as_str(), list["items"].as_array().unwrap().len()), (Some("ThingList"), 1));
    assert_eq!(list["items"][0]["metadata"]["name"], "b");
    assert_eq!(api.get(&format!("{THINGS}?fieldSelector=spec.size%3D3")).await.0, 400);
    let table = api.table(THINGS).await;
    let names: Vec<_> = table["columnDefinitions"].as_array().unwrap().iter().map(|c| c["name"].clone()).collect();
    assert_eq!(names, ["Name", "Size", "Phase"]);
    assert_eq!(table["rows"][0]["cells"], json!(["a", 3, null]));
}

#[tokio::test]
async fn every_served_version_returns_the_same_object() {
    let api = start_with_definition().await;
    let created = api.create(THINGS, thing("a", json!({ "size": 3 }))).await;
    let beta = "/apis/example.com/v1beta1/namespaces/default/things";
    let accept = "application/json";
    let (code, warnings, beta_object) =
        api.send_with_warnings("GET", &format!("{beta}/a"), accept, accept, &Value::Null).await;
    assert_eq!((code, beta_object["apiVersion"].as_str()), (200, Some("example.com/v1beta1")));
    assert!(warnings[0].contains("example.com/v1beta1 Thing is deprecated"), "{warnings:?}");
    assert_eq!(version(&beta_object), version(&created));
    let mut other = thing("b", json!({ "size": 4 }));
    other["apiVersion"] = "example.com/v1beta1".into();
    api.create(beta, other).await;
    let (_, stable_object) = api.get(&format!("{THINGS}/b")).await;
    assert_eq!(stable_object["apiVersion"], "example.com/v1");
    let mut watch = api.watch(&format!("{beta}?watch=1&resourceVersion=0")).await;
    assert_eq!(watch.next().await.unwrap()["object"]["apiVersion"], "example.com/v1beta1");
}

#[tokio::test]
async fn a_changed_definition_applies_at_once_and_tolerates_unchanged_invalid_fields() {
    let api = start_with_definition().await;
    api.create(THINGS, thing("a", json!({ "size": 9 }))).await;
    let path = format!("{DEFINITIONS}/things.example.com");
    let mut watch = api.watch(&format!("{THINGS}?watch=1&resourceVersion=0")).await;
    assert_eq!(watch.next().await.unwrap()["type"], "ADDED");
    let (_, mut stricter) = api.get(&path).await;
    for i in 0..2 {
        stricter["spec"]["versions"][i]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["size"]["maximum"] =
            json!(5);
    }
    let (code, changed) = api.put(&path, stricter).await;
    assert_eq!((code, &changed["metadata"]["generation"]), (200, &json!(2)), "{changed}");
    assert!(watch.next().await.is_none(), "watches of the old schema end");
    assert_eq!(api.post(THINGS, thing("b", json!({ "size": 6 }))).await.0, 422);
    let (code, _) = api.patch(&format!("{THINGS}/a"), json!({ "spec": { "mode": "b" } })).await;
    assert_eq!(code, 200, "a field that was invalid before and does not change is not checked");
    assert_eq!(api.patch(&format!("{THINGS}/a"), json!({ "spec": { "size": 8 } })).await.0, 422);
}

#[tokio::test]
async fn deleting_a_definition_deletes_its_objects() {
    let api = start_with_definition().await;
    let mut held = thing("held", json!({ "size": 1 }));
    held["metadata"]["finalizers"] = json!(["example.com/hold"]);
    api.create(THINGS, held).await;
    api.create(THINGS, thing("plain", json!({ "size": 1 }))).await;
    let path = format!("{DEFINITIONS}/things.example.com");
    let mut watch = api.watch(&format!("{DEFINITIONS}?watch=1&resourceVersion=0")).await;
    api.delete(&path).await;
    loop {
        let event = watch.next().await.unwrap();
        let conditions = event["object"]["status"]["conditions"].as_array().cloned().unwrap_or_default();
        if conditions.iter().any(|c| c["type"] == "Terminating" && c["status"] == "True") {
            break;
        }
    }
    let (code, refused) = api.post(THINGS, thing("new", json!({ "size": 1 }))).await;
    assert_eq!(code, 405, "{refused}");
    api.patch(&format!("{THINGS}/held"), json!({ "metadata": { "finalizers": null } })).await;
    while watch.next().await.unwrap()["type"] != "DELETED" {}
    // The kind leaves discovery with its definition. A new definition of the same name has no objects.
    api.create(DEFINITIONS, definition()).await;
    let mut watch = api.watch(&format!("{DEFINITIONS}?watch=1&resourceVersion=0")).await;
    while !watch.next().await.unwrap()["object"]["status"]["conditions"].is_array() {}
    assert_eq!(api.get(THINGS).await.1["items"], json!([]));
}

#[tokio::test]
async fn definitions_survive_a_restart() {
    let api = start_with_definition().await;
    api.create(THINGS, thing("a", json!({ "size": 3 }))).await;
    let TestApi { client, server, dir } = api;
    drop(client);
    server.close().await;
    let server =
        cleat_apiserver::ApiServer::open(cleat_apiserver::Config::new(dir.path(), "127.0.0.1:0".parse().unwrap()));
    let server = server.await.unwrap();
    let api = TestApi { client: server.client("system:admin"), server, dir };
    assert_eq!(api.get(&format!("{THINGS}/a")).await.0, 200, "served right after the start");
}

/// A definition with the validation rules of the CSI snapshotter's definitions.
fn definition_with_rules() -> Value {
    let mut definition = definition();
    let schema = json!({ "openAPIV3Schema": { "type": "object", "properties": { "spec": {
        "type": "object",
        "x-kubernetes-validations": [
            { "rule": "!has(oldSelf.handle) || has(self.handle)", "message": "handle is required once set" },
            { "rule": "(has(self.a) && !has(self.b)) || (!has(self.a) && has(self.b))", "message": "exactly one of a and b" },
        ],
        "properties": {
            "a": { "type": "string" },
            "b": { "type": "string" },
            // The snapshotter's sizes have a `type` as well.
            "size": { "type": "string", "pattern": "^[0-9]+(Gi)?$", "x-kubernetes-int-or-string": true },
            "handle": { "type": "string", "x-kubernetes-validations": [{ "rule": "self == oldSelf", "message": "handle is immutable" }] },
            "ref": {
                "type": "object",
                "x-kubernetes-validations": [
                    { "rule": "has(self.name) && has(self.__namespace__)", "message": "both are needed" },
                    { "rule": "self.name == oldSelf.name && self.__namespace__ == oldSelf.__namespace__" },
                ],
                "properties": { "name": { "type": "string" }, "namespace": { "type": "string" } },
            },
        },
    } } } });
    definition["spec"]["versions"] = json!([{ "name": "v1", "served": true, "storage": true, "schema": schema }]);
    definition
}

#[tokio::test]
async fn validation_rules_are_compiled_with_the_definition_and_checked_on_every_write() {
    let api = start().await;
    let mut wrong = definition_with_rules();
    let rules = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/x-kubernetes-validations/0/rule";
    for rule in ["self.a ==", "isIP(self.a)", ""] {
        *wrong.pointer_mut(rules).unwrap() = rule.into();
        let (code, refused) = api.post(DEFINITIONS, wrong.clone()).await;
        assert_eq!(code, 422, "{rule}: {refused}");
        assert!(causes(&refused)[0].ends_with("properties[spec].x-kubernetes-validations[0].rule"), "{refused}");
    }
    api.create(DEFINITIONS, definition_with_rules()).await;
    wait_until_established(&api).await;
    let message = |refused: &Value| refused["details"]["causes"][0]["message"].as_str().unwrap_or_default().to_owned();
    for (case, spec, want) in [
        ("neither", json!({}), "Invalid value: \"object\": exactly one of a and b"),
        ("both", json!({ "a": "1", "b": "2" }), "Invalid value: \"object\": exactly one of a and b"),
        ("half a reference", json!({ "a": "1", "ref": { "name": "x" } }), "Invalid value: \"object\": both are needed"),
    ] {
        let (code, refused) = api.post(THINGS, thing("x", spec)).await;
        assert_eq!((code, message(&refused).as_str()), (422, want), "{case}: {refused}");
    }
    let reference = json!({ "name": "x", "namespace": "team" });
    api.create(THINGS, thing("x", json!({ "a": "1", "handle": "h", "ref": reference }))).await;
    let path = format!("{THINGS}/x");
    assert_eq!(api.patch(&path, json!({ "spec": { "a": "2" } })).await.0, 200, "a field without a rule can change");
    for (size, code) in [(json!(1024), 200), (json!("1Gi"), 200), (json!("much"), 422), (json!(true), 422)] {
        assert_eq!(api.patch(&path, json!({ "spec": { "size": size } })).await.0, code, "{size}");
    }
    for (case, change, field) in [
        ("changed", json!({ "handle": "other" }), "spec.handle"),
        ("removed", json!({ "handle": null }), "spec"),
        ("another namespace", json!({ "ref": { "namespace": "other" } }), "spec.ref"),
    ] {
        let (code, refused) = api.patch(&path, json!({ "spec": change })).await;
        assert_eq!((code, causes(&refused)), (422, vec![field.into()]), "{case}: {refused}");
    }
}
