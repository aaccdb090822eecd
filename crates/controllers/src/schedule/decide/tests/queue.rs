//! Who goes first, where to, and who has to look again.

use super::*;

#[test]
fn the_best_of_the_nodes_that_fit() {
    let prefers = json!({"spec": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution":
        [{"weight": 1, "preference": {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}}]}}}});
    let soft = json!({"spec": {"taints": [{"key": "k", "effect": "PreferNoSchedule"}]}});
    for (case, b, before, pod, want) in [
        ("equal ones go by name", json!({}), None, json!({}), "a"),
        ("the one with fewer pods", json!({}), Some("a"), json!({}), "b"),
        ("a wish is met", json!({"metadata": {"labels": {"disk": "ssd"}}}), None, prefers, "b"),
        ("a soft taint is avoided", soft, Some("a"), json!({}), "a"),
        ("more room", json!({"status": {"allocatable": {"cpu": "100", "memory": "100Gi"}}}), None, asks("1"), "b"),
    ] {
        let said = alone(|s| {
            s.node("a", json!({}));
            s.node("b", b);
            if let Some(node) = before {
                s.pod("other", &[], json!({"spec": {"nodeName": node}}));
            }
            s.pod("p", &[], pod);
        });
        assert_eq!(said, format!("p: bind {want}"), "{case}");
    }
    let said = alone(|s| {
        s.node("a", json!({}));
        s.node("b", json!({}));
        s.volume("loose", "local", "9Gi", on_host("a"));
        s.volume("tight", "local", "1Gi", on_host("b"));
        s.claim("c", "local", json!({}));
        s.pod("p", &["c"], json!({}));
    });
    assert_eq!(said, "p: reserve b volumes [tight] claims []", "the volume that wastes least");
    let said = alone(|s| {
        for (node, sizes) in [("a", ["1Gi", "10Gi"]), ("b", ["4Gi", "4Gi"])] {
            s.node(node, json!({}));
            for (number, size) in sizes.into_iter().enumerate() {
                s.volume(&format!("{node}{number}"), "local", size, on_host(node));
            }
        }
        s.claim("c", "local", json!({}));
        s.claim("d", "local", json!({}));
        s.pod("p", &["c", "d"], json!({}));
    });
    assert_eq!(said, "p: reserve b volumes [b0,b1] claims []", "volumes of one class count together");
    let reported = |counts: bool| {
        alone(move |s| {
            s.driver(json!({"storageCapacity": counts}));
            for (node, size) in [("a", "2Gi"), ("b", "9Gi")] {
                s.node(node, json!({}));
                s.capacity(
                    node,
                    "wait",
                    json!({"capacity": size,
                    "nodeTopology": {"matchLabels": {"kubernetes.io/hostname": node}}}),
                );
            }
            s.claim("c", "wait", json!({}));
            s.pod("p", &["c"], json!({}));
        })
    };
    assert_eq!(reported(true), "p: reserve b volumes [] claims [c]", "where most storage is left");
    assert_eq!(reported(false), "p: reserve a volumes [] claims [c]", "a driver that does not count is not compared");
}

#[test]
fn important_pods_go_first_then_the_oldest() {
    let mut s = Scene::with_nodes(&["n1"]);
    s.pod("late", &[], json!({"metadata": {"creationTimestamp": "2026-01-02T00:00:00Z"}}));
    s.pod("early", &[], json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}));
    s.pod("urgent", &[], json!({"metadata": {"creationTimestamp": "2026-01-03T00:00:00Z"}, "spec": {"priority": 9}}));
    assert_eq!(s.turn(), ["urgent: bind n1", "early: bind n1", "late: bind n1"]);
}

