//! Node deployment: a provisioner and a driver on each node.

use std::time::Duration;

use cleat_api::well_known::annotation;
use cleat_csi::Client as Csi;
use cleat_sidecars::csi_provisioner::{NodeDeploymentOptions, ProvisionerOptions};
use cleat_sidecars::{Driver, capacity};
use cleat_testing::{DRIVER_NAME, ScriptedDriver, ZONE_KEY};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use serde_json::json;

use super::fixture::{ProvisionerFixture, annotated, fast_retries};
use super::requests::zone_of;

fn options_for(node: &str) -> ProvisionerOptions {
    let (base_delay, max_delay) = (Duration::from_millis(50), Duration::from_millis(200));
    ProvisionerOptions {
        node_deployment: Some(NodeDeploymentOptions { node: node.to_owned(), immediate: true, base_delay, max_delay }),
        ..fast_retries()
    }
}

fn driver_in(zone: &'static str) -> ScriptedDriver {
    ScriptedDriver::new(DRIVER_NAME).in_zone(zone)
}

#[tokio::test]
async fn one_node_takes_an_open_claim_and_deletes_its_volume() {
    let fixture = ProvisionerFixture::new().await;
    let drivers = [driver_in("n1"), driver_in("n2")];
    fixture.create_class("plain", json!({})).await;
    for driver in &drivers {
        fixture.start_provisioner(driver, options_for(driver.zone.unwrap())).await;
    }
    let names: Vec<String> = (0..8).map(|number| format!("c{number}")).collect();
    for name in &names {
        fixture.create_claim(name, "plain", json!({})).await;
    }
    for name in &names {
        let volume = fixture.wait_until_bound(name).await;
        let node = zone_of(&volume);
        let claim = fixture.claims().get(name).await.unwrap();
        assert_eq!(annotated(&claim, annotation::SELECTED_NODE), Some(node.as_str()), "{name}");
        let volume_name = &volume.metadata.name.unwrap();
        let has = |driver: &ScriptedDriver| driver.state().volumes.contains_key(volume_name);
        assert_eq!(
            drivers.each_ref().map(has),
            drivers.each_ref().map(|d| d.zone == Some(&node)),
            "{name}: one driver has it"
        );
    }
    let calls = drivers.each_ref().map(|d| d.state().created.len());
    assert_eq!(calls.iter().sum::<usize>(), names.len(), "one call per claim: {calls:?}");
    for name in &names {
        fixture.server.delete::<PersistentVolumeClaim>(name).await;
    }
    for driver in &drivers {
        driver.wait_until("its volumes are gone", |s| s.volumes.is_empty()).await;
        let state = driver.state();
        let ids = |requests: &Vec<cleat_csi::v1::CreateVolumeRequest>| {
            requests.iter().map(|request| format!("vol-{}", request.name)).collect::<std::collections::BTreeSet<_>>()
        };
        let deleted: std::collections::BTreeSet<_> = state.deleted.iter().map(|r| r.volume_id.clone()).collect();
        assert_eq!(deleted, ids(&state.created), "each driver deletes the volumes it created");
    }
}

#[tokio::test]
async fn a_node_without_capacity_leaves_the_claim_to_another() {
    let fixture = ProvisionerFixture::new().await;
    let (full, free) = (driver_in("n1"), driver_in("n2"));
    full.set_free_bytes(1 << 20);
    fixture.create_class("plain", json!({})).await;
    fixture.start_provisioner(&full, options_for("n1")).await;
    fixture.create_claim("c", "plain", json!({})).await;
    full.wait_for("GetCapacity is called", |s| {
        let topology = s.capacity_requests.first()?.accessible_topology.as_ref()?;
        assert_eq!(topology.segments[ZONE_KEY], "n1");
        Some(())
    })
    .await;
    fixture.start_provisioner(&free, options_for("n2")).await;
    assert_eq!(zone_of(&fixture.wait_until_bound("c").await), "n2");
    assert!(full.state().created.is_empty());
}

#[tokio::test]
async fn a_waiting_claim_is_provisioned_on_its_selected_node() {
    let fixture = ProvisionerFixture::new().await;
    let (first, second) = (driver_in("n1"), driver_in("n2"));
    fixture.create_class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    fixture.start_provisioner(&first, options_for("n1")).await;
    fixture.start_provisioner(&second, options_for("n2")).await;
    fixture.create_claim("c", "wait", json!({})).await;
    fixture.wait_for_event("c", "WaitForFirstConsumer", "waiting").await;
    fixture.select_node("c", "n2").await;
    assert_eq!(zone_of(&fixture.wait_until_bound("c").await), "n2");
    assert!(first.state().created.is_empty());
    let in_zone = json!([{ "matchLabelExpressions": [{ "key": ZONE_KEY, "values": ["n1"] }] }]);
    fixture.create_class("n1-only", json!({ "allowedTopologies": in_zone })).await;
    fixture.create_claim("d", "n1-only", json!({})).await;
    assert_eq!(zone_of(&fixture.wait_until_bound("d").await), "n1", "the class allows only this zone");
}

#[tokio::test]
async fn each_node_publishes_its_own_capacity() {
    let fixture = ProvisionerFixture::new().await;
    fixture.create_class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    for (node, free) in [("n1", 5 << 30), ("n2", 7 << 30)] {
        let driver = driver_in(node);
        driver.set_free_bytes(free);
        let endpoint = driver.serve(fixture.server.directory(), fixture.server.stop()).await;
        let connected = Driver::connect(Csi::new(endpoint), fixture.server.stop()).await.unwrap();
        let mut options =
            capacity::CapacityOptions { own_node_only: true, ..capacity::CapacityOptions::new("default") };
        options.owner.managed_by = format!("external-provisioner-{node}");
        tokio::spawn(capacity::run(
            fixture.sidecar_context(fixture.server.stop()),
            connected,
            options,
            fixture.server.stop().clone(),
        ));
    }
    let both = |all: &[CSIStorageCapacity]| (all.len() == 2).then(|| all.to_vec());
    let published = fixture.server.wait_for_list("both are published", both).await;
    let mut published: Vec<_> = published
        .into_iter()
        .map(|c| (c.node_topology.unwrap().match_labels.unwrap()[ZONE_KEY].clone(), c.capacity.unwrap().0))
        .collect();
    published.sort();
    assert_eq!(published, [("n1".to_owned(), "5Gi".to_owned()), ("n2".to_owned(), "7Gi".to_owned())]);
}
