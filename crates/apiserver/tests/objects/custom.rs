//! Custom resources: defined, served, pruned, defaulted, validated, converted, and gone with their definition.

use serde_json::{Value, json};

use crate::talk::{Talk, causes, talk, version};

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

async fn defined() -> Talk {
    let talk = talk().await;
    talk.made(DEFINITIONS, definition()).await;
    established(&talk).await;
    talk
}

async fn established(talk: &Talk) {
    let mut watch = talk.watch(&format!("{DEFINITIONS}?watch=1&resourceVersion=0")).await;
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
async fn row_27_a_definition_is_served_by_the_time_it_says_so() {
    let talk = defined().await;
    for i in 0..100 {
        talk.made(THINGS, thing(&format!("t{i}"), json!({ "size": 1 }))).await;
    }
    let (_, resources) = talk.get("/apis/example.com/v1").await;
    let names: Vec<_> = resources["resources"].as_array().unwrap().iter().map(|r| r["name"].clone()).collect();
    assert_eq!(names, ["things", "things/scale", "things/status"]);
    assert_eq!(resources["resources"][0]["shortNames"], json!(["tg"]));
    let (_, group) = talk.get("/apis/example.com").await;
    assert_eq!(group["preferredVersion"]["version"], "v1", "the stable version is preferred");
    let (_, status) = talk.get(&format!("{DEFINITIONS}/things.example.com")).await;
    assert_eq!(status["status"]["acceptedNames"]["listKind"], "ThingList");
    assert_eq!(status["status"]["storedVersions"], json!(["v1"]));
    assert_eq!(status["metadata"]["finalizers"], json!(["customresourcecleanup.apiextensions.k8s.io"]));
}

#[tokio::test]
async fn objects_are_pruned_filled_and_checked() {
    let talk = defined().await;
    let spec = json!({ "size": 3, "unknown": 1, "free": { "any": [1] }, "port": "http", "mode": null });
    let made = talk.made(THINGS, thing("a", spec)).await;
    assert_eq!(made["spec"], json!({ "size": 3, "mode": "a", "free": { "any": [1] }, "port": "http" }));
    assert_eq!(made["metadata"]["generation"], 1);
    let bad = thing("b", json!({ "size": 11, "mode": "c", "port": [] }));
    let (code, refused) = talk.post(THINGS, bad).await;
    assert_eq!((code, refused["reason"].as_str()), (422, Some("Invalid")));
    let mut fields = causes(&refused);
    fields.sort();
    assert_eq!(fields, ["spec.mode", "spec.port", "spec.size"], "every mistake is named");
    let (code, refused) = talk.post(THINGS, thing("b", json!({}))).await;
    assert_eq!((code, causes(&refused)), (422, vec!["spec.size".into()]));
    let strict = format!("{THINGS}?fieldValidation=Strict");
    let (code, refused) = talk.post(&strict, thing("b", json!({ "size": 1, "odd": 1 }))).await;
    assert_eq!(code, 400);
    assert!(refused["message"].as_str().unwrap().contains(r#"unknown field "spec.odd""#), "{refused}");
}

#[tokio::test]
async fn row_24_status_and_specification_are_written_apart() {
    let talk = defined().await;
    let mut with_status = thing("a", json!({ "size": 3 }));
    with_status["status"] = json!({ "phase": "Sneaked" });
    let made = talk.made(THINGS, with_status).await;
    assert!(made.get("status").is_none(), "a new object has no status: {made}");
    let path = format!("{THINGS}/a");
    let change =
        json!({ "status": { "phase": "Ready" }, "spec": { "size": 9 }, "metadata": { "labels": { "x": "y" } } });
    let (_, after) = talk.patch(&format!("{path}/status"), change).await;
    assert_eq!(after["status"]["phase"], "Ready");
    assert_eq!((&after["spec"]["size"], &after["metadata"]["labels"]), (&json!(3), &Value::Null));
    assert_eq!(after["metadata"]["generation"], 1, "a status is no new generation");
    let (_, after) = talk.patch(&path, json!({ "spec": { "size": 4 }, "status": { "phase": "Lost" } })).await;
    assert_eq!((&after["status"]["phase"], &after["metadata"]["generation"]), (&json!("Ready"), &json!(2)));
    let (_, scale) = talk.get(&format!("{path}/scale")).await;
    assert_eq!((scale["kind"].as_str(), &scale["status"]["replicas"]), (Some("Scale"), &json!(0)));
    let (code, scale) = talk.patch(&format!("{path}/scale"), json!({ "spec": { "replicas": 5 } })).await;
    assert_eq!((code, &scale["spec"]["replicas"]), (200, &json!(5)), "{scale}");
    assert_eq!(talk.get(&path).await.1["spec"]["replicas"], 5);
}

#[tokio::test]
async fn writes_follow_the_rules_of_custom_objects() {
    let talk = defined().await;
    let made = talk.made(THINGS, thing("a", json!({ "size": 3 }))).await;
    let path = format!("{THINGS}/a");
    let (code, refused) = talk.put(&path, thing("a", json!({ "size": 4 }))).await;
    assert_eq!((code, causes(&refused)), (422, vec!["metadata.resourceVersion".into()]));
    let (code, same) = talk.put(&path, made.clone()).await;
    assert_eq!((code, version(&same)), (200, version(&made)), "nothing changed");
    let media = "application/strategic-merge-patch+json";
    let (code, _) = talk.send("PATCH", &path, media, "application/json", &json!({ "spec": { "size": 5 } })).await;
    assert_eq!(code, 415, "nothing tells how to merge its lists");
    let (code, status) = talk.delete(&path).await;
    assert_eq!((code, &status["details"]["uid"]), (200, &made["metadata"]["uid"]));
    assert_eq!(talk.get("/apis/example.com/v1/things/a").await.0, 404, "namespaced objects are not at the root");
}

#[tokio::test]
async fn lists_tables_and_selectors() {
    let talk = defined().await;
    talk.made(THINGS, thing("a", json!({ "size": 3 }))).await;
    talk.made(THINGS, thing("b", json!({ "size": 4, "mode": "b" }))).await;
    let (_, list) = talk.get(&format!("{THINGS}?fieldSelector=spec.mode%3Db")).await;
    assert_eq!((list["kind"].as_str(), list["items"].as_array().unwrap().len()), (Some("ThingList"), 1));
    assert_eq!(list["items"][0]["metadata"]["name"], "b");
    assert_eq!(talk.get(&format!("{THINGS}?fieldSelector=spec.size%3D3")).await.0, 400);
    let table = talk.table(THINGS).await;
    let names: Vec<_> = table["columnDefinitions"].as_array().unwrap().iter().map(|c| c["name"].clone()).collect();
    assert_eq!(names, ["Name", "Size", "Phase"]);
    assert_eq!(table["rows"][0]["cells"], json!(["a", 3, null]));
}

#[tokio::test]
async fn every_served_version_shows_the_same_object() {
    let talk = defined().await;
    let made = talk.made(THINGS, thing("a", json!({ "size": 3 }))).await;
    let beta = "/apis/example.com/v1beta1/namespaces/default/things";
    let accept = "application/json";
    let (code, warnings, seen) = talk.whole("GET", &format!("{beta}/a"), accept, accept, &Value::Null).await;
    assert_eq!((code, seen["apiVersion"].as_str()), (200, Some("example.com/v1beta1")));
    assert!(warnings[0].contains("example.com/v1beta1 Thing is deprecated"), "{warnings:?}");
    assert_eq!(version(&seen), version(&made));
    let mut other = thing("b", json!({ "size": 4 }));
    other["apiVersion"] = "example.com/v1beta1".into();
    talk.made(beta, other).await;
    let (_, seen) = talk.get(&format!("{THINGS}/b")).await;
    assert_eq!(seen["apiVersion"], "example.com/v1");
    let mut watch = talk.watch(&format!("{beta}?watch=1&resourceVersion=0")).await;
    assert_eq!(watch.next().await.unwrap()["object"]["apiVersion"], "example.com/v1beta1");
}

#[tokio::test]
async fn a_changed_definition_is_in_force_and_tolerates_what_it_finds() {
    let talk = defined().await;
    talk.made(THINGS, thing("a", json!({ "size": 9 }))).await;
    let path = format!("{DEFINITIONS}/things.example.com");
    let mut watch = talk.watch(&format!("{THINGS}?watch=1&resourceVersion=0")).await;
    assert_eq!(watch.next().await.unwrap()["type"], "ADDED");
    let (_, mut stricter) = talk.get(&path).await;
    for i in 0..2 {
        stricter["spec"]["versions"][i]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["size"]["maximum"] =
            json!(5);
    }
    let (code, changed) = talk.put(&path, stricter).await;
    assert_eq!((code, &changed["metadata"]["generation"]), (200, &json!(2)), "{changed}");
    assert!(watch.next().await.is_none(), "watches of the old form end");
    assert_eq!(talk.post(THINGS, thing("b", json!({ "size": 6 }))).await.0, 422);
    let (code, _) = talk.patch(&format!("{THINGS}/a"), json!({ "spec": { "mode": "b" } })).await;
    assert_eq!(code, 200, "what was there before and did not change is not asked again");
    assert_eq!(talk.patch(&format!("{THINGS}/a"), json!({ "spec": { "size": 8 } })).await.0, 422);
}

#[tokio::test]
async fn a_deleted_definition_takes_its_objects_along() {
    let talk = defined().await;
    let mut held = thing("held", json!({ "size": 1 }));
    held["metadata"]["finalizers"] = json!(["example.com/hold"]);
    talk.made(THINGS, held).await;
    talk.made(THINGS, thing("plain", json!({ "size": 1 }))).await;
    let path = format!("{DEFINITIONS}/things.example.com");
    let mut watch = talk.watch(&format!("{DEFINITIONS}?watch=1&resourceVersion=0")).await;
    talk.delete(&path).await;
    loop {
        let event = watch.next().await.unwrap();
        let conditions = event["object"]["status"]["conditions"].as_array().cloned().unwrap_or_default();
        if conditions.iter().any(|c| c["type"] == "Terminating" && c["status"] == "True") {
            break;
        }
    }
    let (code, refused) = talk.post(THINGS, thing("new", json!({ "size": 1 }))).await;
    assert_eq!(code, 405, "{refused}");
    talk.patch(&format!("{THINGS}/held"), json!({ "metadata": { "finalizers": null } })).await;
    while watch.next().await.unwrap()["type"] != "DELETED" {}
    // Its kind leaves discovery with it; a new definition of the name starts empty.
    talk.made(DEFINITIONS, definition()).await;
    let mut watch = talk.watch(&format!("{DEFINITIONS}?watch=1&resourceVersion=0")).await;
    while !watch.next().await.unwrap()["object"]["status"]["conditions"].is_array() {}
    assert_eq!(talk.get(THINGS).await.1["items"], json!([]));
}

#[tokio::test]
async fn definitions_survive_a_restart() {
    let talk = defined().await;
    talk.made(THINGS, thing("a", json!({ "size": 3 }))).await;
    let Talk { client, server, dir } = talk;
    drop(client);
    server.close().await;
    let server =
        cleat_apiserver::ApiServer::open(cleat_apiserver::Config::new(dir.path(), "127.0.0.1:0".parse().unwrap()));
    let server = server.await.unwrap();
    let talk = Talk { client: server.client("system:admin"), server, dir };
    assert_eq!(talk.get(&format!("{THINGS}/a")).await.0, 200, "served from the first moment");
}

/// A definition as the CSI snapshotter has it, reduced to its rules.
fn ruled() -> Value {
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
            // The snapshotter's sizes have a type beside.
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
async fn rules_are_compiled_with_the_definition_and_kept_with_every_write() {
    let talk = talk().await;
    let mut wrong = ruled();
    let rules = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/x-kubernetes-validations/0/rule";
    for rule in ["self.a ==", "isIP(self.a)", ""] {
        *wrong.pointer_mut(rules).unwrap() = rule.into();
        let (code, refused) = talk.post(DEFINITIONS, wrong.clone()).await;
        assert_eq!(code, 422, "{rule}: {refused}");
        assert!(causes(&refused)[0].ends_with("properties[spec].x-kubernetes-validations[0].rule"), "{refused}");
    }
    talk.made(DEFINITIONS, ruled()).await;
    established(&talk).await;
    let message = |refused: &Value| refused["details"]["causes"][0]["message"].as_str().unwrap_or_default().to_owned();
    for (case, spec, want) in [
        ("neither", json!({}), "Invalid value: \"object\": exactly one of a and b"),
        ("both", json!({ "a": "1", "b": "2" }), "Invalid value: \"object\": exactly one of a and b"),
        ("half a reference", json!({ "a": "1", "ref": { "name": "x" } }), "Invalid value: \"object\": both are needed"),
    ] {
        let (code, refused) = talk.post(THINGS, thing("x", spec)).await;
        assert_eq!((code, message(&refused).as_str()), (422, want), "{case}: {refused}");
    }
    let reference = json!({ "name": "x", "namespace": "team" });
    talk.made(THINGS, thing("x", json!({ "a": "1", "handle": "h", "ref": reference }))).await;
    let path = format!("{THINGS}/x");
    assert_eq!(talk.patch(&path, json!({ "spec": { "a": "2" } })).await.0, 200, "what no rule is about can change");
    for (size, code) in [(json!(1024), 200), (json!("1Gi"), 200), (json!("much"), 422), (json!(true), 422)] {
        assert_eq!(talk.patch(&path, json!({ "spec": { "size": size } })).await.0, code, "{size}");
    }
    for (case, change, field) in [
        ("changed", json!({ "handle": "other" }), "spec.handle"),
        ("taken away", json!({ "handle": null }), "spec"),
        ("turned elsewhere", json!({ "ref": { "namespace": "other" } }), "spec.ref"),
    ] {
        let (code, refused) = talk.patch(&path, json!({ "spec": change })).await;
        assert_eq!((code, causes(&refused)), (422, vec![field.into()]), "{case}: {refused}");
    }
}
