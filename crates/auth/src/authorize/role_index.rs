//! Roles and bindings, indexed by the users and groups that the bindings name as subjects.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use cleat_store::Entry;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject};

use super::store_cache::CachedView;
use super::{Attributes, RequestTarget, rules};
use crate::authenticate::Caller;
use crate::authenticate::service_account::user_name;

const ROLES: &str = "/registry/roles/";
const CLUSTER_ROLES: &str = "/registry/clusterroles/";
const ROLE_BINDINGS: &str = "/registry/rolebindings/";
const CLUSTER_ROLE_BINDINGS: &str = "/registry/clusterrolebindings/";

/// What one binding gives to one of its subjects. `Display` gives the reason that an access review shows.
#[derive(Debug)]
pub struct Grant {
    /// The binding's storage key.
    binding_key: String,
    /// The namespace that the grant is limited to. `None` for a ClusterRoleBinding: every namespace and the cluster
    /// scope.
    namespace: Option<String>,
    /// The role's storage key.
    role_key: String,
    /// Kind and quoted name of the subject.
    subject: String,
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name_of = |key: &str| key.rsplit('/').next().unwrap_or_default().to_owned();
        let kind = if self.role_key.starts_with(CLUSTER_ROLES) { "ClusterRole" } else { "Role" };
        let binding = name_of(&self.binding_key);
        match &self.namespace {
            Some(namespace) => write!(f, "RoleBinding \"{binding}/{namespace}\"")?,
            None => write!(f, "ClusterRoleBinding {binding:?}")?,
        }
        write!(f, " of {kind} {:?} to {}", name_of(&self.role_key), self.subject)
    }
}

#[derive(Default)]
pub(super) struct RoleIndex {
    /// By the role's storage key.
    roles: HashMap<String, Vec<PolicyRule>>,
    /// By user name; those of service accounts are here too.
    user_grants: HashMap<String, Vec<Arc<Grant>>>,
    /// By group name.
    group_grants: HashMap<String, Vec<Arc<Grant>>>,
}

/// The storage key of the role that a binding in `namespace` refers to. `namespace` is `None` for a ClusterRoleBinding.
pub fn role_key(role: &RoleRef, namespace: Option<&str>) -> String {
    match (role.kind.as_str(), namespace) {
        ("Role", Some(namespace)) => format!("{ROLES}{namespace}/{}", role.name),
        _ => format!("{CLUSTER_ROLES}{}", role.name),
    }
}

impl RoleIndex {
    /// A grant that allows the request. If several do, it is not defined which of them is returned.
    pub(super) fn find_grant(&self, caller: &Caller, attributes: &Attributes<'_>) -> Option<Arc<Grant>> {
        let namespace = match attributes.target {
            RequestTarget::Resource { namespace, .. } => namespace,
            RequestTarget::Path(_) => None,
        };
        let is_allowed_by = |rule: &PolicyRule| rules::allows(rule, attributes);
        let mut grants = self.grants(caller, namespace);
        grants.find(|grant| self.rules_of(grant).iter().any(is_allowed_by)).cloned()
    }

    /// All rules that are granted to the caller in the namespace; in the cluster scope if it is `None`.
    pub(super) fn rules_for(&self, caller: &Caller, namespace: Option<&str>) -> Vec<PolicyRule> {
        self.grants(caller, namespace).flat_map(|grant| self.rules_of(grant)).cloned().collect()
    }

    /// The rules of the role with this storage key. `None` if there is no such role.
    pub(super) fn role(&self, key: &str) -> Option<&[PolicyRule]> {
        self.roles.get(key).map(Vec::as_slice)
    }

    /// Empty if the role of the grant does not exist.
    fn rules_of(&self, grant: &Grant) -> &[PolicyRule] {
        self.role(&grant.role_key).unwrap_or_default()
    }

    fn grants<'a>(&'a self, caller: &'a Caller, namespace: Option<&'a str>) -> impl Iterator<Item = &'a Arc<Grant>> {
        let of_user = self.user_grants.get(&caller.name).into_iter();
        let of_groups = caller.groups.iter().filter_map(|group| self.group_grants.get(group));
        let all = of_user.chain(of_groups).flatten();
        all.filter(move |grant| grant.namespace.is_none() || grant.namespace.as_deref() == namespace)
    }

    fn remove_binding(&mut self, binding_key: &str) {
        for grants_by_subject in [&mut self.user_grants, &mut self.group_grants] {
            grants_by_subject.retain(|_, grants| {
                grants.retain(|grant| grant.binding_key != binding_key);
                !grants.is_empty()
            });
        }
    }

    fn add_binding(&mut self, binding_key: &str, namespace: Option<&str>, role: &RoleRef, subjects: &[Subject]) {
        for subject in subjects {
            let (kind, name) = (&subject.kind, &subject.name);
            let grant = |subject_name: String| {
                Arc::new(Grant {
                    binding_key: binding_key.into(),
                    namespace: namespace.map(Into::into),
                    role_key: role_key(role, namespace),
                    subject: format!("{kind} {subject_name:?}"),
                })
            };
            match kind.as_str() {
                "User" => self.user_grants.entry(name.clone()).or_default().push(grant(name.clone())),
                "Group" => self.group_grants.entry(name.clone()).or_default().push(grant(name.clone())),
                "ServiceAccount" => {
                    let given = subject.namespace.as_deref().filter(|n| !n.is_empty());
                    let account_namespace = given.or(namespace).unwrap_or_default();
                    let user = user_name(account_namespace, name);
                    self.user_grants.entry(user).or_default().push(grant(format!("{name}/{account_namespace}")));
                }
                _ => {}
            }
        }
    }
}

