//! The CSI attacher on a real API server, with a driver whose replies the test scripts: which requests the driver gets, how
//! its failures are handled, and that every publish is undone.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use cleat_api::names;
use cleat_csi::Client as Csi;
use cleat_runtime::{Backoff, SystemClock};
use cleat_sidecars::{Context, Driver, csi_attacher};
use cleat_testing::{DRIVER_NAME, Method, ScriptedDriver, ScriptedReply, TestApiServer, merged};
use k8s_openapi::api::core::v1::{PersistentVolume, Secret};
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tonic::Status;

const FINALIZER: &str = "external-attacher/scripted-test";

struct AttacherFixture {
    server: TestApiServer,
    driver: ScriptedDriver,
}

impl AttacherFixture {
    async fn new() -> Self {
        Self::with(ScriptedDriver::new(DRIVER_NAME), Duration::from_secs(2)).await
    }

    async fn with(driver: ScriptedDriver, call_timeout: Duration) -> Self {
        let server = TestApiServer::start().await;
        let stop = server.stop();
        let endpoint = driver.serve(server.directory(), stop).await;
        let connected = Driver::connect(Csi::new(endpoint), stop).await.unwrap();
        // With the permissions of its role, as in `cleat up`.
        let context = Context {
            client: server.component("system:cleat:attacher").into(),
            caches: server.caches(stop),
            clock: Arc::new(SystemClock),
        };
        let options = csi_attacher::CsiAttacherOptions {
            max_concurrent_calls: 1,
            call_timeout,
            retry: Backoff::new(Duration::from_millis(10), Duration::from_millis(100)),
            ..csi_attacher::CsiAttacherOptions::default()
        };
        tokio::spawn(csi_attacher::run(context, connected, options, stop.clone()));
        let registered = json!({ "name": DRIVER_NAME, "nodeID": "id-1", "topologyKeys": [] });
        let csi_node = json!({ "metadata": { "name": "n1" }, "spec": { "drivers": [registered] } });
        server.create::<CSINode>(csi_node).await;
        Self { server, driver }
    }

