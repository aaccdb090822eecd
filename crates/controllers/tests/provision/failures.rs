//! What comes of a driver's failures.

use cleat_api::well_known::annotation;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;
use tonic::Status;

use super::driver::{Answer, Scripted};
use super::rig::{DRIVER, Rig, annotated, create, hasty, until};

const HOLD: &str = "cleat.dev/provisioning";

#[tokio::test]
async fn a_call_that_failed_for_good_is_made_anew_and_keeps_its_node() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    rig.provision(&driver, hasty()).await;
    // Without topology, another node would not help.
    let failures = [Status::internal("broken"), Status::resource_exhausted("full"), Status::already_exists("odd")];
    driver.script.lock().creations.extend(failures.map(Answer::Fail));
    rig.claim("c", "wait", json!({})).await;
    rig.choose("c", "n1").await;
    rig.bound("c").await;
    for part in ["broken", "full", "odd"] {
        rig.event("c", "ProvisioningFailed", part).await;
    }
    rig.event("c", "ProvisioningSucceeded", "Successfully provisioned volume pvc-").await;
    let claim = rig.claims().get("c").await.unwrap();
    assert_eq!(annotated(&claim, annotation::SELECTED_NODE), Some("n1"));
    assert_eq!(driver.script.lock().created.len(), 4);
    assert_eq!(driver.script.lock().volumes.len(), 1);
}

#[tokio::test]
async fn a_claim_deleted_in_the_middle_of_a_call_leaves_nothing_behind() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.class("plain", json!({})).await;
    rig.provision(&driver, hasty()).await;
    let busy = || Answer::Fail(Status::aborted("busy"));
    driver.script.lock().creations.extend([Answer::Hang, busy(), Answer::Fail(Status::unavailable("away")), busy()]);
    rig.claim("c", "plain", json!({})).await;
    driver.until("it is called", |s| (!s.created.is_empty()).then_some(())).await;
    rig.claims().delete("c", &DeleteParams::default()).await.unwrap();
    let going = rig.claims().get("c").await.unwrap();
    assert!(going.finalizers().iter().any(|f| f == HOLD), "it is held until the call is certain");
    rig.gone("c").await;
    driver.until("nothing is left", |s| s.volumes.is_empty().then_some(())).await;
    let script = driver.script.lock();
    assert_eq!(script.created.len(), 5);
    assert!(script.created.iter().all(|request| *request == script.created[0]), "the same call again");
    assert_eq!(script.deleted.len(), 1);
}

#[tokio::test]
async fn the_next_provisioner_finds_out_what_the_last_one_left_in_doubt() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.class("plain", json!({})).await;
    let endpoint = driver.serve(rig.dir(), &rig.stop).await;
    let first = rig.stop.child_token();
    rig.provision_at(endpoint.clone(), hasty(), &first).await;
    driver.script.lock().creations.push_back(Answer::Hang);
    rig.claim("c", "plain", json!({})).await;
    driver.until("it is called", |s| (!s.created.is_empty()).then_some(())).await;
    first.cancel();
    rig.claims().delete("c", &DeleteParams::default()).await.unwrap();
    assert_eq!(driver.script.lock().volumes.len(), 1, "made, and nobody knows");
    rig.provision_at(endpoint, hasty(), &rig.stop).await;
    rig.gone("c").await;
    driver.until("nothing is left", |s| s.volumes.is_empty().then_some(())).await;
}

#[tokio::test]
async fn what_the_driver_calls_impossible_is_not_asked_again_unless_the_class_is_another() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.class("plain", json!({ "parameters": { "kind": "nonsense" } })).await;
    rig.provision(&driver, hasty()).await;
    driver.script.lock().creations.push_back(Answer::Fail(Status::invalid_argument("no such kind")));
    rig.claim("c", "plain", json!({})).await;
    let delayed = "Volume provisioning failed with infeasible error. Retries will be delayed.";
    rig.event("c", "ProvisioningFailed", delayed).await;
    // What wakes the claim does not make it be tried again.
    let touch = Patch::Merge(json!({ "metadata": { "annotations": { "touched": "yes" } } }));
    rig.claims().patch("c", &PatchParams::default(), &touch).await.unwrap();
    let claim = rig.claims().get("c").await.unwrap();
    assert!(!claim.finalizers().iter().any(|f| f == HOLD), "nothing is in the making");
    rig.all::<StorageClass>().delete("plain", &DeleteParams::default()).await.unwrap();
    assert_eq!(driver.script.lock().created.len(), 1);
    rig.class("plain", json!({ "parameters": { "kind": "ssd" } })).await;
    rig.bound("c").await;
    let script = driver.script.lock();
    assert_eq!(script.created.len(), 2);
    assert_eq!(script.created[1].parameters["kind"], "ssd");
}

