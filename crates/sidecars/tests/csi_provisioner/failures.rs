//! Failures of the driver.

use cleat_api::well_known::annotation;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;
use tonic::Status;

use super::driver::{ScriptedDriver, ScriptedReply};
use super::rig::{DRIVER, Rig, annotated, create, fast_retries, until};

const FINALIZER: &str = "cleat.dev/provisioning";

#[tokio::test]
async fn a_final_failure_is_retried_on_the_selected_node() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.create_class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    rig.start_provisioner(&driver, fast_retries()).await;
    // The driver has no topology: another node would not help.
    let failures = [Status::internal("broken"), Status::resource_exhausted("full"), Status::already_exists("odd")];
    driver.script.lock().create_replies.extend(failures.map(ScriptedReply::Fail));
    rig.create_claim("c", "wait", json!({})).await;
    rig.select_node("c", "n1").await;
    rig.wait_until_bound("c").await;
    for part in ["broken", "full", "odd"] {
        rig.wait_for_event("c", "ProvisioningFailed", part).await;
    }
    rig.wait_for_event("c", "ProvisioningSucceeded", "Successfully provisioned volume pvc-").await;
    let claim = rig.claims().get("c").await.unwrap();
    assert_eq!(annotated(&claim, annotation::SELECTED_NODE), Some("n1"));
    assert_eq!(driver.script.lock().created.len(), 4);
    assert_eq!(driver.script.lock().volumes.len(), 1);
}

#[tokio::test]
async fn a_claim_deleted_during_a_call_leaves_no_volume() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.create_class("plain", json!({})).await;
    rig.start_provisioner(&driver, fast_retries()).await;
    let busy = || ScriptedReply::Fail(Status::aborted("busy"));
    driver.script.lock().create_replies.extend([
        ScriptedReply::Hang,
        busy(),
        ScriptedReply::Fail(Status::unavailable("away")),
        busy(),
    ]);
    rig.create_claim("c", "plain", json!({})).await;
    driver.until("CreateVolume is called", |s| (!s.created.is_empty()).then_some(())).await;
    rig.claims().delete("c", &DeleteParams::default()).await.unwrap();
    let deleting = rig.claims().get("c").await.unwrap();
    assert!(deleting.finalizers().iter().any(|f| f == FINALIZER), "it has the finalizer until the outcome is certain");
    rig.wait_until_gone("c").await;
    driver.until("no volume is left", |s| s.volumes.is_empty().then_some(())).await;
    let script = driver.script.lock();
    assert_eq!(script.created.len(), 5);
    assert!(script.created.iter().all(|request| *request == script.created[0]), "the same request every time");
    assert_eq!(script.deleted.len(), 1);
}

#[tokio::test]
async fn a_new_provisioner_resolves_the_pending_call_of_its_predecessor() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.create_class("plain", json!({})).await;
    let endpoint = driver.serve(rig.dir(), &rig.stop).await;
    let first = rig.stop.child_token();
    rig.start_provisioner_at(endpoint.clone(), fast_retries(), &first).await;
    driver.script.lock().create_replies.push_back(ScriptedReply::Hang);
    rig.create_claim("c", "plain", json!({})).await;
    driver.until("CreateVolume is called", |s| (!s.created.is_empty()).then_some(())).await;
    first.cancel();
    rig.claims().delete("c", &DeleteParams::default()).await.unwrap();
    assert_eq!(driver.script.lock().volumes.len(), 1, "created, but no reply was sent");
    rig.start_provisioner_at(endpoint, fast_retries(), &rig.stop).await;
    rig.wait_until_gone("c").await;
    driver.until("no volume is left", |s| s.volumes.is_empty().then_some(())).await;
}

#[tokio::test]
async fn an_infeasible_request_is_not_repeated_unless_the_class_is_replaced() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.create_class("plain", json!({ "parameters": { "kind": "nonsense" } })).await;
    rig.start_provisioner(&driver, fast_retries()).await;
    driver.script.lock().create_replies.push_back(ScriptedReply::Fail(Status::invalid_argument("no such kind")));
    rig.create_claim("c", "plain", json!({})).await;
    let delayed = "Volume provisioning failed with infeasible error. Retries will be delayed.";
    rig.wait_for_event("c", "ProvisioningFailed", delayed).await;
    // A change of the claim does not lead to a new call.
    let touch = Patch::Merge(json!({ "metadata": { "annotations": { "touched": "yes" } } }));
    rig.claims().patch("c", &PatchParams::default(), &touch).await.unwrap();
    let claim = rig.claims().get("c").await.unwrap();
    assert!(!claim.finalizers().iter().any(|f| f == FINALIZER), "no call is pending");
    rig.all::<StorageClass>().delete("plain", &DeleteParams::default()).await.unwrap();
    assert_eq!(driver.script.lock().created.len(), 1);
    rig.create_class("plain", json!({ "parameters": { "kind": "ssd" } })).await;
    rig.wait_until_bound("c").await;
    let script = driver.script.lock();
    assert_eq!(script.created.len(), 2);
    assert_eq!(script.created[1].parameters["kind"], "ssd");
}

