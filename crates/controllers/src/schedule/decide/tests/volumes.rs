//! Claims that wait for their first consumer, storage capacity, volume limits and ReadWriteOncePod claims.

use super::*;

const CLAIM_IN_USE: &str = "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use \
                     by another pod";

fn with_claim(class: &str, prepare: impl FnOnce(&mut TestCluster)) -> String {
    decide_with(|s| {
        s.node("n1", json!({}));
        s.claim("c", class, json!({}));
        prepare(s);
        s.pod("p", &["c"], json!({}));
    })
}

#[test]
fn a_delayed_claim_is_matched_with_a_volume_or_provisioned() {
    let wait = |why: &str| format!("wait 0/1 nodes are available: 1 {why}.");
    let provisioned = "reserve n1 volumes [] claims [c]".to_owned();
    let matches = |name: &str| format!("reserve n1 volumes [{name}] claims []");
    type Prepare = Box<dyn FnOnce(&mut TestCluster)>;
    let cases: Vec<(&str, &str, Prepare, String)> = vec![
        ("no volume", "wait", Box::new(|_| {}), provisioned.clone()),
        ("no volume, and no provisioner", "local", Box::new(|_| {}), wait(NO_VOLUME)),
        (
            "a volume on the node",
            "local",
            Box::new(|s| s.volume("v", "local", "1Gi", host_affinity("n1"))),
            matches("v"),
        ),
        (
            "a volume on another node",
            "local",
            Box::new(|s| s.volume("v", "local", "1Gi", host_affinity("n2"))),
            wait(NO_VOLUME),
        ),
        ("a volume without affinity", "local", Box::new(|s| s.volume("v", "local", "1Gi", json!({}))), matches("v")),
        (
            "an existing volume before a provisioned one",
            "wait",
            Box::new(|s| s.volume("v", "wait", "1Gi", host_affinity("n1"))),
            matches("v"),
        ),
        (
            "a volume on another node does not count",
            "wait",
            Box::new(|s| s.volume("v", "wait", "1Gi", host_affinity("n2"))),
            provisioned.clone(),
        ),
        (
            "the smallest that is large enough",
            "local",
            Box::new(|s| {
                s.volume("a", "local", "9Gi", host_affinity("n1"));
                s.volume("b", "local", "2Gi", json!({}));
                s.volume("c", "local", "512Mi", host_affinity("n1"));
            }),
            matches("b"),
        ),
        ("another class", "local", Box::new(|s| s.volume("v", "wait", "1Gi", json!({}))), wait(NO_VOLUME)),
        ("too small", "local", Box::new(|s| s.volume("v", "local", "1Mi", json!({}))), wait(NO_VOLUME)),
        (
            "other modes",
            "local",
            Box::new(|s| {
                s.volume("v", "local", "1Gi", json!({"spec": {"accessModes": ["ReadOnlyMany"]}}));
            }),
            wait(NO_VOLUME),
        ),
        (
            "not available yet",
            "local",
            Box::new(|s| {
                s.volume("v", "local", "1Gi", json!({"status": {"phase": "Pending"}}));
            }),
            wait(NO_VOLUME),
        ),
        (
            "reserved for another claim",
            "local",
            Box::new(|s| {
                s.volume("v", "local", "1Gi", json!({"spec": {"claimRef": {"namespace": "ns", "name": "other"}}}));
            }),
            wait(NO_VOLUME),
        ),
        (
            "reserved for the claim, with any size",
            "local",
            Box::new(|s| {
                s.volume("a", "local", "1Gi", json!({}));
                s.volume("v", "other", "50Gi", json!({"spec": {"claimRef": {"namespace": "ns", "name": "c"}}}));
            }),
            matches("v"),
        ),
        (
            "reserved for the claim, on another node",
            "local",
            Box::new(|s| {
                s.volume("a", "local", "1Gi", json!({}));
                let for_claim = json!({"spec": {"claimRef": {"namespace": "ns", "name": "c"}}});
                s.volume("v", "local", "1Gi", merged(&host_affinity("n2"), &for_claim));
            }),
            wait(NO_VOLUME),
        ),
        (
            "the class allows this topology",
            "wait",
            Box::new(|s| {
                s.class(
                    "wait",
                    json!({
            "volumeBindingMode": "WaitForFirstConsumer", "allowedTopologies": [{"matchLabelExpressions":
            [{"key": "kubernetes.io/hostname", "values": ["n1"]}]}]}),
                )
            }),
            provisioned.clone(),
        ),
        (
            "the class allows other topologies only",
            "wait",
            Box::new(|s| {
                s.class(
                    "wait",
                    json!({
            "volumeBindingMode": "WaitForFirstConsumer", "allowedTopologies": [{"matchLabelExpressions":
            [{"key": "kubernetes.io/hostname", "values": ["n9"]}]}]}),
                )
            }),
            wait(NO_VOLUME),
        ),
        (
            "the driver is not on the node",
            "wait",
            Box::new(|s| s.csi_node("n1", json!([]))),
            wait("block.cleat.dev CSI driver is not installed on the node"),
        ),
        (
            "a provisioner that is no CSI driver",
            "wait",
            Box::new(|s| {
                s.state.set_driver(build::DRIVER, None);
                s.csi_node("n1", json!([]));
            }),
            provisioned.clone(),
        ),
        (
            "this node is selected already",
            "wait",
            Box::new(|s| {
                s.claim("c", "wait", json!({"metadata": {"annotations": {annotation::SELECTED_NODE: "n1"}}}));
                s.volume("v", "wait", "1Gi", json!({}));
            }),
            "await".to_owned(),
        ),
        (
            "another node is selected",
            "wait",
            Box::new(|s| {
                s.claim("c", "wait", json!({"metadata": {"annotations": {annotation::SELECTED_NODE: "n2"}}}));
            }),
            wait(NO_VOLUME),
        ),
    ];
    for (case, class, prepare, want) in cases {
        assert_eq!(with_claim(class, prepare), format!("p: {want}"), "{case}");
    }
}

