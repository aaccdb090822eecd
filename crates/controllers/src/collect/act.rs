//! Looks up owners live, and carries out what was decided. Every step can be repeated.

use cleat_api::key::Meta as _;
use cleat_runtime::work::Severity;
use k8s_openapi::api::core::v1::Namespace as NamespaceObject;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy};
use serde_json::json;
use tracing::{debug, info};

use super::Collector;
use super::decide::{CONTENT, Condition, Content, ORPHAN, Owner, Propagation, SeenNamespace};
use super::observe::Node;
use super::uid::Uid;

/// A step that failed, and on what.
#[derive(Debug, thiserror::Error)]
pub(super) enum CollectError {
    #[error("{step} {what}: {source}")]
    Request {
        step: &'static str,
        what: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("the owner {0} is of a kind that is not served; whether it exists cannot be told")]
    UnknownOwner(String),
}

impl From<&CollectError> for Severity {
    fn from(error: &CollectError) -> Self {
        match error {
            CollectError::Request { source, .. } if code(source) == Some(409) => Self::Expected,
            CollectError::Request { .. } | CollectError::UnknownOwner(_) => Self::Warning,
        }
    }
}

fn code(error: &kube::Error) -> Option<u16> {
    if let kube::Error::Api(status) = error { Some(status.code) } else { None }
}

fn failed(step: &'static str, what: impl ToString) -> impl FnOnce(kube::Error) -> CollectError {
    let what = what.to_string();
    move |source| CollectError::Request { step, what, source: Box::new(source) }
}

/// For steps whose aim is met when the object is gone.
fn absent_is_fine<T>(result: Result<T, kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(error) if code(&error) != Some(404) => Err(error),
        _ => Ok(()),
    }
}

impl Collector {
    /// What each owner is to the object. Only a live answer proves that an owner is absent.
    pub(super) async fn owners(&self, node: &Node) -> Result<Vec<(String, Owner)>, CollectError> {
        let mut found = Vec::new();
        for reference in &node.owners {
            let known = self.graph.get(&Uid::of(&reference.uid)).map(|owner| owner.as_owner(node));
            let owner = match known {
                Some(owner) => owner,
                None => self.live_owner(node, reference).await?,
            };
            found.push((reference.uid.clone(), owner));
        }
        Ok(found)
    }

    async fn live_owner(&self, node: &Node, reference: &OwnerReference) -> Result<Owner, CollectError> {
        let group = reference.api_version.rsplit_once('/').map_or("", |(group, _)| group);
        let kinds = self.graph.kinds();
        let kind = kinds.iter().find(|k| k.resource.kind == reference.kind && k.resource.group == group);
        let Some(kind) = kind else {
            return Err(CollectError::UnknownOwner(format!("{} {}", reference.kind, reference.name)));
        };
        let namespace = node.key.namespace.as_deref();
        // A cluster-scoped object cannot have an owner in some namespace.
        if kind.namespaced && namespace.is_none() {
            return Ok(Owner::Absent);
        }
        let owner = kind.api(self.context.client.kube(), namespace).get_metadata_opt(&reference.name).await;
        let owner = owner.map_err(failed("get owner", &reference.name))?;
        match owner.filter(|o| o.metadata.uid() == reference.uid) {
            Some(_) => Ok(Owner::Solid),
            None => Ok(Owner::Absent),
        }
    }

