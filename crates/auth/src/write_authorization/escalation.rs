//! Privilege escalation: a role or binding may not grant rights that its writer does not hold.

use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef};

use crate::authenticate::Caller;
use crate::authorize::rules::{format_rule, full_access, uncovered};
use crate::authorize::{Attributes, Authorizer, RequestTarget, role_key};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::{Object, typed};
use cleat_registry::strategy::rbac::GROUP;

/// Refuses roles and bindings that grant rights which the caller does not hold, unless the caller has the verb
/// `escalate` on the role or `bind` on the role of the binding. A write that does not change what is granted is
/// allowed.
pub(super) async fn check_escalation(
    authorizer: &Authorizer,
    caller: &Caller,
    d: &Descriptor,
    new: &dyn Object,
    old: Option<&dyn Object>,
) -> Result<(), ApiError> {
    let name = new.meta().name.as_deref().unwrap_or_default();
    let namespace = new.meta().namespace.as_deref();
    let to_vec = |rules: &Option<Vec<PolicyRule>>| rules.clone().unwrap_or_default();
    let (verb, plural, role_name, granted) = match d.plural.as_str() {
        "roles" => {
            let (new, old) = (typed::<Role>(new), old.map(typed::<Role>));
            if old.is_some_and(|old| old.rules == new.rules) {
                return Ok(());
            }
            ("escalate", "roles", name.to_owned(), to_vec(&new.rules))
        }
        "clusterroles" => {
            let (new, old) = (typed::<ClusterRole>(new), old.map(typed::<ClusterRole>));
            if old.is_some_and(|old| old.rules == new.rules && old.aggregation_rule == new.aggregation_rule) {
                return Ok(());
            }
            // Which rules will be aggregated is not known: roles may be added later.
            let granted = if new.aggregation_rule.is_some() { full_access() } else { to_vec(&new.rules) };
            ("escalate", "clusterroles", name.to_owned(), granted)
        }
        "rolebindings" => {
            let (new, old) = (typed::<RoleBinding>(new), old.map(typed::<RoleBinding>));
            if old.is_some_and(|old| old.subjects == new.subjects && old.role_ref == new.role_ref) {
                return Ok(());
            }
            bound_role(authorizer, &new.role_ref, namespace).await
        }
        _ => {
            let (new, old) = (typed::<ClusterRoleBinding>(new), old.map(typed::<ClusterRoleBinding>));
            if old.is_some_and(|old| old.subjects == new.subjects && old.role_ref == new.role_ref) {
                return Ok(());
            }
            bound_role(authorizer, &new.role_ref, None).await
        }
    };
    let target = RequestTarget::Resource { group: GROUP, plural, subresource: "", namespace, name: &role_name };
    if authorizer.decide(caller, &Attributes::new(verb, target)).await.is_allowed() {
        return Ok(());
    }
    let held = authorizer.rules_for(caller, namespace).await;
    let excess = uncovered(&held, &granted);
    if excess.is_empty() {
        return Ok(());
    }
    let excess: Vec<String> = excess.iter().map(format_rule).collect();
    let why = format!(
        "user {:?} (groups={:?}) is attempting to grant RBAC permissions not currently held:\n{}",
        caller.name,
        caller.groups,
        excess.join("\n")
    );
    Err(ApiError::forbidden(d, name, why))
}

/// For a binding of the role: the verb that is needed to bind it regardless of its rules, its plural and name, and
/// the rules that the binding grants. A role that does not exist counts as full access: it may be created with any
/// rules.
async fn bound_role(
    authorizer: &Authorizer,
    role: &RoleRef,
    namespace: Option<&str>,
) -> (&'static str, &'static str, String, Vec<PolicyRule>) {
    let plural = if role.kind == "Role" { "roles" } else { "clusterroles" };
    let granted = authorizer.role_rules(&role_key(role, namespace)).await.unwrap_or_else(full_access);
    ("bind", plural, role.name.clone(), granted)
}