#[test]
fn drivers_that_publish_capacity_must_have_enough() {
    let short = "wait 0/1 nodes are available: 1 node(s) did not have enough free storage.";
    let provisioned = "reserve n1 volumes [] claims [c]";
    let here = |more: Value| merged(&json!({"nodeTopology": {"matchLabels": {"kubernetes.io/hostname": "n1"}}}), &more);
    for (case, driver, report, want) in [
        ("no capacity object", json!({"storageCapacity": true}), None, short),
        ("not tracked", json!({"storageCapacity": false}), None, provisioned),
        ("enough", json!({"storageCapacity": true}), Some(here(json!({"capacity": "1Gi"}))), provisioned),
        ("too little", json!({"storageCapacity": true}), Some(here(json!({"capacity": "1Mi"}))), short),
        (
            "enough, but the maximum volume size is too small",
            json!({"storageCapacity": true}),
            Some(here(json!({"capacity": "9Gi", "maximumVolumeSize": "1Mi"}))),
            short,
        ),
        (
            "the maximum volume size is large enough",
            json!({"storageCapacity": true}),
            Some(here(json!({"capacity": "2Gi", "maximumVolumeSize": "1Gi"}))),
            provisioned,
        ),
        ("without a capacity", json!({"storageCapacity": true}), Some(here(json!({}))), short),
        (
            "of another node",
            json!({"storageCapacity": true}),
            Some(json!({"capacity": "9Gi", "nodeTopology": {"matchLabels": {"kubernetes.io/hostname": "n2"}}})),
            short,
        ),
        ("of no node", json!({"storageCapacity": true}), Some(json!({"capacity": "9Gi", "nodeTopology": null})), short),
        (
            "of another class",
            json!({"storageCapacity": true}),
            Some(here(json!({"capacity": "9Gi", "storageClassName": "fast"}))),
            short,
        ),
    ] {
        let decisions = with_claim("wait", |s| {
            s.driver(driver);
            if let Some(report) = report {
                s.capacity("r", "wait", report);
            }
        });
        assert_eq!(decisions, format!("p: {want}"), "{case}");
    }
}

#[test]
fn storage_is_not_reserved_twice() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.driver(json!({"storageCapacity": true}));
    s.capacity("r", "wait", json!({"capacity": "1536Mi"}));
    for name in ["a", "b"] {
        s.claim(name, "wait", json!({}));
        s.pod(name, &[name], json!({}));
    }
    let short = "wait 0/1 nodes are available: 1 node(s) did not have enough free storage.";
    assert_eq!(s.decide_all(), ["a: reserve n1 volumes [] claims [a]".to_owned(), format!("b: {short}")]);
    s.write_all();
    s.decide_all();
    s.pod("c", &["a"], json!({}));
    assert_eq!(s.decide_all(), ["c: await"], "one volume for two pods is reserved once");
    s.delete_pod("c");
    s.delete_pod("a");
    s.capacity("r", "wait", json!({"capacity": "1537Mi"}));
    assert_eq!(s.decide_all(), ["b: reserve n1 volumes [] claims [b]"]);
}

#[test]
fn volume_limits_of_drivers_are_kept() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.csi_node("n1", json!([{"name": build::DRIVER, "nodeID": "n1", "allocatable": {"count": 2}}]));
    s.bound("a", json!({}), json!({}));
    s.bound("b", json!({}), json!({}));
    s.claim("c", "wait", json!({}));
    let full = "wait 0/1 nodes are available: 1 node(s) exceed max volume count.";
    s.pod("p", &["a"], json!({}));
    s.pod("q", &["a", "b"], json!({}));
    assert_eq!(s.decide_all(), ["p: bind n1", "q: bind n1"], "one volume of two pods counts once");
    s.write_all();
    s.pod("r", &["c"], json!({}));
    assert_eq!(s.decide_all(), [format!("r: {full}")], "a volume to be provisioned counts too");
    s.write_all();
    s.delete_pod("p");
    assert_eq!(s.decide_all(), [format!("r: {full}")], "the other pod still has the volume");
    s.write_all();
    s.delete_pod("q");
    assert_eq!(s.decide_all(), ["r: reserve n1 volumes [] claims [c]"]);
}

