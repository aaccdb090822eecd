//! An API server with a binder and the protection controller, and provisioners for scripted drivers.

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{claim_phase, volume_name};
use cleat_api::key::Meta as _;
use cleat_api::well_known::annotation;
use cleat_apiserver::{ApiServer, Config};
use cleat_controllers::{Context, bind, protect};
use cleat_csi::Client as Csi;
use cleat_runtime::{Backoff, Caches, SystemClock};
use cleat_sidecars::{Driver, csi_provisioner};
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::driver::{Script, ScriptedDriver, ZONE};

pub(crate) const DRIVER: &str = "scripted.test";
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct Rig {
    pub(crate) client: Client,
    pub(crate) stop: CancellationToken,
    server: ApiServer,
    dir: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Short retry delays, and a short timeout for a driver that does not answer.
pub(crate) fn fast_retries() -> csi_provisioner::ProvisionerOptions {
    csi_provisioner::ProvisionerOptions {
        retry: Backoff::new(Duration::from_millis(10), Duration::from_millis(100)),
        call_timeout: Duration::from_secs(2),
        ..csi_provisioner::ProvisionerOptions::default()
    }
}

impl Rig {
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::open(Config::new(dir.path(), ([127, 0, 0, 1], 0).into())).await.unwrap();
        let stop = CancellationToken::new();
        let caches = Caches::new(server.component("system:cleat:caches"), stop.clone());
        let context = |user: &str| Context {
            client: cleat_runtime::Client::in_process(server.transport(user), server.component(user)),
            caches: caches.clone(),
            clock: Arc::new(SystemClock),
        };
        let binder = bind::BindOptions { holding_provisioners: [DRIVER.to_owned()].into() };
        tokio::spawn(bind::run(context("system:cleat:binder"), binder, stop.clone()));
        tokio::spawn(protect::run(context("system:cleat:protector"), stop.clone()));
        Self { client: server.client("system:admin"), stop, server, dir }
    }

    /// Starts a provisioner for the driver. It ends when the returned token is cancelled or the rig is dropped.
    pub(crate) async fn start_provisioner(
        &self,
        driver: &ScriptedDriver,
        options: csi_provisioner::ProvisionerOptions,
    ) -> CancellationToken {
        let stop = self.stop.child_token();
        let endpoint = driver.serve(self.dir.path(), &self.stop).await;
        self.start_provisioner_at(endpoint, options, &stop).await;
        stop
    }

    pub(crate) async fn start_provisioner_at(
        &self,
        endpoint: cleat_csi::Endpoint,
        options: csi_provisioner::ProvisionerOptions,
        stop: &CancellationToken,
    ) {
        let driver = Driver::connect(Csi::new(endpoint), stop).await.unwrap();
        tokio::spawn(csi_provisioner::run(self.sidecar_context(stop), driver, options, stop.clone()));
    }

    /// With the permissions of the provisioner's role, and caches of its own.
    pub(crate) fn sidecar_context(&self, stop: &CancellationToken) -> cleat_sidecars::Context {
        cleat_sidecars::Context {
            client: self.server.component("system:cleat:provisioner").into(),
            caches: Caches::new(self.server.component("system:cleat:caches"), stop.clone()),
            clock: Arc::new(SystemClock),
        }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::default_namespaced(self.client.clone())
    }

    pub(crate) fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>,
    {
        Api::all(self.client.clone())
    }

    pub(crate) async fn create_class(&self, name: &str, more: Value) {
        let mut class = json!({ "metadata": { "name": name }, "provisioner": DRIVER });
        class.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        create(&self.all::<StorageClass>(), class).await;
    }

    pub(crate) async fn create_secret(&self, name: &str, key: &str, value: &str) {
        let secret = json!({ "metadata": { "name": name }, "stringData": { key: value } });
        create(&Api::<Secret>::default_namespaced(self.client.clone()), secret).await;
    }

    /// Creates a node in the zone, with the driver registered on it.
    pub(crate) async fn create_node(&self, name: &str, zone: &str) {
        create(&self.all::<Node>(), json!({ "metadata": { "name": name, "labels": { ZONE: zone } } })).await;
        let driver = json!({ "name": DRIVER, "nodeID": name, "topologyKeys": [ZONE] });
        create(&self.all::<CSINode>(), json!({ "metadata": { "name": name }, "spec": { "drivers": [driver] } })).await;
    }

    pub(crate) async fn create_claim(&self, name: &str, class: &str, more: Value) -> PersistentVolumeClaim {
        let mut spec = json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } },
        });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        create(&self.claims(), json!({ "metadata": { "name": name }, "spec": spec })).await
    }

    /// Sets the selected node, as the scheduler does.
    pub(crate) async fn select_node(&self, claim: &str, node: &str) {
        let patch = json!({ "metadata": { "annotations": { annotation::SELECTED_NODE: node } } });
        self.claims().patch(claim, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Waits until the claim is bound, and returns its volume.
    pub(crate) async fn wait_until_bound(&self, claim: &str) -> PersistentVolume {
        let bound = until(&format!("{claim} is bound"), || async {
            self.claims().get_opt(claim).await.unwrap().filter(|c| claim_phase(c) == "Bound")
        })
        .await;
        self.all::<PersistentVolume>().get(volume_name(&bound).unwrap()).await.unwrap()
    }

    /// Deletes the claim, and waits until it and all volumes are gone.
    pub(crate) async fn delete_claim(&self, claim: &str) {
        self.claims().delete(claim, &DeleteParams::default()).await.unwrap();
        self.wait_until_gone(claim).await;
        until("the volumes are gone", || async {
            let left = self.all::<PersistentVolume>().list(&ListParams::default()).await.unwrap();
            left.items.is_empty().then_some(())
        })
        .await;
    }

    pub(crate) async fn wait_until_gone(&self, claim: &str) {
        until(&format!("{claim} is gone"), || async {
            self.claims().get_opt(claim).await.unwrap().is_none().then_some(())
        })
        .await;
    }

    /// Waits for an event about the object whose message contains `part`.
    pub(crate) async fn wait_for_event(&self, about: &str, reason: &str, part: &str) {
        let events: Api<Event> = Api::default_namespaced(self.client.clone());
        until(&format!("event {reason} on {about}: {part}"), || async {
            let all = events.list(&ListParams::default()).await.unwrap();
            let matches = |e: &Event| {
                e.involved_object.name.as_deref() == Some(about)
                    && e.reason.as_deref() == Some(reason)
                    && e.message.as_deref().is_some_and(|m| m.contains(part))
            };
            all.iter().any(matches).then_some(())
        })
        .await;
    }
}

impl ScriptedDriver {
    /// Waits until `find` returns something from what the driver recorded.
    pub(crate) async fn until<T>(&self, what: &str, find: impl Fn(&Script) -> Option<T>) -> T {
        until(what, || async { find(&self.script.lock()) }).await
    }
}

pub(crate) async fn until<T, F: Future<Output = Option<T>>>(what: &str, poll: impl Fn() -> F) -> T {
    let wait = async {
        loop {
            if let Some(found) = poll().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, wait).await.unwrap_or_else(|_| panic!("not within {WAIT_TIMEOUT:?}: {what}"))
}

pub(crate) async fn create<K: Clone + DeserializeOwned + serde::Serialize + Debug>(api: &Api<K>, object: Value) -> K {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

pub(crate) fn annotated<'a, K: kube::Resource>(object: &'a K, key: &str) -> Option<&'a str> {
    object.meta().annotation(key)
}
