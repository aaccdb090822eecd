//! Claims that wait for their pod, limits, exclusive claims, and what happens on the way.

use super::*;

const NO_VOLUME: &str = "node(s) didn't find available persistent volumes to bind";
const TAKEN: &str = "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use \
                     by another pod";

fn with_claim(class: &str, prepare: impl FnOnce(&mut Scene)) -> String {
    alone(|s| {
        s.node("n1", json!({}));
        s.claim("c", class, json!({}));
        prepare(s);
        s.pod("p", &["c"], json!({}));
    })
}

#[test]
fn a_waiting_claim_takes_an_existing_volume_or_has_one_made() {
    let wait = |why: &str| format!("wait 0/1 nodes are available: 1 {why}.");
    let provisioned = "reserve n1 volumes [] claims [c]".to_owned();
    let takes = |name: &str| format!("reserve n1 volumes [{name}] claims []");
    type Prepare = Box<dyn FnOnce(&mut Scene)>;
    let cases: Vec<(&str, &str, Prepare, String)> = vec![
        ("nothing there", "wait", Box::new(|_| {}), provisioned.clone()),
        ("nothing there, and nobody makes it", "local", Box::new(|_| {}), wait(NO_VOLUME)),
        ("a volume here", "local", Box::new(|s| s.volume("v", "local", "1Gi", on_host("n1"))), takes("v")),
        ("a volume elsewhere", "local", Box::new(|s| s.volume("v", "local", "1Gi", on_host("n2"))), wait(NO_VOLUME)),
        ("a volume anywhere", "local", Box::new(|s| s.volume("v", "local", "1Gi", json!({}))), takes("v")),
        ("existing before made", "wait", Box::new(|s| s.volume("v", "wait", "1Gi", on_host("n1"))), takes("v")),
        (
            "one elsewhere does not count",
            "wait",
            Box::new(|s| s.volume("v", "wait", "1Gi", on_host("n2"))),
            provisioned.clone(),
        ),
        (
            "the smallest that is large enough",
            "local",
            Box::new(|s| {
                s.volume("a", "local", "9Gi", on_host("n1"));
                s.volume("b", "local", "2Gi", json!({}));
                s.volume("c", "local", "512Mi", on_host("n1"));
            }),
            takes("b"),
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
            "set aside for somebody else",
            "local",
            Box::new(|s| {
                s.volume("v", "local", "1Gi", json!({"spec": {"claimRef": {"namespace": "ns", "name": "other"}}}));
            }),
            wait(NO_VOLUME),
        ),
        (
            "set aside for it, whatever the size",
            "local",
            Box::new(|s| {
                s.volume("a", "local", "1Gi", json!({}));
                s.volume("v", "other", "50Gi", json!({"spec": {"claimRef": {"namespace": "ns", "name": "c"}}}));
            }),
            takes("v"),
        ),
        (
            "set aside for it, elsewhere",
            "local",
            Box::new(|s| {
                s.volume("a", "local", "1Gi", json!({}));
                let mine = json!({"spec": {"claimRef": {"namespace": "ns", "name": "c"}}});
                s.volume("v", "local", "1Gi", merged(&on_host("n2"), &mine));
            }),
            wait(NO_VOLUME),
        ),
        (
            "the class allows this place",
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
            "the class allows others only",
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
                s.world.set_driver(build::DRIVER, None);
                s.csi_node("n1", json!([]));
            }),
            provisioned.clone(),
        ),
        (
            "chosen for this node before",
            "wait",
            Box::new(|s| {
                s.claim("c", "wait", json!({"metadata": {"annotations": {annotation::SELECTED_NODE: "n1"}}}));
                s.volume("v", "wait", "1Gi", json!({}));
            }),
            "await".to_owned(),
        ),
        (
            "chosen for another node",
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
fn drivers_that_report_storage_must_have_enough() {
    let short = "wait 0/1 nodes are available: 1 node(s) did not have enough free storage.";
    let made = "reserve n1 volumes [] claims [c]";
    let here = |more: Value| merged(&json!({"nodeTopology": {"matchLabels": {"kubernetes.io/hostname": "n1"}}}), &more);
    for (case, driver, report, want) in [
        ("nothing reported", json!({"storageCapacity": true}), None, short),
        ("not tracked", json!({"storageCapacity": false}), None, made),
        ("enough", json!({"storageCapacity": true}), Some(here(json!({"capacity": "1Gi"}))), made),
        ("too little", json!({"storageCapacity": true}), Some(here(json!({"capacity": "1Mi"}))), short),
        (
            "enough, not in one piece",
            json!({"storageCapacity": true}),
            Some(here(json!({"capacity": "9Gi", "maximumVolumeSize": "1Mi"}))),
            short,
        ),
        (
            "a piece is large enough",
            json!({"storageCapacity": true}),
            Some(here(json!({"capacity": "2Gi", "maximumVolumeSize": "1Gi"}))),
            made,
        ),
        ("no figure", json!({"storageCapacity": true}), Some(here(json!({}))), short),
        (
            "elsewhere",
            json!({"storageCapacity": true}),
            Some(json!({"capacity": "9Gi", "nodeTopology": {"matchLabels": {"kubernetes.io/hostname": "n2"}}})),
            short,
        ),
        ("nowhere", json!({"storageCapacity": true}), Some(json!({"capacity": "9Gi", "nodeTopology": null})), short),
        (
            "of another class",
            json!({"storageCapacity": true}),
            Some(here(json!({"capacity": "9Gi", "storageClassName": "fast"}))),
            short,
        ),
    ] {
        let said = with_claim("wait", |s| {
            s.driver(driver);
            if let Some(report) = report {
                s.capacity("r", "wait", report);
            }
        });
        assert_eq!(said, format!("p: {want}"), "{case}");
    }
}

#[test]
fn storage_that_pods_wait_for_is_not_promised_twice() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.driver(json!({"storageCapacity": true}));
    s.capacity("r", "wait", json!({"capacity": "1536Mi"}));
    for name in ["a", "b"] {
        s.claim(name, "wait", json!({}));
        s.pod(name, &[name], json!({}));
    }
    let short = "wait 0/1 nodes are available: 1 node(s) did not have enough free storage.";
    assert_eq!(s.turn(), ["a: reserve n1 volumes [] claims [a]".to_owned(), format!("b: {short}")]);
    s.carry_out();
    s.turn();
    s.pod("c", &["a"], json!({}));
    assert_eq!(s.turn(), ["c: await"], "one volume for two pods is promised once");
    s.gone("c");
    s.gone("a");
    s.capacity("r", "wait", json!({"capacity": "1537Mi"}));
    assert_eq!(s.turn(), ["b: reserve n1 volumes [] claims [b]"]);
}

