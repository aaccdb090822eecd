//! What the driver is told.

use std::collections::HashMap;

use cleat_api::well_known::annotation;
use cleat_csi::v1;
use cleat_csi::v1::volume_capability::AccessType;
use k8s_openapi::api::core::v1::{PersistentVolume, Secret};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::driver::{Answer, Scripted, ZONE};
use super::rig::{DRIVER, Rig, annotated, create, hasty, until};

pub(crate) fn pairs<const N: usize>(of: [(&str, &str); N]) -> HashMap<String, String> {
    of.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

#[tokio::test]
async fn the_driver_is_told_what_class_claim_and_secrets_say() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.provision(&driver, hasty()).await;
    rig.class(
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
    rig.secret("c-key", "user", "u").await;
    let gold = json!({ "metadata": { "name": "gold" }, "driverName": DRIVER, "parameters": { "iops": "9000" } });
    create(&rig.all::<VolumeAttributesClass>(), gold).await;
    let claim = rig.claim("c", "full", json!({ "volumeAttributesClassName": "gold" })).await;
    let volume = rig.bound("c").await;

    let request = driver.script.lock().created[0].clone();
    let name = format!("pvc-{}", claim.uid().unwrap());
    assert_eq!(request.name, name);
    assert_eq!(request.parameters, pairs([("kind", "ssd")]));
    assert_eq!(request.secrets, pairs([("user", "u")]));
    assert_eq!(request.mutable_parameters, pairs([("iops", "9000")]));
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

    rig.delete("c").await;
    let deleted = driver.script.lock().deleted.clone();
    assert_eq!(
        deleted,
        [v1::DeleteVolumeRequest { volume_id: format!("vol-{name}"), secrets: pairs([("user", "u")]) }]
    );
    assert!(driver.script.lock().volumes.is_empty());
}

#[tokio::test]
async fn what_is_missing_is_waited_for_and_told() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.provision(&driver, hasty()).await;
    let keys = json!({
        "csi.storage.k8s.io/secret-name": "key", "csi.storage.k8s.io/secret-namespace": "default",
    });
    rig.class("keyed", json!({ "parameters": keys })).await;
    rig.claim("c", "keyed", json!({ "volumeAttributesClassName": "gold" })).await;
    rig.event("c", "ProvisioningFailed", "error getting secret default/key").await;
    rig.secret("key", "user", "u").await;
    rig.event("c", "ProvisioningFailed", "volumeattributesclass.storage.k8s.io \"gold\" not found").await;
    assert!(driver.script.lock().created.is_empty(), "nothing was called");
    let held = rig.claims().get("c").await.unwrap().finalizers().to_vec();
    let gold = json!({ "metadata": { "name": "gold" }, "driverName": DRIVER, "parameters": { "iops": "1" } });
    create(&rig.all::<VolumeAttributesClass>(), gold).await;
    rig.bound("c").await;
    assert!(!held.is_empty(), "it is protected as any claim");

    // The record names the secret: one that is gone does not keep the volume.
    let secrets: Api<Secret> = Api::default_namespaced(rig.client.clone());
    secrets.delete("key", &DeleteParams::default()).await.unwrap();
    rig.delete("c").await;
    assert!(driver.script.lock().deleted[0].secrets.is_empty());
}

#[tokio::test]
async fn attributes_of_another_driver_are_refused() {
    let (rig, driver) = (Rig::new().await, Scripted::new(DRIVER));
    rig.provision(&driver, hasty()).await;
    rig.class("plain", json!({})).await;
    let foreign = json!({ "metadata": { "name": "gold" }, "driverName": "other.test", "parameters": { "iops": "1" } });
    create(&rig.all::<VolumeAttributesClass>(), foreign).await;
    rig.claim("c", "plain", json!({ "volumeAttributesClassName": "gold" })).await;
    rig.event("c", "ProvisioningFailed", "is of driver \"other.test\"").await;
    rig.delete("c").await;
    assert!(driver.script.lock().created.is_empty());
}

/// The zones of the requirement's parts, in order.
fn zones(request: &v1::CreateVolumeRequest) -> (Vec<String>, Vec<String>) {
    let places = request.accessibility_requirements.clone().unwrap();
    let names = |all: Vec<v1::Topology>| all.into_iter().map(|t| t.segments[ZONE].clone()).collect();
    (names(places.requisite), names(places.preferred))
}

