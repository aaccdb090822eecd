//! Writes with optimistic concurrency, reads that bypass the cache, and the classification of their errors.

use cleat_api::transport::Transport;
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

use crate::calls;

#[cfg(test)]
mod tests;

/// The initial size of the buffer that an object is encoded into.
const TYPICAL_OBJECT_BYTES: usize = 2048;

/// Which part of an object a write changes.
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
    /// The HTTP status code of the reply. `None` if there was no reply.
    pub fn code(&self) -> Option<u16> {
        match &*self.source {
            kube::Error::Api(status) => Some(status.code),
            _ => None,
        }
    }

    /// The object was written since it was read (409, but not AlreadyExists).
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409) && !self.already_exists()
    }

    pub fn already_exists(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.reason == "AlreadyExists")
    }

    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// `Some` if the server is overloaded (429), with the delay that it asks for, if any.
    pub fn overload(&self) -> Option<Option<std::time::Duration>> {
        let kube::Error::Api(status) = &*self.source else { return None };
        let delay = status.details.as_ref().map(|d| d.retry_after_seconds).filter(|seconds| *seconds > 0);
        (status.code == 429).then(|| delay.map(|seconds| std::time::Duration::from_secs(seconds.into())))
    }

    /// The server refused the write, so that it had no effect. After any other error it may have taken effect.
    pub fn is_refused(&self) -> bool {
        matches!(self.code(), Some(400..=499)) && !self.already_exists()
    }

    /// Turns "not found" into success, for writes that need do nothing if the object does not exist.
    pub fn ignore_not_found(self) -> Result<(), Self> {
        if self.is_not_found() { Ok(()) } else { Err(self) }
    }
}

/// A kind that can be read and written.
pub trait ApiObject:
    Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug + Send + Sync + 'static
{
    /// The namespace in the URL of a request for an object with this namespace.
    fn request_namespace(namespace: Option<&str>) -> Option<&str>;
}

/// The namespace in the URL, by the scope of the kind.
pub trait RequestScope {
    fn request_namespace(namespace: Option<&str>) -> Option<&str>;
}

impl RequestScope for ClusterResourceScope {
    fn request_namespace(_: Option<&str>) -> Option<&str> {
        None
    }
}

impl RequestScope for NamespaceResourceScope {
    fn request_namespace(namespace: Option<&str>) -> Option<&str> {
        namespace.or(Some("default"))
    }
}

impl<K> ApiObject for K
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug + Send + Sync + 'static,
    K::Scope: RequestScope,
{
    fn request_namespace(namespace: Option<&str>) -> Option<&str> {
        K::Scope::request_namespace(namespace)
    }
}

fn requests<K: ApiObject>(namespace: Option<&str>) -> Request {
    Request::new(K::url_path(&(), K::request_namespace(namespace)))
}

type BuildResult = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

fn failed<K: ApiObject>(verb: &'static str, key: &Key) -> impl FnOnce(kube::Error) -> WriteError {
    let key = key.clone();
    move |source| WriteError { verb, kind: K::kind(&()).into_owned(), key, source: Box::new(source) }
}

/// The JSON of the object, or nothing for a server in this process, which receives the object itself.
fn encode_body<K: ApiObject>(client: &dyn Transport, object: &K) -> kube::Result<Vec<u8>> {
    if client.accepts_objects() {
        return Ok(Vec::new());
    }
    let mut json = Vec::with_capacity(TYPICAL_OBJECT_BYTES);
    serde_json::to_writer(&mut json, object).map_err(kube::Error::SerdeError)?;
    Ok(json)
}

fn check_built(request: BuildResult) -> kube::Result<http::Request<Vec<u8>>> {
    request.map_err(kube::Error::BuildRequest)
}

/// Creates the object and returns it as the server stored it.
pub async fn create<K: ApiObject>(client: &dyn Transport, object: &K) -> Result<Arc<K>, WriteError> {
    let key = Key::of(object.meta());
    let reply = async { calls::exchange(client, creation_request(client, &key, object)?, Some(object)).await };
    reply.await.map_err(failed::<K>("create", &key))
}

/// Like [`create`], but discards the reply.
pub async fn create_without_reply<K: ApiObject>(client: &dyn Transport, object: &K) -> Result<(), WriteError> {
    let key = Key::of(object.meta());
    let reply = async { calls::submit(client, creation_request(client, &key, object)?, object).await };
    reply.await.map_err(failed::<K>("create", &key))
}

fn creation_request<K: ApiObject>(
    client: &dyn Transport,
    key: &Key,
    object: &K,
) -> kube::Result<http::Request<Vec<u8>>> {
    check_built(requests::<K>(key.namespace.as_deref()).create(&PostParams::default(), encode_body(client, object)?))
}

/// Replaces the object or its status if its resourceVersion on the server is still that of `object`.
pub async fn replace<K: ApiObject>(client: &dyn Transport, part: Part, object: &K) -> Result<Arc<K>, WriteError> {
    let key = Key::of(object.meta());
    let reply = async {
        let (requests, params) = (requests::<K>(key.namespace.as_deref()), PostParams::default());
        let data = encode_body(client, object)?;
        let request = match part {
            Part::Whole => requests.replace(&key.name, &params, data),
            Part::Status => requests.replace_subresource("status", &key.name, &params, data),
        };
        calls::exchange(client, check_built(request)?, Some(object)).await
    };
    reply.await.map_err(failed::<K>("update", &key))
}

