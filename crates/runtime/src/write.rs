//! Writes with optimistic concurrency, and what their failures mean.

use std::fmt::Debug;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{ClusterResourceScope, NamespaceResourceScope, Status};
use kube::{Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Which document of an object a write goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Whole,
    Status,
}

#[derive(Debug, thiserror::Error)]
#[error("{verb} {kind} {key}: {source}")]
pub struct WriteError {
    verb: &'static str,
    kind: String,
    key: Key,
    #[source]
    source: Box<kube::Error>,
}

impl WriteError {
    fn code(&self) -> Option<u16> {
        match &*self.source {
            kube::Error::Api(status) => Some(status.code),
            _ => None,
        }
    }

    /// Somebody wrote the object since we read it.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409) && !self.already_exists()
    }

    pub fn already_exists(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.reason == "AlreadyExists")
    }

    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// The server has too much to do; inside, the pause that it asks for.
    pub fn overload(&self) -> Option<Option<std::time::Duration>> {
        let kube::Error::Api(status) = &*self.source else { return None };
        let pause = status.details.as_ref().map(|d| d.retry_after_seconds).filter(|seconds| *seconds > 0);
        (status.code == 429).then(|| pause.map(|seconds| std::time::Duration::from_secs(seconds.into())))
    }

    /// The server looked at the write and refused it; anything else may have taken effect.
    pub fn is_refused(&self) -> bool {
        matches!(self.code(), Some(400..=499)) && !self.already_exists()
    }

    /// For writes whose aim is met when the object is gone.
    pub fn absent_is_fine(self) -> Result<(), Self> {
        if self.is_not_found() { Ok(()) } else { Err(self) }
    }
}

/// A kind whose `Api` can be had from a namespace (or none).
pub trait Reachable: Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug + 'static {
    fn api(client: Client, namespace: Option<&str>) -> Api<Self>;
}

/// Chooses between `Api::all` and `Api::namespaced` by the kind's scope.
pub trait ScopedApi<K> {
    fn api(client: Client, namespace: Option<&str>) -> Api<K>;
}

impl<K: Resource<DynamicType = (), Scope = ClusterResourceScope>> ScopedApi<K> for ClusterResourceScope {
    fn api(client: Client, _: Option<&str>) -> Api<K> {
        Api::all(client)
    }
}

impl<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>> ScopedApi<K> for NamespaceResourceScope {
    fn api(client: Client, namespace: Option<&str>) -> Api<K> {
        Api::namespaced(client, namespace.unwrap_or("default"))
    }
}

impl<K> Reachable for K
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug + 'static,
    K::Scope: ScopedApi<K>,
{
    fn api(client: Client, namespace: Option<&str>) -> Api<Self> {
        K::Scope::api(client, namespace)
    }
}

fn failed<K: Reachable>(verb: &'static str, key: &Key) -> impl FnOnce(kube::Error) -> WriteError {
    let key = key.clone();
    move |source| WriteError { verb, kind: K::kind(&()).into_owned(), key, source: Box::new(source) }
}

pub async fn create<K: Reachable>(client: &Client, object: &K) -> Result<K, WriteError> {
    let key = Key::of(object.meta());
    let api = K::api(client.clone(), key.namespace.as_deref());
    api.create(&PostParams::default(), object).await.map_err(failed::<K>("create", &key))
}

/// Replaces the object (or its status) if its resourceVersion still is the given one.
pub async fn replace<K: Reachable>(client: &Client, part: Part, object: &K) -> Result<K, WriteError> {
    let key = Key::of(object.meta());
    let api = K::api(client.clone(), key.namespace.as_deref());
    match part {
        Part::Whole => api.replace(&key.name, &PostParams::default(), object).await,
        Part::Status => api.replace_status(&key.name, &PostParams::default(), object).await,
    }
    .map_err(failed::<K>("update", &key))
}