#[tokio::test]
async fn a_volume_that_is_too_small_is_given_back() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.class("plain", json!({})).await;
    rig.provision(&driver, hasty()).await;
    driver.script.lock().creations.push_back(Answer::Small);
    driver.script.lock().deletions.push_back(Answer::Fail(Status::internal("stuck")));
    rig.claim("c", "plain", json!({})).await;
    let volume = rig.bound("c").await;
    rig.event("c", "ProvisioningFailed", "created volume capacity 1 less than requested capacity 1073741824").await;
    assert_eq!(volume.spec.unwrap().capacity.unwrap()["storage"].0, "1Gi");
    let calls = driver.until("calls", |s| Some((s.created.len(), s.deleted.len()))).await;
    assert_eq!(calls, (3, 2), "found again, given back, and made anew");
    rig.delete("c").await;

    // And one whose claim has gone meanwhile is not forgotten.
    driver.script.lock().creations.push_back(Answer::Small);
    driver.script.lock().deletions.extend((0..20).map(|_| Answer::Fail(Status::internal("stuck"))));
    rig.claim("d", "plain", json!({})).await;
    rig.event("d", "ProvisioningFailed", "it cannot be given back").await;
    rig.claims().delete("d", &DeleteParams::default()).await.unwrap();
    rig.gone("d").await;
    driver.until("nothing is left", |s| s.volumes.is_empty().then_some(())).await;
}

#[tokio::test]
async fn a_volume_that_cannot_be_deleted_is_tried_again_and_one_to_be_kept_is_kept() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.class("plain", json!({})).await;
    rig.provision(&driver, hasty()).await;
    rig.claim("c", "plain", json!({})).await;
    let volume = rig.bound("c").await;
    driver.script.lock().deletions.push_back(Answer::Fail(Status::failed_precondition("in use")));
    rig.delete("c").await;
    rig.event(&volume.name_any(), "VolumeFailedDelete", "in use").await;
    assert_eq!(driver.script.lock().deleted.len(), 2);

    rig.claim("attached", "plain", json!({})).await;
    let volume = rig.bound("attached").await.name_any();
    let spec = json!({ "attacher": DRIVER, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
    create(&rig.all::<VolumeAttachment>(), json!({ "metadata": { "name": "va" }, "spec": spec })).await;
    rig.claims().delete("attached", &DeleteParams::default()).await.unwrap();
    let said = format!("persistentvolume {volume} is still attached to node n1");
    rig.event(&volume, "VolumeFailedDelete", &said).await;
    assert_eq!(driver.script.lock().deleted.len(), 2, "it waits");
    rig.all::<VolumeAttachment>().delete("va", &DeleteParams::default()).await.unwrap();
    rig.gone("attached").await;
    driver.until("nothing is left", |s| s.volumes.is_empty().then_some(())).await;

    rig.claim("kept", "plain", json!({})).await;
    let volume = rig.bound("kept").await.name_any();
    let keep = Patch::Merge(json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } }));
    rig.all::<PersistentVolume>().patch(&volume, &PatchParams::default(), &keep).await.unwrap();
    rig.claims().delete("kept", &DeleteParams::default()).await.unwrap();
    until("the volume is released and nobody holds it", || async {
        let v = rig.all::<PersistentVolume>().get(&volume).await.unwrap();
        let released = v.status.as_ref()?.phase.as_deref() == Some("Released");
        (released && !v.finalizers().iter().any(|f| f.starts_with("external-provisioner"))).then_some(())
    })
    .await;
    rig.all::<PersistentVolume>().delete(&volume, &DeleteParams::default()).await.unwrap();
    until("its record is gone", || async {
        let left = rig.all::<PersistentVolume>().list(&ListParams::default()).await.unwrap();
        left.items.is_empty().then_some(())
    })
    .await;
    assert_eq!(driver.script.lock().volumes.len(), 1, "the volume itself is still there");
}