#[test]
fn a_driver_takes_so_many_volumes_and_no_more() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.csi_node("n1", json!([{"name": build::DRIVER, "nodeID": "n1", "allocatable": {"count": 2}}]));
    s.bound("a", json!({}), json!({}));
    s.bound("b", json!({}), json!({}));
    s.claim("c", "wait", json!({}));
    let full = "wait 0/1 nodes are available: 1 node(s) exceed max volume count.";
    s.pod("p", &["a"], json!({}));
    s.pod("q", &["a", "b"], json!({}));
    assert_eq!(s.turn(), ["p: bind n1", "q: bind n1"], "one volume of two pods counts once");
    s.carry_out();
    s.pod("r", &["c"], json!({}));
    assert_eq!(s.turn(), [format!("r: {full}")], "one that is to be made counts too");
    s.carry_out();
    s.gone("p");
    assert_eq!(s.turn(), [format!("r: {full}")], "the other pod still has the volume");
    s.carry_out();
    s.gone("q");
    assert_eq!(s.turn(), ["r: reserve n1 volumes [] claims [c]"]);
}

#[test]
fn attachments_count_as_volumes_of_the_node() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.csi_node("n1", json!([{"name": build::DRIVER, "nodeID": "n1", "allocatable": {"count": 1}}]));
    s.bound("a", json!({}), json!({}));
    s.bound("b", json!({}), json!({}));
    let attached = build::attachment(&build::volume("pv-a", "fast", "1Gi"), "n1");
    s.world.set_attachment("att", Some(&attached));
    s.pod("p", &["b"], json!({}));
    assert_eq!(s.turn(), ["p: wait 0/1 nodes are available: 1 node(s) exceed max volume count."]);
    s.carry_out();
    s.pod("q", &["a"], json!({}));
    assert_eq!(s.turn(), ["q: bind n1"], "the attached one is its own");
    s.carry_out();
    s.gone("q");
    s.world.set_attachment("att", None);
    assert_eq!(s.turn(), ["p: bind n1"], "detached");
}

#[test]
fn an_exclusive_claim_has_one_pod_anywhere() {
    let mut s = Scene::with_nodes(&["n1", "n2"]);
    let exclusive = json!({"spec": {"accessModes": ["ReadWriteOncePod"]}});
    s.bound("c", exclusive, json!({}));
    s.pod("p", &["c"], json!({}));
    s.pod("q", &["c"], json!({}));
    assert_eq!(s.turn(), ["p: bind n1".to_owned(), format!("q: wait 0/2 nodes are available: 2 {TAKEN}.")]);
    s.carry_out();
    assert_eq!(s.turn(), [] as [&str; 0]);
    s.gone("p");
    assert_eq!(s.turn(), ["q: bind n1"]);
}

