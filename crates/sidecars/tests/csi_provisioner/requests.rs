//! The requests that the driver gets.

use std::collections::HashMap;

use cleat_api::well_known::annotation;
use cleat_csi::v1;
use cleat_csi::v1::volume_capability::AccessType;
use cleat_testing::{DRIVER_NAME, Method, ScriptedDriver, ScriptedReply, ZONE_KEY};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::ResourceExt as _;
use serde_json::json;

use super::fixture::{ProvisionerFixture, annotated, fast_retries};

pub(crate) fn string_map<const N: usize>(pairs: [(&str, &str); N]) -> HashMap<String, String> {
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

#[tokio::test]
async fn the_request_contains_parameters_secrets_and_attributes() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.start_provisioner(&driver, fast_retries()).await;
    fixture
        .create_class(
            "full",
            json!({
                "parameters": {
                    "csi.storage.k8s.io/fstype": "xfs",
                    "csi.storage.k8s.io/provisioner-secret-name": "${pvc.name}-key",
                    "csi.storage.k8s.io/provisioner-secret-namespace": "${pvc.namespace}",
                    "csi.storage.k8s.io/node-stage-secret-name": "${pv.name}",
                    "csi.storage.k8s.io/node-stage-secret-namespace": "stages",
                    "kind": "ssd",
                },
                "mountOptions": ["noatime"],
            }),
        )
        .await;
    fixture.create_secret("c-key", "user", "u").await;
    let gold = json!({ "metadata": { "name": "gold" }, "driverName": DRIVER_NAME, "parameters": { "iops": "9000" } });
    fixture.server.create::<VolumeAttributesClass>(gold).await;
    let claim = fixture.create_claim("c", "full", json!({ "volumeAttributesClassName": "gold" })).await;
    let volume = fixture.wait_until_bound("c").await;

    let request = driver.state().created[0].clone();
    let name = format!("pvc-{}", claim.uid().unwrap());
    assert_eq!(request.name, name);
    assert_eq!(request.parameters, string_map([("kind", "ssd")]));
    assert_eq!(request.secrets, string_map([("user", "u")]));
    assert_eq!(request.mutable_parameters, string_map([("iops", "9000")]));
    assert_eq!(request.capacity_range.unwrap().required_bytes, 1 << 30);
    assert_eq!(request.accessibility_requirements, None);
    let Some(AccessType::Mount(mount)) = &request.volume_capabilities[0].access_type else {
        panic!("not to be mounted")
    };
    assert_eq!((mount.fs_type.as_str(), mount.mount_flags.as_slice()), ("xfs", &["noatime".to_owned()][..]));

    let spec = volume.spec.as_ref().unwrap();
    let csi = spec.csi.as_ref().unwrap();
    assert_eq!(csi.fs_type.as_deref(), Some("xfs"));
    assert_eq!(csi.volume_attributes.as_ref().unwrap()["made"], "here");
    let staged = csi.node_stage_secret_ref.as_ref().unwrap();
    assert_eq!((staged.name.as_deref(), staged.namespace.as_deref()), (Some(name.as_str()), Some("stages")));
    assert_eq!(spec.mount_options.as_deref(), Some(&["noatime".to_owned()][..]));
    assert_eq!(spec.volume_attributes_class_name.as_deref(), Some("gold"));
    assert_eq!(annotated(&volume, annotation::DELETION_SECRET_NAME), Some("c-key"));
    let status = fixture.claims().get("c").await.unwrap().status.unwrap();
    assert_eq!(status.current_volume_attributes_class_name.as_deref(), Some("gold"));

    fixture.delete_claim("c").await;
    let deleted = driver.state().deleted.clone();
    assert_eq!(
        deleted,
        [v1::DeleteVolumeRequest { volume_id: format!("vol-{name}"), secrets: string_map([("user", "u")]) }]
    );
    assert!(driver.state().volumes.is_empty());
}

#[tokio::test]
async fn missing_objects_are_reported_and_waited_for() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.start_provisioner(&driver, fast_retries()).await;
    let keys = json!({
        "csi.storage.k8s.io/secret-name": "key", "csi.storage.k8s.io/secret-namespace": "default",
    });
    fixture.create_class("keyed", json!({ "parameters": keys })).await;
    fixture.create_claim("c", "keyed", json!({ "volumeAttributesClassName": "gold" })).await;
    fixture.wait_for_event("c", "ProvisioningFailed", "error getting secret default/key").await;
    fixture.create_secret("key", "user", "u").await;
    fixture.wait_for_event("c", "ProvisioningFailed", "volumeattributesclass.storage.k8s.io \"gold\" not found").await;
    assert!(driver.state().created.is_empty(), "CreateVolume was not called");
    let finalizers = fixture.claims().get("c").await.unwrap().finalizers().to_vec();
    let gold = json!({ "metadata": { "name": "gold" }, "driverName": DRIVER_NAME, "parameters": { "iops": "1" } });
    fixture.server.create::<VolumeAttributesClass>(gold).await;
    fixture.wait_until_bound("c").await;
    assert!(!finalizers.is_empty(), "the claim is protected");

    // The PersistentVolume names the secret: if that is missing, the volume is deleted without it.
    fixture.server.delete::<Secret>("key").await;
    fixture.delete_claim("c").await;
    assert!(driver.state().deleted[0].secrets.is_empty());
}

