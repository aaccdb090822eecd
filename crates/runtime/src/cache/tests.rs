//! The cache against lists, watch events and own writes in different orders.

use std::collections::HashSet;

use super::state::{MAX_UNPACKED_OBJECTS, PackCandidate};
use super::*;
use cleat_testing::build;
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;

fn pod(name: &str, revision: u64, node: &str) -> Pod {
    let mut pod = build::pod("ns", name, node, &[]);
    pod.metadata.resource_version = Some(revision.to_string());
    pod
}

fn key(name: &str) -> Key {
    Key::namespaced("ns", name)
}

fn keys(names: &[&str]) -> HashSet<Key> {
    names.iter().map(|name| key(name)).collect()
}

fn recorded_changes(cache: &Cache<Pod>) -> Arc<Mutex<Vec<String>>> {
    let changes = Arc::new(Mutex::new(Vec::new()));
    let sink = changes.clone();
    cache.subscribe(move |change| {
        let verb = if matches!(change, Change::Applied { .. }) { "applied" } else { "deleted" };
        sink.lock().push(format!("{verb} {}", change.object().metadata.revision()));
    });
    changes
}

#[test]
fn a_relist_removes_objects_that_it_does_not_contain() {
    let cache = Cache::default();
    cache.apply_event(pod("a", 1, ""));
    cache.apply_event(pod("b", 2, ""));
    cache.complete_list(&keys(&["a", "b"]), 2);
    assert!(cache.is_synced());
    cache.complete_list(&keys(&["b"]), 5);
    assert!(cache.get(&key("a")).is_none());
    assert!(cache.get(&key("b")).is_some());
}

#[test]
fn a_relist_keeps_objects_that_were_written_after_it() {
    let cache = Cache::default();
    cache.complete_list(&keys(&[]), 5);
    cache.observe_write(pod("a", 9, ""));
    cache.complete_list(&keys(&[]), 7);
    assert!(cache.get(&key("a")).is_some());
    cache.complete_list(&keys(&[]), 9);
    assert!(cache.get(&key("a")).is_none());
}

#[test]
fn an_own_write_is_visible_at_once_and_an_older_event_does_not_undo_it() {
    let cache = Cache::default();
    cache.apply_event(pod("a", 5, ""));
    cache.observe_write(pod("a", 7, "n1"));
    cache.apply_event(pod("a", 6, ""));
    assert_eq!(cache.get(&key("a")).unwrap().metadata.revision(), 7);
    cache.apply_event(pod("a", 8, "n2"));
    assert_eq!(cache.get(&key("a")).unwrap().metadata.revision(), 8);
}

#[test]
fn an_event_for_an_own_write_is_recognised_by_its_revision() {
    let cache = Cache::default();
    cache.observe_write(pod("a", 7, "n1"));
    assert!(cache.confirm_own_write(&key("a"), 7));
    for (case, name, revision) in [("newer", "a", 8), ("older", "a", 6), ("another", "b", 7)] {
        assert!(!cache.confirm_own_write(&key(name), revision), "{case}");
    }
    cache.apply_deletion(&key("a"), 9);
    cache.observe_write(pod("a", 7, "n1"));
    assert!(cache.get(&key("a")).is_none());
}

#[test]
fn a_late_reply_does_not_bring_back_a_deleted_object() {
    let cache = Cache::default();
    cache.apply_event(pod("a", 5, ""));
    cache.apply_deletion(&key("a"), 9);
    cache.observe_write(pod("a", 7, "n1"));
    assert!(cache.get(&key("a")).is_none(), "the watch is ahead of the reply");
    cache.advance_to(20);
    cache.observe_write(pod("b", 15, ""));
    assert!(cache.get(&key("b")).is_none(), "a bookmark is ahead of the reply");
}

#[test]
fn an_object_recreated_under_the_same_name_is_a_deletion_and_a_creation() {
    let cache = Cache::default();
    cache.apply_event(pod("a", 5, ""));
    let changes = recorded_changes(&cache);
    let mut other = pod("a", 9, "");
    other.metadata.uid = Some("another".to_owned());
    cache.apply_event(other);
    assert_eq!(*changes.lock(), ["applied 5", "deleted 5", "applied 9"]);
    cache.apply_deletion(&key("a"), 7);
    assert!(cache.get(&key("a")).is_some(), "the deletion was of the older object");
}

