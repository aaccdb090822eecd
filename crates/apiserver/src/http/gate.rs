//! The gate every request passes before its body is read: who asks, for what, and may they?

use std::sync::Arc;

use http::request::Parts;
use http::{HeaderMap, Method, Uri};

use super::query::Query;
use super::route::{Route, Target};
use crate::api::Api;
use crate::authenticate::{ANONYMOUS, Caller, impersonate};
use crate::authorize::{Attributes, What};
use crate::error::ApiError;
use crate::review;
use crate::selector;

/// What a request asks for, in the words that authorization, audit and metrics share.
pub(crate) struct Asked {
    pub(crate) verb: &'static str,
    pub(crate) uri: Uri,
    /// The resource, with the name a field selector stands for; nothing for other paths.
    pub(crate) target: Option<Arc<Target>>,
    fields: String,
    /// Is the resource one that is served? Only those appear in metrics.
    known: bool,
}

impl Asked {
    pub(crate) fn new(api: &Api, parts: &Parts, route: &Route, query: &Query) -> Self {
        let fields = query.get("fieldSelector").unwrap_or_default().to_owned();
        let target = match route {
            Route::Resource(target) => Some(named(target, &fields)),
            _ => None,
        };
        let verb = match &target {
            Some(_) => resource_verb(&parts.method, is_collection(route), query),
            None => path_verb(&parts.method),
        };
        let known = target.as_ref().is_some_and(|t| {
            api.kinds().find(&t.group, &t.version, &t.plural).is_some()
                || review::find(&t.group, &t.version, &t.plural).is_some()
        });
        Self { verb, uri: parts.uri.clone(), target, fields, known }
    }

    /// Group and resource as metrics name them.
    pub(crate) fn labels(&self) -> (String, String) {
        match self.target.as_deref().filter(|_| self.known) {
            Some(Target { group, plural, subresource: None, .. }) => (group.clone(), plural.clone()),
            Some(Target { group, plural, subresource: Some(sub), .. }) => (group.clone(), format!("{plural}/{sub}")),
            None => (String::new(), String::new()),
        }
    }

    fn attributes(&self) -> Attributes<'_> {
        let what = match &self.target {
            None => What::Path(self.uri.path()),
            Some(target) => {
                let name = target.name.as_deref().unwrap_or_default();
                // A namespace is inside itself, so that a role in it can be about it.
                let is_namespace = target.plural == "namespaces" && target.group.is_empty() && !name.is_empty();
                What::Resource {
                    group: &target.group,
                    plural: &target.plural,
                    subresource: target.subresource.as_deref().unwrap_or_default(),
                    namespace: target.namespace.as_deref().or(is_namespace.then_some(name)),
                    name,
                }
            }
        };
        Attributes { verb: self.verb, what, fields: &self.fields }
    }
}

/// A list or watch of one name is about that name.
fn named(target: &Arc<Target>, fields: &str) -> Arc<Target> {
    let name = || selector::required(fields, "metadata.name").filter(|n| !n.is_empty());
    match target.name.is_none().then(name).flatten() {
        Some(name) => Arc::new(Target { name: Some(name), ..Target::clone(target) }),
        None => target.clone(),
    }
}

/// Does the path itself name no object? What a selector names does not change what the path is.
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

/// Whom the request is to be carried out for, if they may do what it asks. A stranger that may not is told to say who
/// it is.
pub(crate) async fn admit(
    api: &Api,
    caller: Arc<Caller>,
    headers: &HeaderMap,
    asked: &Asked,
) -> Result<Arc<Caller>, ApiError> {
    let caller = impersonate::effective(api, caller, headers).await?;
    match api.security.authorizer.require(api, &caller, &asked.attributes()).await {
        Err(_) if caller.name == ANONYMOUS => Err(ApiError::Unauthorized),
        other => other.map(|()| caller),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::route;

    #[test]
    fn methods_and_paths_become_verbs() {
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
            let target = named(target, query.get("fieldSelector").unwrap_or_default());
            let verb = resource_verb(&method, is_collection(&route), &query);
            assert_eq!((verb, target.name.as_deref()), want, "{method} {uri}");
        }
    }
}
