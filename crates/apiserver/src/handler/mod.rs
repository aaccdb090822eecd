//! Handles one request: authenticates, authorizes, routes, converts errors to Status objects, and records the outcome
//! in metrics and the audit log. Requests to resources are carried out by `endpoint`.

mod authorize;
mod health;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use cleat_api::transport::RequestBody;
use cleat_apimachinery::error::ApiError;
use cleat_auth::actor::Actor;
use cleat_auth::audit;
use cleat_auth::authenticate::{Caller, Peer, token};
use http::header::{ACCEPT, CONTENT_TYPE, IF_NONE_MATCH, USER_AGENT};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use tokio_util::sync::CancellationToken;

use crate::http::body::{IncomingBody, ResponseBody};
use crate::http::query::Query;
use crate::http::reply::{self, Reply};
use crate::http::route::{self, Route};
use crate::http::{ResourceRequest, protobuf};
use crate::state::ServerState;
use crate::{discovery, endpoint, metrics, openapi, review};

/// Handles a request of `peer`. Watches end when `closing` is cancelled.
pub(crate) async fn handle<B>(
    state: Arc<ServerState>,
    request: Request<B>,
    peer: Peer,
    closing: CancellationToken,
) -> Response<ResponseBody>
where
    B: IncomingBody,
{
    let started = Instant::now();
    let (parts, body) = request.into_parts();
    let route = route::parse(parts.uri.path());
    let query = Query::parse(parts.uri.query());
    let info = authorize::request_info(&state, &parts, &route, &query);
    let id = state.security.audit_ids.id_for(&parts.headers);
    let indent = wants_indentation(&query, &parts.headers);
    let authenticated = state.security.authenticator.authenticate(&peer, &parts.headers).await;
    let authorized = match &authenticated {
        Ok(caller) => authorize::authorize(&state, caller.clone(), &parts.headers, &info).await,
        Err(error) => Err(error.clone()),
    };
    let outcome = match &authorized {
        // The body of a refused request is not read.
        Err(error) => Err(error.clone()),
        Ok(caller) => match body.read(state.limits.body_timeout).await {
            Ok(body) => {
                let (caller, verb) = (caller.clone(), info.verb);
                let request = AuthorizedRequest { parts, query, body, caller, verb, closing };
                Box::pin(route_request(&state, route, request)).await
            }
            Err(error) => Err(error),
        },
    };
    let mut response = match outcome {
        Ok(reply) if indent => reply.indented().into_response(),
        Ok(reply) => reply.into_response(),
        Err(error) => reply::error(&error),
    };
    let (code, duration) = (response.status(), started.elapsed());
    state.security.metrics.record_response(&info, code, duration);
    if let Some(audit) = &state.security.audit_log {
        audit.record(
            id.to_str().unwrap_or_default(),
            authenticated.as_deref().ok(),
            authorized.as_deref().ok(),
            &info,
            code,
            duration,
        );
    }
    response.headers_mut().insert(audit::AUDIT_ID_HEADER, id);
    if info.verb == "watch" && code == StatusCode::OK {
        let watching = state.security.metrics.track_watch(&info);
        return response.map(|body| body.with_guard(watching));
    }
    response
}

/// Returns true if the reply is to be indented: as the parameter `pretty` says, and without it for browsers, curl and
/// wget.
fn wants_indentation(query: &Query, headers: &HeaderMap) -> bool {
    match query.get("pretty") {
        Some(value) => !matches!(value, "0" | "false"),
        None => {
            let agent = headers.get(USER_AGENT).and_then(|v| v.to_str().ok()).unwrap_or_default();
            ["curl", "Wget", "Mozilla/"].iter().any(|name| agent.starts_with(name))
        }
    }
}

/// The reply of a server that is closed.
pub(crate) fn unavailable() -> Response<ResponseBody> {
    reply::error(&ApiError::Unavailable)
}

/// A request whose caller may send it.
struct AuthorizedRequest {
    parts: Parts,
    query: Query,
    body: RequestBody,
    caller: Arc<Caller>,
    verb: &'static str,
    closing: CancellationToken,
}