#[tokio::test]
async fn a_volume_attributes_class_of_another_driver_is_refused() {
    let (fixture, driver) = (ProvisionerFixture::new().await, ScriptedDriver::new(DRIVER_NAME));
    fixture.start_provisioner(&driver, fast_retries()).await;
    fixture.create_class("plain", json!({})).await;
    let foreign = json!({ "metadata": { "name": "gold" }, "driverName": "other.test", "parameters": { "iops": "1" } });
    fixture.server.create::<VolumeAttributesClass>(foreign).await;
    fixture.create_claim("c", "plain", json!({ "volumeAttributesClassName": "gold" })).await;
    fixture.wait_for_event("c", "ProvisioningFailed", "is of driver \"other.test\"").await;
    fixture.delete_claim("c").await;
    assert!(driver.state().created.is_empty());
}

/// The zones of the requisite and of the preferred topologies, in order.
fn zones(request: &v1::CreateVolumeRequest) -> (Vec<String>, Vec<String>) {
    let requirement = request.accessibility_requirements.clone().unwrap();
    let names = |all: Vec<v1::Topology>| all.into_iter().map(|t| t.segments[ZONE_KEY].clone()).collect();
    (names(requirement.requisite), names(requirement.preferred))
}

pub(crate) fn zone_of(volume: &PersistentVolume) -> String {
    let affinity = volume.spec.as_ref().unwrap().node_affinity.as_ref().unwrap();
    let rule = &affinity.required.as_ref().unwrap().node_selector_terms[0].match_expressions.as_ref().unwrap()[0];
    assert_eq!((rule.key.as_str(), rule.operator.as_str()), (ZONE_KEY, "In"));
    rule.values.as_ref().unwrap().join("|")
}

#[tokio::test]
async fn claims_without_a_selected_node_are_spread_over_zones() {
    let fixture = ProvisionerFixture::new().await;
    let driver = ScriptedDriver::new(DRIVER_NAME).with_topology();
    for (node, zone) in [("n2", "b"), ("n1", "a"), ("n3", "a")] {
        fixture.create_node(node, zone).await;
    }
    fixture.create_class("plain", json!({})).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    let mut first = Vec::new();
    for name in ["data-web-0", "data-web-1"] {
        fixture.create_claim(name, "plain", json!({})).await;
        let volume = fixture.wait_until_bound(name).await;
        let (requisite, preferred) = zones(driver.state().created.last().unwrap());
        assert_eq!(requisite, ["a", "b"], "each zone once, in order");
        assert_eq!(zone_of(&volume), preferred[0]);
        first.push(preferred[0].clone());
    }
    first.sort();
    assert_eq!(first, ["a", "b"], "consecutive claims get different zones");
    let in_zone = json!([{ "matchLabelExpressions": [{ "key": ZONE_KEY, "values": ["b"] }] }]);
    fixture.create_class("b-only", json!({ "allowedTopologies": in_zone })).await;
    fixture.create_claim("c", "b-only", json!({})).await;
    assert_eq!(zone_of(&fixture.wait_until_bound("c").await), "b");
}

#[tokio::test]
async fn a_waiting_claim_is_provisioned_on_the_selected_node_and_rescheduled_if_it_is_full() {
    let fixture = ProvisionerFixture::new().await;
    let driver = ScriptedDriver::new(DRIVER_NAME).with_topology();
    fixture.create_node("n1", "a").await;
    fixture.create_node("n2", "b").await;
    fixture.create_class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    fixture.start_provisioner(&driver, fast_retries()).await;
    let full = tonic::Status::resource_exhausted("no room in zone a");
    driver.script(Method::CreateVolume, [ScriptedReply::Fail(full)]);
    fixture.create_claim("c", "wait", json!({})).await;
    fixture.wait_for_event("c", "WaitForFirstConsumer", "waiting for first consumer").await;
    assert!(driver.state().created.is_empty());
    fixture.select_node("c", "n1").await;
    fixture.wait_for_event("c", "ProvisioningFailed", "no room in zone a").await;
    let has_no_selected_node = |c: &PersistentVolumeClaim| annotated(c, annotation::SELECTED_NODE).is_none();
    let rescheduled = fixture.server.wait_until("c", "has no selected node", has_no_selected_node).await;
    let has_finalizer = rescheduled.finalizers().iter().any(|f| f == "cleat.dev/provisioning");
    assert!(!has_finalizer, "no call is pending");
    assert_eq!(
        annotated(&rescheduled, annotation::STORAGE_PROVISIONER),
        Some(DRIVER_NAME),
        "the claim stays assigned to the driver"
    );
    assert_eq!(driver.state().created.len(), 1, "the node is not tried again");
    fixture.select_node("c", "n2").await;
    assert_eq!(zone_of(&fixture.wait_until_bound("c").await), "b");
    let created = driver.state().created.clone();
    assert_eq!(zones(&created[0]).1, ["a", "b"], "the selected node's zone first");
    assert_eq!(zones(&created[1]).1, ["b", "a"]);
    fixture.delete_claim("c").await;

    // The driver is not registered on the selected node: it is removed, too.
    fixture.create_claim("d", "wait", json!({})).await;
    fixture.select_node("d", "n9").await;
    fixture.wait_for_event("d", "ProvisioningFailed", "error getting CSINode for selected node \"n9\"").await;
    fixture.server.wait_until("d", "has no selected node", has_no_selected_node).await;
}
