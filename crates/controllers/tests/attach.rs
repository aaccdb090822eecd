//! The attach/detach controller on a real API server. The test is the attacher and the node agents: it says what a driver
//! would have answered, and what a node has in use.

#![allow(clippy::unwrap_used)]

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::{build, names};
use cleat_apiserver::{ApiServer, Config};
use cleat_controllers::Context;
use cleat_controllers::attach::{self, Policy};
use cleat_flex::Drivers;
use cleat_runtime::{Caches, Clock};
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);
const DRIVER: &str = build::DRIVER;

/// A clock that the test puts forward.
struct Hands(Mutex<Timestamp>);

impl Clock for Hands {
    fn now(&self) -> Timestamp {
        *self.0.lock()
    }
}

struct Rig {
    client: Client,
    clock: Arc<Hands>,
    stop: CancellationToken,
    flex: Drivers,
    _server: ApiServer,
    dir: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Rig {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::open(Config::new(dir.path(), ([127, 0, 0, 1], 0).into())).await.unwrap();
        let client = server.client("system:admin");
        let clock = Arc::new(Hands(Mutex::new(Timestamp::now())));
        let flex = Drivers::new(cleat_flex::Config::new(dir.path().join("flex"), dir.path().join("calls")));
        Self { client, clock, stop: CancellationToken::new(), flex, _server: server, dir }
    }

    /// With the rights that its role gives it, as in `cleat up`.
    fn start(&self, policy: Policy) {
        let client = self._server.component("system:cleat:attach-detach");
        let caches = Caches::new(self._server.component("system:cleat:caches"), self.stop.clone());
        let context = Context { client, caches, clock: self.clock.clone() };
        tokio::spawn(attach::run(context, policy, self.flex.clone(), self.stop.clone()));
        tokio::spawn(self.flex.clone().run(self.stop.clone()));
    }

    fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>,
    {
        Api::all(self.client.clone())
    }

    fn here<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn node(&self, name: &str) {
        self.managed_node(name, true).await;
    }

    async fn managed_node(&self, name: &str, managed: bool) {
        let annotations = if managed {
            json!({ "volumes.kubernetes.io/controller-managed-attach-detach": "true" })
        } else {
            json!({})
        };
        create(&self.all::<Node>(), json!({ "metadata": { "name": name, "annotations": annotations } })).await;
        self.status(name, json!({ "conditions": [{ "type": "Ready", "status": "True" }] })).await;
    }

    async fn status(&self, node: &str, status: Value) {
        patch_status(&self.all::<Node>(), node, json!({ "status": status })).await;
    }

    /// A claim bound to a volume of its own. Returns the volume's name in node status.
    async fn volume(&self, name: &str, modes: &[&str]) -> String {
        self.volume_of(name, modes, json!({ "csi": { "driver": DRIVER, "volumeHandle": name } })).await;
        names::unique_volume(DRIVER, name)
    }