impl CachedView for RoleIndex {
    const PREFIXES: &'static [&'static str] = &[ROLES, CLUSTER_ROLES, ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS];

    fn apply(&mut self, key: &str, object: Option<&Entry>) {
        let bytes = object.map(|entry| &entry.value[..]);
        if key.starts_with(ROLES) || key.starts_with(CLUSTER_ROLES) {
            let rules = bytes.and_then(|bytes| match key.starts_with(ROLES) {
                true => serde_json::from_slice::<Role>(bytes).ok()?.rules,
                false => serde_json::from_slice::<ClusterRole>(bytes).ok()?.rules,
            });
            match bytes {
                Some(_) => self.roles.insert(key.into(), rules.unwrap_or_default()),
                None => self.roles.remove(key),
            };
        } else if let Some(rest) = key.strip_prefix(ROLE_BINDINGS) {
            self.remove_binding(key);
            let namespace = rest.split('/').next();
            if let Some(binding) = bytes.and_then(|b| serde_json::from_slice::<RoleBinding>(b).ok()) {
                self.add_binding(key, namespace, &binding.role_ref, binding.subjects.as_deref().unwrap_or_default());
            }
        } else if key.starts_with(CLUSTER_ROLE_BINDINGS) {
            self.remove_binding(key);
            if let Some(binding) = bytes.and_then(|b| serde_json::from_slice::<ClusterRoleBinding>(b).ok()) {
                self.add_binding(key, None, &binding.role_ref, binding.subjects.as_deref().unwrap_or_default());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn set(index: &mut RoleIndex, key: &str, object: &Value) {
        let value = object.to_string().into();
        index.apply(key, Some(&Entry { key: key.into(), value, created: 1, modified: 1 }));
    }

    fn caller(name: &str, groups: &[&str]) -> Caller {
        Caller { name: name.into(), groups: groups.iter().map(|g| (*g).into()).collect(), ..Caller::default() }
    }

    fn pods(namespace: Option<&str>) -> Attributes<'_> {
        Attributes::new(
            "get",
            RequestTarget::Resource { group: "", plural: "pods", subresource: "", namespace, name: "p" },
        )
    }

    #[test]
    fn a_binding_grants_in_its_namespace_while_it_exists() {
        let mut index = RoleIndex::default();
        let rule = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["get"] }]);
        set(&mut index, "/registry/clusterroles/reader", &json!({ "metadata": {}, "rules": rule }));
        let role = json!({ "kind": "ClusterRole", "name": "reader" });
        let subjects = json!([
            { "kind": "User", "name": "ann" }, { "kind": "Group", "name": "staff" },
            { "kind": "ServiceAccount", "name": "robot" },
        ]);
        let binding = json!({ "metadata": {}, "roleRef": role, "subjects": subjects });
        set(&mut index, "/registry/rolebindings/here/b", &binding);
        let robot = "system:serviceaccount:here:robot";
        for (case, caller, namespace, want) in [
            ("the user, in the namespace", caller("ann", &[]), Some("here"), true),
            ("the user, elsewhere", caller("ann", &[]), Some("there"), false),
            ("the user, at the cluster scope", caller("ann", &[]), None, false),
            ("a member of the group", caller("bob", &["staff"]), Some("here"), true),
            ("the account of the namespace", caller(robot, &[]), Some("here"), true),
            ("another user", caller("eve", &[]), Some("here"), false),
        ] {
            assert_eq!(index.find_grant(&caller, &pods(namespace)).is_some(), want, "{case}");
        }
        let ann = caller("ann", &[]);
        let reason = index.find_grant(&ann, &pods(Some("here"))).unwrap().to_string();
        assert_eq!(reason, r#"RoleBinding "b/here" of ClusterRole "reader" to User "ann""#);
        set(&mut index, "/registry/clusterrolebindings/c", &binding);
        assert!(index.find_grant(&ann, &pods(None)).is_some(), "a cluster binding grants at the cluster scope");
        index.apply("/registry/clusterrolebindings/c", None);
        index.apply("/registry/rolebindings/here/b", None);
        assert!(index.find_grant(&ann, &pods(Some("here"))).is_none(), "a deleted binding grants nothing");
    }
}