/// Merge-patches the object. A `metadata.resourceVersion` in the patch makes it conditional.
pub async fn merge<K: ApiObject>(
    client: &dyn Transport,
    part: Part,
    key: &Key,
    patch: &serde_json::Value,
) -> Result<Arc<K>, WriteError> {
    let reply = async {
        let (requests, params) = (requests::<K>(key.namespace.as_deref()), PatchParams::default());
        let patch = Patch::Merge(patch);
        let request = match part {
            Part::Whole => requests.patch(&key.name, &params, &patch),
            Part::Status => requests.patch_subresource("status", &key.name, &params, &patch),
        };
        calls::exchange(client, check_built(request)?, None).await
    };
    reply.await.map_err(failed::<K>("patch", key))
}

/// Sets the finalizers if the object was not written since `object` was read. The complete list is sent, and a finalizer that
/// another component has added meanwhile must not be lost.
pub async fn set_finalizers<K: ApiObject>(
    client: &dyn Transport,
    object: &K,
    finalizers: &[String],
) -> Result<Arc<K>, WriteError> {
    let patch = serde_json::json!({
        "metadata": { "resourceVersion": object.meta().resource_version, "finalizers": finalizers }
    });
    merge(client, Part::Whole, &Key::of(object.meta()), &patch).await
}

/// Deletes the object with this uid, and no other object of the same name. Succeeds if it does not exist. Returns the object if
/// finalizers or a grace period keep it for now.
pub async fn delete<K: ApiObject>(client: &dyn Transport, object: &K) -> Result<Option<Arc<K>>, WriteError> {
    delete_with(client, object, DeleteParams::default()).await
}

/// Like [`delete`], without a grace period: for pods that no kubelet will terminate.
pub async fn delete_immediately<K: ApiObject>(
    client: &dyn Transport,
    object: &K,
) -> Result<Option<Arc<K>>, WriteError> {
    delete_with(client, object, DeleteParams::default().grace_period(0)).await
}

async fn delete_with<K: ApiObject>(
    client: &dyn Transport,
    object: &K,
    params: DeleteParams,
) -> Result<Option<Arc<K>>, WriteError> {
    let key = Key::of(object.meta());
    let uid = Some(object.meta().uid().to_owned()).filter(|uid| !uid.is_empty());
    let params = DeleteParams { preconditions: Some(Preconditions { uid, resource_version: None }), ..params };
    let reply = async {
        let request = requests::<K>(key.namespace.as_deref()).delete(&key.name, &params);
        calls::exchange_unless_status(client, check_built(request)?).await
    };
    // A server may also reply with an object that it has removed.
    let is_held = |object: &Arc<K>| {
        let meta = object.meta();
        let has_grace = meta.deletion_grace_period_seconds.is_some_and(|seconds| seconds > 0);
        meta.deletion_timestamp.is_some() && (has_grace || meta.finalizers.as_ref().is_some_and(|f| !f.is_empty()))
    };
    match reply.await.map_err(failed::<K>("delete", &key)) {
        Ok(held) => Ok(held.filter(is_held)),
        Err(error) => error.ignore_not_found().map(|()| None),
    }
}

/// Reads the object from the server, not from a cache.
pub async fn get_live<K: ApiObject>(client: &dyn Transport, key: &Key) -> Result<Option<K>, WriteError> {
    let reply = async {
        let request = requests::<K>(key.namespace.as_deref()).get(&key.name, &GetParams::default());
        calls::fetch(client, check_built(request)?).await
    };
    match reply.await.map_err(failed::<K>("get", key)) {
        Ok(object) => Ok(Some(object)),
        Err(error) => error.ignore_not_found().map(|()| None),
    }
}

/// Lists from the server, not from a cache: the objects of one namespace, or with `None` those of a cluster-scoped kind (of a
/// namespaced kind, those of the namespace `default`).
pub async fn list_live<K: ApiObject>(client: &dyn Transport, namespace: Option<&str>) -> Result<Vec<K>, WriteError> {
    list_at(client, K::request_namespace(namespace), namespace.unwrap_or("*"), &ListParams::default()).await
}

/// Lists the objects of all namespaces from the server, not from a cache.
pub async fn list_all_namespaces<K: ApiObject>(client: &dyn Transport) -> Result<Vec<K>, WriteError> {
    list_at(client, None, "*", &ListParams::default()).await
}

/// Lists the objects of all namespaces that match a field selector, from the server.
pub async fn list_by_field<K: ApiObject>(client: &dyn Transport, selector: &str) -> Result<Vec<K>, WriteError> {
    list_at(client, None, "*", &ListParams::default().fields(selector)).await
}

async fn list_at<K: ApiObject>(
    client: &dyn Transport,
    namespace: Option<&str>,
    error_key: &str,
    params: &ListParams,
) -> Result<Vec<K>, WriteError> {
    let reply = async {
        let request = Request::new(K::url_path(&(), namespace)).list(params);
        calls::fetch::<ObjectList<K>>(client, check_built(request)?).await
    };
    reply.await.map(|list| list.items).map_err(failed::<K>("list", &Key::cluster(error_key)))
}

/// Binds a pod to a node through the binding subresource. The server refuses if the pod already has a node.
pub async fn bind_pod(client: &dyn Transport, pod: &Pod, node: &str) -> Result<(), WriteError> {
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
    let reply = async {
        let data = serde_json::to_vec(&binding).map_err(kube::Error::SerdeError)?;
        let requests = requests::<Pod>(key.namespace.as_deref());
        let request = requests.create_subresource("binding", &key.name, &PostParams::default(), data);
        calls::send(client, check_built(request)?).await
    };
    reply.await.map_err(failed::<Pod>("bind", &key))
}