#[test]
fn a_pod_follows_its_volumes_from_choice_to_binding() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.claim("c", "wait", json!({}));
    s.pod("p", &["c"], json!({}));
    assert_eq!(s.turn(), ["p: reserve n1 volumes [] claims [c]"]);
    assert_eq!(s.claim_now("c").metadata.annotation(annotation::SELECTED_NODE), Some("n1"));
    s.carry_out();
    assert_eq!(s.turn(), ["p: await"]);
    s.serve("c", merged(&build::volume("v", "wait", "1Gi"), &on_host("n1")));
    assert_eq!(s.turn(), ["p: bind n1"]);
    s.carry_out();
    assert_eq!(s.turn(), [] as [&str; 0], "only the watch can bring news");
    s.pod("p", &["c"], json!({"spec": {"nodeName": "n1"}}));
    assert_eq!(s.turn(), [] as [&str; 0]);
}

#[test]
fn a_taken_volume_carries_its_claim_before_the_pod_is_bound() {
    let mut s = Scene::with_nodes(&["n1", "n2"]);
    s.volume("v", "local", "1Gi", on_host("n2"));
    s.claim("c", "local", json!({}));
    s.pod("p", &["c"], json!({}));
    assert_eq!(s.turn(), ["p: reserve n2 volumes [v] claims []"]);
    let mine = s.world.volume("v").unwrap().clone();
    assert!(is_reserved_for(&mine, &s.claim_now("c")));
    assert_eq!(mine.metadata.annotation(annotation::BOUND_BY_CONTROLLER), Some("yes"));
    s.carry_out();
    assert_eq!(s.turn(), ["p: await"]);
    s.serve("c", s.world.volume("v").unwrap().as_ref().clone());
    assert_eq!(s.turn(), ["p: bind n2"]);
}

#[test]
fn a_place_is_lost_when_its_volumes_cannot_come() {
    type Change = Box<dyn FnOnce(&mut Scene)>;
    let cases: Vec<(&str, Change, &str)> = vec![
        (
            "the provisioner gives the node back",
            Box::new(|s| {
                let mut claim = s.claim_now("c");
                claim.metadata.annotations = None;
                s.put_claim(claim);
            }),
            "give up binding volumes: provisioning failed for PVC \"c\"",
        ),
        (
            "another node is on the claim",
            Box::new(|s| {
                let mut claim = s.claim_now("c");
                build::annotate(&mut claim.metadata, annotation::SELECTED_NODE, "n9");
                s.put_claim(claim);
            }),
            "give up binding volumes: provisioning failed for PVC \"c\"",
        ),
        (
            "the reservation is taken off the volume",
            Box::new(|s| {
                let mut volume = s.world.volume("v").unwrap().as_ref().clone();
                volume.spec.as_mut().unwrap().claim_ref = None;
                s.put_volume(volume);
            }),
            "give up binding volumes: ClaimRef got reset for pv \"v\"",
        ),
        (
            "the volume is somewhere else",
            Box::new(|s| {
                s.serve("c", merged(&build::volume("x", "wait", "1Gi"), &on_host("n2")));
            }),
            "give up binding volumes: volume of PVC \"c\" does not reach the node",
        ),
        (
            "the node is gone",
            Box::new(|s| s.world.set_node("n1", None)),
            "give up binding volumes: node \"n1\" not found",
        ),
        (
            "the claim is gone",
            Box::new(|s| s.world.set_claim(&Key::namespaced("ns", "c"), None)),
            "give up binding volumes: persistentvolumeclaim \"c\" not found",
        ),
        (
            "the time is up",
            Box::new(|s| {
                s.now = 600;
                s.world.expire(Timestamp::from_second(600).unwrap());
            }),
            "give up binding volumes: context deadline exceeded",
        ),
    ];
    for (case, change, want) in cases {
        let mut s = Scene::with_nodes(&["n1"]);
        s.claim("c", "wait", json!({}));
        s.volume("v", "local", "1Gi", json!({}));
        s.claim("d", "local", json!({}));
        s.pod("p", &["c", "d"], json!({}));
        assert_eq!(s.turn(), ["p: reserve n1 volumes [v] claims [c]"], "{case}");
        s.carry_out();
        s.turn();
        change(&mut s);
        let said = s.turn();
        assert_eq!(said, [format!("p: {want}")], "{case}");
        assert!(!s.world.placed.contains_key(&Key::namespaced("ns", "p")), "{case}: it takes nothing any more");
        s.carry_out();
        assert_eq!(s.turn(), [] as [&str; 0], "{case}: it rests");
    }
}

