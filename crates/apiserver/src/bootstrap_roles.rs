//! The roles and bindings every server has. At each start what is missing is made, and what a role lacks is added;
//! what an administrator added stays. Roles marked `autoupdate: "false"` are left alone.

use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::Current;
use cleat_apimachinery::part::ObjectPart;
use cleat_auth::actor::Actor;
use std::collections::BTreeMap;

use futures::future::try_join_all;
use k8s_openapi::api::rbac::v1::{AggregationRule, ClusterRole, ClusterRoleBinding, PolicyRule, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

use crate::endpoint::write::{UpdateSource, insert, modify};
use crate::http::query::WriteMode;
use crate::state::ServerState;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::{Object, typed_mut};
use cleat_apimachinery::managed_fields::Document;
use cleat_auth::authenticate::{AUTHENTICATED, MASTERS, UNAUTHENTICATED};
use cleat_auth::authorize::rules::{everything, missing};
use cleat_registry::strategy::rbac::GROUP;

const AUTOUPDATE: &str = "rbac.authorization.kubernetes.io/autoupdate";

/// Groups, resources, verbs.
type Rule = (&'static [&'static str], &'static [&'static str], &'static [&'static str]);

const READ: &[&str] = &["get", "list", "watch"];
const WRITE: &[&str] = &["create", "delete", "deletecollection", "patch", "update"];
const CORE: &[&str] = &[""];
const STORAGE: &[&str] = &["storage.k8s.io"];
const EVENTS: Rule = (&["", "events.k8s.io"], &["events"], &["create", "patch", "update"]);
const WORKLOADS: &[&str] = &[
    "daemonsets",
    "deployments",
    "deployments/scale",
    "replicasets",
    "replicasets/scale",
    "statefulsets",
    "statefulsets/scale",
];

/// Everybody's own: a role, whom it is for, and what it allows.
const COMPONENTS: &[(&str, &[Rule])] = &[
    (
        "system:cleat:caches",
        &[
            (CORE, &["nodes", "persistentvolumeclaims", "persistentvolumes", "pods"], READ),
            (
                STORAGE,
                &[
                    "csidrivers",
                    "csinodes",
                    "csistoragecapacities",
                    "storageclasses",
                    "volumeattachments",
                    "volumeattributesclasses",
                ],
                READ,
            ),
            (&["coordination.k8s.io"], &["leases"], READ),
        ],
    ),
    (
        "system:cleat:binder",
        &[
            (
                CORE,
                &[
                    "persistentvolumeclaims",
                    "persistentvolumeclaims/status",
                    "persistentvolumes",
                    "persistentvolumes/status",
                ],
                &["get", "update"],
            ),
            EVENTS,
        ],
    ),
    // Whatever it is, it may have an owner or a namespace that is gone.
    (
        "system:cleat:collector",
        &[(&["*"], &["*"], &["delete", "deletecollection", "get", "list", "patch", "update", "watch"])],
    ),
    (
        "system:cleat:protector",
        &[
            (CORE, &["pods"], &["list"]),
            (CORE, &["persistentvolumeclaims", "persistentvolumes"], &["list", "patch"]),
            (CORE, &["persistentvolumeclaims/status"], &["update"]),
            (STORAGE, &["volumeattributesclasses"], &["patch"]),
        ],
    ),
    (
        "system:cleat:scheduler",
        &[
            (CORE, &["pods/binding"], &["create"]),
            (CORE, &["pods/status"], &["patch"]),
            (CORE, &["persistentvolumeclaims", "persistentvolumes"], &["update"]),
            EVENTS,
        ],
    ),
    (
        "system:cleat:node-lifecycle",
        &[
            (CORE, &["nodes"], &["get", "patch"]),
            (CORE, &["nodes/status", "pods/status"], &["patch"]),
            (CORE, &["pods"], &["delete"]),
            EVENTS,
        ],
    ),
    (
        "system:cleat:attach-detach",
        &[
            (STORAGE, &["volumeattachments"], &["create", "delete", "get"]),
            (CORE, &["nodes"], &["get"]),
            (CORE, &["nodes/status"], &["patch"]),
            EVENTS,
        ],
    ),
    ("system:cleat:ephemeral", &[(CORE, &["persistentvolumeclaims"], &["create"]), EVENTS]),
    (
        "system:cleat:provisioner",
        &[
            (CORE, &["persistentvolumes"], &["create", "delete", "get", "patch"]),
            // A claim is held while a volume is made for it, and while it is copied.
            (CORE, &["persistentvolumeclaims"], &["patch"]),
            (CORE, &["secrets"], &["get"]),
            (STORAGE, &["volumeattributesclasses"], &["get"]),
            (STORAGE, &["csistoragecapacities"], &["create", "delete", "update"]),
            (&["snapshot.storage.k8s.io"], &["volumesnapshots"], &["get", "patch"]),
            (&["snapshot.storage.k8s.io"], &["volumesnapshotcontents"], &["get"]),
            EVENTS,
        ],
    ),
    (
        "system:cleat:attacher",
        &[
            (CORE, &["persistentvolumes"], &["patch"]),
            (STORAGE, &["volumeattachments", "volumeattachments/status"], &["patch"]),
            (CORE, &["secrets"], &["get"]),
        ],
    ),
    ("system:cleat:flex-attacher", &[(STORAGE, &["volumeattachments", "volumeattachments/status"], &["patch"])]),
];

