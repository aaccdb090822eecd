//! Volumes that are filled from something, and classes of plugins that moved.

use cleat_api::well_known::annotation;
use cleat_csi::v1::volume_content_source::Type as Origin;
use cleat_sidecars::provision::snapshots::{VolumeSnapshot, VolumeSnapshotContent};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tonic::Status;

use super::driver::{Answer, Scripted};
use super::requests::pairs;
use super::rig::{DRIVER, Rig, annotated, create, hasty, until};

const CLONING: &str = "provisioner.storage.kubernetes.io/cloning-protection";
const RESTORING: &str = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection";

fn origin(driver: &Scripted, call: usize) -> Option<Origin> {
    driver.script.lock().created[call].volume_content_source.clone().and_then(|source| source.r#type)
}

#[tokio::test]
async fn the_source_of_a_clone_stays_until_it_is_copied() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.class("plain", json!({})).await;
    rig.provision(&driver, hasty()).await;
    let source = json!({ "kind": "PersistentVolumeClaim", "name": "src" });
    rig.claim("copy", "plain", json!({ "dataSource": source })).await;
    rig.event("copy", "ProvisioningFailed", "claim in dataSource not found").await;
    rig.claim("src", "plain", json!({})).await;
    // It is bound, and then copied: a first copy that says nothing of its source is given back.
    let handle = rig.bound("src").await.spec.unwrap().csi.unwrap().volume_handle;
    driver.until("the copy is asked for", |s| (s.created.len() > 1).then_some(())).await;
    rig.bound("copy").await;
    let Some(Origin::Volume(from)) = origin(&driver, 1) else { panic!("not a copy of a volume") };
    assert_eq!(from.volume_id, handle);

    driver.script.lock().creations.extend([Answer::Forgetful, Answer::Fail(Status::aborted("copying")), Answer::Hang]);
    rig.claim("second", "plain", json!({ "dataSource": source })).await;
    driver.until("it is copied", |s| (s.created.len() > 4).then_some(())).await;
    rig.claims().delete("src", &DeleteParams::default()).await.unwrap();
    let going = rig.claims().get("src").await.unwrap();
    assert!(going.finalizers().iter().any(|f| f == CLONING), "{:?}", going.finalizers());
    rig.event("second", "ProvisioningFailed", "volume content source missing").await;
    rig.bound("second").await;
    rig.gone("src").await;
}

async fn define(rig: &Rig, kind: &str, plural: &str, scope: &str) {
    let schema = json!({ "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } });
    let definition = json!({
        "metadata": {
            "name": format!("{plural}.snapshot.storage.k8s.io"),
            "annotations": { "api-approved.kubernetes.io": "https://github.com/kubernetes-csi/external-snapshotter/pull/814" },
        },
        "spec": {
            "group": "snapshot.storage.k8s.io", "scope": scope,
            "names": { "kind": kind, "plural": plural, "singular": kind.to_lowercase(), "listKind": format!("{kind}List") },
            "versions": [{
                "name": "v1", "served": true, "storage": true, "schema": schema, "subresources": { "status": {} },
            }],
        },
    });
    let definitions = rig.all::<CustomResourceDefinition>();
    let made = create(&definitions, definition).await.name_any();
    until("the kind is served", || async {
        let conditions = definitions.get(&made).await.unwrap().status?.conditions?;
        conditions.iter().any(|c| c.type_ == "Established" && c.status == "True").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_snapshot_is_restored_when_it_is_ready_and_stays_until_then() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    define(&rig, "VolumeSnapshot", "volumesnapshots", "Namespaced").await;
    define(&rig, "VolumeSnapshotContent", "volumesnapshotcontents", "Cluster").await;
    let snapshots: Api<VolumeSnapshot> = Api::default_namespaced(rig.client.clone());
    rig.class("plain", json!({})).await;
    rig.provision(&driver, hasty()).await;
    let source = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "snap" });
    rig.claim("c", "plain", json!({ "dataSource": source })).await;
    rig.event("c", "ProvisioningFailed", "snapshot snap not found").await;
    let object = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": { "name": "snap" },
    });
    let made = create(&untyped(&rig, "VolumeSnapshot", true), object).await;
    rig.event("c", "ProvisioningFailed", "snapshot snap is not bound").await;
    let back = json!({ "kind": "VolumeSnapshot", "namespace": "default", "name": "snap", "uid": made.uid() });
    let content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": { "name": "content" },
        "spec": { "driver": DRIVER, "volumeSnapshotRef": back, "sourceVolumeMode": "Filesystem" },
    });
    create(&untyped(&rig, "VolumeSnapshotContent", false), content).await;
    let status = |ready: bool| {
        let status = json!({ "boundVolumeSnapshotContentName": "content", "readyToUse": ready, "restoreSize": "1Gi" });
        Patch::Merge(json!({ "status": status }))
    };
    let params = PatchParams::default();
    snapshots.patch_status("snap", &params, &status(false)).await.unwrap();
    rig.event("c", "ProvisioningFailed", "snapshot snap is not Ready").await;
    assert!(driver.script.lock().created.is_empty());
    driver.script.lock().creations.push_back(Answer::Hang);
    let contents: Api<VolumeSnapshotContent> = rig.all();
    let handle = Patch::Merge(json!({ "status": { "snapshotHandle": "snap-1" } }));
    contents.patch_status("content", &params, &handle).await.unwrap();
    snapshots.patch_status("snap", &params, &status(true)).await.unwrap();
    driver.until("it is restored", |s| (!s.created.is_empty()).then_some(())).await;
    snapshots.delete("snap", &DeleteParams::default()).await.unwrap();
    let going = snapshots.get("snap").await.unwrap();
    assert!(going.finalizers().iter().any(|f| f == RESTORING), "{:?}", going.finalizers());
    rig.bound("c").await;
    let Some(Origin::Snapshot(from)) = origin(&driver, 0) else { panic!("not a snapshot's copy") };
    assert_eq!(from.snapshot_id, "snap-1");
    until("the snapshot is gone", || async { snapshots.get_opt("snap").await.unwrap().is_none().then_some(()) }).await;
}