async fn route_request(state: &Arc<ServerState>, route: Route, request: AuthorizedRequest) -> Result<Reply, ApiError> {
    let AuthorizedRequest { parts, query, body, caller, verb, closing } = request;
    let header = |name| parts.headers.get(name).and_then(|v: &http::HeaderValue| v.to_str().ok());
    let accept = header(ACCEPT);
    let kinds = state.kinds();
    let is_read = matches!(parts.method, Method::GET | Method::HEAD);
    match route {
        // Only resources can be written.
        ref other if !is_read && !matches!(other, Route::Resource(_) | Route::Unknown) => {
            Err(ApiError::MethodNotAllowed)
        }
        Route::Health(_) => Ok(health::check(state, parts.uri.path(), parts.uri.query()).await),
        Route::Version => Ok(discovery::version()),
        Route::Metrics => match state.security.metrics.encode(&*state.store, &kinds).await {
            Ok(text) => Ok(Reply { content_type: metrics::MEDIA_TYPE, ..Reply::text(StatusCode::OK, text) }),
            Err(error) => Err(ApiError::Internal(error.to_string())),
        },
        Route::OpenIdConfiguration => Ok(Reply::json(StatusCode::OK, &token::openid_configuration())),
        Route::OpenIdKeys => Ok(Reply {
            content_type: "application/jwk-set+json",
            ..Reply::json(StatusCode::OK, &state.security.authenticator.signer.key_set())
        }),
        Route::Root => Ok(discovery::root(&kinds)),
        Route::CoreVersions => Ok(discovery::core_versions(&kinds, accept).with_etag(header(IF_NONE_MATCH))),
        Route::Groups => Ok(discovery::groups(&kinds, accept).with_etag(header(IF_NONE_MATCH))),
        Route::Group(group) => discovery::group(&kinds, &group),
        Route::Resources { group, version } => discovery::resources(&kinds, &group, &version),
        Route::OpenApiV2 => Ok(openapi::v2(&kinds, openapi::DocumentRequest::new(&parts))),
        Route::OpenApiV3 => Ok(openapi::v3_index(&kinds)),
        Route::OpenApiV3Document(path) => openapi::v3_document(&kinds, &path, openapi::DocumentRequest::new(&parts)),
        Route::Resource(target)
            if kinds.in_group_version(&target.group, &target.version).next().is_none()
                && !review::is_group_version(&target.group, &target.version) =>
        {
            Ok(page_not_found())
        }
        Route::Resource(target) => {
            let (content_type, body) = to_json(header(CONTENT_TYPE), body)?;
            let request = ResourceRequest {
                query,
                accept: accept.map(Into::into),
                content_type,
                user_agent: header(USER_AGENT).unwrap_or(&caller.name).to_owned(),
                method: parts.method,
                actor: Actor::Client { caller: caller.clone(), verb },
                body,
                encoded_object: OnceLock::new(),
                closing,
            };
            match review::find(&target.group, &target.version, &target.plural) {
                Some(_) => review::handle(state, &request, &caller, &target).await,
                None => endpoint::dispatch(state, request, &target).await,
            }
        }
        Route::Unknown => Ok(page_not_found()),
    }
}

fn page_not_found() -> Reply {
    Reply::text(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// Converts a protobuf body to JSON, so that no later code depends on the encoding. Other bodies are not changed.
fn to_json(content_type: Option<&str>, body: RequestBody) -> Result<(Option<String>, RequestBody), ApiError> {
    let is_protobuf = content_type.is_some_and(|t| t.starts_with(protobuf::MEDIA_TYPE));
    let bytes = match body {
        RequestBody::Encoded(bytes, _) if is_protobuf && !bytes.is_empty() => bytes,
        other => return Ok((content_type.map(Into::into), other)),
    };
    match protobuf::decode(&bytes) {
        Ok(value) => Ok((Some(reply::JSON.into()), RequestBody::encoded(value.to_string()))),
        Err(protobuf::ProtobufError::UnknownKind(_)) => Err(ApiError::UnsupportedMediaType(reply::JSON)),
        Err(error) => Err(ApiError::BadRequest(error.to_string())),
    }
}
