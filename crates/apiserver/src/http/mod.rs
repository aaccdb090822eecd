//! The front of the server: one HTTP request in, one response out. It routes, negotiates and turns errors into
//! Status objects; what a request means is decided in `endpoint`.

pub(crate) mod accept;
pub(crate) mod body;
pub(crate) mod gate;
mod health;
mod protobuf;
mod protobuf_security;
mod protobuf_sidecars;
pub(crate) mod query;
pub(crate) mod reply;
pub(crate) mod route;
mod warning;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bytes::Bytes;
use cleat_api::TypedBody;
use http::header::{ACCEPT, CONTENT_TYPE, IF_NONE_MATCH, USER_AGENT};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::authenticate::{Caller, Peer, authenticate, token};
use crate::error::ApiError;
use crate::kind::{Kind, Object};
use crate::{audit, discovery, endpoint, guard, metrics, openapi, review};
use body::ApiBody;
use gate::Asked;
use query::Query;
use reply::Reply;
use route::Route;

/// A request to a resource, taken apart.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) query: Query,
    pub(crate) accept: Option<String>,
    pub(crate) content_type: Option<String>,
    /// Who the client says it is.
    pub(crate) agent: String,
    body: Bytes,
    /// From a component of this process: an object in place of a body, or the type of the answer.
    pub(crate) handed: Option<TypedBody>,
    /// What the object that was handed over says.
    said: OnceLock<Bytes>,
    /// Ends streams when the connection's server stops.
    pub(crate) closing: CancellationToken,
}

impl Call {
    /// What the body says, or the object in its place.
    pub(crate) fn text(&self) -> &Bytes {
        match &self.handed {
            Some(handed) if self.body.is_empty() => {
                self.said.get_or_init(|| handed.encode().map(Bytes::from).unwrap_or_default())
            }
            _ => &self.body,
        }
    }

    /// The object in place of a body, if there is one that the kind knows. Whoever asks again reads what it `says`.
    pub(crate) fn adopted<T>(&self, kind: &dyn Kind, says: impl FnOnce(Box<dyn Object>) -> (T, Bytes)) -> Option<T> {
        let object = kind.adopt(self.handed.as_ref().filter(|_| self.body.is_empty())?)?;
        let (made, text) = says(object);
        self.said.get_or_init(|| text);
        Some(made)
    }
}

pub(crate) async fn handle<B>(
    api: Arc<Api>,
    request: Request<B>,
    peer: Peer,
    closing: CancellationToken,
) -> Response<ApiBody>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let begun = Instant::now();
    let (parts, body) = request.into_parts();
    let route = route::parse(parts.uri.path());
    let query = Query::parse(parts.uri.query());
    let asked = Asked::new(&api, &parts, &route, &query);
    let id = api.security.ids.of(&parts.headers);
    let pretty = wants_pretty(&query, &parts.headers);
    let known = authenticate(&api, &peer, &parts.headers).await;
    let admitted = match &known {
        Ok(caller) => gate::admit(&api, caller.clone(), &parts.headers, &asked).await,
        Err(error) => Err(error.clone()),
    };
    let outcome = match &admitted {
        // Whoever may not do what the path says does not get to send a body either.
        Err(error) => Err(error.clone()),
        Ok(caller) => match body::read(body, api.limits.body).await {
            Ok(body) => {
                let work = Box::pin(answer(&api, parts, route, query, body, caller, closing));
                guard::on_behalf(caller.clone(), asked.verb, work).await
            }
            Err(error) => Err(error),
        },
    };
    let mut response = match outcome {
        Ok(reply) if pretty => reply.pretty().into_response(),
        Ok(reply) => reply.into_response(),
        Err(error) => reply::error(&error),
    };
    let (code, took) = (response.status(), begun.elapsed());
    api.security.metrics.answered(&asked, code, took);
    if let Some(audit) = &api.security.audit {
        audit.record(
            id.to_str().unwrap_or_default(),
            known.as_deref().ok(),
            admitted.as_deref().ok(),
            &asked,
            code,
            took,
        );
    }
    response.headers_mut().insert(audit::ID, id);
    if asked.verb == "watch" && code == StatusCode::OK {
        let watching = api.security.metrics.watching(&asked);
        return response.map(|body| body.holding(watching));
    }
    response
}

