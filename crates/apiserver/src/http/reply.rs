//! Building HTTP responses: objects, Status, plain text, warnings.

use bytes::{Bytes, BytesMut};
use cleat_api::TypedReply;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderName, HeaderValue, RETRY_AFTER, VARY, WARNING};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use super::body::ApiBody;
use crate::descriptor::Descriptor;
use crate::error::ApiError;

pub(crate) const JSON: &str = "application/json";

/// An answer that is not an error.
pub(crate) struct Reply {
    pub(crate) code: StatusCode,
    pub(crate) content_type: &'static str,
    pub(crate) body: ApiBody,
    pub(crate) warnings: Vec<String>,
    /// Beyond those every answer has; one of the same name replaces it.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    /// In the place of a body.
    pub(crate) handed: Option<TypedReply>,
}

impl Reply {
    pub(crate) fn bytes(code: StatusCode, body: impl Into<Bytes>) -> Self {
        Self {
            code,
            content_type: JSON,
            body: ApiBody::full(body),
            warnings: Vec::new(),
            headers: Vec::new(),
            handed: None,
        }
    }

    pub(crate) fn handed(code: StatusCode, handed: TypedReply) -> Self {
        Self { handed: Some(handed), ..Self::bytes(code, Bytes::new()) }
    }

    pub(crate) fn buffer(code: StatusCode, mut body: BytesMut) -> Self {
        body.extend_from_slice(b"\n");
        Self::bytes(code, body.freeze())
    }

    pub(crate) fn json(code: StatusCode, body: &Value) -> Self {
        Self::bytes(code, format!("{body}\n"))
    }

    pub(crate) fn text(code: StatusCode, body: impl Into<Bytes>) -> Self {
        Self { content_type: "text/plain; charset=utf-8", ..Self::bytes(code, body) }
    }

    pub(crate) fn stream(body: ApiBody) -> Self {
        Self { body, ..Self::bytes(StatusCode::OK, Bytes::new()) }
    }

    /// The Status that reports success about one object.
    pub(crate) fn success(code: StatusCode, descriptor: &Descriptor, name: &str, uid: Option<&str>) -> Self {
        let mut details = json!({ "name": name, "kind": descriptor.plural });
        if !descriptor.group.is_empty() {
            details["group"] = descriptor.group.clone().into();
        }
        if let Some(uid) = uid {
            details["uid"] = uid.into();
        }
        let status =
            json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details });
        Self::json(code, &status)
    }

    pub(crate) fn with_warnings(mut self, warnings: Vec<String>) -> Self {
        self.warnings = warnings;
        self
    }

    /// The same JSON on many lines, for people. A stream stays as it is: its readers split it by line.
    pub(crate) fn pretty(mut self) -> Self {
        if let ApiBody::Full(Some(bytes)) = &self.body
            && self.content_type.starts_with(JSON)
            && let Ok(value) = serde_json::from_slice::<Value>(bytes)
        {
            self.body = ApiBody::full(format!("{value:#}\n"));
        }
        self
    }

    /// Lets a client that has this very body already go without it.
    pub(crate) fn conditional(mut self, if_none_match: Option<&str>) -> Self {
        let ApiBody::Full(Some(bytes)) = &self.body else { return self };
        let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
        let tag: String = hash.as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
        let tag = format!("\"{tag}\"");
        if if_none_match.is_some_and(|known| known.split(',').any(|t| t.trim().trim_start_matches("W/") == tag)) {
            self.code = StatusCode::NOT_MODIFIED;
            self.body = ApiBody::full(Bytes::new());
        }
        self.headers.extend(HeaderValue::from_str(&tag).map(|tag| (ETAG, tag)));
        self.headers.push((VARY, HeaderValue::from_static("Accept")));
        self.headers.push((CACHE_CONTROL, HeaderValue::from_static("public")));
        self
    }

    pub(crate) fn into_response(self) -> Response<ApiBody> {
        let mut response = Response::new(self.body);
        *response.status_mut() = self.code;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
        for (name, value) in self.headers {
            headers.insert(name, value);
        }
        for value in super::warning::headers(&self.warnings) {
            headers.append(WARNING, value);
        }
        if let Some(handed) = self.handed {
            response.extensions_mut().insert(handed);
        }
        response
    }
}

pub(crate) fn error(error: &ApiError) -> Response<ApiBody> {
    let (code, status) = error.status();
    let retry = status["details"]["retryAfterSeconds"].as_u64();
    let mut response = Reply::json(code, &status).into_response();
    if let Some(seconds) = retry {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}
