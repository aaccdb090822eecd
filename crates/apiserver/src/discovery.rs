//! What the server can do, told to clients: versions, groups and resources, in the legacy and the aggregated form.

use http::StatusCode;
use serde_json::{Value, json};

use crate::api::Kinds;
use crate::descriptor::Descriptor;
use crate::error::ApiError;
use crate::http::accept::{AGGREGATED, wants_aggregated};
use crate::http::reply::Reply;

const MINOR: &str = "34";

/// Subresources beyond `status`: resource, name, kind of the body, verbs.
const SUBRESOURCES: &[(&str, &str, &str, &[&str])] =
    &[("pods", "binding", "Binding", &["create"]), ("namespaces", "finalize", "Namespace", &["update"])];

pub(crate) fn version() -> Reply {
    let body = json!({
        "major": "1", "minor": MINOR, "gitVersion": format!("v1.{MINOR}.0+cleat-{}", env!("CARGO_PKG_VERSION")),
        "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "",
        "compiler": "rustc", "platform": format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH),
    });
    Reply::json(StatusCode::OK, &body)
}

pub(crate) fn root(kinds: &Kinds) -> Reply {
    let mut paths = vec!["/api".to_owned(), "/api/v1".into(), "/apis".into()];
    for (group, versions) in kinds.groups().into_iter().filter(|(group, _)| !group.is_empty()) {
        paths.push(format!("/apis/{group}"));
        paths.extend(versions.iter().map(|v| format!("/apis/{group}/{v}")));
    }
    paths.extend(["/healthz", "/livez", "/openapi/v2", "/openapi/v3", "/readyz", "/version"].map(Into::into));
    Reply::json(StatusCode::OK, &json!({ "paths": paths }))
}

pub(crate) fn core_versions(kinds: &Kinds, accept: Option<&str>) -> Reply {
    if wants_aggregated(accept) {
        return aggregated(kinds, |group| group.is_empty());
    }
    let body = json!({
        "kind": "APIVersions", "versions": ["v1"],
        "serverAddressByClientCIDRs": [{ "clientCIDR": "0.0.0.0/0", "serverAddress": "" }],
    });
    Reply::json(StatusCode::OK, &body)
}

pub(crate) fn groups(kinds: &Kinds, accept: Option<&str>) -> Reply {
    if wants_aggregated(accept) {
        return aggregated(kinds, |group| !group.is_empty());
    }
    let groups: Vec<Value> = kinds
        .groups()
        .into_iter()
        .filter(|(group, _)| !group.is_empty())
        .map(|(group, versions)| group_body(group, &versions))
        .collect();
    Reply::json(StatusCode::OK, &json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups }))
}

fn group_body(group: &str, versions: &[&str]) -> Value {
    let version = |v: &&str| json!({ "groupVersion": format!("{group}/{v}"), "version": v });
    let preferred = versions.first().map(version);
    let versions: Vec<Value> = versions.iter().map(version).collect();
    json!({ "name": group, "versions": versions, "preferredVersion": preferred })
}

pub(crate) fn group(kinds: &Kinds, name: &str) -> Result<Reply, ApiError> {
    let groups = kinds.groups();
    let (group, versions) =
        groups.iter().find(|(group, _)| *group == name && !name.is_empty()).ok_or(ApiError::NoSuchResource)?;
    let mut body = group_body(group, versions);
    body["kind"] = "APIGroup".into();
    body["apiVersion"] = "v1".into();
    Ok(Reply::json(StatusCode::OK, &body))
}

pub(crate) fn resources(kinds: &Kinds, group: &str, version: &str) -> Result<Reply, ApiError> {
    let mut resources = Vec::new();
    for kind in kinds.in_version(group, version) {
        let d = kind.descriptor();
        let mut main = json!({
            "name": d.plural, "singularName": d.singular, "namespaced": d.namespaced, "kind": d.kind,
            "verbs": d.verbs(),
        });
        if !d.short_names.is_empty() {
            main["shortNames"] = json!(d.short_names);
        }
        if !d.categories.is_empty() {
            main["categories"] = json!(d.categories);
        }
        resources.push(main);
        for (name, kind, verbs) in subresources(d) {
            let mut shown = json!({
                "name": format!("{}/{name}", d.plural), "singularName": "", "namespaced": d.namespaced,
                "kind": kind, "verbs": verbs,
            });
            if let Some((group, version)) = elsewhere(kind) {
                shown["group"] = group.into();
                shown["version"] = version.into();
            }
            resources.push(shown);
        }
    }
    if resources.is_empty() {
        return Err(ApiError::NoSuchResource);
    }
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    let mut body = json!({ "kind": "APIResourceList", "groupVersion": group_version, "resources": resources });
    if !group.is_empty() {
        body["apiVersion"] = "v1".into();
    }
    Ok(Reply::json(StatusCode::OK, &body))
}

fn subresources(d: &Descriptor) -> Vec<(&str, &str, &[&str])> {
    let mut found: Vec<(&str, &str, &[&str])> = SUBRESOURCES
        .iter()
        .filter(|(plural, ..)| *plural == d.plural && d.group.is_empty())
        .map(|(_, name, body, verbs)| (*name, *body, *verbs))
        .collect();
    let shown: &[&str] = &["get", "patch", "update"];
    if d.scale.is_some() {
        found.push(("scale", "Scale", shown));
    }
    if d.has_status {
        found.push(("status", &d.kind, shown));
    }
    found
}

/// Where the kind of a subresource's body lives, if not where the resource does.
fn elsewhere(kind: &str) -> Option<(&'static str, &'static str)> {
    match kind {
        "Scale" => Some(("autoscaling", "v1")),
        _ => None,
    }
}

fn aggregated(kinds: &Kinds, wanted: impl Fn(&str) -> bool) -> Reply {
    // Group and version are left empty where they are those of the document around them.
    let response_kind = |kind: &str| json!({ "group": "", "version": "", "kind": kind });
    let resource = |d: &Descriptor| {
        let subresources: Vec<Value> = subresources(d)
            .into_iter()
            .map(|(name, body, verbs)| {
                let mut kind = response_kind(body);
                if let Some((group, version)) = elsewhere(body) {
                    kind["group"] = group.into();
                    kind["version"] = version.into();
                }
                json!({ "subresource": name, "responseKind": kind, "verbs": verbs })
            })
            .collect();
        let mut body = json!({
            "resource": d.plural, "responseKind": response_kind(&d.kind),
            "scope": if d.namespaced { "Namespaced" } else { "Cluster" },
            "singularResource": d.singular, "verbs": d.verbs(),
        });
        for (key, list) in [
            ("shortNames", json!(d.short_names)),
            ("categories", json!(d.categories)),
            ("subresources", json!(subresources)),
        ] {
            if list.as_array().is_some_and(|l| !l.is_empty()) {
                body[key] = list;
            }
        }
        body
    };
    let items: Vec<Value> = kinds
        .groups()
        .into_iter()
        .filter(|(group, _)| wanted(group))
        .map(|(group, versions)| {
            let versions: Vec<Value> = versions
                .into_iter()
                .map(|version| {
                    let resources: Vec<Value> =
                        kinds.in_version(group, version).map(|k| resource(k.descriptor())).collect();
                    json!({ "version": version, "freshness": "Current", "resources": resources })
                })
                .collect();
            let metadata = if group.is_empty() { json!({}) } else { json!({ "name": group }) };
            json!({ "metadata": metadata, "versions": versions })
        })
        .collect();
    let body = json!({
        "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items,
    });
    Reply { content_type: AGGREGATED, ..Reply::json(StatusCode::OK, &body) }
}
