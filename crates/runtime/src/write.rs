//! Writes with optimistic concurrency, and what their failures mean.

use std::fmt::Debug;
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::api::{
    DeleteParams, GetParams, ListParams, ObjectList, Patch, PatchParams, PostParams, Preconditions, Request,
};
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client::Carrier;
use crate::wire;

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

/// A kind that can be read and written.
pub trait Reachable:
    Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug + Send + Sync + 'static
{
    /// The namespace of a request about an object that says it is in this one.
    fn place(namespace: Option<&str>) -> Option<&str>;
}

/// Where objects of a scope are.
pub trait Placed {
    fn place(namespace: Option<&str>) -> Option<&str>;
}

impl Placed for ClusterResourceScope {
    fn place(_: Option<&str>) -> Option<&str> {
        None
    }
}

impl Placed for NamespaceResourceScope {
    fn place(namespace: Option<&str>) -> Option<&str> {
        namespace.or(Some("default"))
    }
}

impl<K> Reachable for K
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug + Send + Sync + 'static,
    K::Scope: Placed,
{
    fn place(namespace: Option<&str>) -> Option<&str> {
        K::Scope::place(namespace)
    }
}

fn requests<K: Reachable>(namespace: Option<&str>) -> Request {
    Request::new(K::url_path(&(), K::place(namespace)))
}

type Built = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

fn failed<K: Reachable>(verb: &'static str, key: &Key) -> impl FnOnce(kube::Error) -> WriteError {
    let key = key.clone();
    move |source| WriteError { verb, kind: K::kind(&()).into_owned(), key, source: Box::new(source) }
}

/// The text that a server elsewhere is sent.
fn encoded<K: Reachable>(client: &dyn Carrier, object: &K) -> kube::Result<Vec<u8>> {
    if client.is_near() {
        return Ok(Vec::new());
    }
    // Room for most objects from the beginning.
    let mut text = Vec::with_capacity(2048);
    serde_json::to_writer(&mut text, object).map_err(kube::Error::SerdeError)?;
    Ok(text)
}

fn built(request: Built) -> kube::Result<http::Request<Vec<u8>>> {
    request.map_err(kube::Error::BuildRequest)
}

pub async fn create<K: Reachable>(client: &dyn Carrier, object: &K) -> Result<Arc<K>, WriteError> {
    let key = Key::of(object.meta());
    let made = async { wire::exchange(client, creation(client, &key, object)?, Some(object)).await };
    made.await.map_err(failed::<K>("create", &key))
}

/// The same for a caller who does not look at what the server made of it.
pub async fn create_unseen<K: Reachable>(client: &dyn Carrier, object: &K) -> Result<(), WriteError> {
    let key = Key::of(object.meta());
    let made = async { wire::submit(client, creation(client, &key, object)?, object).await };
    made.await.map_err(failed::<K>("create", &key))
}

fn creation<K: Reachable>(client: &dyn Carrier, key: &Key, object: &K) -> kube::Result<http::Request<Vec<u8>>> {
    built(requests::<K>(key.namespace.as_deref()).create(&PostParams::default(), encoded(client, object)?))
}

/// Replaces the object (or its status) if its resourceVersion still is the given one.
pub async fn replace<K: Reachable>(client: &dyn Carrier, part: Part, object: &K) -> Result<Arc<K>, WriteError> {
    let key = Key::of(object.meta());
    let written = async {
        let (requests, params) = (requests::<K>(key.namespace.as_deref()), PostParams::default());
        let data = encoded(client, object)?;
        let request = match part {
            Part::Whole => requests.replace(&key.name, &params, data),
            Part::Status => requests.replace_subresource("status", &key.name, &params, data),
        };
        wire::exchange(client, built(request)?, Some(object)).await
    };
    written.await.map_err(failed::<K>("update", &key))
}

/// Merge-patches the object. A `metadata.resourceVersion` in the patch makes it conditional.
pub async fn merge<K: Reachable>(
    client: &dyn Carrier,
    part: Part,
    key: &Key,
    patch: &serde_json::Value,
) -> Result<Arc<K>, WriteError> {
    let written = async {
        let (requests, params) = (requests::<K>(key.namespace.as_deref()), PatchParams::default());
        let patch = Patch::Merge(patch);
        let request = match part {
            Part::Whole => requests.patch(&key.name, &params, &patch),
            Part::Status => requests.patch_subresource("status", &key.name, &params, &patch),
        };
        wire::exchange(client, built(request)?, None).await
    };
    written.await.map_err(failed::<K>("patch", key))
}