#[tokio::test]
async fn a_volume_that_is_too_small_is_deleted() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.create_class("plain", json!({})).await;
    rig.start_provisioner(&driver, fast_retries()).await;
    driver.script.lock().create_replies.push_back(ScriptedReply::TooSmall);
    driver.script.lock().delete_replies.push_back(ScriptedReply::Fail(Status::internal("stuck")));
    rig.create_claim("c", "plain", json!({})).await;
    let volume = rig.wait_until_bound("c").await;
    rig.wait_for_event("c", "ProvisioningFailed", "created volume capacity 1 less than requested capacity 1073741824")
        .await;
    assert_eq!(volume.spec.unwrap().capacity.unwrap()["storage"].0, "1Gi");
    let calls = driver.until("calls", |s| Some((s.created.len(), s.deleted.len()))).await;
    assert_eq!(calls, (3, 2), "created, found again, and created anew after a successful delete");
    rig.delete_claim("c").await;

    // The same, with the claim deleted before the volume could be.
    driver.script.lock().create_replies.push_back(ScriptedReply::TooSmall);
    driver.script.lock().delete_replies.extend((0..20).map(|_| ScriptedReply::Fail(Status::internal("stuck"))));
    rig.create_claim("d", "plain", json!({})).await;
    rig.wait_for_event("d", "ProvisioningFailed", "it cannot be given back").await;
    rig.claims().delete("d", &DeleteParams::default()).await.unwrap();
    rig.wait_until_gone("d").await;
    driver.until("no volume is left", |s| s.volumes.is_empty().then_some(())).await;
}

#[tokio::test]
async fn a_failed_delete_is_retried_and_a_retained_volume_is_not_deleted() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.create_class("plain", json!({})).await;
    rig.start_provisioner(&driver, fast_retries()).await;
    rig.create_claim("c", "plain", json!({})).await;
    let volume = rig.wait_until_bound("c").await;
    driver.script.lock().delete_replies.push_back(ScriptedReply::Fail(Status::failed_precondition("in use")));
    rig.delete_claim("c").await;
    rig.wait_for_event(&volume.name_any(), "VolumeFailedDelete", "in use").await;
    assert_eq!(driver.script.lock().deleted.len(), 2);

    rig.create_claim("attached", "plain", json!({})).await;
    let volume = rig.wait_until_bound("attached").await.name_any();
    let spec = json!({ "attacher": DRIVER, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
    create(&rig.all::<VolumeAttachment>(), json!({ "metadata": { "name": "va" }, "spec": spec })).await;
    rig.claims().delete("attached", &DeleteParams::default()).await.unwrap();
    let message = format!("persistentvolume {volume} is still attached to node n1");
    rig.wait_for_event(&volume, "VolumeFailedDelete", &message).await;
    assert_eq!(driver.script.lock().deleted.len(), 2, "DeleteVolume waits for the detach");
    rig.all::<VolumeAttachment>().delete("va", &DeleteParams::default()).await.unwrap();
    rig.wait_until_gone("attached").await;
    driver.until("no volume is left", |s| s.volumes.is_empty().then_some(())).await;

    rig.create_claim("kept", "plain", json!({})).await;
    let volume = rig.wait_until_bound("kept").await.name_any();
    let keep = Patch::Merge(json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } }));
    rig.all::<PersistentVolume>().patch(&volume, &PatchParams::default(), &keep).await.unwrap();
    rig.claims().delete("kept", &DeleteParams::default()).await.unwrap();
    until("the volume is released and has no finalizer of the provisioner", || async {
        let v = rig.all::<PersistentVolume>().get(&volume).await.unwrap();
        let released = v.status.as_ref()?.phase.as_deref() == Some("Released");
        (released && !v.finalizers().iter().any(|f| f.starts_with("external-provisioner"))).then_some(())
    })
    .await;
    rig.all::<PersistentVolume>().delete(&volume, &DeleteParams::default()).await.unwrap();
    until("the PersistentVolume is gone", || async {
        let left = rig.all::<PersistentVolume>().list(&ListParams::default()).await.unwrap();
        left.items.is_empty().then_some(())
    })
    .await;
    assert_eq!(driver.script.lock().volumes.len(), 1, "the driver's volume still exists");
}