/// A pod that cannot be placed for one reason, and whether a change gives it another turn.
#[test]
fn a_waiting_pod_is_woken_by_what_can_help_it_and_by_nothing_else() {
    type Prepare = fn(&mut Scene);
    let cases: [(&str, Prepare, Prepare, bool); 22] = [
        ("no room, a pod leaves", no_room, |s| s.gone("other"), true),
        ("no room, the node grows", no_room, |s| s.node("n1", json!({"status": {"allocatable": {"cpu": "20"}}})), true),
        ("no room, a new node", no_room, |s| s.node("n2", json!({})), true),
        ("no room, a heartbeat", no_room, |s| s.node("n1", json!({"metadata": {"resourceVersion": "9"}})), false),
        ("no room, a volume", no_room, |s| s.volume("v", "local", "1Gi", json!({})), false),
        ("cordoned, uncordoned", cordoned, |s| s.node("n1", json!({})), true),
        (
            "cordoned, a label",
            cordoned,
            |s| {
                s.node("n1", json!({"spec": {"unschedulable": true}, "metadata": {"labels": {"x": "y"}}}));
            },
            false,
        ),
        ("wrong label, labelled", unlabelled, |s| s.node("n1", json!({"metadata": {"labels": {"disk": "ssd"}}})), true),
        ("wrong label, a pod leaves", unlabelled, |s| s.gone("other"), false),
        ("no volume, one comes", no_volume, |s| s.volume("v", "local", "1Gi", json!({})), true),
        (
            "no volume, its class changes",
            no_volume,
            |s| {
                s.class(
                    "local",
                    json!({
            "volumeBindingMode": "WaitForFirstConsumer", "allowedTopologies": []}),
                )
            },
            true,
        ),
        ("no volume, a driver comes", no_volume, |s| s.csi_node("n1", json!([])), false),
        ("no volume, its claim changes", no_volume, |s| s.claim("c", "local", json!({})), true),
        ("no volume, another claim changes", no_volume, |s| s.claim("d", "local", json!({})), false),
        ("no driver, it comes", no_driver, |s| s.csi_node("n1", json!([{"name": build::DRIVER, "nodeID": "x"}])), true),
        ("no driver, a volume", no_driver, |s| s.volume("v", "fast", "1Gi", json!({})), false),
        ("no storage, it grows", no_storage, |s| s.capacity("r", "wait", json!({"capacity": "9Gi"})), true),
        ("no storage, it shrinks", no_storage, |s| s.capacity("r", "wait", json!({"capacity": "1"})), false),
        ("no storage, nobody counts any more", no_storage, |s| s.driver(json!({})), true),
        ("unbound, its claim is bound", unbound, |s| s.bound("c", json!({}), json!({})), true),
        ("unbound, a node comes", unbound, |s| s.node("n2", json!({})), true),
        (
            "unbound, the pod's labels change",
            unbound,
            |s| {
                s.pod("p", &["c"], json!({"metadata": {"labels": {"x": "y"}}}));
            },
            false,
        ),
    ];
    fn no_room(s: &mut Scene) {
        s.node("n1", json!({}));
        s.pod("other", &[], merged(&asks("5"), &json!({"spec": {"nodeName": "n1"}})));
        s.pod("p", &[], asks("6"));
    }
    fn cordoned(s: &mut Scene) {
        s.node("n1", json!({"spec": {"unschedulable": true}}));
        s.pod("p", &[], json!({}));
    }
    fn unlabelled(s: &mut Scene) {
        s.node("n1", json!({}));
        s.pod("other", &[], json!({"spec": {"nodeName": "n1"}}));
        s.pod("p", &[], json!({"spec": {"nodeSelector": {"disk": "ssd"}}}));
    }
    fn no_volume(s: &mut Scene) {
        s.node("n1", json!({}));
        s.claim("c", "local", json!({}));
        s.pod("p", &["c"], json!({}));
    }
    fn no_driver(s: &mut Scene) {
        s.node("n1", json!({}));
        s.csi_node("n1", json!([]));
        s.bound("c", json!({}), json!({}));
        s.pod("p", &["c"], json!({}));
    }
    fn no_storage(s: &mut Scene) {
        s.node("n1", json!({}));
        s.driver(json!({"storageCapacity": true}));
        s.capacity("r", "wait", json!({"capacity": "1Mi"}));
        s.claim("c", "wait", json!({}));
        s.pod("p", &["c"], json!({}));
    }
    fn unbound(s: &mut Scene) {
        s.node("n1", json!({}));
        s.claim("c", "fast", json!({}));
        s.pod("p", &["c"], json!({}));
    }
    for (case, prepare, change, want) in cases {
        let mut s = Scene::new();
        prepare(&mut s);
        let said = s.turn();
        assert!(said.len() == 1 && said[0].starts_with("p: wait"), "{case}: {said:?}");
        s.carry_out();
        change(&mut s);
        assert_eq!(!s.turn().is_empty(), want, "{case}");
    }
}
