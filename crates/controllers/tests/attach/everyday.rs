//! Volumes that come and go with their pods, and nodes that are silent, gone or out of service.

use cleat_api::names;
use cleat_controllers::attach::Policy;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::rig::{DRIVER, Rig, claimed, create, patch_status};

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
    rig.told("n1", &[&unique, &names::unique_volume_name(DRIVER, "used")]).await;
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
    let driver = json!({ "metadata": { "name": ebs }, "spec": { "attachRequired": false } });
    create(&rig.all::<CSIDriver>(), driver).await;
    rig.gone(&attachment).await;
    rig.all::<CSIDriver>().delete(ebs, &DeleteParams::default()).await.unwrap();
    rig.made(&attachment).await;
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

#[tokio::test]
async fn a_pod_needs_its_volume_until_its_containers_have_ended() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.volume("v", &["ReadWriteOnce"]).await;
    let attachment = rig.attachment("v", "n1");
    rig.pod("done", "n1", claimed("v")).await;
    rig.made(&attachment).await;
    patch_status(&rig.here::<Pod>(), "done", json!({ "status": { "phase": "Succeeded" } })).await;
    rig.gone(&attachment).await;

    let main = |state: &str| {
        let state = json!({ state: if state == "running" { json!({}) } else { json!({ "exitCode": 0 }) } });
        json!({ "status": { "containerStatuses": [{ "name": "main", "image": "busybox", "imageID": "", "ready": false,
                                                     "restartCount": 0, "state": state }] } })
    };
    rig.pod("leaving", "n1", claimed("v")).await;
    rig.made(&attachment).await;
    patch_status(&rig.here::<Pod>(), "leaving", main("running")).await;
    rig.here::<Pod>().delete("leaving", &DeleteParams::default()).await.unwrap();
    rig.looked_around("w", "n1").await;
    let needed = rig.all::<VolumeAttachment>().get(&attachment).await.unwrap();
    assert!(needed.metadata.deletion_timestamp.is_none(), "a container still writes");
    patch_status(&rig.here::<Pod>(), "leaving", main("terminated")).await;
    rig.gone(&attachment).await;
}

#[tokio::test]
async fn a_claim_that_was_not_made_for_the_pod_is_not_attached_for_it() {
    let rig = Rig::new().await;
    rig.start(Policy::default());
    rig.node("n1").await;
    rig.volume("p-data", &["ReadWriteOnce"]).await;
    let template =
        json!({ "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
    rig.pod("p", "n1", json!({ "ephemeral": { "volumeClaimTemplate": template } })).await;
    rig.looked_around("w", "n1").await;
    let attachment = rig.attachment("p-data", "n1");
    assert!(rig.all::<VolumeAttachment>().get_opt(&attachment).await.unwrap().is_none());
    let pod = rig.here::<Pod>().get("p").await.unwrap();
    let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": pod.uid(), "controller": true });
    let owned = Patch::Merge(json!({ "metadata": { "ownerReferences": [owner] } }));
    rig.here::<PersistentVolumeClaim>().patch("p-data", &PatchParams::default(), &owned).await.unwrap();
    rig.made(&attachment).await;
}
