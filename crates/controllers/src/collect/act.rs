//! Carries out the decisions about objects and namespaces. Every step can be repeated.

use cleat_api::key::Meta as _;
use cleat_runtime::work::Severity;
use k8s_openapi::api::core::v1::Namespace as NamespaceObject;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy};
use serde_json::json;
use tracing::{debug, info};

use super::Collector;
use super::decide::{NAMESPACE_FINALIZER, NamespaceCondition, ORPHAN_FINALIZER, Propagation};
use super::memory::GraphObject;

/// The failed step, and the object it was about.
#[derive(Debug, thiserror::Error)]
pub(super) enum CollectError {
    #[error("{step} {target}: {source}")]
    Request {
        step: &'static str,
        target: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("the owner {0} is of a kind that is not served, so its existence is unknown")]
    UnknownOwner(String),
}

impl From<&CollectError> for Severity {
    fn from(error: &CollectError) -> Self {
        match error {
            CollectError::Request { source, .. } if status_code(source) == Some(409) => Self::Expected,
            CollectError::Request { .. } | CollectError::UnknownOwner(_) => Self::Warning,
        }
    }
}

pub(super) fn status_code(error: &kube::Error) -> Option<u16> {
    if let kube::Error::Api(status) = error { Some(status.code) } else { None }
}

pub(super) fn request_failed(step: &'static str, target: impl ToString) -> impl FnOnce(kube::Error) -> CollectError {
    let target = target.to_string();
    move |source| CollectError::Request { step, target, source: Box::new(source) }
}

/// Accepts 404, for steps that have reached their goal if the object does not exist.
fn ignore_not_found<T>(result: Result<T, kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(error) if status_code(&error) != Some(404) => Err(error),
        _ => Ok(()),
    }
}

