//! The OpenAPI documents: complete references, caching by hash, JSON and protobuf.

#![allow(clippy::unwrap_used)]

use cleat_apiserver::{ApiServer, Config};
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION};
use kube::Client;
use serde_json::{Value, json};

async fn server() -> (tempfile::TempDir, ApiServer, Client) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let client = server.client("test");
    (dir, server, client)
}

async fn get(client: &Client, path: &str, header: (http::HeaderName, &str)) -> (http::response::Parts, Vec<u8>) {
    let request = http::Request::get(path).header(header.0, header.1).body(Vec::new().into()).unwrap();
    let (parts, body) = client.send(request).await.unwrap().into_parts();
    (parts, http_body_util::BodyExt::collect(body).await.unwrap().to_bytes().to_vec())
}

async fn json(client: &Client, path: &str) -> Value {
    serde_json::from_slice(&get(client, path, (ACCEPT, "application/json")).await.1).unwrap()
}

/// Every `$ref` in a document.
fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("$ref").and_then(Value::as_str));
            fields.values().for_each(|v| references(v, found));
        }
        Value::Array(list) => list.iter().for_each(|v| references(v, found)),
        _ => {}
    }
}

#[tokio::test]
async fn every_kind_is_described_completely() {
    let (_dir, _server, client) = server().await;
    let index = json(&client, "/openapi/v3").await;
    for (path, entry) in index["paths"].as_object().unwrap() {
        let document = json(&client, entry["serverRelativeURL"].as_str().unwrap()).await;
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(!found.is_empty(), "{path}");
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{path}: {reference} does not exist");
        }
        for (url, item) in document["paths"].as_object().unwrap() {
            let Some(patch) = item.get("patch") else { continue };
            let kind = &patch["x-kubernetes-group-version-kind"];
            let parameters = patch["parameters"].as_array().unwrap();
            assert!(parameters.iter().any(|p| p["name"] == "fieldValidation" && p["in"] == "query"), "{url}");
            let content = &patch["requestBody"]["content"];
            assert!(content.get("application/apply-patch+yaml").is_some(), "{url}");
            let schemas = document["components"]["schemas"].as_object().unwrap();
            let described = schemas.values().any(|s| s["x-kubernetes-group-version-kind"] == json!([kind]));
            let strategic = content.get("application/strategic-merge-patch+json").is_some();
            assert!(described || !strategic, "{url}: strategic merge without a schema");
        }
    }
    let core = json(&client, "/openapi/v3/api/v1").await;
    let spec = &core["components"]["schemas"]["io.k8s.api.core.v1.PodSpec"]["properties"];
    let volumes = &spec["volumes"];
    assert_eq!(volumes["x-kubernetes-patch-strategy"], "merge,retainKeys");
    assert_eq!(volumes["x-kubernetes-patch-merge-key"], "name");
    assert_eq!(volumes["x-kubernetes-list-map-keys"], json!(["name"]));
    assert_eq!(
        spec["securityContext"]["allOf"][0]["$ref"],
        "#/components/schemas/io.k8s.api.core.v1.PodSecurityContext"
    );
}

#[tokio::test]
async fn documents_are_cached_by_their_hash() {
    let (_dir, _server, client) = server().await;
    let index = json(&client, "/openapi/v3").await;
    let url = index["paths"]["apis/storage.k8s.io/v1"]["serverRelativeURL"].as_str().unwrap();
    let (fresh, _) = get(&client, url, (ACCEPT, "application/json")).await;
    assert_eq!(fresh.status, 200);
    assert_eq!(fresh.headers[CACHE_CONTROL], "public, immutable");
    let etag = fresh.headers[ETAG].to_str().unwrap();
    let (same, body) = get(&client, url, (IF_NONE_MATCH, etag)).await;
    assert_eq!((same.status.as_u16(), body.len()), (304, 0));
    let stale = url.split("hash=").next().unwrap().to_owned() + "hash=OLD";
    let (moved, _) = get(&client, &stale, (ACCEPT, "application/json")).await;
    assert_eq!((moved.status.as_u16(), moved.headers[LOCATION].to_str().unwrap()), (301, url));
    let (missing, _) = get(&client, "/openapi/v3/apis/none/v1", (ACCEPT, "application/json")).await;
    assert_eq!(missing.status, 404);
}

#[tokio::test]
async fn openapi_v2_is_served_as_json_and_protobuf() {
    let (_dir, _server, client) = server().await;
    let document = json(&client, "/openapi/v2").await;
    assert_eq!(document["swagger"], "2.0");
    let claim = &document["definitions"]["io.k8s.api.core.v1.PersistentVolumeClaim"];
    let kind = json!([{ "group": "", "version": "v1", "kind": "PersistentVolumeClaim" }]);
    assert_eq!(claim["x-kubernetes-group-version-kind"], kind);
    assert_eq!(claim["properties"]["spec"]["$ref"], "#/definitions/io.k8s.api.core.v1.PersistentVolumeClaimSpec");
    let any = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON";
    assert_eq!(document["definitions"][any].get("type"), None, "a default can be a number");
    assert!(document["definitions"][any]["description"].is_string());
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.iter().all(|r| document.pointer(r.strip_prefix('#').unwrap()).is_some()));
    let wanted = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf";
    let (parts, bytes) = get(&client, "/openapi/v2", (ACCEPT, wanted)).await;
    assert_eq!(parts.headers[CONTENT_TYPE], "application/com.github.proto-openapi.spec.v2.v1.0+protobuf");
    assert!(bytes.starts_with(b"\x0a\x032.0\x12\x10\x0a\x0aKubernetes\x12\x02v1\x42"));
    let etag = parts.headers[ETAG].to_str().unwrap();
    assert_eq!(get(&client, "/openapi/v2", (IF_NONE_MATCH, etag)).await.0.status, 200, "JSON is another document");
}