/// Merge-patches the object. A `metadata.resourceVersion` in the patch makes it conditional.
pub async fn merge<K: Reachable>(
    client: &Client,
    part: Part,
    key: &Key,
    patch: &serde_json::Value,
) -> Result<K, WriteError> {
    let api = K::api(client.clone(), key.namespace.as_deref());
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    match part {
        Part::Whole => api.patch(&key.name, &params, &patch).await,
        Part::Status => api.patch_status(&key.name, &params, &patch).await,
    }
    .map_err(failed::<K>("patch", key))
}

/// Sets the finalizers, if nobody wrote the object since `object` was read: the list is sent whole, and a finalizer
/// that somebody else put there meanwhile must not be lost.
pub async fn set_finalizers<K: Reachable>(client: &Client, object: &K, finalizers: &[String]) -> Result<K, WriteError> {
    let meta = object.meta();
    let patch = serde_json::json!({
        "metadata": { "resourceVersion": meta.resource_version, "finalizers": finalizers }
    });
    merge(client, Part::Whole, &Key::of(meta), &patch).await
}

/// Deletes exactly this object; one of the same name with another uid is left alone. Absent is fine. Returns the
/// object where something holds it, so that it stays for now.
pub async fn delete<K: Reachable>(client: &Client, object: &K) -> Result<Option<K>, WriteError> {
    delete_with(client, object, DeleteParams::default()).await
}

/// The same without a period of grace: for what nobody is left to wind down.
pub async fn delete_at_once<K: Reachable>(client: &Client, object: &K) -> Result<Option<K>, WriteError> {
    delete_with(client, object, DeleteParams::default().grace_period(0)).await
}

async fn delete_with<K: Reachable>(client: &Client, object: &K, params: DeleteParams) -> Result<Option<K>, WriteError> {
    let key = Key::of(object.meta());
    let api = K::api(client.clone(), key.namespace.as_deref());
    let uid = Some(object.meta().uid().to_owned()).filter(|uid| !uid.is_empty());
    let params = DeleteParams { preconditions: Some(Preconditions { uid, resource_version: None }), ..params };
    match api.delete(&key.name, &params).await.map_err(failed::<K>("delete", &key)) {
        Ok(held) => Ok(held.left()),
        Err(error) => error.absent_is_fine().map(|()| None),
    }
}

/// Reads the object from the server, past the cache.
pub async fn live<K: Reachable>(client: &Client, key: &Key) -> Result<Option<K>, WriteError> {
    let api = K::api(client.clone(), key.namespace.as_deref());
    api.get_opt(&key.name).await.map_err(failed::<K>("get", key))
}

/// Lists a namespace (or everything) from the server, past the cache.
pub async fn list_live<K: Reachable>(client: &Client, namespace: Option<&str>) -> Result<Vec<K>, WriteError> {
    let list = K::api(client.clone(), namespace).list(&ListParams::default()).await;
    let key = Key::cluster(namespace.unwrap_or("*"));
    list.map(|l| l.items).map_err(failed::<K>("list", &key))
}

/// Lists the objects of all namespaces from the server, past the cache.
pub async fn list_everywhere<K: Reachable>(client: &Client) -> Result<Vec<K>, WriteError> {
    let list = Api::<K>::all(client.clone()).list(&ListParams::default()).await;
    list.map(|l| l.items).map_err(failed::<K>("list", &Key::cluster("*")))
}

/// Places a pod on a node through the binding subresource. The server refuses if the pod already has a node.
pub async fn bind_pod(client: &Client, pod: &Pod, node: &str) -> Result<(), WriteError> {
    let key = Key::of(&pod.metadata);
    let binding = Binding {
        metadata: ObjectMeta {
            namespace: key.namespace.clone(),
            name: Some(key.name.clone()),
            uid: pod.metadata.uid.clone(),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    };
    let failed =
        |source| WriteError { verb: "bind", kind: "Pod".to_owned(), key: key.clone(), source: Box::new(source) };
    let api: Api<Pod> = Api::namespaced(client.clone(), key.namespace.as_deref().unwrap_or("default"));
    let bound: Result<Status, _> = api.create_subresource("binding", &key.name, &PostParams::default(), &binding).await;
    bound.map(drop).map_err(failed)
}
