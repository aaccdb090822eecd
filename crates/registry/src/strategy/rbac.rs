//! Strategies of Role, ClusterRole, RoleBinding and ClusterRoleBinding (rbac.authorization.k8s.io/v1). Whether the caller may
//! grant these permissions is decided by write authorization, not here.

use jiff::Timestamp;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject};
use serde_json::Value;

use super::field_checks::check_label_selector;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;
use cleat_apimachinery::names::NameRule;

pub const GROUP: &str = "rbac.authorization.k8s.io";

/// Where the permissions of a role or binding apply.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RoleScope {
    Namespace,
    Cluster,
}

fn descriptor(kind: &str, plural: &str) -> Descriptor {
    Descriptor::new(GROUP, "v1", kind, plural).deletes_with_status().put_creates()
}

const ROLE_COLUMNS: &[Column] = &[NAME, Column::text("Created At", "When the role was created.").format("date-time")];
const BINDING_COLUMNS: &[Column] = &[
    NAME,
    Column::text("Role", "The role that is granted."),
    AGE,
    Column::text("Users", "The users it is granted to.").wide(),
    Column::text("Groups", "The groups it is granted to.").wide(),
    Column::text("ServiceAccounts", "The service accounts it is granted to.").wide(),
];

pub struct RoleStrategy;

impl Strategy for RoleStrategy {
    type Object = Role;

    fn descriptor() -> Descriptor {
        descriptor("Role", "roles")
    }

    fn name_rule() -> NameRule {
        NameRule::PathSegment
    }

    fn validate(role: &Role) -> Vec<FieldError> {
        check_rules(role.rules.as_deref().unwrap_or_default(), RoleScope::Namespace)
    }

    fn columns() -> &'static [Column] {
        ROLE_COLUMNS
    }

    fn cells(role: &Role, _now: Timestamp) -> Vec<Value> {
        vec![column::name(&role.metadata), created_cell(role.metadata.creation_timestamp.as_ref())]
    }
}

pub struct ClusterRoleStrategy;

impl Strategy for ClusterRoleStrategy {
    type Object = ClusterRole;

    fn descriptor() -> Descriptor {
        descriptor("ClusterRole", "clusterroles").cluster_scoped()
    }

    fn name_rule() -> NameRule {
        NameRule::PathSegment
    }

    fn validate(role: &ClusterRole) -> Vec<FieldError> {
        let mut errors = check_rules(role.rules.as_deref().unwrap_or_default(), RoleScope::Cluster);
        if let Some(aggregation) = &role.aggregation_rule {
            let path = "aggregationRule.clusterRoleSelectors";
            let selectors = aggregation.cluster_role_selectors.as_deref().unwrap_or_default();
            if selectors.is_empty() {
                let why = "at least one clusterRoleSelector required if aggregationRule is non-nil";
                errors.push(FieldError::required(path, why));
            }
            for (i, selector) in selectors.iter().enumerate() {
                check_label_selector(&format!("{path}[{i}]"), selector, &mut errors);
            }
        }
        errors
    }

    fn columns() -> &'static [Column] {
        ROLE_COLUMNS
    }

    fn cells(role: &ClusterRole, _now: Timestamp) -> Vec<Value> {
        vec![column::name(&role.metadata), created_cell(role.metadata.creation_timestamp.as_ref())]
    }
}

pub struct RoleBindingStrategy;

impl Strategy for RoleBindingStrategy {
    type Object = RoleBinding;

    fn descriptor() -> Descriptor {
        descriptor("RoleBinding", "rolebindings")
    }

    fn name_rule() -> NameRule {
        NameRule::PathSegment
    }

    fn set_defaults(binding: &mut RoleBinding) {
        default_references(&mut binding.role_ref, &mut binding.subjects);
    }

    fn validate(binding: &RoleBinding) -> Vec<FieldError> {
        let mut errors = check_role_ref(&binding.role_ref, &["Role", "ClusterRole"]);
        check_subjects(binding.subjects.as_deref().unwrap_or_default(), RoleScope::Namespace, &mut errors);
        errors
    }

    fn validate_update(new: &RoleBinding, old: &RoleBinding) -> Vec<FieldError> {
        check_role_unchanged(&new.role_ref, &old.role_ref)
    }

    fn columns() -> &'static [Column] {
        BINDING_COLUMNS
    }

    fn cells(binding: &RoleBinding, now: Timestamp) -> Vec<Value> {
        let subjects = binding.subjects.as_deref().unwrap_or_default();
        let mut cells = vec![column::name(&binding.metadata), role_cell(&binding.role_ref)];
        cells.push(column::age(&binding.metadata, now));
        cells.extend(subject_cells(subjects));
        cells
    }
}

