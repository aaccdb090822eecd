//! An API server in the test's process, with a client that has all rights and functions to write objects and to wait for them.

use std::fmt::Debug;
use std::path::Path;
use std::pin::pin;

use cleat_apiserver::{ApiServer, Config};
use cleat_runtime::Caches;
use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::wait::within_timeout;

/// A running API server. Dropping it cancels [`TestApiServer::stop`] and removes its directory.
pub struct TestApiServer {
    server: ApiServer,
    client: Client,
    stop: CancellationToken,
    directory: TempDir,
}

/// Where [`TestApiServer::api`] finds the objects of a kind: in the cluster or in the namespace `default`.
pub trait ApiScope: Sized {
    fn api<K: Resource<Scope = Self, DynamicType = ()>>(client: Client) -> Api<K>;
}

impl ApiScope for ClusterResourceScope {
    fn api<K: Resource<Scope = Self, DynamicType = ()>>(client: Client) -> Api<K> {
        Api::all(client)
    }
}

impl ApiScope for NamespaceResourceScope {
    fn api<K: Resource<Scope = Self, DynamicType = ()>>(client: Client) -> Api<K> {
        Api::default_namespaced(client)
    }
}

impl TestApiServer {
    pub async fn start() -> Self {
        let directory = TempDir::with_prefix("cleat-test-").unwrap();
        let config = Config::new(directory.path().join("api"), ([127, 0, 0, 1], 0).into());
        let server = ApiServer::open(config).await.unwrap();
        let client = server.client("system:admin");
        Self { server, client, stop: CancellationToken::new(), directory }
    }

    /// A client with all rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A client with the rights that the component has in `cleat up`, for example `system:cleat:attacher`.
    pub fn component(&self, user: &str) -> Client {
        self.server.component(user)
    }

    /// As [`TestApiServer::component`]. Writes hand over typed objects instead of JSON, as in `cleat up`.
    pub fn in_process(&self, user: &str) -> cleat_runtime::Client {
        cleat_runtime::Client::in_process(self.server.transport(user), self.server.component(user))
    }

    /// New caches, which end with `stop`.
    pub fn caches(&self, stop: &CancellationToken) -> Caches {
        Caches::new(self.server.component("system:cleat:caches"), stop.clone())
    }

    /// Cancelled when the server is dropped. The test's controllers run until then.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// A directory for the test's files, removed with the server. The server uses only `api` in it.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The objects of a kind, in the namespace `default` if the kind has namespaces. All rights.
    pub fn api<K: Resource<DynamicType = ()>>(&self) -> Api<K>
    where
        K::Scope: ApiScope,
    {
        <K::Scope as ApiScope>::api(self.client())
    }

    pub async fn create<K>(&self, object: Value) -> K
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
        K::Scope: ApiScope,
    {
        let object = serde_json::from_value(object).unwrap();
        self.api::<K>().create(&PostParams::default(), &object).await.unwrap()
    }

    /// Applies a merge patch.
    pub async fn patch<K>(&self, name: &str, patch: Value) -> K
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
        K::Scope: ApiScope,
    {
        self.api::<K>().patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap()
    }

    /// Applies a merge patch to the subresource `status`.
    pub async fn patch_status<K>(&self, name: &str, patch: Value)
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
        K::Scope: ApiScope,
    {
        self.api::<K>().patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Deletes without waiting for finalizers.
    pub async fn delete<K>(&self, name: &str)
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
        K::Scope: ApiScope,
    {
        self.api::<K>().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Watches the object until `find` returns a value. `find` gets None while the object does not exist.
    pub async fn wait_for<K, T>(&self, name: &str, what: &str, find: impl Fn(Option<&K>) -> Option<T>) -> T
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
        K::Scope: ApiScope,
    {
        let found = await_condition(self.api::<K>(), name, |object: Option<&K>| find(object).is_some());
        let object = within_timeout(&format!("{name}: {what}"), found).await.unwrap();
        find(object.as_ref()).unwrap()
    }

    /// Watches the object until it exists and `holds` is true for it.
    pub async fn wait_until<K>(&self, name: &str, what: &str, holds: impl Fn(&K) -> bool) -> K
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
        K::Scope: ApiScope,
    {
        self.wait_for(name, what, |object: Option<&K>| object.filter(|o| holds(o)).cloned()).await
    }

    pub async fn wait_until_gone<K>(&self, name: &str)
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
        K::Scope: ApiScope,
    {
        self.wait_for(name, "is gone", |object: Option<&K>| object.is_none().then_some(())).await;
    }

    /// Lists the objects of a kind after every change until `find` returns a value.
    pub async fn wait_for_list<K, T>(&self, what: &str, find: impl Fn(&[K]) -> Option<T>) -> T
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
        K::Scope: ApiScope,
    {
        let mut changes = pin!(watcher(self.api::<K>(), watcher::Config::default()));
        within_timeout(what, async {
            loop {
                if let Some(found) = find(&self.api::<K>().list(&ListParams::default()).await.unwrap().items) {
                    return found;
                }
                changes.try_next().await.unwrap().expect("the watch does not end");
            }
        })
        .await
    }

    /// Waits for an Event about the object whose message contains `part`. An empty `about` or `reason` matches any.
    pub async fn wait_for_event(&self, about: &str, reason: &str, part: &str) {
        let matches = |event: &Event| {
            (about.is_empty() || event.involved_object.name.as_deref() == Some(about))
                && (reason.is_empty() || event.reason.as_deref() == Some(reason))
                && event.message.as_deref().is_some_and(|message| message.contains(part))
        };
        let what = format!("event {reason} about {about}: {part}");
        self.wait_for_list(&what, |events: &[Event]| events.iter().any(matches).then_some(())).await;
    }
}

impl Drop for TestApiServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// `base` with the fields of `more`. Both are JSON objects; a field in both gets the value of `more`.
pub fn merged(mut base: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("not an object: {more}") };
    base.as_object_mut().unwrap().extend(more);
    base
}
