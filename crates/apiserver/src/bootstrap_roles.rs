//! The default ClusterRoles and ClusterRoleBindings. Every start of the server creates those that are missing, and
//! adds the missing rules and subjects to the others; rules and subjects that an administrator added stay. Objects
//! with the annotation `autoupdate: "false"` are not changed.

use std::collections::BTreeMap;

use futures::future::try_join_all;
use k8s_openapi::api::rbac::v1::{AggregationRule, ClusterRole, ClusterRoleBinding, PolicyRule, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

use crate::endpoint::write::{UpdateSource, insert, modify};
use crate::http::query::WriteMode;
use crate::state::ServerState;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::{Object, typed_mut};
use cleat_apimachinery::managed_fields::{CurrentObject, ManagedObject};
use cleat_apimachinery::part::ObjectPart;
use cleat_auth::actor::Actor;
use cleat_auth::authenticate::{AUTHENTICATED_GROUP, MASTERS_GROUP, UNAUTHENTICATED_GROUP};
use cleat_auth::authorize::rules::{full_access, uncovered};
use cleat_registry::strategy::rbac::GROUP;

const AUTOUPDATE_ANNOTATION: &str = "rbac.authorization.kubernetes.io/autoupdate";

/// API groups, resources, verbs.
type RuleSpec = (&'static [&'static str], &'static [&'static str], &'static [&'static str]);

const READ: &[&str] = &["get", "list", "watch"];
const WRITE: &[&str] = &["create", "delete", "deletecollection", "patch", "update"];
const CORE: &[&str] = &[""];
const STORAGE: &[&str] = &["storage.k8s.io"];
const WRITE_EVENTS: RuleSpec = (&["", "events.k8s.io"], &["events"], &["create", "patch", "update"]);
const WORKLOADS: &[&str] = &[
    "daemonsets",
    "deployments",
    "deployments/scale",
    "replicasets",
    "replicasets/scale",
    "statefulsets",
    "statefulsets/scale",
];

