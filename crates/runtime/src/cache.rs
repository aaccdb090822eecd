//! One kind's objects, kept current by a watch and shared by everyone in the process.
//!
//! A cache answers reads from memory, tells subscribers of each change, and keeps the indexes controllers ask for.
//! It gives read-your-writes: a component hands the server's reply to [`Cache::observe_write`], and no later read
//! shows an older state. It never decides anything.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use kube::Resource;
use parking_lot::RwLock;
use tokio::sync::watch;

/// What happened to one object. On a relist, objects that vanished are `Deleted` like any other.
#[derive(Debug)]
pub enum Change<K> {
    Applied { old: Option<Arc<K>>, new: Arc<K> },
    Deleted(Arc<K>),
}

impl<K> Change<K> {
    /// The object concerned, in its newest form.
    pub fn object(&self) -> &Arc<K> {
        match self {
            Self::Applied { new, .. } => new,
            Self::Deleted(last) => last,
        }
    }
}

impl<K> Clone for Change<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Applied { old, new } => Self::Applied { old: old.clone(), new: new.clone() },
            Self::Deleted(last) => Self::Deleted(last.clone()),
        }
    }
}

type Subscriber<K> = Arc<dyn Fn(&Change<K>) + Send + Sync>;
type Extract<K> = Box<dyn Fn(&K) -> Vec<String> + Send + Sync>;

pub struct Cache<K>(Arc<Shared<K>>);

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Shared<K> {
    state: RwLock<State<K>>,
    synced: watch::Sender<bool>,
}

struct State<K> {
    objects: HashMap<Key, Arc<K>>,
    /// The highest revision the watch delivered: a reply at or below it is old news.
    seen: u64,
    indexes: Vec<IndexState<K>>,
    subscribers: Vec<Subscriber<K>>,
}

struct IndexState<K> {
    extract: Extract<K>,
    keys: HashMap<String, HashSet<Key>>,
}

impl<K> Default for Cache<K> {
    fn default() -> Self {
        let state = State { objects: HashMap::new(), seen: 0, indexes: Vec::new(), subscribers: Vec::new() };
        Self(Arc::new(Shared { state: RwLock::new(state), synced: watch::Sender::new(false) }))
    }
}

impl<K> Cache<K>
where
    K: Resource + Debug + Send + Sync + 'static,
{
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.0.state.read().objects.get(key).cloned()
    }

    /// A cluster-scoped object by name.
    pub fn named(&self, name: &str) -> Option<Arc<K>> {
        self.get(&Key::cluster(name))
    }

    pub fn all(&self) -> Vec<Arc<K>> {
        self.0.state.read().objects.values().cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.0.state.read().objects.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns once the first complete list has arrived.
    pub async fn synced(&self) {
        let mut synced = self.0.synced.subscribe();
        // The sender lives in `self`, so the channel cannot close under us.
        let _ = synced.wait_for(|s| *s).await;
    }

    pub fn is_synced(&self) -> bool {
        *self.0.synced.borrow()
    }

    /// Calls `subscriber` for every object already here, then for every change. It runs on the task that brought the
    /// change: it must only note what to do (put a key on a queue) and never wait. No lock is held meanwhile, so it may
    /// read this and other caches; the order of notices for one object is not kept.
    pub fn subscribe(&self, subscriber: impl Fn(&Change<K>) + Send + Sync + 'static) {
        let subscriber: Subscriber<K> = Arc::new(subscriber);
        let present: Vec<Arc<K>> = {
            let mut state = self.0.state.write();
            state.subscribers.push(subscriber.clone());
            state.objects.values().cloned().collect()
        };
        for new in present {
            subscriber(&Change::Applied { old: None, new });
        }
    }

    /// Keeps objects findable by the strings that `extract` gives for each.
    pub fn index(&self, extract: impl Fn(&K) -> Vec<String> + Send + Sync + 'static) -> Index<K> {
        let mut state = self.0.state.write();
        let mut index = IndexState { extract: Box::new(extract), keys: HashMap::new() };
        for (key, object) in &state.objects {
            index.insert(key, object);
        }
        state.indexes.push(index);
        Index { cache: self.clone(), position: state.indexes.len() - 1 }
    }

    /// Takes in the server's reply to a write of our own, before the watch brings it.
    pub fn observe_write(&self, object: K) {
        let revision = object.meta().revision();
        self.change(|state| if revision > state.seen { state.apply(object) } else { Vec::new() });
    }

    /// The watch or a list shows the object in this form.
    pub(crate) fn arrived(&self, object: K) {
        self.change(|state| {
            state.seen = state.seen.max(object.meta().revision());
            state.apply(object)
        });
    }

    /// The watch shows the object at this revision. Is that what is here already, by a write of our own?
    pub(crate) fn is_known(&self, key: &Key, revision: u64) -> bool {
        let mut state = self.0.state.write();
        let known = state.objects.get(key).is_some_and(|object| object.meta().revision() == revision);
        if known {
            state.seen = state.seen.max(revision);
        }
        known
    }

    /// The watch shows that the object is gone since this revision.
    pub(crate) fn departed(&self, key: &Key, revision: u64) {
        self.change(|state| {
            state.seen = state.seen.max(revision);
            state.remove_up_to(key, revision)
        });
    }

    /// A complete list was taken at `revision` and showed these objects: what else is here is gone, unless it is newer
    /// than the list.
    pub(crate) fn listed(&self, shown: &HashSet<Key>, revision: u64) {
        let here: Vec<Key> = self.0.state.read().objects.keys().filter(|k| !shown.contains(k)).cloned().collect();
        for key in here {
            self.change(|state| state.remove_up_to(&key, revision));
        }
        self.passed(revision);
        self.0.synced.send_replace(true);
    }

    /// The watch has come to `revision`: replies up to it are old news.
    pub(crate) fn passed(&self, revision: u64) {
        let mut state = self.0.state.write();
        state.seen = state.seen.max(revision);
    }

    /// Changes the state under the lock, then tells the subscribers without it.
    fn change(&self, change: impl FnOnce(&mut State<K>) -> Vec<Change<K>>) {
        let (changes, subscribers) = {
            let mut state = self.0.state.write();
            let changes = change(&mut state);
            if changes.is_empty() {
                return;
            }
            (changes, state.subscribers.clone())
        };
        for change in &changes {
            for subscriber in &subscribers {
                subscriber(change);
            }
        }
    }
}