pub struct ClusterRoleBindingStrategy;

impl Strategy for ClusterRoleBindingStrategy {
    type Object = ClusterRoleBinding;

    fn descriptor() -> Descriptor {
        descriptor("ClusterRoleBinding", "clusterrolebindings").cluster_scoped()
    }

    fn name_rule() -> NameRule {
        NameRule::PathSegment
    }

    fn set_defaults(binding: &mut ClusterRoleBinding) {
        default_references(&mut binding.role_ref, &mut binding.subjects);
    }

    fn validate(binding: &ClusterRoleBinding) -> Vec<FieldError> {
        let mut errors = check_role_ref(&binding.role_ref, &["ClusterRole"]);
        check_subjects(binding.subjects.as_deref().unwrap_or_default(), RoleScope::Cluster, &mut errors);
        errors
    }

    fn validate_update(new: &ClusterRoleBinding, old: &ClusterRoleBinding) -> Vec<FieldError> {
        check_role_unchanged(&new.role_ref, &old.role_ref)
    }

    fn columns() -> &'static [Column] {
        BINDING_COLUMNS
    }

    fn cells(binding: &ClusterRoleBinding, now: Timestamp) -> Vec<Value> {
        let subjects = binding.subjects.as_deref().unwrap_or_default();
        let mut cells = vec![column::name(&binding.metadata), role_cell(&binding.role_ref)];
        cells.push(column::age(&binding.metadata, now));
        cells.extend(subject_cells(subjects));
        cells
    }
}

fn created_cell(time: Option<&k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>) -> Value {
    time.map_or(Value::Null, |t| t.0.to_string().into())
}

fn role_cell(role: &RoleRef) -> Value {
    format!("{}/{}", role.kind, role.name).into()
}

fn subject_cells(subjects: &[Subject]) -> [Value; 3] {
    let of = |kind: &str, format: fn(&Subject) -> String| -> Value {
        subjects.iter().filter(|s| s.kind == kind).map(format).collect::<Vec<_>>().join(", ").into()
    };
    [
        of("User", |s| s.name.clone()),
        of("Group", |s| s.name.clone()),
        of("ServiceAccount", |s| format!("{}/{}", s.namespace.as_deref().unwrap_or_default(), s.name)),
    ]
}

fn check_rules(rules: &[PolicyRule], scope: RoleScope) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for (i, rule) in rules.iter().enumerate() {
        let path = |field: &str| format!("rules[{i}].{field}");
        if rule.verbs.is_empty() {
            errors.push(FieldError::required(path("verbs"), "verbs must contain at least one value"));
        }
        let is_empty = |list: &Option<Vec<String>>| list.as_ref().is_none_or(Vec::is_empty);
        if let Some(urls) = rule.non_resource_urls.as_ref().filter(|u| !u.is_empty()) {
            if scope == RoleScope::Namespace {
                let why = "namespaced rules cannot apply to non-resource URLs";
                errors.push(FieldError::invalid(path("nonResourceURLs"), urls, why));
            }
            if !(is_empty(&rule.api_groups) && is_empty(&rule.resources) && is_empty(&rule.resource_names)) {
                let why = "rules cannot apply to both regular resources and non-resource URLs";
                errors.push(FieldError::invalid(path("nonResourceURLs"), urls, why));
            }
            continue;
        }
        if is_empty(&rule.api_groups) {
            errors.push(FieldError::required(path("apiGroups"), "resource rules must supply at least one api group"));
        }
        if is_empty(&rule.resources) {
            errors.push(FieldError::required(path("resources"), "resource rules must supply at least one resource"));
        }
    }
    errors
}

fn default_references(role: &mut RoleRef, subjects: &mut Option<Vec<Subject>>) {
    if role.api_group.as_deref().is_none_or(str::is_empty) {
        role.api_group = Some(GROUP.into());
    }
    for subject in subjects.iter_mut().flatten() {
        if subject.api_group.as_deref().is_none_or(str::is_empty) {
            subject.api_group = matches!(subject.kind.as_str(), "User" | "Group").then(|| GROUP.into());
        }
    }
    subjects.take_if(|s| s.is_empty());
}

fn check_role_ref(role: &RoleRef, kinds: &[&str]) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let group = role.api_group.as_deref().unwrap_or_default();
    if group != GROUP {
        errors.push(FieldError::not_supported("roleRef.apiGroup", group, &[GROUP]));
    }
    if !kinds.contains(&role.kind.as_str()) {
        errors.push(FieldError::not_supported("roleRef.kind", &role.kind, kinds));
    }
    if role.name.is_empty() {
        errors.push(FieldError::required("roleRef.name", ""));
    } else if let Err(why) = names::validate_name(&role.name, NameRule::PathSegment) {
        errors.push(FieldError::invalid("roleRef.name", &role.name, why));
    }
    errors
}