    async fn volume_of(&self, name: &str, modes: &[&str], source: Value) {
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

    async fn pod(&self, name: &str, node: &str, source: Value) {
        let mut volume = json!({ "name": "data" });
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let pod = json!({
            "metadata": { "name": name },
            "spec": { "nodeName": node, "containers": [{ "name": "main", "image": "busybox" }], "volumes": [volume] },
        });
        create(&self.here::<Pod>(), pod).await;
    }

    async fn forget_pod(&self, name: &str) {
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.here::<Pod>().delete(name, &at_once).await.unwrap();
    }

    fn attachment(&self, volume: &str, node: &str) -> String {
        names::attachment(volume, DRIVER, node)
    }

    async fn made(&self, attachment: &str) -> VolumeAttachment {
        until(&format!("{attachment} is made"), || async {
            self.all::<VolumeAttachment>().get_opt(attachment).await.unwrap()
        })
        .await
    }

    async fn gone(&self, attachment: &str) {
        until(&format!("{attachment} goes"), || async {
            self.all::<VolumeAttachment>().get_opt(attachment).await.unwrap().is_none().then_some(())
        })
        .await;
    }

    /// What the attacher would write.
    async fn confirm(&self, attachment: &str) {
        patch_status(&self.all::<VolumeAttachment>(), attachment, json!({ "status": { "attached": true } })).await;
    }

    async fn told(&self, node: &str, want: &[&str]) {
        until(&format!("{node} is told of {want:?}"), || async {
            let node = self.all::<Node>().get(node).await.unwrap();
            let attached = node.status.and_then(|s| s.volumes_attached).unwrap_or_default();
            (attached.iter().map(|v| v.name.as_str()).collect::<Vec<_>>() == want).then_some(())
        })
        .await;
    }

    /// A volume is attached to a node that has it in use, and its pod is gone.
    async fn left_in_use(&self, volume: &str, node: &str) -> String {
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
    async fn looked_around(&self, name: &str, node: &str) {
        self.volume(name, &["ReadWriteMany"]).await;
        self.pod(name, node, claimed(name)).await;
        let attachment = self.attachment(name, node);
        self.made(&attachment).await;
        self.forget_pod(name).await;
        self.gone(&attachment).await;
    }

    async fn event(&self, pod: &str, part: &str) {
        until(&format!("an event of {pod} says {part:?}"), || async {
            let events = self.here::<Event>().list(&ListParams::default()).await.unwrap();
            let mut events = events.items.into_iter().filter(|e| e.involved_object.name.as_deref() == Some(pod));
            events.any(|e| e.message.is_some_and(|m| m.contains(part))).then_some(())
        })
        .await;
    }

    fn put_forward(&self, seconds: i64) {
        let mut now = self.clock.0.lock();
        *now += SignedDuration::from_secs(seconds);
    }
}

fn claimed(claim: &str) -> Value {
    json!({ "persistentVolumeClaim": { "claimName": claim } })
}

async fn create<K: Clone + DeserializeOwned + serde::Serialize + Debug>(api: &Api<K>, object: Value) -> K {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

async fn patch_status<K: Clone + DeserializeOwned + Debug>(api: &Api<K>, name: &str, patch: Value) {
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

async fn until<T, F: Future<Output = Option<T>>>(what: &str, look: impl Fn() -> F) -> T {
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

#[tokio::test]
async fn a_silent_node_keeps_its_volume_until_its_time_is_over() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.node("n2").await;
    let attachment = rig.left_in_use("v", "n1").await;
    rig.pod("heir", "n2", claimed("v")).await;
    rig.event("heir", "Volume is already exclusively attached to one node").await;
    // The time counts from when the controller sees that nobody needs the volume.
    rig.looked_around("earlier", "n1").await;
    rig.put_forward(3600);
    rig.looked_around("w", "n1").await;
    rig.made(&attachment).await;

    // Its hour as a ready node counts: from now on it is silent.
    rig.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    rig.gone(&attachment).await;
    rig.told("n1", &[]).await;
    rig.made(&rig.attachment("v", "n2")).await;
}

#[tokio::test]
async fn nothing_is_forced_where_that_is_switched_off_but_an_administrator_can() {
    let rig = Rig::new().await;
    rig.start(Policy { force_after: None });
    rig.node("n1").await;
    let attachment = rig.left_in_use("v", "n1").await;
    rig.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    rig.put_forward(3600);
    rig.looked_around("w", "n1").await;
    rig.made(&attachment).await;

    let taint =
        json!({ "spec": { "taints": [{ "key": "node.kubernetes.io/out-of-service", "effect": "NoExecute" }] } });
    rig.all::<Node>().patch("n1", &PatchParams::default(), &Patch::Merge(taint)).await.unwrap();
    rig.gone(&attachment).await;
}

#[tokio::test]
async fn what_a_deleted_node_had_in_use_stays_and_what_it_had_not_goes() {
    let rig = Rig::new().await;
    rig.start(Policy { force_after: None });
    rig.node("n1").await;
    let used = rig.left_in_use("used", "n1").await;
    let unique = rig.volume("idle", &["ReadWriteOnce"]).await;
    rig.pod("idle", "n1", claimed("idle")).await;
    let idle = rig.attachment("idle", "n1");
    rig.made(&idle).await;
    rig.confirm(&idle).await;
    rig.told("n1", &[&unique, &names::unique_volume(DRIVER, "used")]).await;
    rig.all::<Node>().delete("n1", &DeleteParams::default()).await.unwrap();
    rig.gone(&idle).await;
    rig.made(&used).await;

    // It is back, and has unmounted everything.
    rig.forget_pod("idle").await;
    rig.node("n1").await;
    rig.gone(&used).await;
}

#[tokio::test]
async fn what_is_left_over_from_before_goes_and_what_others_make_stays() {
    let rig = Rig::new().await;
    rig.node("n1").await;
    rig.volume("dangling", &["ReadWriteOnce"]).await;
    rig.volume("foreign", &["ReadWriteOnce"]).await;
    let make = async |volume: &str| {
        let name = rig.attachment(volume, "n1");
        let spec = json!({ "attacher": DRIVER, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
        create(&rig.all::<VolumeAttachment>(), json!({ "metadata": { "name": name }, "spec": spec })).await;
        name
    };
    let dangling = make("dangling").await;
    rig.start(Policy::default());
    rig.gone(&dangling).await;
    let foreign = make("foreign").await;
    rig.looked_around("w", "n1").await;
    rig.made(&foreign).await;
}

#[tokio::test]
async fn a_driver_that_wants_no_attachments_gets_none_and_one_that_never_answers_is_named() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    rig.pod("v", "n1", claimed("v")).await;
    let attachment = rig.attachment("v", "n1");
    rig.made(&attachment).await;
    rig.put_forward(121);
    // Anything about the volume makes the controller look at it.
    let touch = json!({ "metadata": { "labels": { "seen": "again" } } });
    rig.all::<PersistentVolume>().patch("v", &PatchParams::default(), &Patch::Merge(touch)).await.unwrap();
    rig.event("v", &format!("timed out waiting for external-attacher of {DRIVER} CSI driver to attach volume v")).await;

    let driver = json!({ "metadata": { "name": DRIVER }, "spec": { "attachRequired": false } });
    create(&rig.all::<CSIDriver>(), driver).await;
    rig.gone(&attachment).await;
    rig.all::<CSIDriver>().delete(DRIVER, &DeleteParams::default()).await.unwrap();
    rig.made(&attachment).await;
}

#[tokio::test]
async fn what_the_driver_says_against_it_is_told_to_the_pod() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claimed("v")).await;
    let attachment = rig.attachment("v", "n1");
    rig.made(&attachment).await;
    let error = json!({ "status": { "attached": false, "attachError": { "message": "no room" } } });
    patch_status(&rig.all::<VolumeAttachment>(), &attachment, error).await;
    rig.event("p", "AttachVolume.Attach failed for volume \"v\" : no room").await;
    rig.told("n1", &[]).await;
    rig.confirm(&attachment).await;
    rig.event("p", "AttachVolume.Attach succeeded for volume \"v\" ").await;
}

#[tokio::test]
async fn disks_of_old_plugins_are_attached_by_the_drivers_that_took_over() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    let ebs = "ebs.csi.aws.com";
    rig.pod("own", "n1", json!({ "awsElasticBlockStore": { "volumeID": "aws://zone/vol-1" } })).await;
    let attachment = names::attachment("vol-1", ebs, "n1");
    let made = rig.made(&attachment).await;
    assert_eq!(made.spec.attacher, ebs);
    let inline = made.spec.source.inline_volume_spec.unwrap();
    assert_eq!(inline.csi.unwrap().volume_handle, "vol-1");
    rig.confirm(&attachment).await;
    rig.told("n1", &["kubernetes.io/csi/ebs.csi.aws.com^vol-1"]).await;
    rig.forget_pod("own").await;
    rig.gone(&attachment).await;
    rig.told("n1", &[]).await;
}

#[tokio::test]
async fn a_node_that_attaches_by_itself_is_left_alone() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.managed_node("own", false).await;
    rig.status("own", json!({ "volumesAttached": [{ "name": "x", "devicePath": "" }] })).await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    rig.pod("v", "own", claimed("v")).await;
    rig.looked_around("w", "n1").await;
    rig.told("own", &["x"]).await;
    let none = rig.all::<VolumeAttachment>().get_opt(&rig.attachment("v", "own")).await.unwrap();
    assert!(none.is_none());
}

const FLEX: &str = "acme/disk";

impl Rig {
    /// The FlexVolume driver [`FLEX`], which only says what it can do: the test attaches.
    fn install_flex(&self, capabilities: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let home = self.dir.path().join("flex").join("acme~disk");
        std::fs::create_dir_all(&home).unwrap();
        let answer = format!(r#"{{"status":"Success","capabilities":{capabilities}}}"#);
        std::fs::write(home.join(".new"), format!("#!/bin/sh\necho '{answer}'\n")).unwrap();
        std::fs::set_permissions(home.join(".new"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(home.join(".new"), home.join("disk")).unwrap();
    }

    /// A FlexVolume and a claim that are bound to each other.
    async fn flex_volume(&self, name: &str, modes: &[&str]) -> String {
        self.volume_of(name, modes, json!({ "flexVolume": { "driver": FLEX, "options": { "lun": "7" } } })).await;
        format!("flexvolume-{FLEX}/{name}")
    }

    fn flex_attachment(&self, volume: &str, node: &str) -> String {
        names::attachment(&format!("{FLEX}/{volume}"), cleat_api::flex::ATTACHER, node)
    }

    /// What the attacher would write.
    async fn confirm_device(&self, attachment: &str, device: &str) {
        let status = json!({ "attached": true, "attachmentMetadata": { "devicePath": device } });
        patch_status(&self.all::<VolumeAttachment>(), attachment, json!({ "status": status })).await;
    }

    async fn told_device(&self, node: &str, unique: &str, device: &str) {
        until(&format!("{node} is told of {device}"), || async {
            let node = self.all::<Node>().get(node).await.unwrap();
            let attached = node.status.and_then(|s| s.volumes_attached).unwrap_or_default();
            attached.iter().any(|v| v.name == unique && v.device_path == device).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn flex_volumes_are_attached_to_one_node_and_the_node_is_told_the_device() {
    let rig = Rig::new().await;
    rig.install_flex("{}");
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.node("n2").await;
    let unique = rig.flex_volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", json!({ "persistentVolumeClaim": { "claimName": "v", "readOnly": true } })).await;
    let attachment = rig.flex_attachment("v", "n1");
    let made = rig.made(&attachment).await;
    assert_eq!(made.spec.attacher, "flexvolume.cleat.dev");
    let recorded = cleat_api::flex::FlexVolume::of_attachment(&made).unwrap();
    assert_eq!((recorded.driver.as_str(), recorded.volume.as_str(), recorded.read_only), (FLEX, "v", true));
    assert_eq!(recorded.options["lun"], "7");
    rig.confirm_device(&attachment, "/dev/a").await;
    rig.told_device("n1", &unique, "/dev/a").await;
    rig.confirm_device(&attachment, "/dev/b").await;
    rig.told_device("n1", &unique, "/dev/b").await;

    rig.pod("heir", "n2", claimed("v")).await;
    rig.event("heir", "Volume is already used by pod(s) p").await;
    rig.status("n1", json!({ "volumesInUse": [unique] })).await;
    rig.forget_pod("p").await;
    rig.event("heir", "Volume is already exclusively attached to one node").await;
    rig.looked_around("w", "n1").await;
    rig.made(&attachment).await;
    rig.status("n1", json!({ "volumesInUse": null })).await;
    rig.gone(&attachment).await;
    rig.told("n1", &[]).await;
    rig.made(&rig.flex_attachment("v", "n2")).await;
}

#[tokio::test]
async fn a_pods_own_flex_volume_is_attached_too() {
    let rig = Rig::new().await;
    rig.install_flex("{}");
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.pod("p", "n1", json!({ "flexVolume": { "driver": FLEX } })).await;
    let attachment = rig.flex_attachment("data", "n1");
    rig.made(&attachment).await;
    rig.confirm_device(&attachment, "").await;
    rig.told("n1", &["flexvolume-acme/disk/data"]).await;
    rig.event("p", "AttachVolume.Attach succeeded for volume \"data\" ").await;
    rig.forget_pod("p").await;
    rig.gone(&attachment).await;
}

#[tokio::test]
async fn a_flex_driver_that_attaches_nothing_is_left_alone() {
    let rig = Rig::new().await;
    rig.install_flex(r#"{"attach":false}"#);
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.flex_volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claimed("v")).await;
    rig.pod("q", "n1", json!({ "flexVolume": { "driver": FLEX } })).await;
    rig.looked_around("w", "n1").await;
    for volume in ["v", "data"] {
        let none = rig.all::<VolumeAttachment>().get_opt(&rig.flex_attachment(volume, "n1")).await.unwrap();
        assert!(none.is_none(), "{volume}");
    }
    // An update of the driver attaches, and the next one does not any more.
    rig.install_flex(r#"{"attach":true}"#);
    let attachment = rig.flex_attachment("v", "n1");
    rig.made(&attachment).await;
    rig.made(&rig.flex_attachment("data", "n1")).await;
    rig.install_flex(r#"{"attach":false}"#);
    rig.gone(&attachment).await;
}

#[tokio::test]
async fn a_flex_driver_that_is_missing_is_named_to_the_pod_and_takes_nothing_away() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.flex_volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claimed("v")).await;
    let attachment = rig.flex_attachment("v", "n1");
    rig.made(&attachment).await;
    let error = json!({ "status": { "attached": false, "attachError": { "message": "there is no driver" } } });
    patch_status(&rig.all::<VolumeAttachment>(), &attachment, error).await;
    rig.event("p", "AttachVolume.Attach failed for volume \"v\" : there is no driver").await;
    rig.put_forward(121);
    rig.confirm_device(&attachment, "/dev/a").await;
    rig.told("n1", &["flexvolume-acme/disk/v"]).await;
}

#[tokio::test]
async fn the_time_of_a_silent_node_begins_anew_when_a_pod_came_back() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    let attachment = rig.left_in_use("v", "n1").await;
    rig.looked_around("w1", "n1").await;
    rig.put_forward(300);
    rig.pod("back", "n1", claimed("v")).await;
    rig.looked_around("w2", "n1").await;
    rig.forget_pod("back").await;
    rig.looked_around("w3", "n1").await;
    rig.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    rig.put_forward(100);
    rig.looked_around("w4", "n1").await;
    let still = rig.all::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(still.metadata.deletion_timestamp.is_none(), "its six minutes are not over");
    rig.put_forward(300);
    rig.looked_around("w5", "n1").await;
    rig.gone(&attachment).await;
}

#[tokio::test]
async fn an_attachment_deleted_by_hand_is_made_anew() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    let unique = rig.volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claimed("v")).await;
    let attachment = rig.attachment("v", "n1");
    let first = rig.made(&attachment).await;
    rig.confirm(&attachment).await;
    rig.told("n1", &[&unique]).await;
    rig.all::<VolumeAttachment>().delete(&attachment, &DeleteParams::default()).await.unwrap();
    rig.told("n1", &[]).await;
    let second = rig.made(&attachment).await;
    assert_ne!(first.uid(), second.uid());
    rig.confirm(&attachment).await;
    rig.told("n1", &[&unique]).await;
}