impl<K: Resource> State<K> {
    /// Takes the object in unless what is here is as new: our own write may be ahead of the watch. An object that took
    /// the name of another is told as a deletion and a creation; a relist shows no more than that it is another.
    fn apply(&mut self, object: K) -> Vec<Change<K>> {
        let revision = object.meta().revision();
        let key = Key::of(object.meta());
        if self.objects.get(&key).is_some_and(|o| revision != 0 && o.meta().revision() >= revision) {
            return Vec::new();
        }
        let mut changes = Vec::new();
        if self.objects.get(&key).is_some_and(|o| o.meta().uid() != object.meta().uid()) {
            changes.extend(self.remove(&key));
        }
        let new = Arc::new(object);
        let old = self.objects.insert(key.clone(), new.clone());
        for index in &mut self.indexes {
            if let Some(old) = &old {
                index.remove(&key, old);
            }
            index.insert(&key, &new);
        }
        changes.push(Change::Applied { old, new });
        changes
    }

    fn remove_up_to(&mut self, key: &Key, revision: u64) -> Vec<Change<K>> {
        match self.objects.get(key) {
            Some(object) if object.meta().revision() <= revision => self.remove(key).into_iter().collect(),
            Some(_) | None => Vec::new(),
        }
    }

    fn remove(&mut self, key: &Key) -> Option<Change<K>> {
        let old = self.objects.remove(key)?;
        for index in &mut self.indexes {
            index.remove(key, &old);
        }
        Some(Change::Deleted(old))
    }
}

impl<K> IndexState<K> {
    fn insert(&mut self, key: &Key, object: &K) {
        for term in (self.extract)(object) {
            self.keys.entry(term).or_default().insert(key.clone());
        }
    }

    fn remove(&mut self, key: &Key, object: &K) {
        for term in (self.extract)(object) {
            if let Some(keys) = self.keys.get_mut(&term) {
                keys.remove(key);
                if keys.is_empty() {
                    self.keys.remove(&term);
                }
            }
        }
    }
}

/// A second way to find the objects of a cache.
pub struct Index<K> {
    cache: Cache<K>,
    position: usize,
}

impl<K> Clone for Index<K> {
    fn clone(&self) -> Self {
        Self { cache: self.cache.clone(), position: self.position }
    }
}

impl<K> Index<K> {
    pub fn get(&self, term: &str) -> Vec<Arc<K>> {
        let state = self.cache.0.state.read();
        let keys = state.indexes[self.position].keys.get(term);
        keys.into_iter().flatten().filter_map(|key| state.objects.get(key).cloned()).collect()
    }

