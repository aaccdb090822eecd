//! Failures of the driver.

use cleat_api::well_known::annotation;
use cleat_testing::{DRIVER_NAME, Method, ScriptedDriver, ScriptedReply};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::ResourceExt as _;
use serde_json::json;
use tonic::Status;

use super::fixture::{ProvisionerFixture, annotated, fast_retries};

const FINALIZER: &str = "cleat.dev/provisioning";

#[tokio::test]
async fn a_final_failure_is_retried_on_the_selected_node() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.create_class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    // The driver has no topology: another node would not help.
    let failures = [Status::internal("broken"), Status::resource_exhausted("full"), Status::already_exists("odd")];
    driver.script(Method::CreateVolume, failures.map(ScriptedReply::Fail));
    fixture.create_claim("c", "wait", json!({})).await;
    fixture.select_node("c", "n1").await;
    fixture.wait_until_bound("c").await;
    for part in ["broken", "full", "odd"] {
        fixture.wait_for_event("c", "ProvisioningFailed", part).await;
    }
    fixture.wait_for_event("c", "ProvisioningSucceeded", "Successfully provisioned volume pvc-").await;
    let claim = fixture.claims().get("c").await.unwrap();
    assert_eq!(annotated(&claim, annotation::SELECTED_NODE), Some("n1"));
    assert_eq!(driver.state().created.len(), 4);
    assert_eq!(driver.state().volumes.len(), 1);
}

#[tokio::test]
async fn a_claim_deleted_during_a_call_leaves_no_volume() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.create_class("plain", json!({})).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    let busy = || ScriptedReply::Fail(Status::aborted("busy"));
    driver.script(
        Method::CreateVolume,
        [ScriptedReply::Hang, busy(), ScriptedReply::Fail(Status::unavailable("away")), busy()],
    );
    fixture.create_claim("c", "plain", json!({})).await;
    driver.wait_until("CreateVolume is called", |s| !s.created.is_empty()).await;
    fixture.server.delete::<PersistentVolumeClaim>("c").await;
    let deleting = fixture.claims().get("c").await.unwrap();
    assert!(deleting.finalizers().iter().any(|f| f == FINALIZER), "it has the finalizer until the outcome is certain");
    fixture.wait_until_gone("c").await;
    driver.wait_until("no volume is left", |s| s.volumes.is_empty()).await;
    let state = driver.state();
    assert_eq!(state.created.len(), 5);
    assert!(state.created.iter().all(|request| *request == state.created[0]), "the same request every time");
    assert_eq!(state.deleted.len(), 1);
}

#[tokio::test]
async fn a_new_provisioner_resolves_the_pending_call_of_its_predecessor() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.create_class("plain", json!({})).await;
    let endpoint = driver.serve(fixture.server.directory(), fixture.server.stop()).await;
    let first = fixture.server.stop().child_token();
    fixture.start_provisioner_at(endpoint.clone(), fast_retries(), &first).await;
    driver.script(Method::CreateVolume, [ScriptedReply::Hang]);
    fixture.create_claim("c", "plain", json!({})).await;
    driver.wait_until("CreateVolume is called", |s| !s.created.is_empty()).await;
    first.cancel();
    fixture.server.delete::<PersistentVolumeClaim>("c").await;
    assert_eq!(driver.state().volumes.len(), 1, "created, but no reply was sent");
    fixture.start_provisioner_at(endpoint, fast_retries(), fixture.server.stop()).await;
    fixture.wait_until_gone("c").await;
    driver.wait_until("no volume is left", |s| s.volumes.is_empty()).await;
}

#[tokio::test]
async fn an_infeasible_request_is_not_repeated_unless_the_class_is_replaced() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.create_class("plain", json!({ "parameters": { "kind": "nonsense" } })).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    driver.script(Method::CreateVolume, [ScriptedReply::Fail(Status::invalid_argument("no such kind"))]);
    fixture.create_claim("c", "plain", json!({})).await;
    let delayed = "Volume provisioning failed with infeasible error. Retries will be delayed.";
    fixture.wait_for_event("c", "ProvisioningFailed", delayed).await;
    // A change of the claim does not lead to a new call.
    let touch = json!({ "metadata": { "annotations": { "touched": "yes" } } });
    fixture.server.patch::<PersistentVolumeClaim>("c", touch).await;
    let claim = fixture.claims().get("c").await.unwrap();
    assert!(!claim.finalizers().iter().any(|f| f == FINALIZER), "no call is pending");
    fixture.server.delete::<StorageClass>("plain").await;
    assert_eq!(driver.state().created.len(), 1);
    fixture.create_class("plain", json!({ "parameters": { "kind": "ssd" } })).await;
    fixture.wait_until_bound("c").await;
    let state = driver.state();
    assert_eq!(state.created.len(), 2);
    assert_eq!(state.created[1].parameters["kind"], "ssd");
}