const VIEW: &[Rule] = &[
    (
        CORE,
        &[
            "configmaps",
            "events",
            "namespaces",
            "persistentvolumeclaims",
            "persistentvolumeclaims/status",
            "pods",
            "pods/log",
            "pods/status",
            "serviceaccounts",
        ],
        READ,
    ),
    (&["apps"], WORKLOADS, READ),
    (&["batch"], &["jobs", "jobs/status"], READ),
    (&["events.k8s.io"], &["events"], READ),
];
const EDIT: &[Rule] = &[
    (CORE, &["configmaps", "persistentvolumeclaims", "pods", "secrets", "serviceaccounts"], WRITE),
    (CORE, &["secrets"], READ),
    (CORE, &["pods/eviction", "serviceaccounts/token"], &["create"]),
    (CORE, &["serviceaccounts"], &["impersonate"]),
    (&["apps"], WORKLOADS, WRITE),
    (&["batch"], &["jobs"], WRITE),
    (
        &["coordination.k8s.io"],
        &["leases"],
        &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
    ),
];
const ADMIN: &[Rule] = &[
    (
        &[GROUP],
        &["rolebindings", "roles"],
        &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
    ),
    (&["authorization.k8s.io"], &["localsubjectaccessreviews"], &["create"]),
];
const BASIC: &[Rule] = &[
    (&["authorization.k8s.io"], &["selfsubjectaccessreviews", "selfsubjectrulesreviews"], &["create"]),
    (&["authentication.k8s.io"], &["selfsubjectreviews"], &["create"]),
];
const DISCOVERY: &[&str] = &[
    "/api",
    "/api/*",
    "/apis",
    "/apis/*",
    "/healthz",
    "/livez",
    "/openapi",
    "/openapi/*",
    "/readyz",
    "/version",
    "/version/",
];
const PUBLIC: &[&str] = &["/healthz", "/livez", "/readyz", "/version", "/version/"];
const ISSUER: &[&str] = &["/.well-known/openid-configuration", "/openid/v1/jwks"];
const MONITORING: &[&str] = &["/healthz", "/healthz/*", "/livez", "/livez/*", "/metrics", "/readyz", "/readyz/*"];

fn owned(values: &[&str]) -> Vec<String> {
    values.iter().map(|v| (*v).into()).collect()
}

fn rules(rules: &[Rule]) -> Vec<PolicyRule> {
    let rule = |(groups, resources, verbs): &Rule| PolicyRule {
        api_groups: Some(owned(groups)),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        ..PolicyRule::default()
    };
    rules.iter().map(rule).collect()
}

fn paths(urls: &[&str]) -> Vec<PolicyRule> {
    vec![PolicyRule { non_resource_urls: Some(owned(urls)), verbs: owned(&["get"]), ..PolicyRule::default() }]
}

fn metadata(name: &str, labels: &[&str]) -> ObjectMeta {
    let mut all: BTreeMap<String, String> = [("kubernetes.io/bootstrapping".into(), "rbac-defaults".into())].into();
    all.extend(labels.iter().map(|l| (aggregate_label(l), "true".to_owned())));
    ObjectMeta {
        name: Some(name.into()),
        labels: Some(all),
        annotations: Some([(AUTOUPDATE.to_owned(), "true".to_owned())].into()),
        ..ObjectMeta::default()
    }
}

fn aggregate_label(role: &str) -> String {
    format!("rbac.authorization.k8s.io/aggregate-to-{role}")
}

fn role(name: &str, rules: Vec<PolicyRule>) -> ClusterRole {
    ClusterRole { metadata: metadata(name, &[]), rules: Some(rules), aggregation_rule: None }
}

/// A role that collects others by label, and is itself collected by `into`.
fn aggregated(name: &str, into: &[&str]) -> ClusterRole {
    let labels = [(aggregate_label(name), "true".to_owned())].into();
    let selector = LabelSelector { match_labels: Some(labels), ..LabelSelector::default() };
    let rule = AggregationRule { cluster_role_selectors: Some(vec![selector]) };
    ClusterRole { metadata: metadata(name, into), rules: None, aggregation_rule: Some(rule) }
}

fn part_of(name: &str, rules: Vec<PolicyRule>) -> ClusterRole {
    let metadata = metadata(&format!("system:aggregate-to-{name}"), &[name]);
    ClusterRole { metadata, rules: Some(rules), aggregation_rule: None }
}

