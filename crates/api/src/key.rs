//! The identity of an object within its kind, and accessors for its metadata.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Namespace (`None` for cluster-scoped kinds) and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub namespace: Option<String>,
    pub name: String,
}

impl Key {
    pub fn cluster(name: impl Into<String>) -> Self {
        Self { namespace: None, name: name.into() }
    }

    pub fn namespaced(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: Some(namespace.into()), name: name.into() }
    }

    pub fn of(meta: &ObjectMeta) -> Self {
        Self { namespace: meta.namespace.clone(), name: meta.name.clone().unwrap_or_default() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// Accessors for metadata whose fields are optional in the API. An absent field reads as empty.
pub trait Meta {
    fn uid(&self) -> &str;
    fn is_deleting(&self) -> bool;
    fn annotation(&self, key: &str) -> Option<&str>;
    fn has_finalizer(&self, finalizer: &str) -> bool;
    /// The finalizers with this one appended, unless it is among them already.
    fn finalizers_with(&self, finalizer: &str) -> Vec<String>;
    fn finalizers_without(&self, finalizer: &str) -> Vec<String>;
    /// The resourceVersion as a number; 0 if it is absent or not a number.
    fn revision(&self) -> u64;
}

impl Meta for ObjectMeta {
    fn uid(&self) -> &str {
        self.uid.as_deref().unwrap_or_default()
    }

    fn is_deleting(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(key).map(String::as_str)
    }

    fn has_finalizer(&self, finalizer: &str) -> bool {
        self.finalizers.iter().flatten().any(|f| f == finalizer)
    }

    fn finalizers_with(&self, finalizer: &str) -> Vec<String> {
        let mut all = self.finalizers.clone().unwrap_or_default();
        if !all.iter().any(|f| f == finalizer) {
            all.push(finalizer.to_owned());
        }
        all
    }

    fn finalizers_without(&self, finalizer: &str) -> Vec<String> {
        self.finalizers.iter().flatten().filter(|f| *f != finalizer).cloned().collect()
    }

    fn revision(&self) -> u64 {
        self.resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(0)
    }
}