#[test]
fn indexes_follow_the_objects() {
    let cache = Cache::default();
    cache.apply_event(pod("a", 1, "n1"));
    let by_node = cache.index(|p: &Pod| p.spec.iter().filter_map(|s| s.node_name.clone()).collect());
    cache.apply_event(pod("b", 2, "n1"));
    cache.apply_event(pod("a", 3, "n2"));
    cache.apply_deletion(&key("b"), 4);
    assert!(by_node.get("n1").is_empty() && !by_node.has("n1") && by_node.has("n2"));
    assert_eq!(by_node.get("n2").len(), 1);
}

#[test]
fn a_new_subscriber_gets_the_objects_already_cached() {
    let cache = Cache::default();
    cache.apply_event(pod("a", 1, ""));
    let changes = recorded_changes(&cache);
    cache.apply_event(pod("a", 2, ""));
    assert_eq!(*changes.lock(), ["applied 1", "applied 2"]);
}

fn unpacked_count(cache: &Cache<Pod>) -> usize {
    cache.0.state.read().objects.values().filter(|entry| entry.stored.is_unpacked()).count()
}

#[test]
fn idle_objects_are_packed_and_read_as_before() {
    let cache = Cache::default();
    let by_node = cache.index(|p: &Pod| p.spec.iter().filter_map(|s| s.node_name.clone()).collect());
    let all = MAX_UNPACKED_OBJECTS + 300;
    for n in 0..all {
        cache.apply_event(pod(&format!("pod-{n}"), n as u64 + 1, &format!("node-{n}")));
    }
    assert_eq!(unpacked_count(&cache), MAX_UNPACKED_OBJECTS);
    let first = pod("pod-0", 1, "node-0");
    assert_eq!(*by_node.get("node-0")[0], first);
    assert_eq!(*cache.get(&key("pod-0")).unwrap(), first);
    assert_eq!(
        unpacked_count(&cache),
        MAX_UNPACKED_OBJECTS,
        "an object that is read is unpacked, and another is packed"
    );
    assert!(cache.0.state.read().objects[&key("pod-0")].stored.is_unpacked());
    assert_eq!(cache.all().len(), all);
    let changes = recorded_changes(&cache);
    assert_eq!(changes.lock().len(), all);
    changes.lock().clear();
    assert!(cache.confirm_own_write(&key("pod-1"), 2), "the revision of a packed object is available");
    cache.apply_event(pod("pod-1", 10_000, "elsewhere"));
    cache.apply_deletion(&key("pod-2"), 10_001);
    assert_eq!(*changes.lock(), ["applied 10000", "deleted 3"]);
    assert!(!by_node.has("node-1") && !by_node.has("node-2") && by_node.has("elsewhere"));
}

#[test]
fn an_object_that_changes_while_it_is_packed_keeps_the_newer_state() {
    let cache = Cache::default();
    cache.apply_event(pod("a", 1, "n1"));
    let object = cache.get(&key("a")).unwrap();
    cache.apply_event(pod("a", 2, "n2"));
    cache.pack_idle(Some(PackCandidate { key: Arc::new(key("a")), revision: 1, object }));
    assert_eq!(cache.get(&key("a")).unwrap().metadata.revision(), 2);
    assert_eq!(unpacked_count(&cache), 1);
}

#[test]
fn an_index_term_may_have_several_objects() {
    let cache = Cache::default();
    let by_node = cache.index(|p: &Pod| p.spec.iter().filter_map(|s| s.node_name.clone()).collect());
    for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
        cache.apply_event(pod(name, n as u64 + 1, "n"));
    }
    assert_eq!(by_node.get("n").len(), 3);
    cache.apply_event(pod("a", 9, "m"));
    cache.apply_deletion(&key("b"), 10);
    assert_eq!((by_node.get("n").len(), by_node.get("m").len()), (1, 1));
    cache.apply_deletion(&key("c"), 11);
    assert!(!by_node.has("n"));
}
