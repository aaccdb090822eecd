//! Runs the controller with an API server, and does the work of users, node agents and the external attacher.

use std::sync::Arc;

use cleat_api::names;
use cleat_controllers::Context;
use cleat_controllers::attach::{self, DetachPolicy};
use cleat_flex::Drivers;
use cleat_runtime::Caches;
use cleat_testing::{ManualClock, TestApiServer, build, merged};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::faults::Faults;

pub(crate) const DRIVER: &str = build::DRIVER;

pub(crate) struct AttachFixture {
    pub(crate) server: TestApiServer,
    pub(crate) clock: ManualClock,
    pub(crate) faults: Arc<Faults>,
    flex: Drivers,
}

impl AttachFixture {
    pub(crate) async fn new() -> Self {
        let server = TestApiServer::start().await;
        let faults = Arc::new(Faults::new(server.client()));
        let scratch = server.directory();
        let flex = Drivers::new(cleat_flex::Config::new(scratch.join("flex"), scratch.join("calls")));
        Self { server, clock: ManualClock::default(), faults, flex }
    }

    /// Starts the controller with the rights of its role, as in `cleat up`.
    pub(crate) fn start(&self, policy: DetachPolicy) {
        let client = self.faults.request_client(self.server.component("system:cleat:attach-detach"));
        let watching = self.faults.cache_client(self.server.component("system:cleat:caches"));
        let stop = self.server.stop();
        let caches = Caches::new(watching, stop.clone());
        let context = Context { client: client.into(), caches, clock: Arc::new(self.clock.clone()) };
        tokio::spawn(attach::run(context, policy, self.flex.clone(), stop.clone()));
        tokio::spawn(self.flex.clone().run(stop.clone()));
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
        self.server.create::<Node>(json!({ "metadata": { "name": name, "annotations": annotations } })).await;
        self.status(name, json!({ "conditions": [{ "type": "Ready", "status": "True" }] })).await;
    }

    pub(crate) async fn status(&self, node: &str, status: Value) {
        self.server.patch_status::<Node>(node, json!({ "status": status })).await;
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
        let claim = self.server.create::<PersistentVolumeClaim>(claim).await;
        let spec = json!({
            "accessModes": modes, "capacity": { "storage": "1Gi" },
            "claimRef": { "kind": "PersistentVolumeClaim", "namespace": "default", "name": name, "uid": claim.uid() },
        });
        let volume = json!({ "metadata": { "name": name }, "spec": merged(spec, source) });
        self.server.create::<PersistentVolume>(volume).await;
        self.server.patch_status::<PersistentVolumeClaim>(name, json!({ "status": { "phase": "Bound" } })).await;
    }

    pub(crate) async fn pod(&self, name: &str, node: &str, source: Value) {
        let volume = merged(json!({ "name": "data" }), source);
        let pod = json!({
            "metadata": { "name": name },
            "spec": { "nodeName": node, "containers": [{ "name": "main", "image": "busybox" }], "volumes": [volume] },
        });
        self.server.create::<Pod>(pod).await;
    }

    pub(crate) async fn delete_pod(&self, name: &str) {
        let immediately = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.server.api::<Pod>().delete(name, &immediately).await.unwrap();
    }

    pub(crate) fn attachment_name(&self, volume: &str, node: &str) -> String {
        names::attachment(volume, DRIVER, node)
    }

    pub(crate) async fn wait_attachment(&self, attachment: &str) -> VolumeAttachment {
        self.server.wait_until(attachment, "exists", |_: &VolumeAttachment| true).await
    }

    pub(crate) async fn wait_deleted(&self, attachment: &str) {
        self.server.wait_until_gone::<VolumeAttachment>(attachment).await;
    }

    /// Writes what the attacher writes after a successful call.
    pub(crate) async fn confirm(&self, attachment: &str) {
        self.server.patch_status::<VolumeAttachment>(attachment, json!({ "status": { "attached": true } })).await;
    }

    pub(crate) async fn wait_reported(&self, node: &str, want: &[&str]) {
        let reported = |node: &Node| {
            let attached = node.status.as_ref().and_then(|s| s.volumes_attached.as_ref());
            attached.into_iter().flatten().map(|v| v.name.as_str()).eq(want.iter().copied())
        };
        self.server.wait_until(node, &format!("reports {want:?} as attached"), reported).await;
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
        self.server.wait_for_event(pod, "", part).await;
    }
}

pub(crate) fn claim_source(claim: &str) -> Value {
    json!({ "persistentVolumeClaim": { "claimName": claim } })
}