fn untyped(rig: &Rig, kind: &str, namespaced: bool) -> Api<kube::core::DynamicObject> {
    let kind = kube::core::GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind);
    let resource = kube::core::ApiResource::from_gvk(&kind);
    match namespaced {
        true => Api::default_namespaced_with(rig.client.clone(), &resource),
        false => Api::all_with(rig.client.clone(), &resource),
    }
}

#[tokio::test]
async fn other_sources_are_left_to_others_and_other_namespaces_to_nobody() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.class("plain", json!({})).await;
    rig.provision(&driver, hasty()).await;
    let other = json!({ "apiGroup": "example.com", "kind": "Backup", "name": "b" });
    rig.claim("filled", "plain", json!({ "dataSourceRef": other })).await;
    rig.event("filled", "Provisioning", "Assuming an external populator will provision the volume").await;
    // The server keeps no word of a source in another namespace, as any does that has not opted in to them.
    let far = json!({ "kind": "PersistentVolumeClaim", "name": "src", "namespace": "elsewhere" });
    let claim: PersistentVolumeClaim = rig.claim("far", "plain", json!({ "dataSourceRef": far })).await;
    let spec = claim.spec.unwrap();
    assert_eq!((spec.data_source, spec.data_source_ref), (None, None));
    rig.bound("far").await;
    assert_eq!(origin(&driver, 0), None);
    assert_eq!(driver.script.lock().created.len(), 1, "the other is not ours to make");
}

#[tokio::test]
async fn a_class_of_an_old_plugin_is_served_and_its_volumes_look_as_before() {
    let (rig, driver) = (Rig::new().await, Scripted::new("ebs.csi.aws.com"));
    rig.provision(&driver, hasty()).await;
    rig.class(
        "gp2",
        json!({ "provisioner": "kubernetes.io/aws-ebs", "parameters": { "fsType": "xfs", "type": "gp2" } }),
    )
    .await;
    rig.claim("c", "gp2", json!({})).await;
    let volume = rig.bound("c").await;
    let request = driver.script.lock().created[0].clone();
    assert_eq!(request.parameters, pairs([("type", "gp2")]));
    let spec = volume.spec.as_ref().unwrap();
    let ebs = spec.aws_elastic_block_store.as_ref().unwrap();
    assert_eq!((ebs.volume_id.clone(), ebs.fs_type.as_deref()), (format!("vol-{}", request.name), Some("xfs")));
    assert!(spec.csi.is_none());
    assert_eq!(annotated(&volume, annotation::PROVISIONED_BY), Some("kubernetes.io/aws-ebs"));
    until("the volume says who took over", || async {
        let now = rig.all::<PersistentVolume>().get(&volume.name_any()).await.unwrap();
        (annotated(&now, annotation::MIGRATED_TO) == Some("ebs.csi.aws.com")).then_some(())
    })
    .await;
    rig.delete("c").await;
    assert_eq!(driver.script.lock().deleted[0].volume_id, format!("vol-{}", request.name));
    assert!(driver.script.lock().volumes.is_empty());
}