#[test]
fn the_deadline_is_that_of_the_oldest_place() {
    let mut s = Scene::with_nodes(&["n1"]);
    let at = |second: i64| Timestamp::from_second(second).unwrap();
    for (name, now) in [("a", 100), ("b", 200)] {
        s.claim(name, "wait", json!({}));
        s.pod(name, &[name], json!({}));
        s.now = now;
        s.turn();
        s.carry_out();
        s.turn();
    }
    assert_eq!(s.world.expire(at(300)), Some(at(700)));
    s.now = 700;
    assert_eq!(s.world.expire(at(700)), Some(at(800)));
    assert_eq!(s.turn(), ["a: give up binding volumes: context deadline exceeded"]);
}

#[test]
fn a_node_that_was_given_back_is_the_last_resort() {
    let mut s = Scene::with_nodes(&["n1", "n2"]);
    s.claim("c", "wait", json!({}));
    s.pod("p", &["c"], json!({}));
    let key = Key::namespaced("ns", "p");
    for node in ["n1", "n2", "n1"] {
        assert_eq!(s.turn(), [format!("p: reserve {node} volumes [] claims [c]")]);
        s.carry_out();
        s.turn();
        let mut claim = s.claim_now("c");
        claim.metadata.annotations = None;
        s.put_claim(claim);
        assert_eq!(s.turn().len(), 1);
        s.carry_out();
        s.world.retry(&key);
    }
}

#[test]
fn what_could_not_be_written_is_not_assumed_any_longer() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.volume("v", "local", "1Gi", json!({}));
    s.claim("c", "local", json!({}));
    s.claim("d", "wait", json!({}));
    s.pod("p", &["c", "d"], asks("10"));
    assert_eq!(s.turn(), ["p: reserve n1 volumes [v] claims [d]"]);
    s.fail();
    assert_eq!(s.claim_now("d").metadata.annotation(annotation::SELECTED_NODE), None);
    assert!(s.world.volume("v").unwrap().spec.as_ref().unwrap().claim_ref.is_none());
    s.pod("q", &["c"], asks("10"));
    assert_eq!(s.turn(), ["q: reserve n1 volumes [v] claims []"], "volume and room are free again");
}

#[test]
fn who_shares_a_claim_looks_again_when_it_could_not_be_written() {
    for (class, p, q) in [
        ("wait", "p: reserve n1 volumes [] claims [c]", "q: reserve n1 volumes [] claims [c]"),
        ("local", "p: reserve n1 volumes [v] claims []", "q: reserve n1 volumes [v] claims []"),
    ] {
        let mut s = Scene::with_nodes(&["n1"]);
        s.volume("v", "local", "1Gi", json!({}));
        s.claim("c", class, json!({}));
        s.pod("p", &["c"], json!({}));
        s.pod("q", &["c"], json!({}));
        assert_eq!(s.turn(), [p, "q: await"], "p writes for both");
        s.fail();
        let next = s.turn();
        assert!(next.len() == 1 && next[0].starts_with("q: give up"), "{next:?}");
        s.carry_out();
        s.world.retry(&Key::namespaced("ns", "q"));
        assert_eq!(s.turn(), [q]);
    }
}

#[test]
fn pods_of_one_turn_see_each_others_choices() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.volume("v", "local", "1Gi", json!({}));
    s.claim("c", "local", json!({}));
    s.claim("d", "local", json!({}));
    s.pod("p", &["c"], json!({}));
    s.pod("q", &["d"], json!({}));
    assert_eq!(
        s.turn(),
        ["p: reserve n1 volumes [v] claims []".to_owned(), format!("q: wait 0/1 nodes are available: 1 {NO_VOLUME}.")]
    );
    let mut s = Scene::with_nodes(&["n1", "n2"]);
    for name in ["p", "q", "r"] {
        s.pod(name, &[], asks("10"));
    }
    assert_eq!(s.turn(), ["p: bind n1", "q: bind n2", "r: wait 0/2 nodes are available: 2 Insufficient cpu."]);
}

