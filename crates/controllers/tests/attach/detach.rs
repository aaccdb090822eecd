//! Volumes follow their pods; nodes are not ready, deleted or out of service.

use cleat_api::names;
use cleat_controllers::attach::DetachPolicy;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::fixture::{AttachFixture, DRIVER, claim_source};

#[tokio::test]
async fn a_node_that_is_not_ready_keeps_a_volume_in_use_until_the_time_limit() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.node("n2").await;
    let attachment = fixture.left_in_use("v", "n1").await;
    fixture.pod("next", "n2", claim_source("v")).await;
    fixture.wait_event("next", "Volume is already exclusively attached to one node").await;
    // The time counts from when the controller notices that no pod needs the volume.
    fixture.wait_reconciled("earlier", "n1").await;
    fixture.clock.advance(3600);
    fixture.wait_reconciled("w", "n1").await;
    fixture.wait_attachment(&attachment).await;

    // The hour in which the node was ready counts too.
    fixture.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    fixture.wait_deleted(&attachment).await;
    fixture.wait_reported("n1", &[]).await;
    fixture.wait_attachment(&fixture.attachment_name("v", "n2")).await;
}

#[tokio::test]
async fn without_a_time_limit_only_the_out_of_service_taint_forces_a_detach() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy { force_after: None });
    fixture.node("n1").await;
    let attachment = fixture.left_in_use("v", "n1").await;
    fixture.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    fixture.clock.advance(3600);
    fixture.wait_reconciled("w", "n1").await;
    fixture.wait_attachment(&attachment).await;

    let taint =
        json!({ "spec": { "taints": [{ "key": "node.kubernetes.io/out-of-service", "effect": "NoExecute" }] } });
    fixture.server.patch::<Node>("n1", taint).await;
    fixture.wait_deleted(&attachment).await;
}

#[tokio::test]
async fn a_deleted_node_keeps_volumes_in_use_and_loses_the_others() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy { force_after: None });
    fixture.node("n1").await;
    let used = fixture.left_in_use("used", "n1").await;
    let unique_name = fixture.volume("idle", &["ReadWriteOnce"]).await;
    fixture.pod("idle", "n1", claim_source("idle")).await;
    let idle = fixture.attachment_name("idle", "n1");
    fixture.wait_attachment(&idle).await;
    fixture.confirm(&idle).await;
    fixture.wait_reported("n1", &[&unique_name, &names::unique_volume_name(DRIVER, "used")]).await;
    fixture.server.delete::<Node>("n1").await;
    fixture.wait_deleted(&idle).await;
    fixture.wait_attachment(&used).await;

    // The Node exists again, and has no volume in use.
    fixture.delete_pod("idle").await;
    fixture.node("n1").await;
    fixture.wait_deleted(&used).await;
}

