//! Volumes follow their pods; nodes are not ready, deleted or out of service.

use cleat_api::names;
use cleat_controllers::attach::DetachPolicy;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::rig::{DRIVER, Rig, claim_source, create, patch_status};

#[tokio::test]
async fn a_node_that_is_not_ready_keeps_a_volume_in_use_until_the_time_limit() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    rig.node("n2").await;
    let attachment = rig.left_in_use("v", "n1").await;
    rig.pod("next", "n2", claim_source("v")).await;
    rig.wait_event("next", "Volume is already exclusively attached to one node").await;
    // The time counts from when the controller notices that no pod needs the volume.
    rig.wait_reconciled("earlier", "n1").await;
    rig.advance_clock(3600);
    rig.wait_reconciled("w", "n1").await;
    rig.wait_attachment(&attachment).await;

    // The hour in which the node was ready counts too.
    rig.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    rig.wait_deleted(&attachment).await;
    rig.wait_reported("n1", &[]).await;
    rig.wait_attachment(&rig.attachment_name("v", "n2")).await;
}

#[tokio::test]
async fn without_a_time_limit_only_the_out_of_service_taint_forces_a_detach() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy { force_after: None });
    rig.node("n1").await;
    let attachment = rig.left_in_use("v", "n1").await;
    rig.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    rig.advance_clock(3600);
    rig.wait_reconciled("w", "n1").await;
    rig.wait_attachment(&attachment).await;

    let taint =
        json!({ "spec": { "taints": [{ "key": "node.kubernetes.io/out-of-service", "effect": "NoExecute" }] } });
    rig.cluster::<Node>().patch("n1", &PatchParams::default(), &Patch::Merge(taint)).await.unwrap();
    rig.wait_deleted(&attachment).await;
}

#[tokio::test]
async fn a_deleted_node_keeps_volumes_in_use_and_loses_the_others() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy { force_after: None });
    rig.node("n1").await;
    let used = rig.left_in_use("used", "n1").await;
    let unique_name = rig.volume("idle", &["ReadWriteOnce"]).await;
    rig.pod("idle", "n1", claim_source("idle")).await;
    let idle = rig.attachment_name("idle", "n1");
    rig.wait_attachment(&idle).await;
    rig.confirm(&idle).await;
    rig.wait_reported("n1", &[&unique_name, &names::unique_volume_name(DRIVER, "used")]).await;
    rig.cluster::<Node>().delete("n1", &DeleteParams::default()).await.unwrap();
    rig.wait_deleted(&idle).await;
    rig.wait_attachment(&used).await;

    // The Node exists again, and has no volume in use.
    rig.delete_pod("idle").await;
    rig.node("n1").await;
    rig.wait_deleted(&used).await;
}

#[tokio::test]
async fn unneeded_attachments_from_before_the_start_are_deleted_and_those_of_other_clients_are_not() {
    let rig = Rig::new().await;
    rig.node("n1").await;
    rig.volume("dangling", &["ReadWriteOnce"]).await;
    rig.volume("foreign", &["ReadWriteOnce"]).await;
    let create_attachment = async |volume: &str| {
        let name = rig.attachment_name(volume, "n1");
        let spec = json!({ "attacher": DRIVER, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
        create(&rig.cluster::<VolumeAttachment>(), json!({ "metadata": { "name": name }, "spec": spec })).await;
        name
    };
    let dangling = create_attachment("dangling").await;
    rig.start(DetachPolicy::default());
    rig.wait_deleted(&dangling).await;
    let foreign = create_attachment("foreign").await;
    rig.wait_reconciled("w", "n1").await;
    rig.wait_attachment(&foreign).await;
}

#[tokio::test]
async fn attach_required_is_honoured_and_a_driver_that_does_not_answer_is_reported() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    rig.pod("v", "n1", claim_source("v")).await;
    let attachment = rig.attachment_name("v", "n1");
    rig.wait_attachment(&attachment).await;
    rig.advance_clock(121);
    // Any change of the volume causes a reconcile.
    let touch = json!({ "metadata": { "labels": { "changed": "again" } } });
    rig.cluster::<PersistentVolume>().patch("v", &PatchParams::default(), &Patch::Merge(touch)).await.unwrap();
    rig.wait_event("v", &format!("timed out waiting for external-attacher of {DRIVER} CSI driver to attach volume v"))
        .await;

    let driver = json!({ "metadata": { "name": DRIVER }, "spec": { "attachRequired": false } });
    create(&rig.cluster::<CSIDriver>(), driver).await;
    rig.wait_deleted(&attachment).await;
    rig.cluster::<CSIDriver>().delete(DRIVER, &DeleteParams::default()).await.unwrap();
    rig.wait_attachment(&attachment).await;
}

#[tokio::test]
async fn an_attach_error_of_the_driver_is_reported_to_the_pod() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claim_source("v")).await;
    let attachment = rig.attachment_name("v", "n1");
    rig.wait_attachment(&attachment).await;
    let error = json!({ "status": { "attached": false, "attachError": { "message": "no room" } } });
    patch_status(&rig.cluster::<VolumeAttachment>(), &attachment, error).await;
    rig.wait_event("p", "AttachVolume.Attach failed for volume \"v\" : no room").await;
    rig.wait_reported("n1", &[]).await;
    rig.confirm(&attachment).await;
    rig.wait_event("p", "AttachVolume.Attach succeeded for volume \"v\" ").await;
}

