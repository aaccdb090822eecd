//! May this caller do this? Members of `system:masters` may do everything, nodes what concerns them (`node`), everybody
//! what roles grant (`index`, `rules`). No request reads the store for it: the index follows the roles by watch, and a
//! grant that was acknowledged counts for the very next request.

mod feed;
mod index;
mod node;
mod reach;
pub mod rules;

use std::sync::Arc;

use k8s_openapi::api::rbac::v1::PolicyRule;

use crate::authenticate::{Caller, MASTERS};
use cleat_apimachinery::descriptor::Resource;
use cleat_apimachinery::error::ApiError;
use cleat_registry::reader::ObjectReader;
use feed::Feed;
pub use index::role_key;
use index::{Grant, Index};
use reach::Reach;

/// One thing somebody wants to do.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    pub verb: &'a str,
    pub what: What<'a>,
    /// The field selector of a list or watch.
    pub fields: &'a str,
}

#[derive(Clone, Copy, Debug)]
pub enum What<'a> {
    /// Empty strings stand for what the request does not name.
    Resource {
        group: &'a str,
        plural: &'a str,
        subresource: &'a str,
        namespace: Option<&'a str>,
        name: &'a str,
    },
    Path(&'a str),
}

impl<'a> Attributes<'a> {
    pub fn new(verb: &'a str, what: What<'a>) -> Self {
        Self { verb, what, fields: "" }
    }
}

/// An answer and what it rests on.
#[derive(Clone, Debug)]
pub enum Verdict {
    Master,
    Granted(Arc<Grant>),
    Node,
    Denied,
}

impl Verdict {
    pub fn is_allowed(&self) -> bool {
        !matches!(self, Self::Denied)
    }

    pub fn reason(&self) -> String {
        match self {
            Self::Master | Self::Denied => String::new(),
            Self::Node => "the node needs it".into(),
            Self::Granted(grant) => format!("RBAC: allowed by {grant}"),
        }
    }
}

pub struct Authorizer {
    objects: ObjectReader,
    roles: Feed<Index>,
    reach: Feed<Reach>,
}

impl Authorizer {
    pub fn new(objects: ObjectReader) -> Self {
        Self { objects, roles: Feed::default(), reach: Feed::default() }
    }

    pub async fn decide(&self, caller: &Caller, asked: &Attributes<'_>) -> Verdict {
        if caller.is_in(MASTERS) {
            return Verdict::Master;
        }
        self.roles.follow(self.objects.store()).await;
        if let Some(grant) = self.roles.read(|index| index.find(caller, asked)) {
            return Verdict::Granted(grant);
        }
        match caller.node() {
            Some(node) if node::may(&self.objects, &self.reach, node, asked).await => Verdict::Node,
            _ => Verdict::Denied,
        }
    }

    pub async fn require(&self, caller: &Caller, asked: &Attributes<'_>) -> Result<(), ApiError> {
        match self.decide(caller, asked).await {
            Verdict::Denied => Err(refusal(caller, asked)),
            Verdict::Master | Verdict::Granted(_) | Verdict::Node => Ok(()),
        }
    }

    /// Everything roles grant the caller in a namespace; `None` is the whole cluster.
    pub async fn rules(&self, caller: &Caller, namespace: Option<&str>) -> Vec<PolicyRule> {
        self.roles.follow(self.objects.store()).await;
        let mut found = self.roles.read(|index| index.rules(caller, namespace));
        if caller.is_in(MASTERS) && !rules::missing(&found, &rules::everything()).is_empty() {
            found.extend(rules::everything());
        }
        found
    }

    /// The rules of a role, by its storage key.
    pub async fn role(&self, key: &str) -> Option<Vec<PolicyRule>> {
        self.roles.follow(self.objects.store()).await;
        self.roles.read(|index| index.role(key).map(|rules| rules.to_vec()))
    }
}

/// The 403 that names who may not do what.
fn refusal(caller: &Caller, asked: &Attributes<'_>) -> ApiError {
    let (user, verb) = (&caller.name, asked.verb);
    match asked.what {
        What::Path(path) => ApiError::Forbidden {
            resource: Resource { group: String::new(), plural: String::new() },
            name: String::new(),
            why: format!("User {user:?} cannot {verb} path {path:?}"),
            cause: None,
        },
        What::Resource { group, plural, subresource, namespace, name } => {
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
    fn a_refusal_names_who_what_and_where() {
        let caller = Caller { name: "bob".into(), ..Caller::default() };
        let pods =
            |subresource, namespace, name| What::Resource { group: "", plural: "pods", subresource, namespace, name };
        for (verb, what, want) in [
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
            ("get", What::Path("/metrics"), r#"forbidden: User "bob" cannot get path "/metrics""#),
        ] {
            let (code, status) = refusal(&caller, &Attributes::new(verb, what)).status();
            assert_eq!((code.as_u16(), status["message"].as_str()), (403, Some(want)));
        }
    }
}
