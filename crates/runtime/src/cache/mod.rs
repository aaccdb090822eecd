//! One kind's objects, kept current by a watch and shared by everyone in the process.
//!
//! A cache answers reads from memory, tells subscribers of each change, and keeps the indexes controllers ask for.
//! It gives read-your-writes: a component hands the server's reply to [`Cache::observe_write`], and no later read
//! shows an older state. It never decides anything. Objects that nobody has read or changed for a while are packed.

mod held;
mod index;

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_pack::{Compressor, MaybePacked};
use kube::Resource;
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use held::{Held, Recent};
pub use index::Index;
use index::Terms;

/// So many reads and changes back an object counts as being worked with.
const WARM: usize = 4096;

/// A kind that can be cached.
pub trait Cached: Resource + Serialize + DeserializeOwned + Debug + Send + Sync + 'static {}

impl<K: Resource + Serialize + DeserializeOwned + Debug + Send + Sync + 'static> Cached for K {}

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

pub struct Cache<K>(Arc<Shared<K>>);

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Shared<K> {
    state: RwLock<State<K>>,
    sort: Mutex<Compressor>,
    synced: watch::Sender<bool>,
}

struct State<K> {
    objects: HashMap<Arc<Key>, Held<K>>,
    recent: Recent,
    /// The highest revision the watch delivered: a reply at or below it is old news.
    seen: u64,
    indexes: Vec<Terms<K>>,
    subscribers: Vec<Subscriber<K>>,
}

/// What is to be packed.
struct Due<K> {
    key: Arc<Key>,
    revision: u64,
    object: Arc<K>,
}

impl<K> Default for Cache<K> {
    fn default() -> Self {
        let (objects, recent) = (HashMap::new(), Recent::default());
        let state = State { objects, recent, seen: 0, indexes: Vec::new(), subscribers: Vec::new() };
        let (state, sort) = (RwLock::new(state), Mutex::default());
        Self(Arc::new(Shared { state, sort, synced: watch::Sender::new(false) }))
    }
}

