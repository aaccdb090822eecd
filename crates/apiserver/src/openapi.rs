//! As much OpenAPI as makes kubectl send its work to the server: v3 names every kind's PATCH operation with the
//! `fieldValidation` parameter, so kubectl leaves validation to us. No schemas are published yet; kubectl then merges
//! with the keys compiled into it, which are the ones `patch::strategic` uses. v2 is empty, which is legal.

use http::StatusCode;
use serde_json::{Map, Value, json};

use crate::api::Kinds;
use crate::descriptor::Descriptor;
use crate::error::ApiError;
use crate::http::reply::Reply;

/// Clients ask for it with an `@`, which no parser of media types accepts in an answer.
const PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// openapi.v2.Document { swagger = 1: "2.0", info = 2: { title = 1: "Kubernetes", version = 2: "v1" }, paths = 8: {} }
const EMPTY_V2: &[u8] = b"\x0a\x032.0\x12\x10\x0a\x0aKubernetes\x12\x02v1\x42\x00";

pub(crate) fn v2(accept: Option<&str>) -> Reply {
    if accept.is_some_and(|a| a.contains("protobuf")) {
        return Reply { content_type: PROTOBUF, ..Reply::bytes(StatusCode::OK, EMPTY_V2) };
    }
    let body = json!({ "swagger": "2.0", "info": { "title": "Kubernetes", "version": "v1" }, "paths": {} });
    Reply::json(StatusCode::OK, &body)
}

fn document_path(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

pub(crate) fn v3_index(kinds: &Kinds) -> Reply {
    let mut paths = Map::new();
    for (group, versions) in kinds.groups() {
        for version in versions {
            let path = document_path(group, version);
            let url = format!("/openapi/v3/{path}?hash={}", env!("CARGO_PKG_VERSION"));
            paths.insert(path, json!({ "serverRelativeURL": url }));
        }
    }
    Reply::json(StatusCode::OK, &json!({ "paths": paths }))
}

pub(crate) fn v3_document(kinds: &Kinds, path: &str) -> Result<Reply, ApiError> {
    let groups = kinds.groups();
    let (group, version) = groups
        .iter()
        .flat_map(|(group, versions)| versions.iter().map(move |version| (*group, *version)))
        .find(|(group, version)| document_path(group, version) == path)
        .ok_or(ApiError::NoSuchResource)?;
    let mut paths = Map::new();
    for kind in kinds.in_version(group, version) {
        let d = kind.descriptor();
        let base = format!("/{}", document_path(group, version));
        let collection = match d.namespaced {
            true => format!("{base}/namespaces/{{namespace}}/{}", d.plural),
            false => format!("{base}/{}", d.plural),
        };
        paths.insert(format!("{collection}/{{name}}"), item(d));
        paths.insert(collection, operations(d, &["get", "post"]));
    }
    let body = json!({
        "openapi": "3.0.0", "info": { "title": "Kubernetes", "version": "v1" }, "paths": paths,
        "components": { "schemas": {} },
    });
    Ok(Reply::json(StatusCode::OK, &body))
}

fn operations(d: &Descriptor, methods: &[&str]) -> Value {
    let operation = json!({
        "responses": { "200": { "description": "OK" } },
        "x-kubernetes-group-version-kind": { "group": d.group, "version": d.version, "kind": d.kind },
    });
    methods.iter().map(|method| ((*method).to_owned(), operation.clone())).collect::<Map<_, _>>().into()
}

fn item(d: &Descriptor) -> Value {
    let mut item = operations(d, &["get", "put", "patch", "delete"]);
    let parameter = |name| json!({ "name": name, "in": "query", "schema": { "type": "string" } });
    item["patch"]["parameters"] = ["dryRun", "fieldManager", "fieldValidation", "force"].map(parameter).to_vec().into();
    item["patch"]["requestBody"] =
        json!({ "content": { "application/merge-patch+json": {}, "application/json-patch+json": {} } });
    item
}