/// The roles of Cleat's components. Each is bound to the user of the same name.
const COMPONENT_ROLES: &[(&str, &[RuleSpec])] = &[
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
            WRITE_EVENTS,
        ],
    ),
    // An object of any kind may have an owner or a namespace that was deleted.
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
            WRITE_EVENTS,
        ],
    ),
    (
        "system:cleat:node-lifecycle",
        &[
            (CORE, &["nodes"], &["get", "patch"]),
            (CORE, &["nodes/status", "pods/status"], &["patch"]),
            (CORE, &["pods"], &["delete"]),
            WRITE_EVENTS,
        ],
    ),
    (
        "system:cleat:attach-detach",
        &[
            (STORAGE, &["volumeattachments"], &["create", "delete", "get"]),
            (CORE, &["nodes"], &["get"]),
            (CORE, &["nodes/status"], &["patch"]),
            WRITE_EVENTS,
        ],
    ),
    ("system:cleat:ephemeral", &[(CORE, &["persistentvolumeclaims"], &["create"]), WRITE_EVENTS]),
    (
        "system:cleat:provisioner",
        &[
            (CORE, &["persistentvolumes"], &["create", "delete", "get", "patch"]),
            // A claim has a finalizer while a volume is created for it, and while its volume is cloned.
            (CORE, &["persistentvolumeclaims"], &["patch"]),
            (CORE, &["secrets"], &["get"]),
            (STORAGE, &["volumeattributesclasses"], &["get"]),
            (STORAGE, &["csistoragecapacities"], &["create", "delete", "update"]),
            (&["snapshot.storage.k8s.io"], &["volumesnapshots"], &["get", "patch"]),
            (&["snapshot.storage.k8s.io"], &["volumesnapshotcontents"], &["get"]),
            WRITE_EVENTS,
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

const VIEW_RULES: &[RuleSpec] = &[
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
const EDIT_RULES: &[RuleSpec] = &[
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
const ADMIN_RULES: &[RuleSpec] = &[
    (
        &[GROUP],
        &["rolebindings", "roles"],
        &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
    ),
    (&["authorization.k8s.io"], &["localsubjectaccessreviews"], &["create"]),
];
const BASIC_USER_RULES: &[RuleSpec] = &[
    (&["authorization.k8s.io"], &["selfsubjectaccessreviews", "selfsubjectrulesreviews"], &["create"]),
    (&["authentication.k8s.io"], &["selfsubjectreviews"], &["create"]),
];
const DISCOVERY_PATHS: &[&str] = &[
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
const PUBLIC_PATHS: &[&str] = &["/healthz", "/livez", "/readyz", "/version", "/version/"];
const ISSUER_PATHS: &[&str] = &["/.well-known/openid-configuration", "/openid/v1/jwks"];
const MONITORING_PATHS: &[&str] = &["/healthz", "/healthz/*", "/livez", "/livez/*", "/metrics", "/readyz", "/readyz/*"];

fn to_strings(values: &[&str]) -> Vec<String> {
    values.iter().map(|v| (*v).into()).collect()
}

fn rules(specs: &[RuleSpec]) -> Vec<PolicyRule> {
    let rule = |(groups, resources, verbs): &RuleSpec| PolicyRule {
        api_groups: Some(to_strings(groups)),
        resources: Some(to_strings(resources)),
        verbs: to_strings(verbs),
        ..PolicyRule::default()
    };
    specs.iter().map(rule).collect()
}

/// One rule: `get` on these paths.
fn paths(urls: &[&str]) -> Vec<PolicyRule> {
    vec![PolicyRule { non_resource_urls: Some(to_strings(urls)), verbs: to_strings(&["get"]), ..PolicyRule::default() }]
}

/// `aggregate_to`: the aggregated roles that include this one.
fn metadata(name: &str, aggregate_to: &[&str]) -> ObjectMeta {
    let mut labels: BTreeMap<String, String> = [("kubernetes.io/bootstrapping".into(), "rbac-defaults".into())].into();
    labels.extend(aggregate_to.iter().map(|role| (aggregate_label(role), "true".to_owned())));
    ObjectMeta {
        name: Some(name.into()),
        labels: Some(labels),
        annotations: Some([(AUTOUPDATE_ANNOTATION.to_owned(), "true".to_owned())].into()),
        ..ObjectMeta::default()
    }
}

fn aggregate_label(role: &str) -> String {
    format!("rbac.authorization.k8s.io/aggregate-to-{role}")
}

fn role(name: &str, rules: Vec<PolicyRule>) -> ClusterRole {
    ClusterRole { metadata: metadata(name, &[]), rules: Some(rules), aggregation_rule: None }
}

/// A role with the rules of those that carry its label. It is itself included in the roles `aggregate_to`.
fn aggregated_role(name: &str, aggregate_to: &[&str]) -> ClusterRole {
    let labels = [(aggregate_label(name), "true".to_owned())].into();
    let selector = LabelSelector { match_labels: Some(labels), ..LabelSelector::default() };
    let rule = AggregationRule { cluster_role_selectors: Some(vec![selector]) };
    ClusterRole { metadata: metadata(name, aggregate_to), rules: None, aggregation_rule: Some(rule) }
}

/// The role with the rules that are aggregated to the role `name`.
fn aggregate_to_role(name: &str, rules: Vec<PolicyRule>) -> ClusterRole {
    let metadata = metadata(&format!("system:aggregate-to-{name}"), &[name]);
    ClusterRole { metadata, rules: Some(rules), aggregation_rule: None }
}

fn roles() -> Vec<ClusterRole> {
    let mut all = vec![
        role("cluster-admin", full_access()),
        aggregate_to_role("view", rules(VIEW_RULES)),
        aggregate_to_role("edit", rules(EDIT_RULES)),
        aggregate_to_role("admin", rules(ADMIN_RULES)),
        aggregated_role("view", &["edit"]),
        aggregated_role("edit", &["admin"]),
        aggregated_role("admin", &[]),
        role("system:basic-user", rules(BASIC_USER_RULES)),
        role("system:discovery", paths(DISCOVERY_PATHS)),
        role("system:public-info-viewer", paths(PUBLIC_PATHS)),
        role("system:service-account-issuer-discovery", paths(ISSUER_PATHS)),
        role("system:monitoring", paths(MONITORING_PATHS)),
    ];
    all.extend(COMPONENT_ROLES.iter().map(|(name, allowed)| role(name, rules(allowed))));
    all
}

fn bindings() -> Vec<ClusterRoleBinding> {
    let groups: &[(&str, &[&str])] = &[
        ("cluster-admin", &[MASTERS_GROUP]),
        ("system:basic-user", &[AUTHENTICATED_GROUP]),
        ("system:discovery", &[AUTHENTICATED_GROUP]),
        ("system:public-info-viewer", &[AUTHENTICATED_GROUP, UNAUTHENTICATED_GROUP]),
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
    let to_components = COMPONENT_ROLES.iter().map(|(name, _)| binding(name, vec![subject("User", name)]));
    to_groups.chain(to_components).collect()
}

/// Writes the roles, then the bindings. Those of a kind are written concurrently, so that the store commits them
/// together.
pub(crate) async fn ensure(api: &ServerState) -> Result<(), ApiError> {
    try_join_all(roles().into_iter().map(|role| ensure_role(api, role))).await?;
    try_join_all(bindings().into_iter().map(|binding| ensure_binding(api, binding))).await?;
    Ok(())
}

async fn ensure_role(api: &ServerState, role: ClusterRole) -> Result<(), ApiError> {
    let wanted = role.rules.clone().unwrap_or_default();
    // The aggregation controller writes the rules of an aggregated role.
    let is_aggregated = role.aggregation_rule.is_some();
    let add_missing = |object: &mut dyn Object| {
        if !is_aggregated {
            let held = typed_mut::<ClusterRole>(object).rules.get_or_insert_default();
            held.extend(uncovered(&held.clone(), &wanted));
        }
    };
    create_or_update(api, "clusterroles", Box::new(role), add_missing).await
}

async fn ensure_binding(api: &ServerState, binding: ClusterRoleBinding) -> Result<(), ApiError> {
    let wanted = binding.subjects.clone().unwrap_or_default();
    let add_missing = |object: &mut dyn Object| {
        let held = typed_mut::<ClusterRoleBinding>(object).subjects.get_or_insert_default();
        held.extend(wanted.iter().filter(|s| !held.contains(s)).cloned().collect::<Vec<_>>());
    };
    create_or_update(api, "clusterrolebindings", Box::new(binding), add_missing).await
}

/// Creates the object. If it exists and may be updated, applies `add_missing` to it.
async fn create_or_update(
    api: &ServerState,
    plural: &str,
    object: Box<dyn Object>,
    add_missing: impl Fn(&mut dyn Object) + Send + Sync,
) -> Result<(), ApiError> {
    let kinds = api.kinds();
    let kind = kinds.find(GROUP, "v1", plural).ok_or(ApiError::NoSuchResource)?;
    let name = object.meta().name.clone().unwrap_or_default();
    match insert(api, &Actor::Server, &**kind, None, ManagedObject::without_owners(object), WriteMode::Persist).await {
        Err(ApiError::AlreadyExists { .. }) => {}
        other => return other.map(drop),
    }
    let mut change = |current: &CurrentObject<'_>| {
        Ok(current.edited(|new| {
            let annotations = new.meta().annotations.as_ref();
            if annotations.is_none_or(|a| a.get(AUTOUPDATE_ANNOTATION).is_none_or(|v| v != "false")) {
                add_missing(new);
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
    use cleat_registry::strategy::rbac::{ClusterRoleBindingStrategy, ClusterRoleStrategy};

    #[test]
    fn roles_and_bindings_are_valid_and_every_bound_role_exists() {
        let roles = roles();
        for role in &roles {
            assert_eq!(ClusterRoleStrategy::validate(role), [], "{:?}", role.metadata.name);
        }
        for binding in bindings() {
            assert_eq!(ClusterRoleBindingStrategy::validate(&binding), []);
            assert!(roles.iter().any(|r| r.metadata.name.as_ref() == Some(&binding.role_ref.name)));
        }
    }
}