#[tokio::test]
async fn a_volume_that_is_too_small_is_deleted() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.create_class("plain", json!({})).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    driver.script(Method::CreateVolume, [ScriptedReply::TooSmall]);
    driver.script(Method::DeleteVolume, [ScriptedReply::Fail(Status::internal("stuck"))]);
    fixture.create_claim("c", "plain", json!({})).await;
    let volume = fixture.wait_until_bound("c").await;
    fixture
        .wait_for_event("c", "ProvisioningFailed", "created volume capacity 1 less than requested capacity 1073741824")
        .await;
    assert_eq!(volume.spec.unwrap().capacity.unwrap()["storage"].0, "1Gi");
    let calls = driver.wait_for("calls", |s| Some((s.created.len(), s.deleted.len()))).await;
    assert_eq!(calls, (3, 2), "created, found again, and created anew after a successful delete");
    fixture.delete_claim("c").await;

    // The same, with the claim deleted before the volume could be.
    driver.script(Method::CreateVolume, [ScriptedReply::TooSmall]);
    driver.script(Method::DeleteVolume, (0..20).map(|_| ScriptedReply::Fail(Status::internal("stuck"))));
    fixture.create_claim("d", "plain", json!({})).await;
    fixture.wait_for_event("d", "ProvisioningFailed", "it cannot be given back").await;
    fixture.server.delete::<PersistentVolumeClaim>("d").await;
    fixture.wait_until_gone("d").await;
    driver.wait_until("no volume is left", |s| s.volumes.is_empty()).await;
}

#[tokio::test]
async fn a_failed_delete_is_retried_and_a_retained_volume_is_not_deleted() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.create_class("plain", json!({})).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    fixture.create_claim("c", "plain", json!({})).await;
    let volume = fixture.wait_until_bound("c").await;
    driver.script(Method::DeleteVolume, [ScriptedReply::Fail(Status::failed_precondition("in use"))]);
    fixture.delete_claim("c").await;
    fixture.wait_for_event(&volume.name_any(), "VolumeFailedDelete", "in use").await;
    assert_eq!(driver.state().deleted.len(), 2);

    fixture.create_claim("attached", "plain", json!({})).await;
    let volume = fixture.wait_until_bound("attached").await.name_any();
    let spec = json!({ "attacher": DRIVER_NAME, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
    fixture.server.create::<VolumeAttachment>(json!({ "metadata": { "name": "va" }, "spec": spec })).await;
    fixture.server.delete::<PersistentVolumeClaim>("attached").await;
    let message = format!("persistentvolume {volume} is still attached to node n1");
    fixture.wait_for_event(&volume, "VolumeFailedDelete", &message).await;
    assert_eq!(driver.state().deleted.len(), 2, "DeleteVolume waits for the detach");
    fixture.server.delete::<VolumeAttachment>("va").await;
    fixture.wait_until_gone("attached").await;
    driver.wait_until("no volume is left", |s| s.volumes.is_empty()).await;

    fixture.create_claim("kept", "plain", json!({})).await;
    let volume = fixture.wait_until_bound("kept").await.name_any();
    let retain = json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } });
    fixture.server.patch::<PersistentVolume>(&volume, retain).await;
    fixture.server.delete::<PersistentVolumeClaim>("kept").await;
    let released = |v: &PersistentVolume| {
        let is_released = v.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Released");
        is_released && !v.finalizers().iter().any(|f| f.starts_with("external-provisioner"))
    };
    fixture.server.wait_until(&volume, "is released and has no finalizer of the provisioner", released).await;
    fixture.server.delete::<PersistentVolume>(&volume).await;
    fixture.wait_for_no_volumes().await;
    assert_eq!(driver.state().volumes.len(), 1, "the driver's volume still exists");
}