    pub(super) async fn delete(&self, node: &Node, how: Propagation) -> Result<(), CollectError> {
        info!(object = %node.key, kind = node.kind.resource.kind, ?how, "its owners are gone, and so it goes");
        let policy = match how {
            Propagation::Background => PropagationPolicy::Background,
            Propagation::Foreground => PropagationPolicy::Foreground,
            Propagation::Orphan => PropagationPolicy::Orphan,
        };
        let params = DeleteParams {
            propagation_policy: Some(policy),
            preconditions: Some(Preconditions { uid: Some(node.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        let api = node.kind.api(self.context.client.kube(), node.key.namespace.as_deref());
        absent_is_fine(api.delete(&node.key.name, &params).await).map_err(failed("delete", &node.key))
    }

    /// Removes these owners from the object, as it is now.
    pub(super) async fn disown(&self, node: &Node, owners: &[String]) -> Result<(), CollectError> {
        let api = node.kind.api(self.context.client.kube(), node.key.namespace.as_deref());
        let current = api.get_metadata_opt(&node.key.name).await.map_err(failed("get", &node.key))?;
        let Some(current) = current.filter(|c| c.metadata.uid() == node.uid) else { return Ok(()) };
        let mut left = current.metadata.owner_references.clone().unwrap_or_default();
        let before = left.len();
        left.retain(|o| !owners.contains(&o.uid));
        if left.len() == before {
            return Ok(());
        }
        debug!(object = %node.key, ?owners, "disowned");
        let version = current.metadata.resource_version;
        let patch = json!({ "metadata": { "resourceVersion": version, "uid": node.uid, "ownerReferences": left } });
        let patched = api.patch_metadata(&node.key.name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        absent_is_fine(patched).map_err(failed("disown", &node.key))
    }

    /// The dependents forget the object first: once its finalizer is gone, nothing would tell them from garbage.
    pub(super) async fn orphan(&self, node: &Node, dependents: &[Node]) -> Result<(), CollectError> {
        for dependent in dependents {
            self.disown(dependent, std::slice::from_ref(&node.uid)).await?;
        }
        self.release(node, ORPHAN).await
    }

    pub(super) async fn release(&self, node: &Node, finalizer: &str) -> Result<(), CollectError> {
        let api = node.kind.api(self.context.client.kube(), node.key.namespace.as_deref());
        let current = api.get_metadata_opt(&node.key.name).await.map_err(failed("get", &node.key))?;
        let Some(current) = current.filter(|c| c.metadata.uid() == node.uid) else { return Ok(()) };
        if !current.metadata.has_finalizer(finalizer) {
            return Ok(());
        }
        let left = current.metadata.finalizers_without(finalizer);
        let version = current.metadata.resource_version;
        let patch = json!({ "metadata": { "resourceVersion": version, "uid": node.uid, "finalizers": left } });
        let patched = api.patch_metadata(&node.key.name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        absent_is_fine(patched).map_err(failed("release", &node.key))
    }

    fn namespaces(&self) -> Api<NamespaceObject> {
        Api::all(self.context.client.kube().clone())
    }

    /// The namespace and, if it is being deleted, everything in it, live; nothing if it is gone.
    pub(super) async fn content(&self, name: &str) -> Result<Option<SeenNamespace>, CollectError> {
        let namespace = self.namespaces().get_opt(name).await.map_err(failed("get namespace", name))?;
        let Some(namespace) = namespace else { return Ok(None) };
        let mut seen = SeenNamespace {
            deleting: namespace.metadata.is_deleting(),
            finalizers: namespace.spec.and_then(|s| s.finalizers).unwrap_or_default(),
            content: Vec::new(),
        };
        if !seen.deleting {
            return Ok(Some(seen));
        }
        for kind in self.graph.kinds().into_iter().filter(|k| k.namespaced) {
            let api = kind.api(self.context.client.kube(), Some(name));
            let listed = match api.list_metadata(&ListParams::default()).await {
                Ok(listed) => listed,
                // The kind went away since it was discovered, and its objects with it.
                Err(error) if code(&error) == Some(404) => continue,
                Err(error) => return Err(failed("list", kind.name())(error)),
            };
            seen.content.extend(listed.items.into_iter().map(|object| Content {
                kind: kind.name(),
                deleting: object.metadata.is_deleting(),
                finalizers: object.metadata.finalizers.unwrap_or_default(),
            }));
        }
        Ok(Some(seen))
    }

    pub(super) async fn empty(&self, name: &str, kinds: &[String]) -> Result<(), CollectError> {
        let params = DeleteParams::background();
        for kind in self.graph.kinds().into_iter().filter(|k| kinds.contains(&k.name())) {
            let api = kind.api(self.context.client.kube(), Some(name));
            if kind.collections {
                let deleted = api.delete_collection(&params, &ListParams::default()).await;
                absent_is_fine(deleted).map_err(failed("delete all", kind.name()))?;
                continue;
            }
            let listed = api.list_metadata(&ListParams::default()).await.map_err(failed("list", kind.name()))?;
            for object in listed {
                let object = object.metadata.name.unwrap_or_default();
                absent_is_fine(api.delete(&object, &params).await).map_err(failed("delete", object))?;
            }
        }
        Ok(())
    }

    /// Says in the status what the namespace waits for.
    pub(super) async fn report(&self, name: &str, conditions: &[Condition]) -> Result<(), CollectError> {
        let api = self.namespaces();
        let current = api.get_opt(name).await.map_err(failed("get namespace", name))?;
        let Some(current) = current else { return Ok(()) };
        let now = self.context.clock.now();
        let known = current.status.and_then(|s| s.conditions).unwrap_or_default();
        let shown: Vec<_> = conditions
            .iter()
            .map(|c| {
                let status = if c.holds { "True" } else { "False" };
                let same = known.iter().find(|k| k.type_ == c.kind && k.status == status);
                let since = same.and_then(|k| k.last_transition_time.clone()).map_or(now, |t| t.0);
                let since = since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
                json!({
                    "type": c.kind, "status": status, "reason": c.reason, "message": c.message,
                    "lastTransitionTime": since,
                })
            })
            .collect();
        let patch = Patch::Merge(json!({ "status": { "conditions": shown } }));
        let patched = api.patch_status(name, &PatchParams::default(), &patch).await;
        absent_is_fine(patched).map_err(failed("report on namespace", name))
    }

    pub(super) async fn finalize(&self, name: &str) -> Result<(), CollectError> {
        let api = self.namespaces();
        let current = api.get_opt(name).await.map_err(failed("get namespace", name))?;
        let Some(mut current) = current else { return Ok(()) };
        if let Some(finalizers) = current.spec.as_mut().and_then(|s| s.finalizers.as_mut()) {
            finalizers.retain(|f| f != CONTENT);
        }
        let replaced = api.replace_subresource("finalize", name, &PostParams::default(), &current).await;
        absent_is_fine(replaced).map_err(failed("finalize namespace", name))?;
        info!(namespace = name, "namespace emptied");
        // A create that was admitted just before the deletion may have landed after the last look.
        let kinds: Vec<String> = self.graph.kinds().iter().filter(|k| k.namespaced).map(|k| k.name()).collect();
        self.empty(name, &kinds).await
    }
}
