//! The order of pods, the choice among nodes, and which changes queue a pod again.

use super::*;

#[test]
fn the_best_of_the_possible_nodes_is_selected() {
    let prefers = json!({"spec": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution":
        [{"weight": 1, "preference": {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}}]}}}});
    let soft = json!({"spec": {"taints": [{"key": "k", "effect": "PreferNoSchedule"}]}});
    for (case, b, before, pod, want) in [
        ("equal nodes: the first by name", json!({}), None, json!({}), "a"),
        ("the node with fewer pods", json!({}), Some("a"), json!({}), "b"),
        ("preferred affinity", json!({"metadata": {"labels": {"disk": "ssd"}}}), None, prefers, "b"),
        ("a PreferNoSchedule taint is avoided", soft, Some("a"), json!({}), "a"),
        (
            "more free resources",
            json!({"status": {"allocatable": {"cpu": "100", "memory": "100Gi"}}}),
            None,
            cpu_request("1"),
            "b",
        ),
    ] {
        let decisions = decide_with(|s| {
            s.node("a", json!({}));
            s.node("b", b);
            if let Some(node) = before {
                s.pod("other", &[], json!({"spec": {"nodeName": node}}));
            }
            s.pod("p", &[], pod);
        });
        assert_eq!(decisions, format!("p: bind {want}"), "{case}");
    }
    let decisions = decide_with(|s| {
        s.node("a", json!({}));
        s.node("b", json!({}));
        s.volume("loose", "local", "9Gi", host_affinity("a"));
        s.volume("tight", "local", "1Gi", host_affinity("b"));
        s.claim("c", "local", json!({}));
        s.pod("p", &["c"], json!({}));
    });
    assert_eq!(decisions, "p: reserve b volumes [tight] claims []", "the volume with the least unused capacity");
    let decisions = decide_with(|s| {
        for (node, sizes) in [("a", ["1Gi", "10Gi"]), ("b", ["4Gi", "4Gi"])] {
            s.node(node, json!({}));
            for (number, size) in sizes.into_iter().enumerate() {
                s.volume(&format!("{node}{number}"), "local", size, host_affinity(node));
            }
        }
        s.claim("c", "local", json!({}));
        s.claim("d", "local", json!({}));
        s.pod("p", &["c", "d"], json!({}));
    });
    assert_eq!(decisions, "p: reserve b volumes [b0,b1] claims []", "volumes of one class count together");
    let with_capacity = |tracks: bool| {
        decide_with(move |s| {
            s.driver(json!({"storageCapacity": tracks}));
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
    assert_eq!(with_capacity(true), "p: reserve b volumes [] claims [c]", "the node with the most storage left");
    assert_eq!(
        with_capacity(false),
        "p: reserve a volumes [] claims [c]",
        "capacity does not count if the driver does not track it"
    );
}

#[test]
fn pods_are_ordered_by_priority_then_age() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.pod("late", &[], json!({"metadata": {"creationTimestamp": "2026-01-02T00:00:00Z"}}));
    s.pod("early", &[], json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}));
    s.pod("urgent", &[], json!({"metadata": {"creationTimestamp": "2026-01-03T00:00:00Z"}, "spec": {"priority": 9}}));
    assert_eq!(s.decide_all(), ["urgent: bind n1", "early: bind n1", "late: bind n1"]);
}

