//! The requests that the driver gets.

use std::collections::HashMap;

use cleat_api::well_known::annotation;
use cleat_csi::v1;
use cleat_csi::v1::volume_capability::AccessType;
use k8s_openapi::api::core::v1::{PersistentVolume, Secret};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::driver::{ScriptedDriver, ScriptedReply, ZONE};
use super::rig::{DRIVER, Rig, annotated, create, fast_retries, until};

pub(crate) fn string_map<const N: usize>(pairs: [(&str, &str); N]) -> HashMap<String, String> {
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

#[tokio::test]
async fn the_request_contains_parameters_secrets_and_attributes() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.start_provisioner(&driver, fast_retries()).await;
    rig.create_class(
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
    rig.create_secret("c-key", "user", "u").await;
    let gold = json!({ "metadata": { "name": "gold" }, "driverName": DRIVER, "parameters": { "iops": "9000" } });
    create(&rig.all::<VolumeAttributesClass>(), gold).await;
    let claim = rig.create_claim("c", "full", json!({ "volumeAttributesClassName": "gold" })).await;
    let volume = rig.wait_until_bound("c").await;

    let request = driver.script.lock().created[0].clone();
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
    let status = rig.claims().get("c").await.unwrap().status.unwrap();
    assert_eq!(status.current_volume_attributes_class_name.as_deref(), Some("gold"));

    rig.delete_claim("c").await;
    let deleted = driver.script.lock().deleted.clone();
    assert_eq!(
        deleted,
        [v1::DeleteVolumeRequest { volume_id: format!("vol-{name}"), secrets: string_map([("user", "u")]) }]
    );
    assert!(driver.script.lock().volumes.is_empty());
}

#[tokio::test]
async fn missing_objects_are_reported_and_waited_for() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.start_provisioner(&driver, fast_retries()).await;
    let keys = json!({
        "csi.storage.k8s.io/secret-name": "key", "csi.storage.k8s.io/secret-namespace": "default",
    });
    rig.create_class("keyed", json!({ "parameters": keys })).await;
    rig.create_claim("c", "keyed", json!({ "volumeAttributesClassName": "gold" })).await;
    rig.wait_for_event("c", "ProvisioningFailed", "error getting secret default/key").await;
    rig.create_secret("key", "user", "u").await;
    rig.wait_for_event("c", "ProvisioningFailed", "volumeattributesclass.storage.k8s.io \"gold\" not found").await;
    assert!(driver.script.lock().created.is_empty(), "CreateVolume was not called");
    let finalizers = rig.claims().get("c").await.unwrap().finalizers().to_vec();
    let gold = json!({ "metadata": { "name": "gold" }, "driverName": DRIVER, "parameters": { "iops": "1" } });
    create(&rig.all::<VolumeAttributesClass>(), gold).await;
    rig.wait_until_bound("c").await;
    assert!(!finalizers.is_empty(), "the claim is protected");

    // The PersistentVolume names the secret: if that is missing, the volume is deleted without it.
    let secrets: Api<Secret> = Api::default_namespaced(rig.client.clone());
    secrets.delete("key", &DeleteParams::default()).await.unwrap();
    rig.delete_claim("c").await;
    assert!(driver.script.lock().deleted[0].secrets.is_empty());
}

#[tokio::test]
async fn a_volume_attributes_class_of_another_driver_is_refused() {
    let (rig, driver) = (Rig::new().await, ScriptedDriver::new(DRIVER));
    rig.start_provisioner(&driver, fast_retries()).await;
    rig.create_class("plain", json!({})).await;
    let foreign = json!({ "metadata": { "name": "gold" }, "driverName": "other.test", "parameters": { "iops": "1" } });
    create(&rig.all::<VolumeAttributesClass>(), foreign).await;
    rig.create_claim("c", "plain", json!({ "volumeAttributesClassName": "gold" })).await;
    rig.wait_for_event("c", "ProvisioningFailed", "is of driver \"other.test\"").await;
    rig.delete_claim("c").await;
    assert!(driver.script.lock().created.is_empty());
}

/// The zones of the requisite and of the preferred topologies, in order.
fn zones(request: &v1::CreateVolumeRequest) -> (Vec<String>, Vec<String>) {
    let requirement = request.accessibility_requirements.clone().unwrap();
    let names = |all: Vec<v1::Topology>| all.into_iter().map(|t| t.segments[ZONE].clone()).collect();
    (names(requirement.requisite), names(requirement.preferred))
}

