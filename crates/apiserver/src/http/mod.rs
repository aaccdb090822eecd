//! The front of the server: one HTTP request in, one response out. It routes, negotiates and turns errors into
//! Status objects; what a request means is decided in `endpoint`.

pub(crate) mod accept;
pub(crate) mod body;
mod protobuf;
pub(crate) mod query;
pub(crate) mod reply;
pub(crate) mod route;

use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::authenticate::Caller;
use crate::error::ApiError;
use crate::{discovery, endpoint, openapi};
use body::ApiBody;
use query::Query;
use reply::Reply;
use route::Route;

/// A request to a resource, taken apart.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) query: Query,
    pub(crate) accept: Option<String>,
    pub(crate) content_type: Option<String>,
    pub(crate) body: Bytes,
    /// Ends streams when the connection's server stops.
    pub(crate) closing: CancellationToken,
}

pub(crate) async fn handle<B>(
    api: Arc<Api>,
    request: Request<B>,
    caller: Option<Caller>,
    closing: CancellationToken,
) -> Response<ApiBody>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (parts, body) = request.into_parts();
    let outcome = match body::read(body).await {
        Ok(body) => answer(&api, parts, body, caller, closing).await,
        Err(error) => Err(error),
    };
    match outcome {
        Ok(reply) => reply.into_response(),
        Err(error) => reply::error(&error),
    }
}

/// What a client of a server that is gone is told.
pub(crate) fn unavailable() -> Response<ApiBody> {
    reply::error(&ApiError::Unavailable)
}

async fn answer(
    api: &Arc<Api>,
    parts: Parts,
    body: Bytes,
    caller: Option<Caller>,
    closing: CancellationToken,
) -> Result<Reply, ApiError> {
    let header = |name| parts.headers.get(name).and_then(|v: &http::HeaderValue| v.to_str().ok());
    let accept = header(ACCEPT);
    let route = route::parse(parts.uri.path());
    if let Route::Health(check) = &route {
        let verbose = Query::parse(parts.uri.query()).get("verbose").is_some();
        let text = if verbose { format!("[+]ping ok\n[+]store ok\n{check} check passed\n") } else { "ok".into() };
        return Ok(Reply::text(StatusCode::OK, text));
    }
    if route == Route::Version {
        return Ok(discovery::version());
    }
    let caller = caller.ok_or(ApiError::Unauthorized)?;
    // Authorization belongs here: whoever has proved to be somebody may do everything so far.
    tracing::trace!(user = caller.name, groups = ?caller.groups, method = %parts.method, uri = %parts.uri, "request");
    let kinds = api.kinds();
    match route {
        Route::Root => Ok(discovery::root(&kinds)),
        Route::CoreVersions => Ok(discovery::core_versions(&kinds, accept)),
        Route::Groups => Ok(discovery::groups(&kinds, accept)),
        Route::Group(group) => discovery::group(&kinds, &group),
        Route::Resources { group, version } => discovery::resources(&kinds, &group, &version),
        Route::OpenApiV2 => Ok(openapi::v2(accept)),
        Route::OpenApiV3 => Ok(openapi::v3_index(&kinds)),
        Route::OpenApiV3Document(path) => openapi::v3_document(&kinds, &path),
        Route::Resource(target) if kinds.in_version(&target.group, &target.version).next().is_none() => {
            Ok(page_not_found())
        }
        Route::Resource(target) => {
            let (content_type, body) = as_json(header(CONTENT_TYPE), body)?;
            let call = Call {
                query: Query::parse(parts.uri.query()),
                accept: accept.map(Into::into),
                content_type,
                method: parts.method,
                body,
                closing,
            };
            endpoint::dispatch(api, call, target).await
        }
        Route::Health(_) | Route::Version | Route::Unknown => Ok(page_not_found()),
    }
}

fn page_not_found() -> Reply {
    Reply::text(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// Bodies in other encodings are turned into JSON at the door, so that nothing behind it has to know of them.
fn as_json(content_type: Option<&str>, body: Bytes) -> Result<(Option<String>, Bytes), ApiError> {
    let is_protobuf = content_type.is_some_and(|t| t.starts_with(protobuf::MEDIA_TYPE));
    if !is_protobuf || body.is_empty() {
        return Ok((content_type.map(Into::into), body));
    }
    match protobuf::decode(&body) {
        Ok(value) => Ok((Some(reply::JSON.into()), value.to_string().into())),
        Err(protobuf::ProtobufError::UnknownKind(_)) => Err(ApiError::UnsupportedMediaType(reply::JSON)),
        Err(error) => Err(ApiError::BadRequest(error.to_string())),
    }
}
