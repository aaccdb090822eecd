//! Data sources, and classes of in-tree plugins that were migrated.

use cleat_api::well_known::annotation;
use cleat_csi::v1::volume_content_source::Type as ContentSource;
use cleat_sidecars::csi_provisioner::snapshots::{VolumeSnapshot, VolumeSnapshotContent};
use cleat_testing::wait::within_timeout;
use cleat_testing::{DRIVER_NAME, Method, ScriptedDriver, ScriptedReply};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use tonic::Status;

use super::fixture::{ProvisionerFixture, annotated, fast_retries};
use super::requests::string_map;

const CLONING: &str = "provisioner.storage.kubernetes.io/cloning-protection";
const RESTORING: &str = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection";

fn content_source(driver: &ScriptedDriver, call: usize) -> Option<ContentSource> {
    driver.state().created[call].volume_content_source.clone().and_then(|source| source.r#type)
}

#[tokio::test]
async fn the_source_of_a_clone_cannot_be_deleted_until_it_is_cloned() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.create_class("plain", json!({})).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    let source = json!({ "kind": "PersistentVolumeClaim", "name": "src" });
    fixture.create_claim("copy", "plain", json!({ "dataSource": source })).await;
    fixture.wait_for_event("copy", "ProvisioningFailed", "claim in dataSource not found").await;
    fixture.create_claim("src", "plain", json!({})).await;
    let handle = fixture.wait_until_bound("src").await.spec.unwrap().csi.unwrap().volume_handle;
    driver.wait_until("the clone is requested", |s| s.created.len() > 1).await;
    fixture.wait_until_bound("copy").await;
    let Some(ContentSource::Volume(from)) = content_source(&driver, 1) else { panic!("not a clone") };
    assert_eq!(from.volume_id, handle);

    // A clone without a content source in the reply is deleted and created again.
    driver.script(
        Method::CreateVolume,
        [ScriptedReply::WithoutSource, ScriptedReply::Fail(Status::aborted("copying")), ScriptedReply::Hang],
    );
    fixture.create_claim("second", "plain", json!({ "dataSource": source })).await;
    driver.wait_until("it is cloned", |s| s.created.len() > 4).await;
    fixture.server.delete::<PersistentVolumeClaim>("src").await;
    let deleting = fixture.claims().get("src").await.unwrap();
    assert!(deleting.finalizers().iter().any(|f| f == CLONING), "{:?}", deleting.finalizers());
    fixture.wait_for_event("second", "ProvisioningFailed", "volume content source missing").await;
    fixture.wait_until_bound("second").await;
    fixture.wait_until_gone("src").await;
}

async fn define(fixture: &ProvisionerFixture, kind: &str, plural: &str, scope: &str) {
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
    let created = fixture.server.create::<CustomResourceDefinition>(definition).await.name_any();
    let is_served = await_condition(fixture.server.api(), &created, conditions::is_crd_established());
    within_timeout("the kind is served", is_served).await.unwrap();
}

#[tokio::test]
async fn a_snapshot_is_restored_when_it_is_ready_and_cannot_be_deleted_until_then() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    define(&fixture, "VolumeSnapshot", "volumesnapshots", "Namespaced").await;
    define(&fixture, "VolumeSnapshotContent", "volumesnapshotcontents", "Cluster").await;
    let snapshots: Api<VolumeSnapshot> = fixture.server.api();
    fixture.create_class("plain", json!({})).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    let source = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "snap" });
    fixture.create_claim("c", "plain", json!({ "dataSource": source })).await;
    fixture.wait_for_event("c", "ProvisioningFailed", "snapshot snap not found").await;
    let object = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": { "name": "snap" },
    });
    let created = create_untyped(&untyped(&fixture, "VolumeSnapshot", true), object).await;
    fixture.wait_for_event("c", "ProvisioningFailed", "snapshot snap is not bound").await;
    let reference = json!({ "kind": "VolumeSnapshot", "namespace": "default", "name": "snap", "uid": created.uid() });
    let content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": { "name": "content" },
        "spec": { "driver": DRIVER_NAME, "volumeSnapshotRef": reference, "sourceVolumeMode": "Filesystem" },
    });
    create_untyped(&untyped(&fixture, "VolumeSnapshotContent", false), content).await;
    let status = |ready: bool| {
        let status = json!({ "boundVolumeSnapshotContentName": "content", "readyToUse": ready, "restoreSize": "1Gi" });
        Patch::Merge(json!({ "status": status }))
    };
    let params = PatchParams::default();
    snapshots.patch_status("snap", &params, &status(false)).await.unwrap();
    fixture.wait_for_event("c", "ProvisioningFailed", "snapshot snap is not Ready").await;
    assert!(driver.state().created.is_empty());
    driver.script(Method::CreateVolume, [ScriptedReply::Hang]);
    let contents: Api<VolumeSnapshotContent> = fixture.server.api();
    let handle = Patch::Merge(json!({ "status": { "snapshotHandle": "snap-1" } }));
    contents.patch_status("content", &params, &handle).await.unwrap();
    snapshots.patch_status("snap", &params, &status(true)).await.unwrap();
    driver.wait_until("it is restored", |s| !s.created.is_empty()).await;
    fixture.server.delete::<VolumeSnapshot>("snap").await;
    let deleting = snapshots.get("snap").await.unwrap();
    assert!(deleting.finalizers().iter().any(|f| f == RESTORING), "{:?}", deleting.finalizers());
    fixture.wait_until_bound("c").await;
    let Some(ContentSource::Snapshot(from)) = content_source(&driver, 0) else { panic!("not a restore") };
    assert_eq!(from.snapshot_id, "snap-1");
    fixture.server.wait_until_gone::<VolumeSnapshot>("snap").await;
}