fn check_role_unchanged(new: &RoleRef, old: &RoleRef) -> Vec<FieldError> {
    if new == old { Vec::new() } else { vec![FieldError::invalid("roleRef", new, "cannot change roleRef")] }
}

fn check_subjects(subjects: &[Subject], scope: RoleScope, errors: &mut Vec<FieldError>) {
    for (i, subject) in subjects.iter().enumerate() {
        let path = |field: &str| format!("subjects[{i}].{field}");
        let group = subject.api_group.as_deref().unwrap_or_default();
        if subject.name.is_empty() {
            errors.push(FieldError::required(path("name"), ""));
        }
        match subject.kind.as_str() {
            "ServiceAccount" => {
                if let Some(why) = names::validate_subdomain(&subject.name).err().filter(|_| !subject.name.is_empty()) {
                    errors.push(FieldError::invalid(path("name"), &subject.name, why));
                }
                if !group.is_empty() {
                    errors.push(FieldError::not_supported(path("apiGroup"), group, &[""]));
                }
                if scope == RoleScope::Cluster && subject.namespace.as_deref().is_none_or(str::is_empty) {
                    errors.push(FieldError::required(path("namespace"), ""));
                }
            }
            "User" | "Group" => {
                if group != GROUP {
                    errors.push(FieldError::not_supported(path("apiGroup"), group, &[GROUP]));
                }
            }
            other => {
                errors.push(FieldError::not_supported(path("kind"), other, &["ServiceAccount", "User", "Group"]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn binding(role: Value, subjects: Value) -> RoleBinding {
        let mut binding = serde_json::from_value(json!({ "roleRef": role, "subjects": subjects })).unwrap();
        RoleBindingStrategy::set_defaults(&mut binding);
        binding
    }

    #[test]
    fn incomplete_rules_name_the_field() {
        for (case, rule, scope, want) in [
            (
                "complete",
                json!({ "verbs": ["get"], "apiGroups": [""], "resources": ["pods"] }),
                RoleScope::Namespace,
                vec![],
            ),
            (
                "nothing",
                json!({ "verbs": [] }),
                RoleScope::Namespace,
                vec!["rules[0].verbs", "rules[0].apiGroups", "rules[0].resources"],
            ),
            (
                "paths in a cluster role",
                json!({ "verbs": ["get"], "nonResourceURLs": ["/x"] }),
                RoleScope::Cluster,
                vec![],
            ),
            (
                "paths in a namespace",
                json!({ "verbs": ["get"], "nonResourceURLs": ["/x"] }),
                RoleScope::Namespace,
                vec!["rules[0].nonResourceURLs"],
            ),
            (
                "resources and paths",
                json!({ "verbs": ["get"], "nonResourceURLs": ["/x"], "resources": ["pods"] }),
                RoleScope::Cluster,
                vec!["rules[0].nonResourceURLs"],
            ),
        ] {
            let rule: PolicyRule = serde_json::from_value(rule).unwrap();
            let found: Vec<_> = check_rules(&[rule], scope).into_iter().map(|e| e.field).collect();
            assert_eq!(found, want, "{case}");
        }
    }

    #[test]
    fn invalid_bindings_name_the_field() {
        let role = || json!({ "kind": "ClusterRole", "name": "view" });
        for (case, role, subjects, want) in [
            ("a user", role(), json!([{ "kind": "User", "name": "u" }]), vec![]),
            ("an account of the namespace", role(), json!([{ "kind": "ServiceAccount", "name": "s" }]), vec![]),
            ("an unknown kind of subject", role(), json!([{ "kind": "Robot", "name": "r" }]), vec!["subjects[0].kind"]),
            ("a subject without a name", role(), json!([{ "kind": "User", "name": "" }]), vec!["subjects[0].name"]),
            ("no role", json!({ "kind": "Pod", "name": "" }), json!([]), vec!["roleRef.kind", "roleRef.name"]),
        ] {
            let found: Vec<_> =
                RoleBindingStrategy::validate(&binding(role, subjects)).into_iter().map(|e| e.field).collect();
            assert_eq!(found, want, "{case}");
        }
    }

    #[test]
    fn the_role_of_a_binding_is_immutable() {
        let old = binding(json!({ "kind": "ClusterRole", "name": "view" }), json!([]));
        let new = binding(json!({ "kind": "ClusterRole", "name": "edit" }), json!([]));
        assert_eq!(RoleBindingStrategy::validate_update(&old, &old), []);
        let errors = RoleBindingStrategy::validate_update(&new, &old);
        assert!(errors[0].to_string().ends_with("cannot change roleRef"), "{errors:?}");
    }
}