#[tokio::test]
async fn unneeded_attachments_from_before_the_start_are_deleted_and_those_of_other_clients_are_not() {
    let fixture = AttachFixture::new().await;
    fixture.node("n1").await;
    fixture.volume("dangling", &["ReadWriteOnce"]).await;
    fixture.volume("foreign", &["ReadWriteOnce"]).await;
    let create_attachment = async |volume: &str| {
        let name = fixture.attachment_name(volume, "n1");
        let spec = json!({ "attacher": DRIVER, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
        fixture.server.create::<VolumeAttachment>(json!({ "metadata": { "name": name }, "spec": spec })).await;
        name
    };
    let dangling = create_attachment("dangling").await;
    fixture.start(DetachPolicy::default());
    fixture.wait_deleted(&dangling).await;
    let foreign = create_attachment("foreign").await;
    fixture.wait_reconciled("w", "n1").await;
    fixture.wait_attachment(&foreign).await;
}

#[tokio::test]
async fn attach_required_is_honoured_and_a_driver_that_does_not_answer_is_reported() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.volume("v", &["ReadWriteOnce"]).await;
    fixture.pod("v", "n1", claim_source("v")).await;
    let attachment = fixture.attachment_name("v", "n1");
    fixture.wait_attachment(&attachment).await;
    fixture.clock.advance(121);
    // Any change of the volume causes a reconcile.
    let touch = json!({ "metadata": { "labels": { "changed": "again" } } });
    fixture.server.patch::<PersistentVolume>("v", touch).await;
    fixture
        .wait_event("v", &format!("timed out waiting for external-attacher of {DRIVER} CSI driver to attach volume v"))
        .await;

    let driver = json!({ "metadata": { "name": DRIVER }, "spec": { "attachRequired": false } });
    fixture.server.create::<CSIDriver>(driver).await;
    fixture.wait_deleted(&attachment).await;
    fixture.server.delete::<CSIDriver>(DRIVER).await;
    fixture.wait_attachment(&attachment).await;
}

#[tokio::test]
async fn an_attach_error_of_the_driver_is_reported_to_the_pod() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.volume("v", &["ReadWriteOnce"]).await;
    fixture.pod("p", "n1", claim_source("v")).await;
    let attachment = fixture.attachment_name("v", "n1");
    fixture.wait_attachment(&attachment).await;
    let error = json!({ "status": { "attached": false, "attachError": { "message": "no room" } } });
    fixture.server.patch_status::<VolumeAttachment>(&attachment, error).await;
    fixture.wait_event("p", "AttachVolume.Attach failed for volume \"v\" : no room").await;
    fixture.wait_reported("n1", &[]).await;
    fixture.confirm(&attachment).await;
    fixture.wait_event("p", "AttachVolume.Attach succeeded for volume \"v\" ").await;
}

#[tokio::test]
async fn migrated_in_tree_volumes_are_attached_by_their_csi_driver() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    let ebs = "ebs.csi.aws.com";
    fixture.pod("own", "n1", json!({ "awsElasticBlockStore": { "volumeID": "aws://zone/vol-1" } })).await;
    let attachment = names::attachment("vol-1", ebs, "n1");
    let created = fixture.wait_attachment(&attachment).await;
    assert_eq!(created.spec.attacher, ebs);
    let inline = created.spec.source.inline_volume_spec.unwrap();
    assert_eq!(inline.csi.unwrap().volume_handle, "vol-1");
    fixture.confirm(&attachment).await;
    fixture.wait_reported("n1", &["kubernetes.io/csi/ebs.csi.aws.com^vol-1"]).await;
    let driver = json!({ "metadata": { "name": ebs }, "spec": { "attachRequired": false } });
    fixture.server.create::<CSIDriver>(driver).await;
    fixture.wait_deleted(&attachment).await;
    fixture.server.delete::<CSIDriver>(ebs).await;
    fixture.wait_attachment(&attachment).await;
    fixture.delete_pod("own").await;
    fixture.wait_deleted(&attachment).await;
    fixture.wait_reported("n1", &[]).await;
}

#[tokio::test]
async fn a_node_without_controller_managed_attach_is_ignored() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.managed_node("own", false).await;
    fixture.status("own", json!({ "volumesAttached": [{ "name": "x", "devicePath": "" }] })).await;
    fixture.volume("v", &["ReadWriteOnce"]).await;
    fixture.pod("v", "own", claim_source("v")).await;
    fixture.wait_reconciled("w", "n1").await;
    fixture.wait_reported("own", &["x"]).await;
    let none = fixture.server.api::<VolumeAttachment>().get_opt(&fixture.attachment_name("v", "own")).await.unwrap();
    assert!(none.is_none());
}