#[test]
fn a_pod_with_two_claims_never_takes_one_volume_twice() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.volume("v", "local", "5Gi", json!({}));
    s.volume("w", "local", "2Gi", json!({}));
    s.claim("large", "local", json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}));
    s.claim("small", "local", json!({}));
    s.pod("p", &["large", "small"], json!({}));
    assert_eq!(s.turn(), ["p: reserve n1 volumes [w,v] claims []"], "the smaller claim chooses first");
}

#[test]
fn an_older_notice_does_not_undo_a_choice() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.claim("c", "wait", json!({}));
    let before = Arc::new(s.claim_now("c"));
    s.pod("p", &["c"], json!({}));
    s.turn();
    s.world.set_claim(&Key::namespaced("ns", "c"), Some(before));
    assert_eq!(s.claim_now("c").metadata.annotation(annotation::SELECTED_NODE), Some("n1"), "the write is under way");
    s.claim("c", "wait", json!({}));
    assert_eq!(s.claim_now("c").metadata.annotation(annotation::SELECTED_NODE), None, "somebody else wrote first");
}

#[test]
fn a_pod_of_the_same_name_is_another_pod() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.claim("c", "wait", json!({}));
    s.pod("p", &["c"], json!({}));
    s.turn();
    s.gone("p");
    s.pod("p", &[], json!({"metadata": {"uid": "another"}}));
    assert_eq!(s.turn(), [] as [&str; 0], "what is under way for the first must end first");
    s.carry_out();
    assert_eq!(s.turn(), ["p: bind n1"]);
}

#[test]
fn everything_against_a_pods_volumes_is_said() {
    let said = alone(|s| {
        s.node("n1", json!({}));
        s.bound("far", json!({}), on_host("n2"));
        s.claim("none", "local", json!({}));
        s.pod("p", &["far", "none"], json!({}));
    });
    let both = format!("1 {NO_VOLUME}, 1 node(s) didn't match PersistentVolume's node affinity");
    assert_eq!(said, format!("p: wait 0/1 nodes are available: {both}."));
}

/// Disks that old plugins had are the volumes of the drivers that took over.
#[test]
fn volumes_of_old_plugins_are_their_drivers() {
    const DRIVER: &str = "pd.csi.storage.gke.io";
    let zone = json!({"spec": {"csi": null, "gcePersistentDisk": {"pdName": "d"}, "nodeAffinity": {"required":
        {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}]}]}}}});
    let labels = json!({"metadata": {"labels": {"topology.gke.io/zone": "a"}}});
    let installed = |count: usize| json!([{"name": DRIVER, "nodeID": "n1", "allocatable": {"count": count}}]);
    let wait = |why: &str| format!("p: wait 0/1 nodes are available: 1 {why}.");
    for (case, plugins, drivers, want) in [
        ("in the driver's zone", "kubernetes.io/aws-ebs,kubernetes.io/gce-pd", installed(9), "p: bind n1".to_owned()),
        ("the node has not moved yet", "", installed(9), wait("node(s) didn't match PersistentVolume's node affinity")),
        (
            "the driver is not there",
            "kubernetes.io/gce-pd",
            json!([]),
            wait("pd.csi.storage.gke.io CSI driver is not installed on the node"),
        ),
        ("no more of them", "kubernetes.io/gce-pd", installed(0), wait("node(s) exceed max volume count")),
    ] {
        let said = alone(|s| {
            s.node("n1", labels.clone());
            let object = json!({"metadata": {"annotations": {annotation::MIGRATED_PLUGINS: plugins}},
                "spec": {"drivers": drivers}});
            s.world.set_csi_node("n1", Some(&serde_json::from_value::<CSINode>(object).unwrap()));
            s.bound("c", json!({}), zone.clone());
            s.pod("p", &["c"], json!({}));
        });
        assert_eq!(said, want, "{case}");
    }
    // One that the pod names itself counts too.
    let disk = json!({"spec": {"volumes": [{"name": "v", "gcePersistentDisk": {"pdName": "x"}}]}});
    let said = alone(|s| {
        s.node("n1", json!({}));
        s.csi_node("n1", installed(1));
        s.pod("other", &[], merged(&disk, &json!({"spec": {"nodeName": "n1"}})));
        s.bound("c", json!({}), json!({"spec": {"csi": {"driver": DRIVER}}}));
        s.pod("p", &["c"], json!({}));
    });
    assert_eq!(said, wait("node(s) exceed max volume count"));
    // A class of the old name is its driver's.
    let said = with_claim("old", |s| {
        s.class("old", json!({"provisioner": "kubernetes.io/gce-pd", "volumeBindingMode": "WaitForFirstConsumer"}));
        s.csi_node("n1", installed(0));
    });
    assert_eq!(said, wait("node(s) exceed max volume count"));
}