impl Collector {
    /// Deletes exactly this object; another object of the same name is kept.
    pub(super) async fn delete(&self, object: &GraphObject, propagation: Propagation) -> Result<(), CollectError> {
        info!(object = %object.key, kind = object.kind.resource.kind, ?propagation, "deleting object without owners");
        let policy = match propagation {
            Propagation::Background => PropagationPolicy::Background,
            Propagation::Foreground => PropagationPolicy::Foreground,
            Propagation::Orphan => PropagationPolicy::Orphan,
        };
        let params = DeleteParams {
            propagation_policy: Some(policy),
            preconditions: Some(Preconditions { uid: Some(object.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        let api = object.kind.api(self.context.client.kube(), object.key.namespace.as_deref());
        ignore_not_found(api.delete(&object.key.name, &params).await).map_err(request_failed("delete", &object.key))
    }

    /// Removes the references to these owners, by uid, from the current version of the object.
    pub(super) async fn remove_owners(&self, object: &GraphObject, owners: &[String]) -> Result<(), CollectError> {
        let api = object.kind.api(self.context.client.kube(), object.key.namespace.as_deref());
        let current = api.get_metadata_opt(&object.key.name).await.map_err(request_failed("get", &object.key))?;
        let Some(current) = current.filter(|c| c.metadata.uid() == object.uid) else { return Ok(()) };
        let mut left = current.metadata.owner_references.clone().unwrap_or_default();
        let old_count = left.len();
        left.retain(|o| !owners.contains(&o.uid));
        if left.len() == old_count {
            return Ok(());
        }
        debug!(object = %object.key, ?owners, "removing owner references");
        let version = current.metadata.resource_version;
        let patch = json!({ "metadata": { "resourceVersion": version, "uid": object.uid, "ownerReferences": left } });
        let patched = api.patch_metadata(&object.key.name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        ignore_not_found(patched).map_err(request_failed("remove owners", &object.key))
    }

    /// Removes the references of the dependents before the finalizer: without the finalizer the object disappears, and
    /// dependents that still refer to it would be deleted.
    pub(super) async fn orphan_dependents(
        &self,
        object: &GraphObject,
        dependents: &[GraphObject],
    ) -> Result<(), CollectError> {
        for dependent in dependents {
            self.remove_owners(dependent, std::slice::from_ref(&object.uid)).await?;
        }
        self.remove_finalizer(object, ORPHAN_FINALIZER).await
    }

    pub(super) async fn remove_finalizer(&self, object: &GraphObject, finalizer: &str) -> Result<(), CollectError> {
        let api = object.kind.api(self.context.client.kube(), object.key.namespace.as_deref());
        let current = api.get_metadata_opt(&object.key.name).await.map_err(request_failed("get", &object.key))?;
        let Some(current) = current.filter(|c| c.metadata.uid() == object.uid) else { return Ok(()) };
        if !current.metadata.has_finalizer(finalizer) {
            return Ok(());
        }
        let left = current.metadata.finalizers_without(finalizer);
        let version = current.metadata.resource_version;
        let patch = json!({ "metadata": { "resourceVersion": version, "uid": object.uid, "finalizers": left } });
        let patched = api.patch_metadata(&object.key.name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        ignore_not_found(patched).map_err(request_failed("remove finalizer", &object.key))
    }

    pub(super) fn namespaces(&self) -> Api<NamespaceObject> {
        Api::all(self.context.client.kube().clone())
    }

    /// Deletes all objects of these kinds in the namespace.
    pub(super) async fn delete_content(&self, name: &str, kinds: &[String]) -> Result<(), CollectError> {
        let params = DeleteParams::background();
        for kind in self.graph.kinds().into_iter().filter(|k| kinds.contains(&k.name())) {
            let api = kind.api(self.context.client.kube(), Some(name));
            if kind.deletes_collections {
                let deleted = api.delete_collection(&params, &ListParams::default()).await;
                ignore_not_found(deleted).map_err(request_failed("delete all", kind.name()))?;
                continue;
            }
            let listed =
                api.list_metadata(&ListParams::default()).await.map_err(request_failed("list", kind.name()))?;
            for object in listed {
                let object_name = object.metadata.name.unwrap_or_default();
                ignore_not_found(api.delete(&object_name, &params).await)
                    .map_err(request_failed("delete", object_name))?;
            }
        }
        Ok(())
    }

    /// Writes the conditions that say what the namespace waits for.
    pub(super) async fn report(&self, name: &str, conditions: &[NamespaceCondition]) -> Result<(), CollectError> {
        let api = self.namespaces();
        let current = api.get_opt(name).await.map_err(request_failed("get namespace", name))?;
        let Some(current) = current else { return Ok(()) };
        let now = self.context.clock.now();
        let old = current.status.and_then(|s| s.conditions).unwrap_or_default();
        let new: Vec<_> = conditions
            .iter()
            .map(|c| {
                let status = if c.is_true { "True" } else { "False" };
                let unchanged = old.iter().find(|o| o.type_ == c.type_ && o.status == status);
                let since = unchanged.and_then(|o| o.last_transition_time.clone()).map_or(now, |t| t.0);
                let since = since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
                json!({
                    "type": c.type_, "status": status, "reason": c.reason, "message": c.message,
                    "lastTransitionTime": since,
                })
            })
            .collect();
        let patch = Patch::Merge(json!({ "status": { "conditions": new } }));
        let patched = api.patch_status(name, &PatchParams::default(), &patch).await;
        ignore_not_found(patched).map_err(request_failed("report on namespace", name))
    }

    /// Removes the finalizer that stands for the content of the namespace.
    pub(super) async fn finalize(&self, name: &str) -> Result<(), CollectError> {
        let api = self.namespaces();
        let current = api.get_opt(name).await.map_err(request_failed("get namespace", name))?;
        let Some(mut current) = current else { return Ok(()) };
        if let Some(finalizers) = current.spec.as_mut().and_then(|s| s.finalizers.as_mut()) {
            finalizers.retain(|f| f != NAMESPACE_FINALIZER);
        }
        let replaced = api.replace_subresource("finalize", name, &PostParams::default(), &current).await;
        ignore_not_found(replaced).map_err(request_failed("finalize namespace", name))?;
        info!(namespace = name, "namespace is empty, finalized");
        // A create that the server admitted before the deletion may have been stored after the last list.
        let kinds: Vec<String> = self.graph.kinds().iter().filter(|k| k.namespaced).map(|k| k.name()).collect();
        self.delete_content(name, &kinds).await
    }
}