impl<K: Cached> Cache<K> {
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        let (key, held) = {
            let state = self.0.state.read();
            let (key, held) = state.objects.get_key_value(key)?;
            if let MaybePacked::Unpacked(object) = &held.maybe_packed {
                return Some(object.clone());
            }
            (key.clone(), held.clone())
        };
        Some(self.worked_with(key, &held))
    }

    /// The object, which is not packed for the time being.
    fn worked_with(&self, key: Arc<Key>, held: &Held<K>) -> Arc<K> {
        let object = held.maybe_packed.object();
        if held.maybe_packed.is_unpacked() {
            return object;
        }
        let due = {
            let mut state = self.0.state.write();
            state.warm(key, held.revision, &object);
            state.due()
        };
        self.settle(due);
        object
    }

    /// A cluster-scoped object by name.
    pub fn named(&self, name: &str) -> Option<Arc<K>> {
        self.get(&Key::cluster(name))
    }

    pub fn all(&self) -> Vec<Arc<K>> {
        self.each().collect()
    }

    /// Every object that is here now, each unpacked when it is asked for.
    pub fn each(&self) -> impl Iterator<Item = Arc<K>> + use<K> {
        let here: Vec<Held<K>> = self.0.state.read().objects.values().cloned().collect();
        here.into_iter().map(|held| held.maybe_packed.object())
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
        let present: Vec<Held<K>> = {
            let mut state = self.0.state.write();
            state.subscribers.push(subscriber.clone());
            state.objects.values().cloned().collect()
        };
        for held in present {
            subscriber(&Change::Applied { old: None, new: held.maybe_packed.object() });
        }
    }

    /// Keeps objects findable by the strings that `extract` gives for each.
    pub fn index(&self, extract: impl Fn(&K) -> Vec<String> + Send + Sync + 'static) -> Index<K> {
        let mut state = self.0.state.write();
        let mut terms = Terms::new(extract);
        for (key, held) in &state.objects {
            terms.insert(key, &held.maybe_packed.object());
        }
        state.indexes.push(terms);
        Index { cache: self.clone(), position: state.indexes.len() - 1 }
    }

    fn indexed(&self, position: usize, term: &str) -> Vec<Arc<K>> {
        let found: Vec<(Arc<Key>, Held<K>)> = {
            let state = self.0.state.read();
            let keys = state.indexes[position].get(term).into_iter();
            keys.filter_map(|key| state.objects.get(&*key).cloned().map(|held| (key, held))).collect()
        };
        // Whoever asks for very many works with none of them.
        let is_work = found.len() <= WARM / 8;
        let object = |(key, held): (Arc<Key>, Held<K>)| match is_work {
            true => self.worked_with(key, &held),
            false => held.maybe_packed.object(),
        };
        found.into_iter().map(object).collect()
    }

    fn keys_indexed(&self, position: usize, term: &str) -> Vec<Arc<Key>> {
        self.0.state.read().indexes[position].get(term)
    }

    fn is_indexed(&self, position: usize, term: &str) -> bool {
        self.0.state.read().indexes[position].has(term)
    }

    /// Takes in the server's reply to a write of our own, before the watch brings it.
    pub fn observe_write(&self, object: impl Into<Arc<K>>) {
        let object = object.into();
        let revision = object.meta().revision();
        self.change(|state| if revision > state.seen { state.apply(object) } else { Vec::new() });
    }

    /// The watch or a list shows the object in this form.
    pub(crate) fn arrived(&self, object: K) {
        self.change(|state| {
            state.seen = state.seen.max(object.meta().revision());
            state.apply(Arc::new(object))
        });
    }

    /// The watch shows the object at this revision. Is that what is here already, by a write of our own?
    pub(crate) fn is_known(&self, key: &Key, revision: u64) -> bool {
        let mut state = self.0.state.write();
        let known = state.objects.get(key).is_some_and(|held| held.revision == revision);
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
        // First of all: a reply that comes from now on is older than the list.
        self.passed(revision);
        let here: Vec<Arc<Key>> =
            self.0.state.read().objects.keys().filter(|k| !shown.contains(&***k)).cloned().collect();
        for key in here {
            self.change(|state| state.remove_up_to(&key, revision));
        }
        self.0.synced.send_replace(true);
    }

    /// The watch has come to `revision`: replies up to it are old news.
    pub(crate) fn passed(&self, revision: u64) {
        let mut state = self.0.state.write();
        state.seen = state.seen.max(revision);
    }

    /// Changes the state under the lock, then tells the subscribers without it.
    fn change(&self, change: impl FnOnce(&mut State<K>) -> Vec<Change<K>>) {
        let (changes, subscribers, due) = {
            let mut state = self.0.state.write();
            let changes = change(&mut state);
            if changes.is_empty() {
                return;
            }
            (changes, state.subscribers.clone(), state.due())
        };
        for change in &changes {
            for subscriber in &subscribers {
                subscriber(change);
            }
        }
        self.settle(due);
    }

    /// Packs what has not been worked with for long enough. The lock is not held meanwhile.
    fn settle(&self, mut due: Option<Due<K>>) {
        while let Some(Due { key, revision, object }) = due {
            let packed = MaybePacked::Unpacked(object).into_packed(&mut self.0.sort.lock());
            let mut state = self.0.state.write();
            if let Some(held) = state.at(&key, revision) {
                held.maybe_packed = packed;
            }
            due = state.due();
        }
    }
}

impl<K: Cached> State<K> {
    /// Takes the object in unless what is here is as new: our own write may be ahead of the watch. An object that took
    /// the name of another is told as a deletion and a creation; a relist shows no more than that it is another.
    fn apply(&mut self, new: Arc<K>) -> Vec<Change<K>> {
        let revision = new.meta().revision();
        let key = Key::of(new.meta());
        let found = self.objects.get_key_value(&key);
        if found.is_some_and(|(_, held)| revision != 0 && held.revision >= revision) {
            return Vec::new();
        }
        let (key, mut old) = match found {
            Some((key, held)) => (key.clone(), Some(held.maybe_packed.object())),
            None => (Arc::new(key), None),
        };
        let mut changes = Vec::new();
        if old.as_ref().is_some_and(|old| old.meta().uid() != new.meta().uid()) {
            changes.extend(self.remove(&key));
            old = None;
        }
        self.objects.insert(key.clone(), Held { revision, maybe_packed: MaybePacked::Unpacked(new.clone()) });
        for terms in &mut self.indexes {
            match &old {
                Some(old) => terms.replace(&key, old, &new),
                None => terms.insert(&key, &new),
            }
        }
        self.recent.push(key, revision);
        changes.push(Change::Applied { old, new });
        changes
    }