#[tokio::test]
async fn migrated_in_tree_volumes_are_attached_by_their_csi_driver() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    let ebs = "ebs.csi.aws.com";
    rig.pod("own", "n1", json!({ "awsElasticBlockStore": { "volumeID": "aws://zone/vol-1" } })).await;
    let attachment = names::attachment("vol-1", ebs, "n1");
    let created = rig.wait_attachment(&attachment).await;
    assert_eq!(created.spec.attacher, ebs);
    let inline = created.spec.source.inline_volume_spec.unwrap();
    assert_eq!(inline.csi.unwrap().volume_handle, "vol-1");
    rig.confirm(&attachment).await;
    rig.wait_reported("n1", &["kubernetes.io/csi/ebs.csi.aws.com^vol-1"]).await;
    let driver = json!({ "metadata": { "name": ebs }, "spec": { "attachRequired": false } });
    create(&rig.cluster::<CSIDriver>(), driver).await;
    rig.wait_deleted(&attachment).await;
    rig.cluster::<CSIDriver>().delete(ebs, &DeleteParams::default()).await.unwrap();
    rig.wait_attachment(&attachment).await;
    rig.delete_pod("own").await;
    rig.wait_deleted(&attachment).await;
    rig.wait_reported("n1", &[]).await;
}

#[tokio::test]
async fn a_node_without_controller_managed_attach_is_ignored() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    rig.managed_node("own", false).await;
    rig.status("own", json!({ "volumesAttached": [{ "name": "x", "devicePath": "" }] })).await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    rig.pod("v", "own", claim_source("v")).await;
    rig.wait_reconciled("w", "n1").await;
    rig.wait_reported("own", &["x"]).await;
    let none = rig.cluster::<VolumeAttachment>().get_opt(&rig.attachment_name("v", "own")).await.unwrap();
    assert!(none.is_none());
}

#[tokio::test]
async fn the_time_limit_starts_again_when_a_pod_needed_the_volume_meanwhile() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    let attachment = rig.left_in_use("v", "n1").await;
    rig.wait_reconciled("w1", "n1").await;
    rig.advance_clock(300);
    rig.pod("back", "n1", claim_source("v")).await;
    rig.wait_reconciled("w2", "n1").await;
    rig.delete_pod("back").await;
    rig.wait_reconciled("w3", "n1").await;
    rig.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    rig.advance_clock(100);
    rig.wait_reconciled("w4", "n1").await;
    let still = rig.cluster::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(still.metadata.deletion_timestamp.is_none(), "the time limit is not over");
    rig.advance_clock(300);
    rig.wait_reconciled("w5", "n1").await;
    rig.wait_deleted(&attachment).await;
}

#[tokio::test]
async fn an_attachment_deleted_by_a_user_is_created_again() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    let unique_name = rig.volume("v", &["ReadWriteOnce"]).await;
    rig.pod("p", "n1", claim_source("v")).await;
    let attachment = rig.attachment_name("v", "n1");
    let first = rig.wait_attachment(&attachment).await;
    rig.confirm(&attachment).await;
    rig.wait_reported("n1", &[&unique_name]).await;
    rig.cluster::<VolumeAttachment>().delete(&attachment, &DeleteParams::default()).await.unwrap();
    rig.wait_reported("n1", &[]).await;
    let second = rig.wait_attachment(&attachment).await;
    assert_ne!(first.uid(), second.uid());
    rig.confirm(&attachment).await;
    rig.wait_reported("n1", &[&unique_name]).await;
}

#[tokio::test]
async fn a_pod_needs_its_volume_until_its_containers_have_terminated() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    let attachment = rig.attachment_name("v", "n1");
    rig.pod("done", "n1", claim_source("v")).await;
    rig.wait_attachment(&attachment).await;
    patch_status(&rig.namespaced::<Pod>(), "done", json!({ "status": { "phase": "Succeeded" } })).await;
    rig.wait_deleted(&attachment).await;

    let main = |state: &str| {
        let state = json!({ state: if state == "running" { json!({}) } else { json!({ "exitCode": 0 }) } });
        json!({ "status": { "containerStatuses": [{ "name": "main", "image": "busybox", "imageID": "", "ready": false,
                                                     "restartCount": 0, "state": state }] } })
    };
    rig.pod("leaving", "n1", claim_source("v")).await;
    rig.wait_attachment(&attachment).await;
    patch_status(&rig.namespaced::<Pod>(), "leaving", main("running")).await;
    rig.namespaced::<Pod>().delete("leaving", &DeleteParams::default()).await.unwrap();
    rig.wait_reconciled("w", "n1").await;
    let needed = rig.cluster::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(needed.metadata.deletion_timestamp.is_none(), "a container still writes");
    patch_status(&rig.namespaced::<Pod>(), "leaving", main("terminated")).await;
    rig.wait_deleted(&attachment).await;
}

#[tokio::test]
async fn a_claim_of_another_owner_is_not_attached_for_an_ephemeral_volume() {
    let rig = Rig::new().await;
    rig.start(DetachPolicy::default());
    rig.node("n1").await;
    rig.volume("p-data", &["ReadWriteOnce"]).await;
    let template =
        json!({ "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
    rig.pod("p", "n1", json!({ "ephemeral": { "volumeClaimTemplate": template } })).await;
    rig.wait_reconciled("w", "n1").await;
    let attachment = rig.attachment_name("p-data", "n1");
    assert!(rig.cluster::<VolumeAttachment>().get_opt(&attachment).await.unwrap().is_none());
    let pod = rig.namespaced::<Pod>().get("p").await.unwrap();
    let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": pod.uid(), "controller": true });
    let owned = Patch::Merge(json!({ "metadata": { "ownerReferences": [owner] } }));
    rig.namespaced::<PersistentVolumeClaim>().patch("p-data", &PatchParams::default(), &owned).await.unwrap();
    rig.wait_attachment(&attachment).await;
}