#[test]
fn a_pending_pod_is_queued_again_by_changes_that_can_help_it_only() {
    type Prepare = fn(&mut TestCluster);
    let cases: [(&str, Prepare, Prepare, bool); 22] = [
        ("no resources, a pod is deleted", no_resources, |s| s.delete_pod("other"), true),
        (
            "no resources, the node grows",
            no_resources,
            |s| s.node("n1", json!({"status": {"allocatable": {"cpu": "20"}}})),
            true,
        ),
        ("no resources, a new node", no_resources, |s| s.node("n2", json!({})), true),
        (
            "no resources, a heartbeat",
            no_resources,
            |s| s.node("n1", json!({"metadata": {"resourceVersion": "9"}})),
            false,
        ),
        ("no resources, a volume", no_resources, |s| s.volume("v", "local", "1Gi", json!({})), false),
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
        ("wrong label, a pod is deleted", unlabelled, |s| s.delete_pod("other"), false),
        ("no volume, a volume is created", no_volume, |s| s.volume("v", "local", "1Gi", json!({})), true),
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
        ("no volume, drivers change", no_volume, |s| s.csi_node("n1", json!([])), false),
        ("no volume, its claim changes", no_volume, |s| s.claim("c", "local", json!({})), true),
        ("no volume, another claim changes", no_volume, |s| s.claim("d", "local", json!({})), false),
        (
            "no driver, it is installed",
            no_driver,
            |s| s.csi_node("n1", json!([{"name": build::DRIVER, "nodeID": "x"}])),
            true,
        ),
        ("no driver, a volume", no_driver, |s| s.volume("v", "fast", "1Gi", json!({})), false),
        ("no storage, it grows", no_storage, |s| s.capacity("r", "wait", json!({"capacity": "9Gi"})), true),
        ("no storage, it shrinks", no_storage, |s| s.capacity("r", "wait", json!({"capacity": "1"})), false),
        ("no storage, the driver stops tracking it", no_storage, |s| s.driver(json!({})), true),
        ("unbound, its claim is bound", unbound, |s| s.bound("c", json!({}), json!({})), true),
        ("unbound, a node is added", unbound, |s| s.node("n2", json!({})), true),
        (
            "unbound, the pod's labels change",
            unbound,
            |s| {
                s.pod("p", &["c"], json!({"metadata": {"labels": {"x": "y"}}}));
            },
            false,
        ),
    ];
    fn no_resources(s: &mut TestCluster) {
        s.node("n1", json!({}));
        s.pod("other", &[], merged(&cpu_request("5"), &json!({"spec": {"nodeName": "n1"}})));
        s.pod("p", &[], cpu_request("6"));
    }
    fn cordoned(s: &mut TestCluster) {
        s.node("n1", json!({"spec": {"unschedulable": true}}));
        s.pod("p", &[], json!({}));
    }
    fn unlabelled(s: &mut TestCluster) {
        s.node("n1", json!({}));
        s.pod("other", &[], json!({"spec": {"nodeName": "n1"}}));
        s.pod("p", &[], json!({"spec": {"nodeSelector": {"disk": "ssd"}}}));
    }
    fn no_volume(s: &mut TestCluster) {
        s.node("n1", json!({}));
        s.claim("c", "local", json!({}));
        s.pod("p", &["c"], json!({}));
    }
    fn no_driver(s: &mut TestCluster) {
        s.node("n1", json!({}));
        s.csi_node("n1", json!([]));
        s.bound("c", json!({}), json!({}));
        s.pod("p", &["c"], json!({}));
    }
    fn no_storage(s: &mut TestCluster) {
        s.node("n1", json!({}));
        s.driver(json!({"storageCapacity": true}));
        s.capacity("r", "wait", json!({"capacity": "1Mi"}));
        s.claim("c", "wait", json!({}));
        s.pod("p", &["c"], json!({}));
    }
    fn unbound(s: &mut TestCluster) {
        s.node("n1", json!({}));
        s.claim("c", "fast", json!({}));
        s.pod("p", &["c"], json!({}));
    }
    for (case, prepare, change, want) in cases {
        let mut s = TestCluster::new();
        prepare(&mut s);
        let decisions = s.decide_all();
        assert!(decisions.len() == 1 && decisions[0].starts_with("p: wait"), "{case}: {decisions:?}");
        s.write_all();
        change(&mut s);
        assert_eq!(!s.decide_all().is_empty(), want, "{case}");
    }
}
