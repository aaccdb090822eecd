//! The controller, its API server, and the hands of everybody else.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::names;
use cleat_apiserver::{ApiServer, Config};
use cleat_controllers::Context;
use cleat_controllers::attach::{self, Policy};
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

/// A clock that the test puts forward.
pub(crate) struct Hands(Mutex<Timestamp>);

impl Clock for Hands {
    fn now(&self) -> Timestamp {
        *self.0.lock()
    }
}

pub(crate) struct Rig {
    pub(crate) client: Client,
    pub(crate) clock: Arc<Hands>,
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
        let clock = Arc::new(Hands(Mutex::new(Timestamp::now())));
        let flex = Drivers::new(cleat_flex::Config::new(dir.path().join("flex"), dir.path().join("calls")));
        Self { client, clock, stop: CancellationToken::new(), flex, faults, _server: server, dir }
    }

    /// With the rights that its role gives it, as in `cleat up`.
    pub(crate) fn start(&self, policy: Policy) {
        let client = self.faults.acting(self._server.component("system:cleat:attach-detach"));
        let watching = self.faults.watching(self._server.component("system:cleat:caches"));
        let caches = Caches::new(watching, self.stop.clone());
        let context = Context { client: client.into(), caches, clock: self.clock.clone() };
        tokio::spawn(attach::run(context, policy, self.flex.clone(), self.stop.clone()));
        tokio::spawn(self.flex.clone().run(self.stop.clone()));
    }

    pub(crate) fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>,
    {
        Api::all(self.client.clone())
    }

    pub(crate) fn here<K>(&self) -> Api<K>
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
        create(&self.all::<Node>(), json!({ "metadata": { "name": name, "annotations": annotations } })).await;
        self.status(name, json!({ "conditions": [{ "type": "Ready", "status": "True" }] })).await;
    }

    pub(crate) async fn status(&self, node: &str, status: Value) {
        patch_status(&self.all::<Node>(), node, json!({ "status": status })).await;
    }

    /// A claim bound to a volume of its own. Returns the volume's name in node status.
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
        let claim = create(&self.here::<PersistentVolumeClaim>(), claim).await;
        let mut volume = json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": modes, "capacity": { "storage": "1Gi" },
                "claimRef": { "kind": "PersistentVolumeClaim", "namespace": "default", "name": name, "uid": claim.uid() },
            },
        });
        volume["spec"].as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        create(&self.all::<PersistentVolume>(), volume).await;
        patch_status(&self.here::<PersistentVolumeClaim>(), name, json!({ "status": { "phase": "Bound" } })).await;
    }

    pub(crate) async fn pod(&self, name: &str, node: &str, source: Value) {
        let mut volume = json!({ "name": "data" });
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let pod = json!({
            "metadata": { "name": name },
            "spec": { "nodeName": node, "containers": [{ "name": "main", "image": "busybox" }], "volumes": [volume] },
        });
        create(&self.here::<Pod>(), pod).await;
    }

    pub(crate) async fn forget_pod(&self, name: &str) {
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.here::<Pod>().delete(name, &at_once).await.unwrap();
    }

    pub(crate) fn attachment(&self, volume: &str, node: &str) -> String {
        names::attachment(volume, DRIVER, node)
    }

    pub(crate) async fn made(&self, attachment: &str) -> VolumeAttachment {
        until(&format!("{attachment} is made"), || async {
            self.all::<VolumeAttachment>().get_opt(attachment).await.unwrap()
        })
        .await
    }

    pub(crate) async fn gone(&self, attachment: &str) {
        until(&format!("{attachment} goes"), || async {
            self.all::<VolumeAttachment>().get_opt(attachment).await.unwrap().is_none().then_some(())
        })
        .await;
    }

    /// What the attacher would write.
    pub(crate) async fn confirm(&self, attachment: &str) {
        patch_status(&self.all::<VolumeAttachment>(), attachment, json!({ "status": { "attached": true } })).await;
    }

    pub(crate) async fn told(&self, node: &str, want: &[&str]) {
        until(&format!("{node} is told of {want:?}"), || async {
            let node = self.all::<Node>().get(node).await.unwrap();
            let attached = node.status.and_then(|s| s.volumes_attached).unwrap_or_default();
            (attached.iter().map(|v| v.name.as_str()).collect::<Vec<_>>() == want).then_some(())
        })
        .await;
    }

    /// A volume is attached to a node that has it in use, and its pod is gone.
    pub(crate) async fn left_in_use(&self, volume: &str, node: &str) -> String {
        let unique = self.volume(volume, &["ReadWriteOnce"]).await;
        self.pod(volume, node, claimed(volume)).await;
        let attachment = self.attachment(volume, node);
        self.made(&attachment).await;
        self.confirm(&attachment).await;
        self.told(node, &[&unique]).await;
        self.status(node, json!({ "volumesInUse": [unique] })).await;
        self.forget_pod(volume).await;
        attachment
    }

    /// Brings the controller to look at everything once more, and waits until it has: a new volume goes its way.
    pub(crate) async fn looked_around(&self, name: &str, node: &str) {
        self.volume(name, &["ReadWriteMany"]).await;
        self.pod(name, node, claimed(name)).await;
        let attachment = self.attachment(name, node);
        self.made(&attachment).await;
        self.forget_pod(name).await;
        self.gone(&attachment).await;
    }

    pub(crate) async fn event(&self, pod: &str, part: &str) {
        until(&format!("an event of {pod} says {part:?}"), || async {
            let events = self.here::<Event>().list(&ListParams::default()).await.unwrap();
            let mut events = events.items.into_iter().filter(|e| e.involved_object.name.as_deref() == Some(pod));
            events.any(|e| e.message.is_some_and(|m| m.contains(part))).then_some(())
        })
        .await;
    }

    pub(crate) fn put_forward(&self, seconds: i64) {
        let mut now = self.clock.0.lock();
        *now += SignedDuration::from_secs(seconds);
    }
}

pub(crate) fn claimed(claim: &str) -> Value {
    json!({ "persistentVolumeClaim": { "claimName": claim } })
}

pub(crate) async fn create<K: Clone + DeserializeOwned + serde::Serialize + Debug>(api: &Api<K>, object: Value) -> K {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

pub(crate) async fn patch_status<K: Clone + DeserializeOwned + Debug>(api: &Api<K>, name: &str, patch: Value) {
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

pub(crate) async fn until<T, F: Future<Output = Option<T>>>(what: &str, look: impl Fn() -> F) -> T {
    let wait = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, wait).await.unwrap_or_else(|_| panic!("{what}: not within {WAIT:?}"))
}
