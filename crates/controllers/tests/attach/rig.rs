//! Runs the controller with an API server, and does the work of users, node agents and the external attacher.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::names;
use cleat_apiserver::{ApiServer, Config};
use cleat_controllers::Context;
use cleat_controllers::attach::{self, DetachPolicy};
use cleat_flex::Drivers;
use cleat_runtime::{Caches, Clock};
use cleat_testing::build;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::faults::Faults;

pub(crate) const WAIT: Duration = Duration::from_secs(60);
pub(crate) const DRIVER: &str = build::DRIVER;

/// A clock that only the test advances.
pub(crate) struct ManualClock(Mutex<Timestamp>);

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        *self.0.lock()
    }
}

pub(crate) struct Rig {
    pub(crate) client: Client,
    pub(crate) clock: Arc<ManualClock>,
    stop: CancellationToken,
    flex: Drivers,
    pub(crate) faults: Arc<Faults>,
    _server: ApiServer,
    pub(crate) dir: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Rig {
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::open(Config::new(dir.path(), ([127, 0, 0, 1], 0).into())).await.unwrap();
        let client = server.client("system:admin");
        let faults = Arc::new(Faults::new(client.clone()));
        let clock = Arc::new(ManualClock(Mutex::new(Timestamp::now())));
        let flex = Drivers::new(cleat_flex::Config::new(dir.path().join("flex"), dir.path().join("calls")));
        Self { client, clock, stop: CancellationToken::new(), flex, faults, _server: server, dir }
    }

    /// Starts the controller with the rights of its role, as in `cleat up`.
    pub(crate) fn start(&self, policy: DetachPolicy) {
        let client = self.faults.request_client(self._server.component("system:cleat:attach-detach"));
        let watching = self.faults.cache_client(self._server.component("system:cleat:caches"));
        let caches = Caches::new(watching, self.stop.clone());
        let context = Context { client: client.into(), caches, clock: self.clock.clone() };
        tokio::spawn(attach::run(context, policy, self.flex.clone(), self.stop.clone()));
        tokio::spawn(self.flex.clone().run(self.stop.clone()));
    }

    pub(crate) fn cluster<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>,
    {
        Api::all(self.client.clone())
    }

