//! Roles and bindings, arranged by whom they are for.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use cleat_store::Entry;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject};

use super::feed::Picture;
use super::{Attributes, What, rules};
use crate::authenticate::Caller;
use crate::authenticate::account::user_name;

const ROLES: &str = "/registry/roles/";
const CLUSTER_ROLES: &str = "/registry/clusterroles/";
const ROLE_BINDINGS: &str = "/registry/rolebindings/";
const CLUSTER_ROLE_BINDINGS: &str = "/registry/clusterrolebindings/";

/// One binding's effect on one subject.
#[derive(Debug)]
pub struct Grant {
    /// The binding's storage key.
    binding: String,
    /// Where it counts; everywhere if absent.
    namespace: Option<String>,
    /// The role's storage key.
    role: String,
    subject: String,
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |key: &str| key.rsplit('/').next().unwrap_or_default().to_owned();
        let kind = if self.role.starts_with(CLUSTER_ROLES) { "ClusterRole" } else { "Role" };
        let binding = named(&self.binding);
        match &self.namespace {
            Some(namespace) => write!(f, "RoleBinding \"{binding}/{namespace}\"")?,
            None => write!(f, "ClusterRoleBinding {binding:?}")?,
        }
        write!(f, " of {kind} {:?} to {}", named(&self.role), self.subject)
    }
}

#[derive(Default)]
pub(super) struct Index {
    roles: HashMap<String, Vec<PolicyRule>>,
    users: HashMap<String, Vec<Arc<Grant>>>,
    groups: HashMap<String, Vec<Arc<Grant>>>,
}

/// The storage key of the role that a binding in `namespace` refers to.
pub fn role_key(role: &RoleRef, namespace: Option<&str>) -> String {
    match (role.kind.as_str(), namespace) {
        ("Role", Some(namespace)) => format!("{ROLES}{namespace}/{}", role.name),
        _ => format!("{CLUSTER_ROLES}{}", role.name),
    }
}

impl Index {
    pub(super) fn find(&self, caller: &Caller, asked: &Attributes<'_>) -> Option<Arc<Grant>> {
        let namespace = match asked.what {
            What::Resource { namespace, .. } => namespace,
            What::Path(_) => None,
        };
        let fits = |rule: &PolicyRule| rules::allows(rule, asked);
        let found = self.grants(caller, namespace).find(|grant| self.rules_of(grant).iter().any(fits));
        found.cloned()
    }

    pub(super) fn rules(&self, caller: &Caller, namespace: Option<&str>) -> Vec<PolicyRule> {
        self.grants(caller, namespace).flat_map(|grant| self.rules_of(grant)).cloned().collect()
    }

    pub(super) fn role(&self, key: &str) -> Option<&[PolicyRule]> {
        self.roles.get(key).map(Vec::as_slice)
    }

    fn rules_of(&self, grant: &Grant) -> &[PolicyRule] {
        self.role(&grant.role).unwrap_or_default()
    }

    fn grants<'a>(&'a self, caller: &'a Caller, namespace: Option<&'a str>) -> impl Iterator<Item = &'a Arc<Grant>> {
        let own = self.users.get(&caller.name).into_iter();
        let shared = caller.groups.iter().filter_map(|group| self.groups.get(group));
        let all = own.chain(shared).flatten();
        all.filter(move |grant| grant.namespace.is_none() || grant.namespace.as_deref() == namespace)
    }

    fn forget(&mut self, binding: &str) {
        for grants in [&mut self.users, &mut self.groups] {
            grants.retain(|_, list| {
                list.retain(|grant| grant.binding != binding);
                !list.is_empty()
            });
        }
    }

    fn bind(&mut self, binding: &str, namespace: Option<&str>, role: &RoleRef, subjects: &[Subject]) {
        for subject in subjects {
            let (kind, name) = (&subject.kind, &subject.name);
            let grant = |shown: String| {
                Arc::new(Grant {
                    binding: binding.into(),
                    namespace: namespace.map(Into::into),
                    role: role_key(role, namespace),
                    subject: format!("{kind} {shown:?}"),
                })
            };
            match kind.as_str() {
                "User" => self.users.entry(name.clone()).or_default().push(grant(name.clone())),
                "Group" => self.groups.entry(name.clone()).or_default().push(grant(name.clone())),
                "ServiceAccount" => {
                    let home = subject.namespace.as_deref().filter(|n| !n.is_empty()).or(namespace).unwrap_or_default();
                    let user = user_name(home, name);
                    self.users.entry(user).or_default().push(grant(format!("{name}/{home}")));
                }
                _ => {}
            }
        }
    }
}

impl Picture for Index {
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
            self.forget(key);
            let namespace = rest.split('/').next();
            if let Some(found) = bytes.and_then(|b| serde_json::from_slice::<RoleBinding>(b).ok()) {
                self.bind(key, namespace, &found.role_ref, found.subjects.as_deref().unwrap_or_default());
            }
        } else if key.starts_with(CLUSTER_ROLE_BINDINGS) {
            self.forget(key);
            if let Some(found) = bytes.and_then(|b| serde_json::from_slice::<ClusterRoleBinding>(b).ok()) {
                self.bind(key, None, &found.role_ref, found.subjects.as_deref().unwrap_or_default());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn set(index: &mut Index, key: &str, object: &Value) {
        let value = object.to_string().into();
        index.apply(key, Some(&Entry { key: key.into(), value, created: 1, modified: 1 }));
    }

    fn caller(name: &str, groups: &[&str]) -> Caller {
        Caller { name: name.into(), groups: groups.iter().map(|g| (*g).into()).collect(), ..Caller::default() }
    }

    fn pods(namespace: Option<&str>) -> Attributes<'_> {
        Attributes::new("get", What::Resource { group: "", plural: "pods", subresource: "", namespace, name: "p" })
    }

    #[test]
    fn a_binding_counts_where_it_is_and_while_it_is() {
        let mut index = Index::default();
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
        for (case, who, namespace, want) in [
            ("the user, in the namespace", caller("ann", &[]), Some("here"), true),
            ("the user, elsewhere", caller("ann", &[]), Some("there"), false),
            ("the user, everywhere", caller("ann", &[]), None, false),
            ("a member of the group", caller("bob", &["staff"]), Some("here"), true),
            ("the account of the namespace", caller(robot, &[]), Some("here"), true),
            ("somebody else", caller("eve", &[]), Some("here"), false),
        ] {
            assert_eq!(index.find(&who, &pods(namespace)).is_some(), want, "{case}");
        }
        let ann = caller("ann", &[]);
        let shown = index.find(&ann, &pods(Some("here"))).unwrap().to_string();
        assert_eq!(shown, r#"RoleBinding "b/here" of ClusterRole "reader" to User "ann""#);
        set(&mut index, "/registry/clusterrolebindings/c", &binding);
        assert!(index.find(&ann, &pods(None)).is_some(), "a cluster binding counts everywhere");
        index.apply("/registry/clusterrolebindings/c", None);
        index.apply("/registry/rolebindings/here/b", None);
        assert!(index.find(&ann, &pods(Some("here"))).is_none(), "a binding that is gone grants nothing");
    }
}
