//! Authorization of every request, before its body is read: derives the verb and the resource from method, path and
//! query, applies impersonation, and checks the caller's rights.

use std::sync::Arc;

use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::selector;
use cleat_auth::authenticate::{ANONYMOUS_USER, Caller};
use cleat_auth::impersonate;
use cleat_auth::request_info::{RequestInfo, ResourcePath};
use http::request::Parts;
use http::{HeaderMap, Method};

use crate::http::query::Query;
use crate::http::route::Route;
use crate::review;
use crate::state::ServerState;

/// The verb, the resource and the field selector of a request.
pub(crate) fn request_info(state: &ServerState, parts: &Parts, route: &Route, query: &Query) -> RequestInfo {
    let fields = query.get("fieldSelector").unwrap_or_default().to_owned();
    let target = match route {
        Route::Resource(target) => Some(with_selected_name(target, &fields)),
        _ => None,
    };
    let verb = match &target {
        Some(_) => resource_verb(&parts.method, is_collection(route), query),
        None => path_verb(&parts.method),
    };
    let known = target.as_ref().is_some_and(|t| {
        state.kinds().find(&t.group, &t.version, &t.plural).is_some()
            || review::find(&t.group, &t.version, &t.plural).is_some()
    });
    RequestInfo { verb, uri: parts.uri.clone(), target, field_selector: fields, is_served: known }
}

/// Adds the name that the field selector of a list or watch requires: rights for one name cover such requests.
fn with_selected_name(target: &Arc<ResourcePath>, fields: &str) -> Arc<ResourcePath> {
    let name = || selector::required_value(fields, "metadata.name").filter(|n| !n.is_empty());
    match target.name.is_none().then(name).flatten() {
        Some(name) => Arc::new(ResourcePath { name: Some(name), ..ResourcePath::clone(target) }),
        None => target.clone(),
    }
}

/// Returns true if the path names no object. A name in a selector does not count.
fn is_collection(route: &Route) -> bool {
    matches!(route, Route::Resource(target) if target.name.is_none())
}

fn resource_verb(method: &Method, collection: bool, query: &Query) -> &'static str {
    match *method {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if collection => "deletecollection",
        Method::DELETE => "delete",
        Method::GET | Method::HEAD if collection && query.is_watch() => "watch",
        Method::GET | Method::HEAD if collection => "list",
        Method::GET | Method::HEAD => "get",
        _ => "other",
    }
}

fn path_verb(method: &Method) -> &'static str {
    match *method {
        Method::GET => "get",
        Method::HEAD => "head",
        Method::POST => "post",
        Method::PUT => "put",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        Method::OPTIONS => "options",
        _ => "other",
    }
}

/// Checks the rights of the caller, or of the user that it impersonates, and returns that user. An anonymous caller
/// without the right gets 401 Unauthorized, so that clients authenticate.
pub(crate) async fn authorize(
    state: &ServerState,
    caller: Arc<Caller>,
    headers: &HeaderMap,
    info: &RequestInfo,
) -> Result<Arc<Caller>, ApiError> {
    let caller = impersonate::effective_caller(&state.security.authorizer, caller, headers).await?;
    match state.security.authorizer.require(&caller, &info.attributes()).await {
        Err(_) if caller.name == ANONYMOUS_USER => Err(ApiError::Unauthorized),
        other => other.map(|()| caller),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::route;

    #[test]
    fn verbs_follow_from_method_path_and_query() {
        for (method, uri, want) in [
            (Method::GET, "/api/v1/pods", ("list", None)),
            (Method::GET, "/api/v1/pods?watch=1", ("watch", None)),
            (Method::GET, "/api/v1/pods?fieldSelector=metadata.name%3Dp", ("list", Some("p"))),
            (Method::GET, "/api/v1/pods?watch=true&fieldSelector=metadata.name%3Dp", ("watch", Some("p"))),
            (Method::GET, "/api/v1/namespaces/a/pods/p", ("get", Some("p"))),
            (Method::GET, "/api/v1/namespaces/a/pods/p?watch=1&fieldSelector=metadata.name%3Dq", ("get", Some("p"))),
            (Method::DELETE, "/api/v1/namespaces/a/pods/p?fieldSelector=metadata.name%3Dq", ("delete", Some("p"))),
            (Method::HEAD, "/api/v1/namespaces/a/pods/p", ("get", Some("p"))),
            (Method::POST, "/api/v1/namespaces/a/pods", ("create", None)),
            (Method::PUT, "/api/v1/namespaces/a/pods/p/status", ("update", Some("p"))),
            (Method::PATCH, "/api/v1/namespaces/a/pods/p", ("patch", Some("p"))),
            (Method::DELETE, "/api/v1/namespaces/a/pods/p", ("delete", Some("p"))),
            (Method::DELETE, "/api/v1/namespaces/a/pods", ("deletecollection", None)),
        ] {
            let uri: http::Uri = uri.parse().unwrap();
            let route = route::parse(uri.path());
            let Route::Resource(target) = &route else { panic!("{uri}") };
            let query = Query::parse(uri.query());
            let target = with_selected_name(target, query.get("fieldSelector").unwrap_or_default());
            let verb = resource_verb(&method, is_collection(&route), &query);
            assert_eq!((verb, target.name.as_deref()), want, "{method} {uri}");
        }
    }
}