    /// The object at this revision is worked with.
    fn warm(&mut self, key: Arc<Key>, revision: u64, object: &Arc<K>) {
        if let Some(held) = self.at(&key, revision).filter(|held| !held.maybe_packed.is_unpacked()) {
            held.maybe_packed = MaybePacked::Unpacked(object.clone());
            self.recent.push(key, revision);
        }
    }

    fn at(&mut self, key: &Key, revision: u64) -> Option<&mut Held<K>> {
        self.objects.get_mut(key).filter(|held| held.revision == revision)
    }

    /// An object that is at rest and not packed yet.
    fn due(&mut self) -> Option<Due<K>> {
        while let Some((key, revision)) = self.recent.due(WARM) {
            if let Some(MaybePacked::Unpacked(object)) = self.at(&key, revision).map(|held| &held.maybe_packed) {
                let object = object.clone();
                return Some(Due { key, revision, object });
            }
        }
        None
    }

    fn remove_up_to(&mut self, key: &Key, revision: u64) -> Vec<Change<K>> {
        match self.objects.get(key) {
            Some(held) if held.revision <= revision => self.remove(key).into_iter().collect(),
            Some(_) | None => Vec::new(),
        }
    }

    fn remove(&mut self, key: &Key) -> Option<Change<K>> {
        let old = self.objects.remove(key)?.maybe_packed.object();
        for terms in &mut self.indexes {
            terms.remove(key, &old);
        }
        Some(Change::Deleted(old))
    }
}

#[cfg(test)]
mod tests {
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

    fn warm(cache: &Cache<Pod>) -> usize {
        cache.0.state.read().objects.values().filter(|held| held.maybe_packed.is_unpacked()).count()
    }

    #[test]
    fn what_is_at_rest_is_packed_and_read_as_before() {
        let cache = Cache::default();
        let by_node = cache.index(|p: &Pod| p.spec.iter().filter_map(|s| s.node_name.clone()).collect());
        let all = WARM + 300;
        for n in 0..all {
            cache.arrived(pod(&format!("pod-{n}"), n as u64 + 1, &format!("node-{n}")));
        }
        assert_eq!(warm(&cache), WARM);
        let first = pod("pod-0", 1, "node-0");
        assert_eq!(*by_node.get("node-0")[0], first);
        assert_eq!(*cache.get(&key("pod-0")).unwrap(), first);
        assert_eq!(warm(&cache), WARM, "what is read again is warm again, and something else is not");
        assert!(cache.0.state.read().objects[&key("pod-0")].maybe_packed.is_unpacked());
        assert_eq!(cache.all().len(), all);
        let heard = notices(&cache);
        assert_eq!(heard.lock().len(), all);
        heard.lock().clear();
        assert!(cache.is_known(&key("pod-1"), 2), "a packed object's revision is known");
        cache.arrived(pod("pod-1", 10_000, "elsewhere"));
        cache.departed(&key("pod-2"), 10_001);
        assert_eq!(*heard.lock(), ["applied 10000", "deleted 3"]);
        assert!(!by_node.has("node-1") && !by_node.has("node-2") && by_node.has("elsewhere"));
    }

    #[test]
    fn what_changes_while_it_is_being_packed_stays_as_it_is_now() {
        let cache = Cache::default();
        cache.arrived(pod("a", 1, "n1"));
        let object = cache.get(&key("a")).unwrap();
        cache.arrived(pod("a", 2, "n2"));
        cache.settle(Some(Due { key: Arc::new(key("a")), revision: 1, object }));
        assert_eq!(cache.get(&key("a")).unwrap().metadata.revision(), 2);
        assert_eq!(warm(&cache), 1);
    }

    #[test]
    fn a_term_may_belong_to_many() {
        let cache = Cache::default();
        let by_node = cache.index(|p: &Pod| p.spec.iter().filter_map(|s| s.node_name.clone()).collect());
        for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
            cache.arrived(pod(name, n as u64 + 1, "n"));
        }
        assert_eq!(by_node.get("n").len(), 3);
        cache.arrived(pod("a", 9, "m"));
        cache.departed(&key("b"), 10);
        assert_eq!((by_node.get("n").len(), by_node.get("m").len()), (1, 1));
        cache.departed(&key("c"), 11);
        assert!(!by_node.has("n"));
    }
}
