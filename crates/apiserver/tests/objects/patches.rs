//! The three kinds of patches where they are refused, and where they touch what they should not.

use serde_json::{Value, json};

use crate::talk::{send, server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const JSON: &str = "application/json-patch+json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

#[tokio::test]
async fn patches_that_do_not_apply_are_refused() {
    let (_dir, _server, client) = server().await;
    let map = json!({ "metadata": { "name": "a" }, "data": { "k": "v" } });
    let (_, made) = send(&client, "POST", MAPS, "application/json", map).await;
    let rejected = "the server rejected our request due to an error in our request";
    let many = vec![json!({ "op": "test", "path": "/data/k", "value": "v" }); 10_001];
    for (case, media, patch, code, text) in [
        ("a test that fails", JSON, json!([{ "op": "test", "path": "/data/k", "value": "x" }]), 422, rejected),
        (
            "a parent that is not there",
            JSON,
            json!([{ "op": "add", "path": "/metadata/finalizers/-", "value": "a/b" }]),
            422,
            rejected,
        ),
        ("nothing to remove", JSON, json!([{ "op": "remove", "path": "/data/none" }]), 422, rejected),
        ("nothing to replace", JSON, json!([{ "op": "replace", "path": "/data/none", "value": "x" }]), 422, rejected),
        ("an operation there is not", JSON, json!([{ "op": "increment", "path": "/data/k" }]), 422, rejected),
        ("an object for a list of operations", JSON, json!({ "op": "remove" }), 400, "error decoding patch"),
        ("too many operations", JSON, many.into(), 413, "10000"),
        ("a list for an object", MERGE, json!([]), 400, "json: cannot unmarshal array into Go value"),
        ("a wrong type", MERGE, json!({ "data": ["x"] }), 422, "patch: Invalid value"),
        ("an old version", MERGE, json!({ "metadata": { "resourceVersion": "1" } }), 409, "has been modified"),
        ("another incarnation", MERGE, json!({ "metadata": { "uid": "x" } }), 422, "field is immutable"),
        ("an unknown directive", STRATEGIC, json!({ "data": { "$patch": "shuffle" } }), 400, "shuffle"),
    ] {
        let (got, status) = send(&client, "PATCH", &format!("{MAPS}/a"), media, patch).await;
        let message = status["message"].as_str().unwrap_or_default();
        assert!(got == code && message.contains(text), "{case}: {got} {message}");
    }
    for (text, want) in [("{nope", "invalid JSON patch"), ("", "invalid JSON patch")] {
        let (got, status) = send(&client, "PATCH", &format!("{MAPS}/a"), MERGE, text).await;
        assert_eq!((got, status["message"].as_str().unwrap()), (400, want));
    }
    let (_, now) = send(&client, "GET", &format!("{MAPS}/a"), "application/json", "").await;
    assert_eq!(now, made, "no refused patch has left anything");
}

#[tokio::test]
async fn a_pod_merges_as_its_schema_says() {
    let (_dir, _server, client) = server().await;
    let pods = "/api/v1/namespaces/default/pods";
    let pod = json!({ "metadata": { "name": "p" }, "spec": {
        "containers": [{ "name": "c", "image": "i:1", "ports": [{ "containerPort": 80 }] }],
        "tolerations": [{ "key": "a", "operator": "Exists" }],
    } });
    let (code, made) = send(&client, "POST", pods, "application/json", pod).await;
    assert_eq!(code, 201, "{made}");
    let patch = json!({
        "metadata": { "finalizers": ["a/b"] },
        "spec": { "containers": [{ "name": "c", "image": "i:2" }] },
    });
    let (code, merged) = send(&client, "PATCH", &format!("{pods}/p"), STRATEGIC, patch).await;
    assert_eq!(code, 200, "{merged}");
    let container = &merged["spec"]["containers"][0];
    assert_eq!((&container["image"], &container["ports"][0]["containerPort"]), (&json!("i:2"), &json!(80)));
    let more = json!({ "metadata": { "finalizers": ["c/d"], "$deleteFromPrimitiveList/finalizers": ["a/b"] } });
    let (_, merged) = send(&client, "PATCH", &format!("{pods}/p"), STRATEGIC, more).await;
    assert_eq!(merged["metadata"]["finalizers"], json!(["c/d"]));
    let status = json!({ "status": { "conditions": [{ "type": "X", "status": "True" }] } });
    send(&client, "PATCH", &format!("{pods}/p/status"), STRATEGIC, status).await;
    let status = json!({ "status": { "conditions": [{ "type": "Y", "status": "True" }] } });
    let (_, merged) = send(&client, "PATCH", &format!("{pods}/p/status"), STRATEGIC, status).await;
    let types: Vec<_> =
        merged["status"]["conditions"].as_array().unwrap().iter().map(|c| c["type"].as_str().unwrap()).collect();
    assert!(types.contains(&"X") && types.contains(&"Y"), "{types:?}");
}

#[tokio::test]
async fn a_patch_of_finalizers_alone_does_what_one_of_more_does() {
    let path = &format!("{MAPS}/a");
    let mut seen = [Vec::new(), Vec::new()];
    for (more, seen) in [false, true].into_iter().zip(&mut seen) {
        let (_dir, _server, client) = server().await;
        let map = json!({ "metadata": { "name": "a", "labels": { "l": "m" } }, "data": { "k": "v" } });
        send(&client, "POST", MAPS, "application/json", map).await;
        let patch = async |mut metadata: Value| {
            if metadata["resourceVersion"] == "now" {
                let (_, now) = send(&client, "GET", path, "application/json", "").await;
                metadata["resourceVersion"] = now["metadata"]["resourceVersion"].clone();
            }
            if more {
                // It says nothing new.
                metadata["name"] = "a".into();
            }
            let (code, mut answer) = send(&client, "PATCH", path, MERGE, json!({ "metadata": metadata })).await;
            if answer["kind"] == "ConfigMap" {
                for field in ["uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"] {
                    answer["metadata"].as_object_mut().unwrap().remove(field);
                }
                for entry in answer["metadata"]["managedFields"].as_array_mut().unwrap() {
                    entry["time"].take();
                }
            }
            (code, answer)
        };
        for metadata in [
            json!({ "finalizers": ["a/b", "c/d"] }),
            json!({ "finalizers": ["a/b", "c/d"] }),
            json!({ "finalizers": ["a/b", "a/b"] }),
            json!({ "finalizers": ["no good"] }),
            json!({ "finalizers": ["e/f"], "resourceVersion": "1" }),
            json!({ "finalizers": ["e/f"], "resourceVersion": null }),
            json!({ "finalizers": ["e/f"], "resourceVersion": "now" }),
            json!({ "finalizers": [] }),
            json!({ "finalizers": ["g/h"] }),
            json!({ "finalizers": null }),
            json!({ "finalizers": ["i/j"] }),
        ] {
            seen.push(patch(metadata).await);
        }
        for unreadable in [json!({ "finalizers": [1] }), json!({ "finalizers": "a/b" })] {
            // They are told what they have sent.
            seen.push((patch(unreadable).await.0, Value::Null));
        }
        send(&client, "DELETE", path, "application/json", "").await;
        seen.push(patch(json!({ "finalizers": [] })).await);
        let (code, gone) = send(&client, "GET", path, "application/json", "").await;
        assert_eq!(code, 404, "{gone}");
    }
    let [alone, more] = seen;
    let codes: Vec<u16> = alone.iter().map(|(code, _)| *code).collect();
    assert_eq!(codes, [200, 200, 200, 422, 409, 200, 200, 200, 200, 200, 200, 422, 422, 200]);
    assert_eq!(alone, more);
}