/// Sets the finalizers, if nobody wrote the object since `object` was read: the list is sent whole, and a finalizer
/// that somebody else put there meanwhile must not be lost.
pub async fn set_finalizers<K: Reachable>(
    client: &dyn Carrier,
    object: &K,
    finalizers: &[String],
) -> Result<Arc<K>, WriteError> {
    let patch = serde_json::json!({
        "metadata": { "resourceVersion": object.meta().resource_version, "finalizers": finalizers }
    });
    merge(client, Part::Whole, &Key::of(object.meta()), &patch).await
}

/// Deletes exactly this object; one of the same name with another uid is left alone. Absent is fine. Returns the
/// object where something holds it, so that it stays for now.
pub async fn delete<K: Reachable>(client: &dyn Carrier, object: &K) -> Result<Option<Arc<K>>, WriteError> {
    delete_with(client, object, DeleteParams::default()).await
}

/// The same without a period of grace: for what nobody is left to wind down.
pub async fn delete_at_once<K: Reachable>(client: &dyn Carrier, object: &K) -> Result<Option<Arc<K>>, WriteError> {
    delete_with(client, object, DeleteParams::default().grace_period(0)).await
}

async fn delete_with<K: Reachable>(
    client: &dyn Carrier,
    object: &K,
    params: DeleteParams,
) -> Result<Option<Arc<K>>, WriteError> {
    let key = Key::of(object.meta());
    let uid = Some(object.meta().uid().to_owned()).filter(|uid| !uid.is_empty());
    let params = DeleteParams { preconditions: Some(Preconditions { uid, resource_version: None }), ..params };
    let deleted = async {
        let request = requests::<K>(key.namespace.as_deref()).delete(&key.name, &params);
        wire::exchange_unless_status(client, built(request)?).await
    };
    // A server may also show what it has removed.
    let is_held = |object: &Arc<K>| {
        let meta = object.meta();
        let graced = meta.deletion_grace_period_seconds.is_some_and(|seconds| seconds > 0);
        meta.deletion_timestamp.is_some() && (graced || meta.finalizers.as_ref().is_some_and(|f| !f.is_empty()))
    };
    match deleted.await.map_err(failed::<K>("delete", &key)) {
        Ok(held) => Ok(held.filter(is_held)),
        Err(error) => error.absent_is_fine().map(|()| None),
    }
}

/// Reads the object from the server, past the cache.
pub async fn live<K: Reachable>(client: &dyn Carrier, key: &Key) -> Result<Option<K>, WriteError> {
    let read = async {
        let request = requests::<K>(key.namespace.as_deref()).get(&key.name, &GetParams::default());
        wire::fetch(client, built(request)?).await
    };
    match read.await.map_err(failed::<K>("get", key)) {
        Ok(object) => Ok(Some(object)),
        Err(error) => error.absent_is_fine().map(|()| None),
    }
}

/// Lists a namespace (or everything) from the server, past the cache.
pub async fn list_live<K: Reachable>(client: &dyn Carrier, namespace: Option<&str>) -> Result<Vec<K>, WriteError> {
    list_at(client, K::place(namespace), namespace.unwrap_or("*")).await
}

/// Lists the objects of all namespaces from the server, past the cache.
pub async fn list_everywhere<K: Reachable>(client: &dyn Carrier) -> Result<Vec<K>, WriteError> {
    list_at(client, None, "*").await
}

async fn list_at<K: Reachable>(client: &dyn Carrier, place: Option<&str>, shown: &str) -> Result<Vec<K>, WriteError> {
    let listed = async {
        let request = Request::new(K::url_path(&(), place)).list(&ListParams::default());
        wire::fetch::<ObjectList<K>>(client, built(request)?).await
    };
    listed.await.map(|list| list.items).map_err(failed::<K>("list", &Key::cluster(shown)))
}

/// Places a pod on a node through the binding subresource. The server refuses if the pod already has a node.
pub async fn bind_pod(client: &dyn Carrier, pod: &Pod, node: &str) -> Result<(), WriteError> {
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
    let bound = async {
        let data = serde_json::to_vec(&binding).map_err(kube::Error::SerdeError)?;
        let requests = requests::<Pod>(key.namespace.as_deref());
        let request = requests.create_subresource("binding", &key.name, &PostParams::default(), data);
        wire::send(client, built(request)?).await
    };
    bound.await.map_err(failed::<Pod>("bind", &key))
}