    pub fn has(&self, term: &str) -> bool {
        self.cache.0.state.read().indexes[self.position].keys.contains_key(term)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::build;
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

    fn notices(cache: &Cache<Pod>) -> Arc<Mutex<Vec<String>>> {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let sink = heard.clone();
        cache.subscribe(move |change| {
            let verb = if matches!(change, Change::Applied { .. }) { "applied" } else { "deleted" };
            sink.lock().push(format!("{verb} {}", change.object().metadata.revision()));
        });
        heard
    }

    #[test]
    fn a_relist_removes_what_it_does_not_show() {
        let cache = Cache::default();
        cache.arrived(pod("a", 1, ""));
        cache.arrived(pod("b", 2, ""));
        cache.listed(&keys(&["a", "b"]), 2);
        assert!(cache.is_synced());
        cache.listed(&keys(&["b"]), 5);
        assert!(cache.get(&key("a")).is_none());
        assert!(cache.get(&key("b")).is_some());
    }

    #[test]
    fn a_relist_keeps_what_was_written_after_it_was_taken() {
        let cache = Cache::default();
        cache.listed(&keys(&[]), 5);
        cache.observe_write(pod("a", 9, ""));
        cache.listed(&keys(&[]), 7);
        assert!(cache.get(&key("a")).is_some());
        cache.listed(&keys(&[]), 9);
        assert!(cache.get(&key("a")).is_none());
    }

    #[test]
    fn an_own_write_is_visible_at_once_and_an_older_event_does_not_undo_it() {
        let cache = Cache::default();
        cache.arrived(pod("a", 5, ""));
        cache.observe_write(pod("a", 7, "n1"));
        cache.arrived(pod("a", 6, ""));
        assert_eq!(cache.get(&key("a")).unwrap().metadata.revision(), 7);
        cache.arrived(pod("a", 8, "n2"));
        assert_eq!(cache.get(&key("a")).unwrap().metadata.revision(), 8);
    }

    #[test]
    fn what_the_watch_brings_is_news_only_if_it_was_not_our_own() {
        let cache = Cache::default();
        cache.observe_write(pod("a", 7, "n1"));
        assert!(cache.is_known(&key("a"), 7));
        for (case, name, revision) in [("newer", "a", 8), ("older", "a", 6), ("another", "b", 7)] {
            assert!(!cache.is_known(&key(name), revision), "{case}");
        }
        cache.departed(&key("a"), 9);
        cache.observe_write(pod("a", 7, "n1"));
        assert!(cache.get(&key("a")).is_none());
    }

    #[test]
    fn a_late_reply_does_not_bring_back_a_deleted_object() {
        let cache = Cache::default();
        cache.arrived(pod("a", 5, ""));
        cache.departed(&key("a"), 9);
        cache.observe_write(pod("a", 7, "n1"));
        assert!(cache.get(&key("a")).is_none(), "the watch had passed it");
        cache.passed(20);
        cache.observe_write(pod("b", 15, ""));
        assert!(cache.get(&key("b")).is_none(), "a bookmark had passed it");
    }

    #[test]
    fn an_object_that_took_the_name_of_another_is_a_deletion_and_a_creation() {
        let cache = Cache::default();
        cache.arrived(pod("a", 5, ""));
        let heard = notices(&cache);
        let mut other = pod("a", 9, "");
        other.metadata.uid = Some("another".to_owned());
        cache.arrived(other);
        assert_eq!(*heard.lock(), ["applied 5", "deleted 5", "applied 9"]);
        cache.departed(&key("a"), 7);
        assert!(cache.get(&key("a")).is_some(), "the old one's end is not the new one's");
    }

    #[test]
    fn indexes_follow_the_objects() {
        let cache = Cache::default();
        cache.arrived(pod("a", 1, "n1"));
        let by_node = cache.index(|p: &Pod| p.spec.iter().filter_map(|s| s.node_name.clone()).collect());
        cache.arrived(pod("b", 2, "n1"));
        cache.arrived(pod("a", 3, "n2"));
        cache.departed(&key("b"), 4);
        assert!(by_node.get("n1").is_empty() && !by_node.has("n1") && by_node.has("n2"));
        assert_eq!(by_node.get("n2").len(), 1);
    }

    #[test]
    fn a_late_subscriber_hears_of_what_is_already_there() {
        let cache = Cache::default();
        cache.arrived(pod("a", 1, ""));
        let heard = notices(&cache);
        cache.arrived(pod("a", 2, ""));
        assert_eq!(*heard.lock(), ["applied 1", "applied 2"]);
    }
}