#[test]
fn attachments_count_against_the_volume_limit() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.csi_node("n1", json!([{"name": build::DRIVER, "nodeID": "n1", "allocatable": {"count": 1}}]));
    s.bound("a", json!({}), json!({}));
    s.bound("b", json!({}), json!({}));
    let attached = build::attachment(&build::volume("pv-a", "fast", "1Gi"), "n1");
    s.state.set_attachment("att", Some(&attached));
    s.pod("p", &["b"], json!({}));
    assert_eq!(s.decide_all(), ["p: wait 0/1 nodes are available: 1 node(s) exceed max volume count."]);
    s.write_all();
    s.pod("q", &["a"], json!({}));
    assert_eq!(s.decide_all(), ["q: bind n1"], "the attached volume is the pod's own");
    s.write_all();
    s.delete_pod("q");
    s.state.set_attachment("att", None);
    assert_eq!(s.decide_all(), ["p: bind n1"], "detached");
}

#[test]
fn a_read_write_once_pod_claim_is_used_by_one_pod() {
    let mut s = TestCluster::with_nodes(&["n1", "n2"]);
    let exclusive = json!({"spec": {"accessModes": ["ReadWriteOncePod"]}});
    s.bound("c", exclusive, json!({}));
    s.pod("p", &["c"], json!({}));
    s.pod("q", &["c"], json!({}));
    assert_eq!(
        s.decide_all(),
        ["p: bind n1".to_owned(), format!("q: wait 0/2 nodes are available: 2 {CLAIM_IN_USE}.")]
    );
    s.write_all();
    assert_eq!(s.decide_all(), [] as [&str; 0]);
    s.delete_pod("p");
    assert_eq!(s.decide_all(), ["q: bind n1"]);
}

#[test]
fn all_rejections_about_volumes_are_reported() {
    let decisions = decide_with(|s| {
        s.node("n1", json!({}));
        s.bound("far", json!({}), host_affinity("n2"));
        s.claim("none", "local", json!({}));
        s.pod("p", &["far", "none"], json!({}));
    });
    let both = format!("1 {NO_VOLUME}, 1 node(s) didn't match PersistentVolume's node affinity");
    assert_eq!(decisions, format!("p: wait 0/1 nodes are available: {both}."));
}

#[test]
fn migrated_in_tree_volumes_count_as_volumes_of_their_csi_driver() {
    const DRIVER: &str = "pd.csi.storage.gke.io";
    let zone = json!({"spec": {"csi": null, "gcePersistentDisk": {"pdName": "d"}, "nodeAffinity": {"required":
        {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}]}]}}}});
    let labels = json!({"metadata": {"labels": {"topology.gke.io/zone": "a"}}});
    let installed = |count: usize| json!([{"name": DRIVER, "nodeID": "n1", "allocatable": {"count": count}}]);
    let wait = |why: &str| format!("p: wait 0/1 nodes are available: 1 {why}.");
    for (case, plugins, drivers, want) in [
        ("in the driver's zone", "kubernetes.io/aws-ebs,kubernetes.io/gce-pd", installed(9), "p: bind n1".to_owned()),
        (
            "the node has not migrated the plugin",
            "",
            installed(9),
            wait("node(s) didn't match PersistentVolume's node affinity"),
        ),
        (
            "the driver is not installed",
            "kubernetes.io/gce-pd",
            json!([]),
            wait("pd.csi.storage.gke.io CSI driver is not installed on the node"),
        ),
        ("no more of them", "kubernetes.io/gce-pd", installed(0), wait("node(s) exceed max volume count")),
    ] {
        let decisions = decide_with(|s| {
            s.node("n1", labels.clone());
            let object = json!({"metadata": {"annotations": {annotation::MIGRATED_PLUGINS: plugins}},
                "spec": {"drivers": drivers}});
            s.state.set_csi_node("n1", Some(&serde_json::from_value::<CSINode>(object).unwrap()));
            s.bound("c", json!({}), zone.clone());
            s.pod("p", &["c"], json!({}));
        });
        assert_eq!(decisions, want, "{case}");
    }
    // An inline disk counts too.
    let disk = json!({"spec": {"volumes": [{"name": "v", "gcePersistentDisk": {"pdName": "x"}}]}});
    let decisions = decide_with(|s| {
        s.node("n1", json!({}));
        s.csi_node("n1", installed(1));
        s.pod("other", &[], merged(&disk, &json!({"spec": {"nodeName": "n1"}})));
        s.bound("c", json!({}), json!({"spec": {"csi": {"driver": DRIVER}}}));
        s.pod("p", &["c"], json!({}));
    });
    assert_eq!(decisions, wait("node(s) exceed max volume count"));
    // The provisioner of a class is translated to its CSI driver.
    let decisions = with_claim("old", |s| {
        s.class("old", json!({"provisioner": "kubernetes.io/gce-pd", "volumeBindingMode": "WaitForFirstConsumer"}));
        s.csi_node("n1", installed(0));
    });
    assert_eq!(decisions, wait("node(s) exceed max volume count"));
}
