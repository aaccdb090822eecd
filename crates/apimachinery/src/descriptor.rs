//! The names of a kind, its storage key and its endpoint options. Routing, discovery, storage and error messages use them.

use std::fmt;

use crate::meta::FinalizerRule;

/// What the response to a completed deletion contains: the object, or a Status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteReply {
    Object,
    Status,
}

/// Whether a PUT may leave out `metadata.resourceVersion`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutVersion {
    Optional,
    Required,
}

/// What a PUT does if the object does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutMissing {
    NotFound,
    Creates,
}

/// Whether the first update of an object may be skipped because it changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstUpdate {
    MayBeNoop,
    /// The first update is stored even if it changes nothing, and so gets a resourceVersion of its own. In Kubernetes it
    /// persists defaults that are otherwise set only when the object is read.
    AlwaysStored,
}

/// The fields that the `scale` subresource reads and writes. A path is a list of field names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalePaths {
    pub spec_replicas: Vec<String>,
    pub status_replicas: Vec<String>,
    pub selector: ScaleSelector,
}

/// Where the pod selector of the `scale` subresource is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScaleSelector {
    None,
    /// The path of a field that contains the selector as a string.
    String(Vec<String>),
    /// The path of a field that contains a LabelSelector object.
    LabelSelector(Vec<String>),
}

impl ScalePaths {
    /// The paths of Deployments, ReplicaSets and StatefulSets.
    pub fn of_workload() -> Self {
        let path = |parts: [&str; 2]| parts.map(Into::into).to_vec();
        Self {
            spec_replicas: path(["spec", "replicas"]),
            status_replicas: path(["status", "replicas"]),
            selector: ScaleSelector::LabelSelector(path(["spec", "selector"])),
        }
    }
}

/// One kind in one version of its group.
#[derive(Clone, Debug)]
pub struct Descriptor {
    pub group: String,
    pub version: String,
    pub kind: String,
    pub plural: String,
    pub singular: String,
    pub short_names: Vec<String>,
    pub categories: Vec<String>,
    pub namespaced: bool,
    pub has_status: bool,
    pub scale: Option<ScalePaths>,
    /// The kind is defined by a CustomResourceDefinition.
    pub custom: bool,
    pub delete_reply: DeleteReply,
    pub put_version: PutVersion,
    pub put_missing: PutMissing,
    pub first_update: FirstUpdate,
    /// Objects of the kind are requests that the server answers and does not store, such as a TokenReview.
    create_only: bool,
    pub list_kind: String,
    /// The part of the storage key between the root and the namespace.
    storage_path: String,
    /// The first bytes of every stored object of the kind, up to the inside of `metadata`. `render` inserts the
    /// resourceVersion after them.
    head: String,
}

impl Descriptor {
    pub fn new(group: &str, version: &str, kind: &str, plural: &str) -> Self {
        let mut descriptor = Self {
            group: group.into(),
            version: version.into(),
            kind: kind.into(),
            plural: plural.into(),
            singular: kind.to_ascii_lowercase(),
            short_names: Vec::new(),
            categories: Vec::new(),
            namespaced: true,
            has_status: false,
            scale: None,
            custom: false,
            list_kind: format!("{kind}List"),
            delete_reply: DeleteReply::Object,
            put_version: PutVersion::Optional,
            put_missing: PutMissing::NotFound,
            first_update: FirstUpdate::MayBeNoop,
            create_only: false,
            storage_path: plural.into(),
            head: String::new(),
        };
        descriptor.head = format!(r#"{{"apiVersion":"{}","kind":"{}","metadata":{{"#, descriptor.api_version(), kind);
        descriptor
    }

    pub fn short_names(mut self, names: &[&str]) -> Self {
        self.short_names = names.iter().map(|n| (*n).into()).collect();
        self
    }

    pub fn category(mut self, name: &str) -> Self {
        self.categories.push(name.into());
        self
    }

    pub fn cluster_scoped(mut self) -> Self {
        self.namespaced = false;
        self
    }

    pub fn with_status(mut self) -> Self {
        self.has_status = true;
        self
    }

    pub fn with_scale(mut self, scale: ScalePaths) -> Self {
        self.scale = Some(scale);
        self
    }

    pub fn deletes_with_status(mut self) -> Self {
        self.delete_reply = DeleteReply::Status;
        self
    }

    /// A PUT without `metadata.resourceVersion` is refused.
    pub fn put_needs_version(mut self) -> Self {
        self.put_version = PutVersion::Required;
        self
    }

    pub fn put_creates(mut self) -> Self {
        self.put_missing = PutMissing::Creates;
        self
    }

    pub fn always_stores_first_update(mut self) -> Self {
        self.first_update = FirstUpdate::AlwaysStored;
        self
    }

    pub fn create_only(mut self) -> Self {
        self.create_only = true;
        self
    }

    pub fn stored_under(mut self, segment: &str) -> Self {
        self.storage_path = segment.into();
        self
    }

    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    pub fn list_kind(&self) -> String {
        self.list_kind.clone()
    }

    pub fn finalizers(&self) -> FinalizerRule {
        if self.custom || self.group == "apiextensions.k8s.io" { FinalizerRule::Any } else { FinalizerRule::Qualified }
    }

    pub fn head(&self) -> &str {
        &self.head
    }

    pub fn resource(&self) -> Resource {
        Resource { group: self.group.clone(), plural: self.plural.clone() }
    }

    /// The key prefix of all objects of the kind, or of those in one namespace. It ends in `/`: without it the prefix of
    /// namespace `a` would match objects of namespace `ab`.
    pub fn prefix(&self, namespace: Option<&str>) -> String {
        self.key(namespace, "")
    }

    pub fn key(&self, namespace: Option<&str>, name: &str) -> String {
        const ROOT: &str = "/registry/";
        let namespace = namespace.filter(|_| self.namespaced);
        let inside = namespace.map_or(0, |namespace| namespace.len() + 1);
        let mut key = String::with_capacity(ROOT.len() + self.storage_path.len() + 1 + inside + name.len());
        key.extend([ROOT, &self.storage_path, "/"]);
        if let Some(namespace) = namespace {
            key.extend([namespace, "/"]);
        }
        key.push_str(name);
        key
    }

    pub fn verbs(&self) -> &'static [&'static str] {
        if self.create_only {
            &["create"]
        } else if self.plural == "namespaces" {
            &["create", "delete", "get", "list", "patch", "update", "watch"]
        } else {
            &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
        }
    }
}

/// A resource as error messages name it: `pods`, `leases.coordination.k8s.io`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    pub group: String,
    pub plural: String,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.plural)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        Ok(())
    }
}
