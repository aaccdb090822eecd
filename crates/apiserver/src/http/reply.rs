//! HTTP responses: objects, Status, plain text, errors and warnings.

use bytes::{Bytes, BytesMut};
use cleat_api::transport::TypedReply;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderName, HeaderValue, RETRY_AFTER, VARY, WARNING};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use super::body::ResponseBody;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;

pub(crate) const JSON: &str = "application/json";

/// A response that is not an error.
pub(crate) struct Reply {
    pub(crate) code: StatusCode,
    pub(crate) content_type: &'static str,
    pub(crate) body: ResponseBody,
    pub(crate) warnings: Vec<String>,
    /// Additional headers. They replace default headers of the same name.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
}

impl Reply {
    pub(crate) fn bytes(code: StatusCode, body: impl Into<Bytes>) -> Self {
        Self { code, content_type: JSON, body: ResponseBody::full(body), warnings: Vec::new(), headers: Vec::new() }
    }

    /// An object without encoding, for a caller in this process that accepts it.
    pub(crate) fn object(code: StatusCode, object: TypedReply) -> Self {
        Self { body: ResponseBody::Object(object), ..Self::bytes(code, Bytes::new()) }
    }

    /// JSON in a buffer; a newline is added.
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

    pub(crate) fn stream(body: ResponseBody) -> Self {
        Self { body, ..Self::bytes(StatusCode::OK, Bytes::new()) }
    }

    /// A Status that reports the success of an operation on one object.
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

    /// Indents a JSON body. Streams are not changed: watch clients expect one object per line.
    pub(crate) fn indented(mut self) -> Self {
        if let ResponseBody::Full(Some(bytes)) = &self.body
            && self.content_type.starts_with(JSON)
            && let Ok(value) = serde_json::from_slice::<Value>(bytes)
        {
            self.body = ResponseBody::full(format!("{value:#}\n"));
        }
        self
    }

    /// Adds an ETag. If the client already has this body, the reply becomes 304 Not Modified.
    pub(crate) fn with_etag(mut self, if_none_match: Option<&str>) -> Self {
        let ResponseBody::Full(Some(bytes)) = &self.body else { return self };
        let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
        let tag: String = hash.as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
        let tag = format!("\"{tag}\"");
        if if_none_match.is_some_and(|tags| tags.split(',').any(|t| t.trim().trim_start_matches("W/") == tag)) {
            self.code = StatusCode::NOT_MODIFIED;
            self.body = ResponseBody::full(Bytes::new());
        }
        self.headers.extend(HeaderValue::from_str(&tag).map(|tag| (ETAG, tag)));
        self.headers.push((VARY, HeaderValue::from_static("Accept")));
        self.headers.push((CACHE_CONTROL, HeaderValue::from_static("public")));
        self
    }

    pub(crate) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    pub(crate) fn into_response(self) -> Response<ResponseBody> {
        let mut response = Response::new(self.body);
        *response.status_mut() = self.code;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
        for (name, value) in self.headers {
            headers.insert(name, value);
        }
        for value in super::warnings::headers(&self.warnings) {
            headers.append(WARNING, value);
        }
        response
    }
}

/// The Status of an error, with `Retry-After` if it names a time.
pub(crate) fn error(error: &ApiError) -> Response<ResponseBody> {
    let (code, status) = error.status();
    let retry = status["details"]["retryAfterSeconds"].as_u64();
    let mut response = Reply::json(code, &status).into_response();
    if let Some(seconds) = retry {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}
