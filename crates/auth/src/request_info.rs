//! What a request asks for, in the terms that authorization, audit and metrics share.

use std::sync::Arc;

use http::Uri;

use crate::authorize::{Attributes, RequestTarget};

/// The resource that a request path names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourcePath {
    pub group: String,
    pub version: String,
    pub namespace: Option<String>,
    pub plural: String,
    pub name: Option<String>,
    pub subresource: Option<String>,
}

/// The parsed head of a request: its verb and its target.
pub struct RequestInfo {
    pub verb: &'static str,
    pub uri: Uri,
    /// The resource of the path. If the path names no object but the field selector requires one `metadata.name`, that
    /// name is the target's name. `None` for paths that are not of resources.
    pub target: Option<Arc<ResourcePath>>,
    /// The field selector of a list or watch. Empty if there is none.
    pub field_selector: String,
    /// True if the server serves the resource. Metrics have labels only for those, so that clients cannot create new
    /// label values.
    pub is_served: bool,
}

impl RequestInfo {
    /// The labels `group` and `resource` of metrics. Both are empty for paths and for resources that are not served.
    pub fn metric_labels(&self) -> (String, String) {
        match self.target.as_deref().filter(|_| self.is_served) {
            Some(ResourcePath { group, plural, subresource: None, .. }) => (group.clone(), plural.clone()),
            Some(ResourcePath { group, plural, subresource: Some(subresource), .. }) => {
                (group.clone(), format!("{plural}/{subresource}"))
            }
            None => (String::new(), String::new()),
        }
    }

    /// The attributes on which authorization decides.
    pub fn attributes(&self) -> Attributes<'_> {
        let target = match &self.target {
            None => RequestTarget::Path(self.uri.path()),
            Some(target) => {
                let name = target.name.as_deref().unwrap_or_default();
                // A Namespace object counts as being in the namespace of its own name: a role there can grant access
                // to it.
                let is_namespace = target.plural == "namespaces" && target.group.is_empty() && !name.is_empty();
                RequestTarget::Resource {
                    group: &target.group,
                    plural: &target.plural,
                    subresource: target.subresource.as_deref().unwrap_or_default(),
                    namespace: target.namespace.as_deref().or(is_namespace.then_some(name)),
                    name,
                }
            }
        };
        Attributes { verb: self.verb, target, field_selector: &self.field_selector }
    }
}