#[tokio::test]
async fn the_time_limit_starts_again_when_a_pod_needed_the_volume_meanwhile() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    let attachment = fixture.left_in_use("v", "n1").await;
    fixture.wait_reconciled("w1", "n1").await;
    fixture.clock.advance(300);
    fixture.pod("back", "n1", claim_source("v")).await;
    fixture.wait_reconciled("w2", "n1").await;
    fixture.delete_pod("back").await;
    fixture.wait_reconciled("w3", "n1").await;
    fixture.status("n1", json!({ "conditions": [{ "type": "Ready", "status": "Unknown" }] })).await;
    fixture.clock.advance(100);
    fixture.wait_reconciled("w4", "n1").await;
    let still = fixture.server.api::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(still.metadata.deletion_timestamp.is_none(), "the time limit is not over");
    fixture.clock.advance(300);
    fixture.wait_reconciled("w5", "n1").await;
    fixture.wait_deleted(&attachment).await;
}

#[tokio::test]
async fn an_attachment_deleted_by_a_user_is_created_again() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    let unique_name = fixture.volume("v", &["ReadWriteOnce"]).await;
    fixture.pod("p", "n1", claim_source("v")).await;
    let attachment = fixture.attachment_name("v", "n1");
    let first = fixture.wait_attachment(&attachment).await;
    fixture.confirm(&attachment).await;
    fixture.wait_reported("n1", &[&unique_name]).await;
    fixture.server.delete::<VolumeAttachment>(&attachment).await;
    fixture.wait_reported("n1", &[]).await;
    let second = fixture.wait_attachment(&attachment).await;
    assert_ne!(first.uid(), second.uid());
    fixture.confirm(&attachment).await;
    fixture.wait_reported("n1", &[&unique_name]).await;
}

#[tokio::test]
async fn a_pod_needs_its_volume_until_its_containers_have_terminated() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.volume("v", &["ReadWriteOnce"]).await;
    let attachment = fixture.attachment_name("v", "n1");
    fixture.pod("done", "n1", claim_source("v")).await;
    fixture.wait_attachment(&attachment).await;
    fixture.server.patch_status::<Pod>("done", json!({ "status": { "phase": "Succeeded" } })).await;
    fixture.wait_deleted(&attachment).await;

    let main = |state: &str| {
        let state = json!({ state: if state == "running" { json!({}) } else { json!({ "exitCode": 0 }) } });
        json!({ "status": { "containerStatuses": [{ "name": "main", "image": "busybox", "imageID": "", "ready": false,
                                                     "restartCount": 0, "state": state }] } })
    };
    fixture.pod("leaving", "n1", claim_source("v")).await;
    fixture.wait_attachment(&attachment).await;
    fixture.server.patch_status::<Pod>("leaving", main("running")).await;
    fixture.server.delete::<Pod>("leaving").await;
    fixture.wait_reconciled("w", "n1").await;
    let needed = fixture.server.api::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(needed.metadata.deletion_timestamp.is_none(), "a container still writes");
    fixture.server.patch_status::<Pod>("leaving", main("terminated")).await;
    fixture.wait_deleted(&attachment).await;
}

#[tokio::test]
async fn a_claim_of_another_owner_is_not_attached_for_an_ephemeral_volume() {
    let fixture = AttachFixture::new().await;
    fixture.start(DetachPolicy::default());
    fixture.node("n1").await;
    fixture.volume("p-data", &["ReadWriteOnce"]).await;
    let template =
        json!({ "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
    fixture.pod("p", "n1", json!({ "ephemeral": { "volumeClaimTemplate": template } })).await;
    fixture.wait_reconciled("w", "n1").await;
    let attachment = fixture.attachment_name("p-data", "n1");
    assert!(fixture.server.api::<VolumeAttachment>().get_opt(&attachment).await.unwrap().is_none());
    let pod = fixture.server.api::<Pod>().get("p").await.unwrap();
    let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": pod.uid(), "controller": true });
    let owned = Patch::Merge(json!({ "metadata": { "ownerReferences": [owner] } }));
    fixture.server.api::<PersistentVolumeClaim>().patch("p-data", &PatchParams::default(), &owned).await.unwrap();
    fixture.wait_attachment(&attachment).await;
}
