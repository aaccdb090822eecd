//! What a request asks for, in the terms that authorization, audit and metrics share.

use std::sync::Arc;

use http::Uri;

use crate::authorize::{Attributes, What};

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

/// What a request asks for, in the words that authorization, audit and metrics share.
pub struct RequestInfo {
    pub verb: &'static str,
    pub uri: Uri,
    /// The resource, with the name a field selector stands for; nothing for other paths.
    pub target: Option<Arc<ResourcePath>>,
    /// The field selector of a list or watch.
    pub fields: String,
    /// Is the resource one that is served? Only those appear in metrics.
    pub known: bool,
}

impl RequestInfo {
    /// Group and resource as metrics name them.
    pub fn labels(&self) -> (String, String) {
        match self.target.as_deref().filter(|_| self.known) {
            Some(ResourcePath { group, plural, subresource: None, .. }) => (group.clone(), plural.clone()),
            Some(ResourcePath { group, plural, subresource: Some(sub), .. }) => {
                (group.clone(), format!("{plural}/{sub}"))
            }
            None => (String::new(), String::new()),
        }
    }

    pub fn attributes(&self) -> Attributes<'_> {
        let what = match &self.target {
            None => What::Path(self.uri.path()),
            Some(target) => {
                let name = target.name.as_deref().unwrap_or_default();
                // A namespace is inside itself, so that a role in it can be about it.
                let is_namespace = target.plural == "namespaces" && target.group.is_empty() && !name.is_empty();
                What::Resource {
                    group: &target.group,
                    plural: &target.plural,
                    subresource: target.subresource.as_deref().unwrap_or_default(),
                    namespace: target.namespace.as_deref().or(is_namespace.then_some(name)),
                    name,
                }
            }
        };
        Attributes { verb: self.verb, what, fields: &self.fields }
    }
}
