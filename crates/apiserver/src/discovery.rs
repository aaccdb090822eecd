//! Discovery: the served groups, versions and resources, as separate documents and in the aggregated form.

use http::StatusCode;
use serde_json::{Value, json};

use crate::http::accept::{AGGREGATED_DISCOVERY, wants_aggregated};
use crate::http::reply::Reply;
use crate::review;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_registry::catalog::ServedKinds;

/// The Kubernetes minor version that clients see.
const MINOR: &str = "34";

/// A subresource: its name, the kind of its body, the body's group and version if they differ from the resource's, its
/// verbs.
type Subresource<'a> = (&'a str, &'a str, Option<(&'a str, &'a str)>, &'a [&'a str]);

/// Subresources beyond `status`, by resource of the core group.
const SUBRESOURCES: &[(&str, Subresource<'_>)] = &[
    ("pods", ("binding", "Binding", None, &["create"])),
    ("namespaces", ("finalize", "Namespace", None, &["update"])),
    ("serviceaccounts", ("token", "TokenRequest", Some(("authentication.k8s.io", "v1")), &["create"])),
];

/// The groups of stored kinds and of reviews with their versions; the core group is first.
fn all_groups(kinds: &ServedKinds) -> Vec<(&str, Vec<&str>)> {
    let mut groups = kinds.groups();
    for d in review::descriptors() {
        if !groups.iter().any(|(group, _)| *group == d.group) {
            groups.push((&d.group, vec![&d.version]));
        }
    }
    groups
}

fn in_version<'a>(kinds: &'a ServedKinds, group: &'a str, version: &'a str) -> impl Iterator<Item = &'a Descriptor> {
    let reviews = review::descriptors().iter().filter(move |d| d.group == group && d.version == version);
    kinds.in_group_version(group, version).map(|kind| kind.descriptor()).chain(reviews)
}

pub(crate) fn version() -> Reply {
    let body = json!({
        "major": "1", "minor": MINOR, "gitVersion": format!("v1.{MINOR}.0+cleat-{}", env!("CARGO_PKG_VERSION")),
        "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "",
        "compiler": "rustc", "platform": format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH),
    });
    Reply::json(StatusCode::OK, &body)
}

pub(crate) fn root(kinds: &ServedKinds) -> Reply {
    let mut paths = vec!["/api".to_owned(), "/api/v1".into(), "/apis".into()];
    for (group, versions) in all_groups(kinds).into_iter().filter(|(group, _)| !group.is_empty()) {
        paths.push(format!("/apis/{group}"));
        paths.extend(versions.iter().map(|v| format!("/apis/{group}/{v}")));
    }
    paths.extend(["/healthz", "/livez", "/openapi/v2", "/openapi/v3", "/readyz", "/version"].map(Into::into));
    Reply::json(StatusCode::OK, &json!({ "paths": paths }))
}

pub(crate) fn core_versions(kinds: &ServedKinds, accept: Option<&str>) -> Reply {
    if wants_aggregated(accept) {
        return aggregated(kinds, |group| group.is_empty());
    }
    let body = json!({
        "kind": "APIVersions", "versions": ["v1"],
        "serverAddressByClientCIDRs": [{ "clientCIDR": "0.0.0.0/0", "serverAddress": "" }],
    });
    Reply::json(StatusCode::OK, &body)
}

pub(crate) fn groups(kinds: &ServedKinds, accept: Option<&str>) -> Reply {
    if wants_aggregated(accept) {
        return aggregated(kinds, |group| !group.is_empty());
    }
    let groups: Vec<Value> = all_groups(kinds)
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

pub(crate) fn group(kinds: &ServedKinds, name: &str) -> Result<Reply, ApiError> {
    let groups = all_groups(kinds);
    let (group, versions) =
        groups.iter().find(|(group, _)| *group == name && !name.is_empty()).ok_or(ApiError::NoSuchResource)?;
    let mut body = group_body(group, versions);
    body["kind"] = "APIGroup".into();
    body["apiVersion"] = "v1".into();
    Ok(Reply::json(StatusCode::OK, &body))
}

pub(crate) fn resources(kinds: &ServedKinds, group: &str, version: &str) -> Result<Reply, ApiError> {
    let mut resources = Vec::new();
    for d in in_version(kinds, group, version) {
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
        for (name, kind, group_version, verbs) in subresources(d) {
            let mut sub = json!({
                "name": format!("{}/{name}", d.plural), "singularName": "", "namespaced": d.namespaced,
                "kind": kind, "verbs": verbs,
            });
            if let Some((group, version)) = group_version {
                sub["group"] = group.into();
                sub["version"] = version.into();
            }
            resources.push(sub);
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

fn subresources(d: &Descriptor) -> Vec<Subresource<'_>> {
    let of_resource = SUBRESOURCES.iter().filter(|(plural, _)| *plural == d.plural && d.group.is_empty());
    let mut found: Vec<Subresource<'_>> = of_resource.map(|(_, sub)| *sub).collect();
    let verbs: &[&str] = &["get", "patch", "update"];
    if d.scale.is_some() {
        found.push(("scale", "Scale", Some(("autoscaling", "v1")), verbs));
    }
    if d.has_status {
        found.push(("status", &d.kind, None, verbs));
    }
    found
}

fn aggregated(kinds: &ServedKinds, wanted: impl Fn(&str) -> bool) -> Reply {
    // Group and version are empty if they are those of the surrounding document.
    let response_kind = |kind: &str| json!({ "group": "", "version": "", "kind": kind });
    let resource = |d: &Descriptor| {
        let subresources: Vec<Value> = subresources(d)
            .into_iter()
            .map(|(name, body, group_version, verbs)| {
                let mut kind = response_kind(body);
                if let Some((group, version)) = group_version {
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
    let items: Vec<Value> = all_groups(kinds)
        .into_iter()
        .filter(|(group, _)| wanted(group))
        .map(|(group, versions)| {
            let versions: Vec<Value> = versions
                .into_iter()
                .map(|version| {
                    let resources: Vec<Value> = in_version(kinds, group, version).map(resource).collect();
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
    Reply { content_type: AGGREGATED_DISCOVERY, ..Reply::json(StatusCode::OK, &body) }
}