pub(crate) fn zone_of(volume: &PersistentVolume) -> String {
    let affinity = volume.spec.as_ref().unwrap().node_affinity.as_ref().unwrap();
    let rule = &affinity.required.as_ref().unwrap().node_selector_terms[0].match_expressions.as_ref().unwrap()[0];
    assert_eq!((rule.key.as_str(), rule.operator.as_str()), (ZONE, "In"));
    rule.values.as_ref().unwrap().join("|")
}

#[tokio::test]
async fn claims_without_a_selected_node_are_spread_over_zones() {
    let rig = Rig::new().await;
    let driver = ScriptedDriver { supports_topology: true, ..ScriptedDriver::new(DRIVER) };
    for (node, zone) in [("n2", "b"), ("n1", "a"), ("n3", "a")] {
        rig.create_node(node, zone).await;
    }
    rig.create_class("plain", json!({})).await;
    rig.start_provisioner(&driver, fast_retries()).await;
    let mut first = Vec::new();
    for name in ["data-web-0", "data-web-1"] {
        rig.create_claim(name, "plain", json!({})).await;
        let volume = rig.wait_until_bound(name).await;
        let (requisite, preferred) = zones(driver.script.lock().created.last().unwrap());
        assert_eq!(requisite, ["a", "b"], "each zone once, in order");
        assert_eq!(zone_of(&volume), preferred[0]);
        first.push(preferred[0].clone());
    }
    first.sort();
    assert_eq!(first, ["a", "b"], "consecutive claims get different zones");
    let in_zone = json!([{ "matchLabelExpressions": [{ "key": ZONE, "values": ["b"] }] }]);
    rig.create_class("b-only", json!({ "allowedTopologies": in_zone })).await;
    rig.create_claim("c", "b-only", json!({})).await;
    assert_eq!(zone_of(&rig.wait_until_bound("c").await), "b");
}

#[tokio::test]
async fn a_waiting_claim_is_provisioned_on_the_selected_node_and_rescheduled_if_it_is_full() {
    let rig = Rig::new().await;
    let driver = ScriptedDriver { supports_topology: true, ..ScriptedDriver::new(DRIVER) };
    rig.create_node("n1", "a").await;
    rig.create_node("n2", "b").await;
    rig.create_class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    rig.start_provisioner(&driver, fast_retries()).await;
    let full = tonic::Status::resource_exhausted("no room in zone a");
    driver.script.lock().create_replies.push_back(ScriptedReply::Fail(full));
    rig.create_claim("c", "wait", json!({})).await;
    rig.wait_for_event("c", "WaitForFirstConsumer", "waiting for first consumer").await;
    assert!(driver.script.lock().created.is_empty());
    rig.select_node("c", "n1").await;
    rig.wait_for_event("c", "ProvisioningFailed", "no room in zone a").await;
    let rescheduled = until("the selected node is removed", || async {
        let claim = rig.claims().get("c").await.unwrap();
        annotated(&claim, annotation::SELECTED_NODE).is_none().then_some(claim)
    })
    .await;
    let has_finalizer = rescheduled.finalizers().iter().any(|f| f == "cleat.dev/provisioning");
    assert!(!has_finalizer, "no call is pending");
    assert_eq!(
        annotated(&rescheduled, annotation::STORAGE_PROVISIONER),
        Some(DRIVER),
        "the claim stays assigned to the driver"
    );
    assert_eq!(driver.script.lock().created.len(), 1, "the node is not tried again");
    rig.select_node("c", "n2").await;
    assert_eq!(zone_of(&rig.wait_until_bound("c").await), "b");
    let created = driver.script.lock().created.clone();
    assert_eq!(zones(&created[0]).1, ["a", "b"], "the selected node's zone first");
    assert_eq!(zones(&created[1]).1, ["b", "a"]);
    rig.delete_claim("c").await;

    // The driver is not registered on the selected node: it is removed, too.
    rig.create_claim("d", "wait", json!({})).await;
    rig.select_node("d", "n9").await;
    rig.wait_for_event("d", "ProvisioningFailed", "error getting CSINode for selected node \"n9\"").await;
    until("the selected node is removed", || async {
        let claim = rig.claims().get("d").await.unwrap();
        annotated(&claim, annotation::SELECTED_NODE).is_none().then_some(())
    })
    .await;
}