fn roles() -> Vec<ClusterRole> {
    let mut all = vec![
        role("cluster-admin", everything()),
        part_of("view", rules(VIEW)),
        part_of("edit", rules(EDIT)),
        part_of("admin", rules(ADMIN)),
        aggregated("view", &["edit"]),
        aggregated("edit", &["admin"]),
        aggregated("admin", &[]),
        role("system:basic-user", rules(BASIC)),
        role("system:discovery", paths(DISCOVERY)),
        role("system:public-info-viewer", paths(PUBLIC)),
        role("system:service-account-issuer-discovery", paths(ISSUER)),
        role("system:monitoring", paths(MONITORING)),
    ];
    all.extend(COMPONENTS.iter().map(|(name, allowed)| role(name, rules(allowed))));
    all
}

fn bindings() -> Vec<ClusterRoleBinding> {
    let groups: &[(&str, &[&str])] = &[
        ("cluster-admin", &[MASTERS]),
        ("system:basic-user", &[AUTHENTICATED]),
        ("system:discovery", &[AUTHENTICATED]),
        ("system:public-info-viewer", &[AUTHENTICATED, UNAUTHENTICATED]),
        ("system:service-account-issuer-discovery", &["system:serviceaccounts"]),
        ("system:monitoring", &["system:monitoring"]),
    ];
    let subject = |kind: &str, name: &str| Subject {
        kind: kind.into(),
        name: name.into(),
        api_group: Some(GROUP.into()),
        namespace: None,
    };
    let binding = |name: &str, subjects| ClusterRoleBinding {
        metadata: metadata(name, &[]),
        role_ref: RoleRef { api_group: Some(GROUP.into()), kind: "ClusterRole".into(), name: name.into() },
        subjects: Some(subjects),
    };
    let to_groups = groups.iter().map(|(role, to)| binding(role, to.iter().map(|g| subject("Group", g)).collect()));
    let to_components = COMPONENTS.iter().map(|(name, _)| binding(name, vec![subject("User", name)]));
    to_groups.chain(to_components).collect()
}

/// All at once, so that they share commits.
pub(crate) async fn ensure(api: &ServerState) -> Result<(), ApiError> {
    try_join_all(roles().into_iter().map(|role| ensure_role(api, role))).await?;
    try_join_all(bindings().into_iter().map(|binding| ensure_binding(api, binding))).await?;
    Ok(())
}

async fn ensure_role(api: &ServerState, role: ClusterRole) -> Result<(), ApiError> {
    let wanted = role.rules.clone().unwrap_or_default();
    // What an aggregated role has is decided by those it collects.
    let aggregated = role.aggregation_rule.is_some();
    let complete = |object: &mut dyn Object| {
        if !aggregated {
            let held = typed_mut::<ClusterRole>(object).rules.get_or_insert_default();
            held.extend(missing(&held.clone(), &wanted));
        }
    };
    make(api, "clusterroles", Box::new(role), complete).await
}

async fn ensure_binding(api: &ServerState, binding: ClusterRoleBinding) -> Result<(), ApiError> {
    let wanted = binding.subjects.clone().unwrap_or_default();
    let complete = |object: &mut dyn Object| {
        let held = typed_mut::<ClusterRoleBinding>(object).subjects.get_or_insert_default();
        held.extend(wanted.iter().filter(|s| !held.contains(s)).cloned().collect::<Vec<_>>());
    };
    make(api, "clusterrolebindings", Box::new(binding), complete).await
}

async fn make(
    api: &ServerState,
    plural: &str,
    object: Box<dyn Object>,
    complete: impl Fn(&mut dyn Object) + Send + Sync,
) -> Result<(), ApiError> {
    let kinds = api.kinds();
    let kind = kinds.find(GROUP, "v1", plural).ok_or(ApiError::NoSuchResource)?;
    let name = object.meta().name.clone().unwrap_or_default();
    match insert(api, &Actor::Server, &**kind, None, Document::unowned(object), WriteMode::Persist).await {
        Err(ApiError::AlreadyExists { .. }) => {}
        other => return other.map(drop),
    }
    let mut change = |current: &Current<'_>| {
        Ok(current.edited(|new| {
            let annotations = new.meta().annotations.as_ref();
            if annotations.is_none_or(|a| a.get(AUTOUPDATE).is_none_or(|v| v != "false")) {
                complete(new);
            }
        }))
    };
    let at = ObjectAddress { kind: &**kind, namespace: None, name: &name };
    modify(api, &Actor::Server, at, ObjectPart::Whole, UpdateSource::Server, WriteMode::Persist, &mut change)
        .await
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_apimachinery::kind::Strategy;
    use cleat_registry::strategy::rbac::{ClusterRoleBindings, ClusterRoles};

    #[test]
    fn what_is_made_is_valid_and_bound() {
        let roles = roles();
        for role in &roles {
            assert_eq!(ClusterRoles::validate(role), [], "{:?}", role.metadata.name);
        }
        for binding in bindings() {
            assert_eq!(ClusterRoleBindings::validate(&binding), []);
            assert!(roles.iter().any(|r| r.metadata.name.as_ref() == Some(&binding.role_ref.name)));
        }
    }
}
