//! A provisioner on each node, each beside a driver of its own.

use std::time::Duration;

use cleat_api::well_known::annotation;
use cleat_csi::Client as Csi;
use cleat_sidecars::provision::{LocalOptions, Options};
use cleat_sidecars::{Driver, capacity};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;

use super::driver::{Scripted, ZONE};
use super::requests::zone_of;
use super::rig::{DRIVER, Rig, annotated, hasty, until};

fn on(node: &str) -> Options {
    let (base_delay, max_delay) = (Duration::from_millis(50), Duration::from_millis(200));
    Options { local: Some(LocalOptions { node: node.to_owned(), immediate: true, base_delay, max_delay }), ..hasty() }
}

fn at(place: &'static str) -> Scripted {
    Scripted { place: Some(place), knows_topology: true, ..Scripted::new(DRIVER) }
}

#[tokio::test]
async fn of_two_nodes_one_takes_an_open_claim_and_deletes_its_volume_again() {
    let rig = Rig::new().await;
    let drivers = [at("n1"), at("n2")];
    rig.class("plain", json!({})).await;
    for driver in &drivers {
        rig.provision(driver, on(driver.place.unwrap())).await;
    }
    let names: Vec<String> = (0..8).map(|number| format!("c{number}")).collect();
    for name in &names {
        rig.claim(name, "plain", json!({})).await;
    }
    for name in &names {
        let volume = rig.bound(name).await;
        let node = zone_of(&volume);
        let claim = rig.claims().get(name).await.unwrap();
        assert_eq!(annotated(&claim, annotation::SELECTED_NODE), Some(node.as_str()), "{name}");
        let made = &volume.metadata.name.unwrap();
        let has = |driver: &Scripted| driver.script.lock().volumes.contains_key(made);
        assert_eq!(
            drivers.each_ref().map(has),
            drivers.each_ref().map(|d| d.place == Some(&node)),
            "{name}: one has it"
        );
    }
    let calls = drivers.each_ref().map(|d| d.script.lock().created.len());
    assert_eq!(calls.iter().sum::<usize>(), names.len(), "nobody is asked for another's: {calls:?}");
    for name in &names {
        rig.claims().delete(name, &kube::api::DeleteParams::default()).await.unwrap();
    }
    for driver in &drivers {
        driver.until("its volumes are gone", |s| s.volumes.is_empty().then_some(())).await;
        let script = driver.script.lock();
        let of = |made: &Vec<cleat_csi::v1::CreateVolumeRequest>| {
            made.iter().map(|request| format!("vol-{}", request.name)).collect::<std::collections::BTreeSet<_>>()
        };
        let deleted: std::collections::BTreeSet<_> = script.deleted.iter().map(|r| r.volume_id.clone()).collect();
        assert_eq!(deleted, of(&script.created), "each deletes what it made");
    }
}

#[tokio::test]
async fn a_node_without_room_leaves_the_claim_to_one_that_has() {
    let rig = Rig::new().await;
    let (full, free) = (at("n1"), at("n2"));
    full.script.lock().free = 1 << 20;
    rig.class("plain", json!({})).await;
    rig.provision(&full, on("n1")).await;
    rig.claim("c", "plain", json!({})).await;
    full.until("it is asked about its room", |s| {
        let asked = s.asked.first()?.accessible_topology.as_ref()?;
        assert_eq!(asked.segments[ZONE], "n1");
        Some(())
    })
    .await;
    rig.provision(&free, on("n2")).await;
    assert_eq!(zone_of(&rig.bound("c").await), "n2");
    assert!(full.script.lock().created.is_empty());
}

#[tokio::test]
async fn a_pods_claim_is_made_on_the_pods_node_and_nowhere_else() {
    let rig = Rig::new().await;
    let (here, there) = (at("n1"), at("n2"));
    rig.class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    rig.provision(&here, on("n1")).await;
    rig.provision(&there, on("n2")).await;
    rig.claim("c", "wait", json!({})).await;
    rig.event("c", "WaitForFirstConsumer", "waiting").await;
    rig.choose("c", "n2").await;
    assert_eq!(zone_of(&rig.bound("c").await), "n2");
    assert!(here.script.lock().created.is_empty());
    let in_zone = json!([{ "matchLabelExpressions": [{ "key": ZONE, "values": ["n1"] }] }]);
    rig.class("n1-only", json!({ "allowedTopologies": in_zone })).await;
    rig.claim("d", "n1-only", json!({})).await;
    assert_eq!(zone_of(&rig.bound("d").await), "n1", "the class says where");
}

#[tokio::test]
async fn each_node_tells_of_its_own_room() {
    let rig = Rig::new().await;
    rig.class("wait", json!({ "volumeBindingMode": "WaitForFirstConsumer" })).await;
    for (node, free) in [("n1", 5 << 30), ("n2", 7 << 30)] {
        let driver = at(node);
        driver.script.lock().free = free;
        let endpoint = driver.serve(rig.dir(), &rig.stop).await;
        let connected = Driver::connect(Csi::new(endpoint), &rig.stop).await.unwrap();
        let mut options = capacity::Options { local: true, ..capacity::Options::new("default") };
        options.manager.name = format!("external-provisioner-{node}");
        tokio::spawn(capacity::run(rig.sidecar(&rig.stop), connected, options, rig.stop.clone()));
    }
    let published: Api<CSIStorageCapacity> = Api::default_namespaced(rig.client.clone());
    let told = until("both are told", || async {
        let all = published.list(&ListParams::default()).await.unwrap().items;
        (all.len() == 2).then_some(all)
    })
    .await;
    let mut told: Vec<_> = told
        .into_iter()
        .map(|c| (c.node_topology.unwrap().match_labels.unwrap()[ZONE].clone(), c.capacity.unwrap().0))
        .collect();
    told.sort();
    assert_eq!(told, [("n1".to_owned(), "5Gi".to_owned()), ("n2".to_owned(), "7Gi".to_owned())]);
}
