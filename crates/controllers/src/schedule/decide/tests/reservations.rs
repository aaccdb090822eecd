//! Reservations from the first decision to the binding, and how they end otherwise.

use super::*;

#[test]
fn a_pod_is_bound_after_its_volume_is_provisioned() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.claim("c", "wait", json!({}));
    s.pod("p", &["c"], json!({}));
    assert_eq!(s.decide_all(), ["p: reserve n1 volumes [] claims [c]"]);
    assert_eq!(s.current_claim("c").metadata.annotation(annotation::SELECTED_NODE), Some("n1"));
    s.write_all();
    assert_eq!(s.decide_all(), ["p: await"]);
    s.bind_claim("c", merged(&build::volume("v", "wait", "1Gi"), &host_affinity("n1")));
    assert_eq!(s.decide_all(), ["p: bind n1"]);
    s.write_all();
    assert_eq!(s.decide_all(), [] as [&str; 0], "the pod waits for the cache");
    s.pod("p", &["c"], json!({"spec": {"nodeName": "n1"}}));
    assert_eq!(s.decide_all(), [] as [&str; 0]);
}

#[test]
fn a_matched_volume_gets_its_claim_ref_before_the_pod_is_bound() {
    let mut s = TestCluster::with_nodes(&["n1", "n2"]);
    s.volume("v", "local", "1Gi", host_affinity("n2"));
    s.claim("c", "local", json!({}));
    s.pod("p", &["c"], json!({}));
    assert_eq!(s.decide_all(), ["p: reserve n2 volumes [v] claims []"]);
    let volume = s.state.volume("v").unwrap().clone();
    assert!(is_reserved_for(&volume, &s.current_claim("c")));
    assert_eq!(volume.metadata.annotation(annotation::BOUND_BY_CONTROLLER), Some("yes"));
    s.write_all();
    assert_eq!(s.decide_all(), ["p: await"]);
    s.bind_claim("c", s.state.volume("v").unwrap().as_ref().clone());
    assert_eq!(s.decide_all(), ["p: bind n2"]);
}

#[test]
fn a_reservation_is_given_up_when_its_volumes_cannot_be_bound() {
    type Change = Box<dyn FnOnce(&mut TestCluster)>;
    let cases: Vec<(&str, Change, &str)> = vec![
        (
            "the provisioner removes the selected node",
            Box::new(|s| {
                let mut claim = s.current_claim("c");
                claim.metadata.annotations = None;
                s.put_claim(claim);
            }),
            "give up binding volumes: provisioning failed for PVC \"c\"",
        ),
        (
            "another node is selected on the claim",
            Box::new(|s| {
                let mut claim = s.current_claim("c");
                build::annotate(&mut claim.metadata, annotation::SELECTED_NODE, "n9");
                s.put_claim(claim);
            }),
            "give up binding volumes: provisioning failed for PVC \"c\"",
        ),
        (
            "the claimRef is removed from the volume",
            Box::new(|s| {
                let mut volume = s.state.volume("v").unwrap().as_ref().clone();
                volume.spec.as_mut().unwrap().claim_ref = None;
                s.put_volume(volume);
            }),
            "give up binding volumes: ClaimRef got reset for pv \"v\"",
        ),
        (
            "the volume does not reach the node",
            Box::new(|s| {
                s.bind_claim("c", merged(&build::volume("x", "wait", "1Gi"), &host_affinity("n2")));
            }),
            "give up binding volumes: volume of PVC \"c\" does not reach the node",
        ),
        (
            "the node is deleted",
            Box::new(|s| s.state.set_node("n1", None)),
            "give up binding volumes: node \"n1\" not found",
        ),
        (
            "the claim is deleted",
            Box::new(|s| s.state.set_claim(&Key::namespaced("ns", "c"), None)),
            "give up binding volumes: persistentvolumeclaim \"c\" not found",
        ),
        (
            "the time is up",
            Box::new(|s| {
                s.now = 600;
                s.state.expire_reservations(Timestamp::from_second(600).unwrap());
            }),
            "give up binding volumes: context deadline exceeded",
        ),
    ];
    for (case, change, want) in cases {
        let mut s = TestCluster::with_nodes(&["n1"]);
        s.claim("c", "wait", json!({}));
        s.volume("v", "local", "1Gi", json!({}));
        s.claim("d", "local", json!({}));
        s.pod("p", &["c", "d"], json!({}));
        assert_eq!(s.decide_all(), ["p: reserve n1 volumes [v] claims [c]"], "{case}");
        s.write_all();
        s.decide_all();
        change(&mut s);
        let decisions = s.decide_all();
        assert_eq!(decisions, [format!("p: {want}")], "{case}");
        assert!(!s.state.assigned.contains_key(&Key::namespaced("ns", "p")), "{case}: the reservation is released");
        s.write_all();
        assert_eq!(s.decide_all(), [] as [&str; 0], "{case}: the pod is not queued");
    }
}

#[test]
fn the_next_expiry_is_that_of_the_oldest_reservation() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    let at = |second: i64| Timestamp::from_second(second).unwrap();
    for (name, now) in [("a", 100), ("b", 200)] {
        s.claim(name, "wait", json!({}));
        s.pod(name, &[name], json!({}));
        s.now = now;
        s.decide_all();
        s.write_all();
        s.decide_all();
    }
    assert_eq!(s.state.expire_reservations(at(300)), Some(at(700)));
    s.now = 700;
    assert_eq!(s.state.expire_reservations(at(700)), Some(at(800)));
    assert_eq!(s.decide_all(), ["a: give up binding volumes: context deadline exceeded"]);
}