pub(crate) fn zone_of(volume: &PersistentVolume) -> String {
    let affinity = volume.spec.as_ref().unwrap().node_affinity.as_ref().unwrap();
    let rule = &affinity.required.as_ref().unwrap().node_selector_terms[0].match_expressions.as_ref().unwrap()[0];
    assert_eq!((rule.key.as_str(), rule.operator.as_str()), (ZONE, "In"));
    rule.values.as_ref().unwrap().join("|")
}

#[tokio::test]
async fn an_immediate_claim_may_be_anywhere_and_those_of_a_set_spread() {
    let rig = Rig::new().await;
    let driver = Scripted { knows_topology: true, ..Scripted::new(DRIVER) };
    for (node, zone) in [("n2", "b"), ("n1", "a"), ("n3", "a")] {
        rig.node(node, zone).await;
    }
    rig.class("plain", json!({})).await;
    rig.provision(&driver, hasty()).await;
    let mut first = Vec::new();
    for name in ["data-web-0", "data-web-1"] {
        rig.claim(name, "plain", json!({})).await;
        let volume = rig.bound(name).await;
        let (requisite, preferred) = zones(driver.script.lock().created.last().unwrap());
        assert_eq!(requisite, ["a", "b"], "each zone once, and in order");
        assert_eq!(zone_of(&volume), preferred[0]);
        first.push(preferred[0].clone());
    }
    first.sort();
    assert_eq!(first, ["a", "b"], "one after the other");
    let in_zone = json!([{ "matchLabelExpressions": [{ "key": ZONE, "values": ["b"] }] }]);
    rig.class("b-only", json!({ "allowedTopologies": in_zone })).await;
    rig.claim("c", "b-only", json!({})).await;
    assert_eq!(zone_of(&rig.bound("c").await), "b");
}

#[tokio::test]
async fn a_claim_that_waits_gets_its_volume_where_its_pod_goes_and_gives_a_full_node_back() {
    let rig = Rig::new().await;
    let driver = Scripted { knows_topology: true, ..Scripted::new(DRIVER) };
    rig.node("n1", "a").await;
    rig.node("n2", "b").await;
    rig.class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    rig.provision(&driver, hasty()).await;
    let full = tonic::Status::resource_exhausted("no room in zone a");
    driver.script.lock().creations.push_back(Answer::Fail(full));
    rig.claim("c", "wait", json!({})).await;
    rig.event("c", "WaitForFirstConsumer", "waiting for first consumer").await;
    assert!(driver.script.lock().created.is_empty());
    rig.choose("c", "n1").await;
    rig.event("c", "ProvisioningFailed", "no room in zone a").await;
    let given_back = until("the node is given back", || async {
        let claim = rig.claims().get("c").await.unwrap();
        annotated(&claim, annotation::SELECTED_NODE).is_none().then_some(claim)
    })
    .await;
    let held = given_back.finalizers().iter().any(|f| f == "cleat.dev/provisioning");
    assert!(!held, "nothing is in the making");
    assert_eq!(annotated(&given_back, annotation::STORAGE_PROVISIONER), Some(DRIVER), "it stays asked");
    assert_eq!(driver.script.lock().created.len(), 1, "and is not tried again there");
    rig.choose("c", "n2").await;
    assert_eq!(zone_of(&rig.bound("c").await), "b");
    let created = driver.script.lock().created.clone();
    assert_eq!(zones(&created[0]).1, ["a", "b"], "the chosen node's zone first");
    assert_eq!(zones(&created[1]).1, ["b", "a"]);
    rig.delete("c").await;

    // A node that the driver is not on, or that is gone: another is chosen.
    rig.claim("d", "wait", json!({})).await;
    rig.choose("d", "n9").await;
    rig.event("d", "ProvisioningFailed", "error getting CSINode for selected node \"n9\"").await;
    until("the node is given back", || async {
        let claim = rig.claims().get("d").await.unwrap();
        annotated(&claim, annotation::SELECTED_NODE).is_none().then_some(())
    })
    .await;
}