/// People with a browser or curl get indented answers, unless they say otherwise.
fn wants_pretty(query: &Query, headers: &HeaderMap) -> bool {
    match query.get("pretty") {
        Some(text) => !matches!(text, "0" | "false"),
        None => {
            let agent = headers.get(USER_AGENT).and_then(|v| v.to_str().ok()).unwrap_or_default();
            ["curl", "Wget", "Mozilla/"].iter().any(|name| agent.starts_with(name))
        }
    }
}

/// What a client of a server that is gone is told.
pub(crate) fn unavailable() -> Response<ApiBody> {
    reply::error(&ApiError::Unavailable)
}

async fn answer(
    api: &Arc<Api>,
    mut parts: Parts,
    route: Route,
    query: Query,
    body: Bytes,
    caller: &Caller,
    closing: CancellationToken,
) -> Result<Reply, ApiError> {
    let handed = parts.extensions.remove::<TypedBody>();
    let header = |name| parts.headers.get(name).and_then(|v: &http::HeaderValue| v.to_str().ok());
    let accept = header(ACCEPT);
    let kinds = api.kinds();
    let reads = matches!(parts.method, Method::GET | Method::HEAD);
    match route {
        // Only objects can be written.
        ref other if !reads && !matches!(other, Route::Resource(_) | Route::Unknown) => Err(ApiError::MethodNotAllowed),
        Route::Health(_) => Ok(health::check(api, parts.uri.path(), parts.uri.query()).await),
        Route::Version => Ok(discovery::version()),
        Route::Metrics => match api.security.metrics.text(api).await {
            Ok(text) => Ok(Reply { content_type: metrics::MEDIA_TYPE, ..Reply::text(StatusCode::OK, text) }),
            Err(error) => Err(ApiError::Internal(error.to_string())),
        },
        Route::Issuer => Ok(Reply::json(StatusCode::OK, &token::configuration())),
        Route::KeySet => Ok(Reply {
            content_type: "application/jwk-set+json",
            ..Reply::json(StatusCode::OK, &api.security.signer.key_set())
        }),
        Route::Root => Ok(discovery::root(&kinds)),
        Route::CoreVersions => Ok(discovery::core_versions(&kinds, accept).conditional(header(IF_NONE_MATCH))),
        Route::Groups => Ok(discovery::groups(&kinds, accept).conditional(header(IF_NONE_MATCH))),
        Route::Group(group) => discovery::group(&kinds, &group),
        Route::Resources { group, version } => discovery::resources(&kinds, &group, &version),
        Route::OpenApiV2 => Ok(openapi::v2(&kinds, openapi::Asked::of(&parts))),
        Route::OpenApiV3 => Ok(openapi::v3_index(&kinds)),
        Route::OpenApiV3Document(path) => openapi::v3_document(&kinds, &path, openapi::Asked::of(&parts)),
        Route::Resource(target)
            if kinds.in_version(&target.group, &target.version).next().is_none()
                && !review::is_group(&target.group, &target.version) =>
        {
            Ok(page_not_found())
        }
        Route::Resource(target) => {
            let (content_type, body) = as_json(header(CONTENT_TYPE), body)?;
            let call = Call {
                query,
                accept: accept.map(Into::into),
                content_type,
                agent: header(USER_AGENT).unwrap_or(&caller.name).to_owned(),
                method: parts.method,
                body,
                handed,
                said: OnceLock::new(),
                closing,
            };
            match review::find(&target.group, &target.version, &target.plural) {
                Some(_) => review::answer(api, &call, caller, &target).await,
                None => endpoint::dispatch(api, call, &target).await,
            }
        }
        Route::Unknown => Ok(page_not_found()),
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