async fn create_untyped(api: &Api<DynamicObject>, object: Value) -> DynamicObject {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

fn untyped(fixture: &ProvisionerFixture, kind: &str, namespaced: bool) -> Api<DynamicObject> {
    let kind = kube::core::GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind);
    let resource = kube::core::ApiResource::from_gvk(&kind);
    match namespaced {
        true => Api::default_namespaced_with(fixture.server.client(), &resource),
        false => Api::all_with(fixture.server.client(), &resource),
    }
}

#[tokio::test]
async fn other_kinds_are_left_to_populators_and_other_namespaces_are_dropped() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.create_class("plain", json!({})).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    let other = json!({ "apiGroup": "example.com", "kind": "Backup", "name": "b" });
    fixture.create_claim("filled", "plain", json!({ "dataSourceRef": other })).await;
    fixture.wait_for_event("filled", "Provisioning", "Assuming an external populator will provision the volume").await;
    // The API server drops a source in another namespace, as Kubernetes does without the feature gate.
    let far = json!({ "kind": "PersistentVolumeClaim", "name": "src", "namespace": "elsewhere" });
    let claim: PersistentVolumeClaim = fixture.create_claim("far", "plain", json!({ "dataSourceRef": far })).await;
    let spec = claim.spec.unwrap();
    assert_eq!((spec.data_source, spec.data_source_ref), (None, None));
    fixture.wait_until_bound("far").await;
    assert_eq!(content_source(&driver, 0), None);
    assert_eq!(driver.state().created.len(), 1, "the populator's volume is not created here");
}

#[tokio::test]
async fn a_class_of_an_in_tree_plugin_is_served_with_volumes_in_its_form() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new("ebs.csi.aws.com"));
    fixture.start_provisioner(&driver, fast_retries()).await;
    fixture
        .create_class(
            "gp2",
            json!({ "provisioner": "kubernetes.io/aws-ebs", "parameters": { "fsType": "xfs", "type": "gp2" } }),
        )
        .await;
    fixture.create_claim("c", "gp2", json!({})).await;
    let volume = fixture.wait_until_bound("c").await;
    let request = driver.state().created[0].clone();
    assert_eq!(request.parameters, string_map([("type", "gp2")]));
    let spec = volume.spec.as_ref().unwrap();
    let ebs = spec.aws_elastic_block_store.as_ref().unwrap();
    assert_eq!((ebs.volume_id.clone(), ebs.fs_type.as_deref()), (format!("vol-{}", request.name), Some("xfs")));
    assert!(spec.csi.is_none());
    assert_eq!(annotated(&volume, annotation::PROVISIONED_BY), Some("kubernetes.io/aws-ebs"));
    let names_driver = |v: &PersistentVolume| annotated(v, annotation::MIGRATED_TO) == Some("ebs.csi.aws.com");
    fixture.server.wait_until(&volume.name_any(), "names the driver it is migrated to", names_driver).await;
    fixture.delete_claim("c").await;
    assert_eq!(driver.state().deleted[0].volume_id, format!("vol-{}", request.name));
    assert!(driver.state().volumes.is_empty());
}
