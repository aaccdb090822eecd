//! OpenAPI documents of the served kinds, which kubectl uses for `explain`, validation and merging.
//!
//! Documents are generated for each request and not cached: their descriptions make them large. Clients cache them by
//! their ETag, a hash that is computed without the document.

mod gnostic;
mod paths;
mod v2;
mod v3;

use bytes::Bytes;
use http::StatusCode;
use http::header::{ACCEPT, CACHE_CONTROL, ETAG, EXPIRES, HeaderName, HeaderValue, IF_NONE_MATCH, LOCATION};
use http::request::Parts;
use serde_json::{Map, json};
use sha2::{Digest, Sha256};

use crate::http::reply::Reply;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::schema::builtin::OpenApiDefinitions;
use cleat_registry::catalog::ServedKinds;

/// The media type of the protobuf form. Clients request it with `@` before the version, which is not valid in
/// Content-Type.
const PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// The parts of a request that decide the reply.
#[derive(Clone, Copy)]
pub(crate) struct DocumentRequest<'a> {
    pub(crate) accept: Option<&'a str>,
    pub(crate) if_none_match: Option<&'a str>,
    /// The parameter `hash`, which the URLs in the v3 index contain.
    pub(crate) hash: Option<&'a str>,
}

impl<'a> DocumentRequest<'a> {
    pub(crate) fn new(request: &'a Parts) -> Self {
        let header = |name: HeaderName| request.headers.get(name).and_then(|v| v.to_str().ok());
        let hash = request.uri.query().into_iter().flat_map(|q| q.split('&')).find_map(|p| p.strip_prefix("hash="));
        Self { accept: header(ACCEPT), if_none_match: header(IF_NONE_MATCH), hash }
    }
}

pub(crate) fn v2(kinds: &ServedKinds, request: DocumentRequest<'_>) -> Reply {
    let is_protobuf = request.accept.is_some_and(|a| a.contains("protobuf"));
    let hash = hash_of_kinds(kinds, |_, _| true);
    let etag = if is_protobuf { format!("{hash}P") } else { hash };
    if let Some(reply) = not_modified(&etag, request) {
        return reply;
    }
    let document = v2::document(kinds);
    let reply = match is_protobuf {
        true => Reply { content_type: PROTOBUF, ..Reply::bytes(StatusCode::OK, gnostic::encode(&document)) },
        false => Reply::json(StatusCode::OK, &document),
    };
    reply.with_header(ETAG, quoted(&etag))
}

fn document_path(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

fn document_url(kinds: &ServedKinds, group: &str, version: &str) -> (String, String) {
    let hash = hash_of_kinds(kinds, |g, v| g == group && v == version);
    (format!("/openapi/v3/{}?hash={hash}", document_path(group, version)), hash)
}

pub(crate) fn v3_index(kinds: &ServedKinds) -> Reply {
    let mut paths = Map::new();
    for (group, versions) in kinds.groups() {
        for version in versions {
            let (url, _) = document_url(kinds, group, version);
            paths.insert(document_path(group, version), json!({ "serverRelativeURL": url }));
        }
    }
    Reply::json(StatusCode::OK, &json!({ "paths": paths }))
}

pub(crate) fn v3_document(kinds: &ServedKinds, path: &str, request: DocumentRequest<'_>) -> Result<Reply, ApiError> {
    let groups = kinds.groups();
    let (group, version) = groups
        .iter()
        .flat_map(|(group, versions)| versions.iter().map(move |version| (*group, *version)))
        .find(|(group, version)| document_path(group, version) == path)
        .ok_or(ApiError::NoSuchResource)?;
    let (url, hash) = document_url(kinds, group, version);
    if request.hash.is_some_and(|h| h != hash) {
        let moved = Reply::bytes(StatusCode::MOVED_PERMANENTLY, Bytes::new());
        return Ok(moved.with_header(LOCATION, HeaderValue::from_str(&url).unwrap_or(HeaderValue::from_static("/"))));
    }
    if let Some(reply) = not_modified(&hash, request) {
        return Ok(reply);
    }
    let mut reply = Reply::json(StatusCode::OK, &v3::document(kinds, group, version));
    reply = reply.with_header(ETAG, quoted(&hash));
    if request.hash.is_some() {
        // The document at a URL with its hash never changes.
        reply = reply
            .with_header(CACHE_CONTROL, HeaderValue::from_static("public, immutable"))
            .with_header(EXPIRES, HeaderValue::from_static("Thu, 31 Dec 2099 23:59:59 GMT"));
    }
    Ok(reply)
}

fn quoted(hash: &str) -> HeaderValue {
    HeaderValue::from_str(&format!("\"{hash}\"")).unwrap_or(HeaderValue::from_static("\"\""))
}

fn not_modified(hash: &str, request: DocumentRequest<'_>) -> Option<Reply> {
    let mut tags = request.if_none_match?.split(',').map(|tag| tag.trim().trim_start_matches("W/").trim_matches('"'));
    let is_current = tags.any(|tag| tag == hash || tag == "*");
    is_current.then(|| Reply::bytes(StatusCode::NOT_MODIFIED, Bytes::new()).with_header(ETAG, quoted(hash)))
}

/// A hash that changes whenever the documents of the included versions change. Built-in kinds change only with the
/// program's version; of custom resources the schema is hashed.
fn hash_of_kinds(kinds: &ServedKinds, included: impl Fn(&str, &str) -> bool) -> String {
    let mut hasher = Sha256::new();
    hasher.update(env!("CARGO_PKG_VERSION"));
    for kind in kinds.iter().filter(|k| included(&k.descriptor().group, &k.descriptor().version)) {
        hasher.update(format!("{:?}", kind.descriptor()));
        if !kind.supports_strategic_merge() {
            let mut definitions = OpenApiDefinitions::new();
            if let Some(name) = kind.add_openapi_definition(&mut definitions) {
                let definition = definitions.finish().remove(&name).unwrap_or_default();
                hasher.update(definition.to_string());
            }
        }
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02X}")).collect()
}