    async fn create_volume(&self, name: &str, more: Value) {
        let csi = merged(json!({ "driver": DRIVER_NAME, "volumeHandle": format!("handle-{name}") }), more);
        let spec = json!({ "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "csi": csi });
        self.server.create::<PersistentVolume>(json!({ "metadata": { "name": name }, "spec": spec })).await;
    }

    async fn create_attachment(&self, volume: &str) -> String {
        let name = names::attachment(&format!("handle-{volume}"), DRIVER_NAME, "n1");
        let spec = json!({ "attacher": DRIVER_NAME, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
        self.server.create::<VolumeAttachment>(json!({ "metadata": { "name": name }, "spec": spec })).await;
        name
    }

    async fn delete_attachment(&self, attachment: &str) {
        self.server.delete::<VolumeAttachment>(attachment).await;
    }

    async fn wait_until_attached(&self, attachment: &str) -> VolumeAttachment {
        let is_attached = |a: &VolumeAttachment| a.status.as_ref().is_some_and(|s| s.attached);
        self.server.wait_until(attachment, "is attached", is_attached).await
    }

    async fn wait_until_gone(&self, attachment: &str) {
        self.server.wait_until_gone::<VolumeAttachment>(attachment).await;
    }
}

#[tokio::test]
async fn the_request_is_complete_and_the_publish_context_is_stored() {
    let fixture = AttacherFixture::new().await;
    fixture.server.create::<Secret>(json!({ "metadata": { "name": "key" }, "stringData": { "user": "u" } })).await;
    let reference = json!({ "name": "key", "namespace": "default" });
    let more = json!({
        "controllerPublishSecretRef": reference, "readOnly": true, "volumeAttributes": { "zone": "z" }, "fsType": "xfs",
    });
    fixture.create_volume("v", more).await;
    let name = fixture.create_attachment("v").await;
    let attachment = fixture.wait_until_attached(&name).await;
    let context = attachment.status.as_ref().unwrap().attachment_metadata.clone().unwrap();
    assert_eq!(context["device"], "/dev/x");
    assert_eq!(attachment.finalizers(), [FINALIZER]);
    assert_eq!(attachment.annotations()["csi.alpha.kubernetes.io/node-id"], "id-1");
    let volume = fixture.server.api::<PersistentVolume>().get("v").await.unwrap();
    assert!(volume.finalizers().contains(&FINALIZER.to_owned()), "{:?}", volume.finalizers());
    let request = fixture.driver.state().published[0].clone();
    assert_eq!((request.volume_id.as_str(), request.node_id.as_str(), request.readonly), ("handle-v", "id-1", true));
    assert_eq!(request.secrets["user"], "u");
    assert_eq!(request.volume_context["zone"], "z");

    // The volume is deleted first: it stays until the attachment, which needs its handle and its secret, is gone.
    fixture.server.delete::<PersistentVolume>("v").await;
    fixture.delete_attachment(&name).await;
    fixture.wait_until_gone(&name).await;
    assert_eq!(fixture.driver.state().unpublished[0].secrets["user"], "u");
    let finalizer_removed = |volume: Option<&PersistentVolume>| {
        volume.is_none_or(|v| !v.finalizers().contains(&FINALIZER.to_owned())).then_some(())
    };
    fixture.server.wait_for("v", "the finalizer is removed from the volume", finalizer_removed).await;
}

#[tokio::test]
async fn a_failure_is_reported_retried_and_cleared_after_success() {
    let full = || ScriptedReply::Fail(Status::resource_exhausted("no room"));
    let busy = || ScriptedReply::Fail(Status::aborted("busy"));
    let fixture = AttacherFixture::new().await;
    fixture.driver.script(Method::ControllerPublishVolume, std::iter::repeat_with(full).take(3));
    fixture.create_volume("v", json!({})).await;
    let name = fixture.create_attachment("v").await;
    let attach_error = |a: Option<&VolumeAttachment>| a?.status.as_ref()?.attach_error.clone();
    let error = fixture.server.wait_for(&name, "an attach error is reported", attach_error).await;
    assert!(error.message.as_ref().unwrap().contains("no room"), "{error:?}");
    assert_eq!(error.error_code, Some(8));
    let attachment = fixture.wait_until_attached(&name).await;
    assert!(attachment.status.unwrap().attach_error.is_none());
    assert_eq!(fixture.driver.state().published.len(), 4);

    fixture.driver.script(Method::ControllerUnpublishVolume, std::iter::repeat_with(busy).take(3));
    fixture.delete_attachment(&name).await;
    let detach_error = |a: Option<&VolumeAttachment>| a?.status.as_ref()?.detach_error.clone();
    let error = fixture.server.wait_for(&name, "a detach error is reported", detach_error).await;
    assert!(error.message.unwrap().contains("busy"));
    fixture.wait_until_gone(&name).await;
    assert_eq!(fixture.driver.state().unpublished.len(), 4);
}

#[tokio::test]
async fn a_call_without_a_reply_is_undone_before_the_attachment_is_deleted() {
    let fixture = AttacherFixture::new().await;
    fixture.driver.script(Method::ControllerPublishVolume, [ScriptedReply::Hang]);
    let failures = std::iter::repeat_n(ScriptedReply::Fail(Status::internal("no")), 2);
    fixture.driver.script(Method::ControllerUnpublishVolume, failures);
    fixture.create_volume("v", json!({})).await;
    let name = fixture.create_attachment("v").await;
    let has_finalizer = |a: &VolumeAttachment| a.finalizers().contains(&FINALIZER.to_owned());
    fixture.server.wait_until(&name, "has the finalizer", has_finalizer).await;
    fixture.delete_attachment(&name).await;
    fixture.wait_until_gone(&name).await;
    let state = fixture.driver.state();
    assert!(!state.unpublished.is_empty(), "the call may have taken effect");
    assert_eq!(state.unpublished[0].node_id, "id-1");
}

#[tokio::test]
async fn a_driver_that_does_not_publish_has_its_attachments_confirmed() {
    let driver = ScriptedDriver::new(DRIVER_NAME).with_capabilities(&[]);
    let fixture = AttacherFixture::with(driver, Duration::from_secs(2)).await;
    fixture.create_volume("v", json!({})).await;
    let name = fixture.create_attachment("v").await;
    let attachment = fixture.wait_until_attached(&name).await;
    assert_eq!(attachment.finalizers(), [] as [&str; 0]);
    fixture.delete_attachment(&name).await;
    fixture.wait_until_gone(&name).await;
    let state = fixture.driver.state();
    assert!(state.published.is_empty() && state.unpublished.is_empty());
}

#[tokio::test]
async fn an_unpublish_that_hangs_does_not_delay_a_publish() {
    let fixture = AttacherFixture::with(ScriptedDriver::new(DRIVER_NAME), Duration::from_secs(600)).await;
    fixture.driver.script(Method::ControllerUnpublishVolume, [ScriptedReply::Hang]);
    fixture.create_volume("old", json!({})).await;
    fixture.create_volume("new", json!({})).await;
    let old = fixture.create_attachment("old").await;
    fixture.wait_until_attached(&old).await;
    fixture.delete_attachment(&old).await;
    fixture.driver.wait_until("ControllerUnpublishVolume is called", |state| !state.unpublished.is_empty()).await;
    let new = fixture.create_attachment("new").await;
    fixture.wait_until_attached(&new).await;
    fixture.server.api::<VolumeAttachment>().get(&old).await.unwrap();
}
