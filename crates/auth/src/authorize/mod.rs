//! May this caller do this? Members of `system:masters` may do everything, nodes what concerns them
//! (`node_authorizer`), every caller what roles grant (`role_index`, `rules`).
//!
//! Roles, bindings and the references of pods are read from caches that are current at every decision: a grant that was
//! acknowledged is in force for the next request.

mod node_authorizer;
mod node_references;
mod role_index;
pub mod rules;
mod store_cache;

use std::sync::Arc;

use k8s_openapi::api::rbac::v1::PolicyRule;

use crate::authenticate::{Caller, MASTERS_GROUP};
use cleat_apimachinery::descriptor::Resource;
use cleat_apimachinery::error::ApiError;
use cleat_registry::reader::ObjectReader;
use node_authorizer::NodeAuthorizer;
use node_references::NodeReferences;
pub use role_index::role_key;
use role_index::{Grant, RoleIndex};
use store_cache::StoreCache;

/// The attributes of a request on which authorization decides.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    pub verb: &'a str,
    pub target: RequestTarget<'a>,
    /// The field selector of a list or watch. Empty if there is none.
    pub field_selector: &'a str,
}

#[derive(Clone, Copy, Debug)]
pub enum RequestTarget<'a> {
    /// `group` is empty for the core group; `subresource` and `name` are empty if the request names none.
    Resource { group: &'a str, plural: &'a str, subresource: &'a str, namespace: Option<&'a str>, name: &'a str },
    /// A path that is not of a resource.
    Path(&'a str),
}

impl<'a> Attributes<'a> {
    /// Attributes without a field selector.
    pub fn new(verb: &'a str, target: RequestTarget<'a>) -> Self {
        Self { verb, target, field_selector: "" }
    }
}

/// Whether a request is allowed, and by which rule.
#[derive(Clone, Debug)]
pub enum AccessDecision {
    /// The caller is a member of `system:masters`.
    AllowedToMasters,
    /// A role allows it.
    AllowedByGrant(Arc<Grant>),
    /// The node authorizer allows it.
    AllowedToNode,
    Denied,
}

impl AccessDecision {
    pub fn is_allowed(&self) -> bool {
        !matches!(self, Self::Denied)
    }

    /// The reason that an access review shows. Empty if there is none to show.
    pub fn reason(&self) -> String {
        match self {
            Self::AllowedToMasters | Self::Denied => String::new(),
            Self::AllowedToNode => "the node needs it".into(),
            Self::AllowedByGrant(grant) => format!("RBAC: allowed by {grant}"),
        }
    }
}

pub struct Authorizer {
    objects: ObjectReader,
    roles: StoreCache<RoleIndex>,
    node_references: StoreCache<NodeReferences>,
}

impl Authorizer {
    pub fn new(objects: ObjectReader) -> Self {
        Self { objects, roles: StoreCache::default(), node_references: StoreCache::default() }
    }

    pub async fn decide(&self, caller: &Caller, attributes: &Attributes<'_>) -> AccessDecision {
        if caller.is_member_of(MASTERS_GROUP) {
            return AccessDecision::AllowedToMasters;
        }
        self.roles.refresh(self.objects.store()).await;
        if let Some(grant) = self.roles.read(|index| index.find_grant(caller, attributes)) {
            return AccessDecision::AllowedByGrant(grant);
        }
        let Some(node) = caller.node_name() else { return AccessDecision::Denied };
        let authorizer = NodeAuthorizer { objects: &self.objects, references: &self.node_references, node };
        match authorizer.is_allowed(attributes).await {
            true => AccessDecision::AllowedToNode,
            false => AccessDecision::Denied,
        }
    }

    /// Fails with a 403 if the decision is [`AccessDecision::Denied`].
    pub async fn require(&self, caller: &Caller, attributes: &Attributes<'_>) -> Result<(), ApiError> {
        match self.decide(caller, attributes).await.is_allowed() {
            true => Ok(()),
            false => Err(forbidden(caller, attributes)),
        }
    }

    /// All rules that roles grant the caller in a namespace; in the cluster scope if it is `None`. Does not contain
    /// what the node authorizer allows.
    pub async fn rules_for(&self, caller: &Caller, namespace: Option<&str>) -> Vec<PolicyRule> {
        self.roles.refresh(self.objects.store()).await;
        let mut rules = self.roles.read(|index| index.rules_for(caller, namespace));
        if caller.is_member_of(MASTERS_GROUP) && !rules::uncovered(&rules, &rules::full_access()).is_empty() {
            rules.extend(rules::full_access());
        }
        rules
    }

    /// The rules of the role with this storage key. `None` if there is no such role.
    pub async fn role_rules(&self, key: &str) -> Option<Vec<PolicyRule>> {
        self.roles.refresh(self.objects.store()).await;
        self.roles.read(|index| index.role(key).map(|rules| rules.to_vec()))
    }
}

/// The 403: names the user, the verb and the target.
fn forbidden(caller: &Caller, attributes: &Attributes<'_>) -> ApiError {
    let (user, verb) = (&caller.name, attributes.verb);
    match attributes.target {
        RequestTarget::Path(path) => ApiError::Forbidden {
            resource: Resource { group: String::new(), plural: String::new() },
            name: String::new(),
            why: format!("User {user:?} cannot {verb} path {path:?}"),
            cause: None,
        },
        RequestTarget::Resource { group, plural, subresource, namespace, name } => {
            let slash = if subresource.is_empty() { "" } else { "/" };
            let scope = match namespace {
                Some(namespace) => format!("in the namespace {namespace:?}"),
                None => "at the cluster scope".into(),
            };
            ApiError::Forbidden {
                resource: Resource { group: group.into(), plural: plural.into() },
                name: name.into(),
                why: format!(
                    "User {user:?} cannot {verb} resource \"{plural}{slash}{subresource}\" in API group {group:?} {scope}"
                ),
                cause: None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_user_verb_and_target() {
        let caller = Caller { name: "bob".into(), ..Caller::default() };
        let pods = |subresource, namespace, name| RequestTarget::Resource {
            group: "",
            plural: "pods",
            subresource,
            namespace,
            name,
        };
        for (verb, target, want) in [
            (
                "list",
                pods("", Some("ns"), ""),
                r#"pods is forbidden: User "bob" cannot list resource "pods" in API group "" in the namespace "ns""#,
            ),
            (
                "get",
                pods("log", Some("ns"), "p"),
                r#"pods "p" is forbidden: User "bob" cannot get resource "pods/log" in API group "" in the namespace "ns""#,
            ),
            (
                "list",
                pods("", None, ""),
                r#"pods is forbidden: User "bob" cannot list resource "pods" in API group "" at the cluster scope"#,
            ),
            ("get", RequestTarget::Path("/metrics"), r#"forbidden: User "bob" cannot get path "/metrics""#),
        ] {
            let (code, status) = forbidden(&caller, &Attributes::new(verb, target)).status();
            assert_eq!((code.as_u16(), status["message"].as_str()), (403, Some(want)));
        }
    }
}
