//! JSON patches, merge patches and strategic merge patches: refused patches, merging by schema, and patches of
//! finalizers.

use serde_json::{Value, json};

use crate::test_api::{send, start_with_component_client};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const JSON: &str = "application/json-patch+json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

#[tokio::test]
async fn patches_that_do_not_apply_are_refused() {
    let (_dir, _server, client) = start_with_component_client().await;
    let map = json!({ "metadata": { "name": "a" }, "data": { "k": "v" } });
    let (_, created) = send(&client, "POST", MAPS, "application/json", map).await;
    let rejected = "the server rejected our request due to an error in our request";
    let many = vec![json!({ "op": "test", "path": "/data/k", "value": "v" }); 10_001];
    for (case, media, patch, code, text) in [
        ("a test that fails", JSON, json!([{ "op": "test", "path": "/data/k", "value": "x" }]), 422, rejected),
        (
            "a parent that does not exist",
            JSON,
            json!([{ "op": "add", "path": "/metadata/finalizers/-", "value": "a/b" }]),
            422,
            rejected,
        ),
        ("nothing to remove", JSON, json!([{ "op": "remove", "path": "/data/none" }]), 422, rejected),
        ("nothing to replace", JSON, json!([{ "op": "replace", "path": "/data/none", "value": "x" }]), 422, rejected),
        ("an unknown operation", JSON, json!([{ "op": "increment", "path": "/data/k" }]), 422, rejected),
        ("an object for a list of operations", JSON, json!({ "op": "remove" }), 400, "error decoding patch"),
        ("too many operations", JSON, many.into(), 413, "10000"),
        ("a list for an object", MERGE, json!([]), 400, "json: cannot unmarshal array into Go value"),
        ("a wrong type", MERGE, json!({ "data": ["x"] }), 422, "patch: Invalid value"),
        ("an old version", MERGE, json!({ "metadata": { "resourceVersion": "1" } }), 409, "has been modified"),
        ("another uid", MERGE, json!({ "metadata": { "uid": "x" } }), 422, "field is immutable"),
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
    assert_eq!(now, created, "no refused patch changed the object");
}

#[tokio::test]
async fn a_strategic_patch_of_a_pod_follows_the_schema() {
    let (_dir, _server, client) = start_with_component_client().await;
    let pods = "/api/v1/namespaces/default/pods";
    let pod = json!({ "metadata": { "name": "p" }, "spec": {
        "containers": [{ "name": "c", "image": "i:1", "ports": [{ "containerPort": 80 }] }],
        "tolerations": [{ "key": "a", "operator": "Exists" }],
    } });
    let (code, created) = send(&client, "POST", pods, "application/json", pod).await;
    assert_eq!(code, 201, "{created}");
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
async fn a_patch_of_finalizers_only_gives_the_same_results_as_other_patches() {
    let path = &format!("{MAPS}/a");
    let mut results = [Vec::new(), Vec::new()];
    for (with_name, results) in [false, true].into_iter().zip(&mut results) {
        let (_dir, _server, client) = start_with_component_client().await;
        let map = json!({ "metadata": { "name": "a", "labels": { "l": "m" } }, "data": { "k": "v" } });
        send(&client, "POST", MAPS, "application/json", map).await;
        let patch = async |mut metadata: Value| {
            if metadata["resourceVersion"] == "now" {
                let (_, now) = send(&client, "GET", path, "application/json", "").await;
                metadata["resourceVersion"] = now["metadata"]["resourceVersion"].clone();
            }
            if with_name {
                // The name changes nothing, but the patch is no longer one of finalizers only.
                metadata["name"] = "a".into();
            }
            let (code, mut reply) = send(&client, "PATCH", path, MERGE, json!({ "metadata": metadata })).await;
            if reply["kind"] == "ConfigMap" {
                for field in ["uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"] {
                    reply["metadata"].as_object_mut().unwrap().remove(field);
                }
                for entry in reply["metadata"]["managedFields"].as_array_mut().unwrap() {
                    entry["time"].take();
                }
            }
            (code, reply)
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
            results.push(patch(metadata).await);
        }
        for unreadable in [json!({ "finalizers": [1] }), json!({ "finalizers": "a/b" })] {
            // The error messages contain the patch, so only the codes are equal.
            results.push((patch(unreadable).await.0, Value::Null));
        }
        send(&client, "DELETE", path, "application/json", "").await;
        results.push(patch(json!({ "finalizers": [] })).await);
        let (code, gone) = send(&client, "GET", path, "application/json", "").await;
        assert_eq!(code, 404, "{gone}");
    }
    let [only, with_name] = results;
    let codes: Vec<u16> = only.iter().map(|(code, _)| *code).collect();
    assert_eq!(codes, [200, 200, 200, 422, 409, 200, 200, 200, 200, 200, 200, 422, 422, 200]);
    assert_eq!(only, with_name);
}