#[test]
fn a_returned_node_is_selected_last() {
    let mut s = TestCluster::with_nodes(&["n1", "n2"]);
    s.claim("c", "wait", json!({}));
    s.pod("p", &["c"], json!({}));
    let key = Key::namespaced("ns", "p");
    for node in ["n1", "n2", "n1"] {
        assert_eq!(s.decide_all(), [format!("p: reserve {node} volumes [] claims [c]")]);
        s.write_all();
        s.decide_all();
        let mut claim = s.current_claim("c");
        claim.metadata.annotations = None;
        s.put_claim(claim);
        assert_eq!(s.decide_all().len(), 1);
        s.write_all();
        s.state.enqueue(&key);
    }
}

#[test]
fn a_failed_write_reverts_the_assumed_objects() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.volume("v", "local", "1Gi", json!({}));
    s.claim("c", "local", json!({}));
    s.claim("d", "wait", json!({}));
    s.pod("p", &["c", "d"], cpu_request("10"));
    assert_eq!(s.decide_all(), ["p: reserve n1 volumes [v] claims [d]"]);
    s.fail_all();
    assert_eq!(s.current_claim("d").metadata.annotation(annotation::SELECTED_NODE), None);
    assert!(s.state.volume("v").unwrap().spec.as_ref().unwrap().claim_ref.is_none());
    s.pod("q", &["c"], cpu_request("10"));
    assert_eq!(s.decide_all(), ["q: reserve n1 volumes [v] claims []"], "volume and resources are free again");
}

#[test]
fn pods_that_share_a_claim_are_queued_when_its_write_failed() {
    for (class, p, q) in [
        ("wait", "p: reserve n1 volumes [] claims [c]", "q: reserve n1 volumes [] claims [c]"),
        ("local", "p: reserve n1 volumes [v] claims []", "q: reserve n1 volumes [v] claims []"),
    ] {
        let mut s = TestCluster::with_nodes(&["n1"]);
        s.volume("v", "local", "1Gi", json!({}));
        s.claim("c", class, json!({}));
        s.pod("p", &["c"], json!({}));
        s.pod("q", &["c"], json!({}));
        assert_eq!(s.decide_all(), [p, "q: await"], "p's decision is written for both");
        s.fail_all();
        let next = s.decide_all();
        assert!(next.len() == 1 && next[0].starts_with("q: give up"), "{next:?}");
        s.write_all();
        s.state.enqueue(&Key::namespaced("ns", "q"));
        assert_eq!(s.decide_all(), [q]);
    }
}

#[test]
fn pods_of_one_round_see_each_others_decisions() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.volume("v", "local", "1Gi", json!({}));
    s.claim("c", "local", json!({}));
    s.claim("d", "local", json!({}));
    s.pod("p", &["c"], json!({}));
    s.pod("q", &["d"], json!({}));
    assert_eq!(
        s.decide_all(),
        ["p: reserve n1 volumes [v] claims []".to_owned(), format!("q: wait 0/1 nodes are available: 1 {NO_VOLUME}.")]
    );
    let mut s = TestCluster::with_nodes(&["n1", "n2"]);
    for name in ["p", "q", "r"] {
        s.pod(name, &[], cpu_request("10"));
    }
    assert_eq!(s.decide_all(), ["p: bind n1", "q: bind n2", "r: wait 0/2 nodes are available: 2 Insufficient cpu."]);
}

#[test]
fn one_volume_is_never_matched_with_two_claims_of_a_pod() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.volume("v", "local", "5Gi", json!({}));
    s.volume("w", "local", "2Gi", json!({}));
    s.claim("large", "local", json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}));
    s.claim("small", "local", json!({}));
    s.pod("p", &["large", "small"], json!({}));
    assert_eq!(s.decide_all(), ["p: reserve n1 volumes [w,v] claims []"], "the smaller claim is matched first");
}

#[test]
fn an_unchanged_object_does_not_undo_an_assumption() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.claim("c", "wait", json!({}));
    let before = Arc::new(s.current_claim("c"));
    s.pod("p", &["c"], json!({}));
    s.decide_all();
    s.state.set_claim(&Key::namespaced("ns", "c"), Some(before));
    assert_eq!(
        s.current_claim("c").metadata.annotation(annotation::SELECTED_NODE),
        Some("n1"),
        "the write is in progress"
    );
    s.claim("c", "wait", json!({}));
    assert_eq!(
        s.current_claim("c").metadata.annotation(annotation::SELECTED_NODE),
        None,
        "another client has changed the claim"
    );
}

#[test]
fn a_recreated_pod_is_another_pod() {
    let mut s = TestCluster::with_nodes(&["n1"]);
    s.claim("c", "wait", json!({}));
    s.pod("p", &["c"], json!({}));
    s.decide_all();
    s.delete_pod("p");
    s.pod("p", &[], json!({"metadata": {"uid": "another"}}));
    assert_eq!(s.decide_all(), [] as [&str; 0], "the decision about the first pod must be completed first");
    s.write_all();
    assert_eq!(s.decide_all(), ["p: bind n1"]);
}
