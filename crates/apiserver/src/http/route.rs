//! Parses request paths. Whether the resource exists is decided later.

use std::borrow::Cow;
use std::sync::Arc;

use cleat_auth::request_info::ResourcePath;
use percent_encoding::percent_decode_str;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Root,
    Version,
    Health(String),
    CoreVersions,
    Groups,
    Group(String),
    Resources { group: String, version: String },
    Metrics,
    OpenIdConfiguration,
    OpenIdKeys,
    OpenApiV2,
    OpenApiV3,
    OpenApiV3Document(String),
    Resource(Arc<ResourcePath>),
    Unknown,
}

pub(crate) fn parse(path: &str) -> Route {
    let segments = path.split('/').filter(|s| !s.is_empty());
    // The longest path of an object has 8 segments.
    let mut decoded: Vec<Cow<'_, str>> = Vec::with_capacity(8);
    decoded.extend(segments.map(|s| percent_decode_str(s).decode_utf8_lossy()));
    let parts: Vec<&str> = decoded.iter().map(|s| &**s).collect();
    match parts.as_slice() {
        [] => Route::Root,
        ["version"] => Route::Version,
        ["healthz" | "livez" | "readyz", ..] => Route::Health(parts[0].into()),
        ["metrics"] => Route::Metrics,
        [".well-known", "openid-configuration"] => Route::OpenIdConfiguration,
        ["openid", "v1", "jwks"] => Route::OpenIdKeys,
        ["openapi", "v2"] => Route::OpenApiV2,
        ["openapi", "v3"] => Route::OpenApiV3,
        ["openapi", "v3", rest @ ..] => Route::OpenApiV3Document(rest.join("/")),
        ["api"] => Route::CoreVersions,
        ["apis"] => Route::Groups,
        ["api", version] => Route::Resources { group: String::new(), version: (*version).into() },
        ["apis", group] => Route::Group((*group).into()),
        ["apis", group, version] => Route::Resources { group: (*group).into(), version: (*version).into() },
        ["api", version, rest @ ..] => resource("", version, rest),
        ["apis", group, version, rest @ ..] => resource(group, version, rest),
        _ => Route::Unknown,
    }
}

fn resource(group: &str, version: &str, rest: &[&str]) -> Route {
    let (namespace, rest) = match rest {
        // `status` and `finalize` are the only subresources of a namespace; any other segment there is a resource in
        // it.
        ["namespaces", _, "status" | "finalize"] => (None, rest),
        ["namespaces", namespace, inside @ ..] if !inside.is_empty() => (Some((*namespace).into()), inside),
        _ => (None, rest),
    };
    let [plural, path @ ..] = rest else { return Route::Unknown };
    Route::Resource(Arc::new(ResourcePath {
        group: group.into(),
        version: version.into(),
        namespace,
        plural: (*plural).into(),
        name: path.first().map(|s| (*s).into()),
        subresource: path.get(1..).filter(|rest| !rest.is_empty()).map(|rest| rest.join("/")),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_their_target() {
        let target = |namespace: Option<&str>, plural: &str, name: Option<&str>, sub: Option<&str>| {
            Route::Resource(Arc::new(ResourcePath {
                group: String::new(),
                version: "v1".into(),
                namespace: namespace.map(Into::into),
                plural: plural.into(),
                name: name.map(Into::into),
                subresource: sub.map(Into::into),
            }))
        };
        for (path, want) in [
            ("/api/v1/pods", target(None, "pods", None, None)),
            ("/api/v1/namespaces/a", target(None, "namespaces", Some("a"), None)),
            ("/api/v1/namespaces/a/status", target(None, "namespaces", Some("a"), Some("status"))),
            ("/api/v1/namespaces/a/pods", target(Some("a"), "pods", None, None)),
            ("/api/v1/namespaces/a/pods/p/binding", target(Some("a"), "pods", Some("p"), Some("binding"))),
            ("/api/v1/nodes/n%2E1/status", target(None, "nodes", Some("n.1"), Some("status"))),
            ("/readyz/ping", Route::Health("readyz".into())),
            ("/nowhere", Route::Unknown),
        ] {
            assert_eq!(parse(path), want, "{path}");
        }
    }
}