    pub(crate) fn namespaced<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), "default")
    }

    pub(crate) async fn node(&self, name: &str) {
        self.managed_node(name, true).await;
    }

    pub(crate) async fn managed_node(&self, name: &str, managed: bool) {
        let annotations = if managed {
            json!({ "volumes.kubernetes.io/controller-managed-attach-detach": "true" })
        } else {
            json!({})
        };
        create(&self.cluster::<Node>(), json!({ "metadata": { "name": name, "annotations": annotations } })).await;
        self.status(name, json!({ "conditions": [{ "type": "Ready", "status": "True" }] })).await;
    }

    pub(crate) async fn status(&self, node: &str, status: Value) {
        patch_status(&self.cluster::<Node>(), node, json!({ "status": status })).await;
    }

    /// Creates a volume and a claim that are bound to each other. Returns the unique volume name.
    pub(crate) async fn volume(&self, name: &str, modes: &[&str]) -> String {
        self.volume_of(name, modes, json!({ "csi": { "driver": DRIVER, "volumeHandle": name } })).await;
        names::unique_volume_name(DRIVER, name)
    }

    pub(crate) async fn volume_of(&self, name: &str, modes: &[&str], source: Value) {
        let claim = json!({
            "metadata": { "name": name },
            "spec": { "accessModes": modes, "volumeName": name, "storageClassName": "",
                      "resources": { "requests": { "storage": "1Gi" } } },
        });
        let claim = create(&self.namespaced::<PersistentVolumeClaim>(), claim).await;
        let mut volume = json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": modes, "capacity": { "storage": "1Gi" },
                "claimRef": { "kind": "PersistentVolumeClaim", "namespace": "default", "name": name, "uid": claim.uid() },
            },
        });
        volume["spec"].as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        create(&self.cluster::<PersistentVolume>(), volume).await;
        patch_status(&self.namespaced::<PersistentVolumeClaim>(), name, json!({ "status": { "phase": "Bound" } }))
            .await;
    }

    pub(crate) async fn pod(&self, name: &str, node: &str, source: Value) {
        let mut volume = json!({ "name": "data" });
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let pod = json!({
            "metadata": { "name": name },
            "spec": { "nodeName": node, "containers": [{ "name": "main", "image": "busybox" }], "volumes": [volume] },
        });
        create(&self.namespaced::<Pod>(), pod).await;
    }

    pub(crate) async fn delete_pod(&self, name: &str) {
        let immediately = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.namespaced::<Pod>().delete(name, &immediately).await.unwrap();
    }

    pub(crate) fn attachment_name(&self, volume: &str, node: &str) -> String {
        names::attachment(volume, DRIVER, node)
    }

    pub(crate) async fn wait_attachment(&self, attachment: &str) -> VolumeAttachment {
        wait_until(&format!("{attachment} exists"), || async {
            self.cluster::<VolumeAttachment>().get_opt(attachment).await.unwrap()
        })
        .await
    }

    pub(crate) async fn wait_deleted(&self, attachment: &str) {
        wait_until(&format!("{attachment} is deleted"), || async {
            self.cluster::<VolumeAttachment>().get_opt(attachment).await.unwrap().is_none().then_some(())
        })
        .await;
    }

    /// Writes what the attacher writes after a successful call.
    pub(crate) async fn confirm(&self, attachment: &str) {
        patch_status(&self.cluster::<VolumeAttachment>(), attachment, json!({ "status": { "attached": true } })).await;
    }

    pub(crate) async fn wait_reported(&self, node: &str, want: &[&str]) {
        wait_until(&format!("{node} reports {want:?} as attached"), || async {
            let node = self.cluster::<Node>().get(node).await.unwrap();
            let attached = node.status.and_then(|s| s.volumes_attached).unwrap_or_default();
            (attached.iter().map(|v| v.name.as_str()).collect::<Vec<_>>() == want).then_some(())
        })
        .await;
    }

    /// Attaches a volume to a node that has it in use, and deletes its pod. Returns the attachment's name.
    pub(crate) async fn left_in_use(&self, volume: &str, node: &str) -> String {
        let unique_name = self.volume(volume, &["ReadWriteOnce"]).await;
        self.pod(volume, node, claim_source(volume)).await;
        let attachment = self.attachment_name(volume, node);
        self.wait_attachment(&attachment).await;
        self.confirm(&attachment).await;
        self.wait_reported(node, &[&unique_name]).await;
        self.status(node, json!({ "volumesInUse": [unique_name] })).await;
        self.delete_pod(volume).await;
        attachment
    }

    /// Waits until the controller has reconciled the node again: another volume is attached and detached.
    pub(crate) async fn wait_reconciled(&self, name: &str, node: &str) {
        self.volume(name, &["ReadWriteMany"]).await;
        self.pod(name, node, claim_source(name)).await;
        let attachment = self.attachment_name(name, node);
        self.wait_attachment(&attachment).await;
        self.delete_pod(name).await;
        self.wait_deleted(&attachment).await;
    }

    pub(crate) async fn wait_event(&self, pod: &str, part: &str) {
        wait_until(&format!("an event of {pod} says {part:?}"), || async {
            let events = self.namespaced::<Event>().list(&ListParams::default()).await.unwrap();
            let mut events = events.items.into_iter().filter(|e| e.involved_object.name.as_deref() == Some(pod));
            events.any(|e| e.message.is_some_and(|m| m.contains(part))).then_some(())
        })
        .await;
    }

    pub(crate) fn advance_clock(&self, seconds: i64) {
        let mut now = self.clock.0.lock();
        *now += SignedDuration::from_secs(seconds);
    }
}

pub(crate) fn claim_source(claim: &str) -> Value {
    json!({ "persistentVolumeClaim": { "claimName": claim } })
}

pub(crate) async fn create<K: Clone + DeserializeOwned + serde::Serialize + Debug>(api: &Api<K>, object: Value) -> K {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

pub(crate) async fn patch_status<K: Clone + DeserializeOwned + Debug>(api: &Api<K>, name: &str, patch: Value) {
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

pub(crate) async fn wait_until<T, F: Future<Output = Option<T>>>(what: &str, check: impl Fn() -> F) -> T {
    let wait = async {
        loop {
            if let Some(found) = check().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, wait).await.unwrap_or_else(|_| panic!("{what}: not within {WAIT:?}"))
}
