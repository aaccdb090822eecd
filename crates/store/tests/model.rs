//! Compares the embedded store with a model, a map with its complete history: after any sequence of operations,
//! compactions and restarts both return the same results.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use bytes::Bytes;
use cleat_store::embedded::HistoryLimits;
use cleat_store::{EmbeddedStore, ListError, Range, Store, WatchError, WriteError};
use proptest::prelude::*;

const KEYS: [&str; 6] = ["/a/1", "/a/2", "/a/10", "/a1/1", "/b/1", "/b/2"];
const PREFIXES: [&str; 4] = ["/", "/a/", "/a1/", "/b/"];

#[derive(Clone, Debug)]
enum Step {
    Create(usize, u8),
    /// The last field is true if the right revision is expected, false for a wrong one.
    Update(usize, u8, bool),
    Delete(usize, bool),
    List(usize, u64),
    Watch(usize, u64),
    Compact(u64),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0..KEYS.len();
    let prefix = 0..PREFIXES.len();
    prop_oneof![
        4 => (key.clone(), any::<u8>()).prop_map(|(k, v)| Step::Create(k, v)),
        4 => (key.clone(), any::<u8>(), any::<bool>()).prop_map(|(k, v, right)| Step::Update(k, v, right)),
        2 => (key, any::<bool>()).prop_map(|(k, right)| Step::Delete(k, right)),
        3 => (prefix.clone(), 0..40u64).prop_map(|(p, r)| Step::List(p, r)),
        3 => (prefix, 0..40u64).prop_map(|(p, r)| Step::Watch(p, r)),
        1 => (0..40u64).prop_map(Step::Compact),
        1 => Just(Step::Reopen),
    ]
}

/// A value with its create and modify revisions.
type ModelEntry = (u8, u64, u64);

#[derive(Default)]
struct Model {
    /// The state at each revision, from revision 1 on.
    states: Vec<BTreeMap<&'static str, ModelEntry>>,
    /// The history is complete for every revision greater than this one.
    compacted: u64,
}

impl Model {
    fn revision(&self) -> u64 {
        self.states.len() as u64
    }

    fn at(&self, revision: u64) -> &BTreeMap<&'static str, ModelEntry> {
        &self.states[revision as usize - 1]
    }

    fn now(&self) -> &BTreeMap<&'static str, ModelEntry> {
        self.at(self.revision())
    }

    fn push(&mut self, change: impl FnOnce(&mut BTreeMap<&'static str, ModelEntry>, u64)) {
        let revision = self.revision() + 1;
        let mut state = self.now().clone();
        change(&mut state, revision);
        self.states.push(state);
    }

    /// Key, old value and new value of every change under the prefix after a revision.
    fn changes(&self, prefix: &str, after: u64) -> Vec<(u64, String, Option<u8>, Option<u8>)> {
        (after + 1..=self.revision())
            .filter_map(|revision| {
                let (old, new) = (self.at(revision - 1), self.at(revision));
                let key = KEYS.iter().find(|k| old.get(*k) != new.get(*k))?;
                let value = |state: &BTreeMap<_, ModelEntry>| state.get(key).map(|(v, _, _)| *v);
                key.starts_with(prefix).then(|| (revision, (*key).to_owned(), value(old), value(new)))
            })
            .collect()
    }
}

/// A value that encodes the number. Values are similar, so that most are compressed; the shortest are not.
fn value_of(number: u8) -> Bytes {
    let words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"];
    let repeated = usize::from(number) % (words.len() + 1);
    format!("{number} {} {}", words.join("/"), words[..repeated].join(" and then ")).into()
}

fn number_of(value: &Bytes) -> u8 {
    let number =
        value.split(|byte| *byte == b' ').next().and_then(|n| std::str::from_utf8(n).ok()?.parse().ok()).unwrap();
    assert_eq!(*value, value_of(number), "the value is intact");
    number
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn check(store: &EmbeddedStore, model: &mut Model, step: &Step) {
    match *step {
        Step::Create(k, value) => {
            let key = KEYS[k];
            match store.create(key, value_of(value)).await {
                Ok(revision) => {
                    assert!(!model.now().contains_key(key));
                    model.push(|state, now| {
                        state.insert(key, (value, now, now));
                    });
                    assert_eq!(revision, model.revision());
                }
                Err(WriteError::Exists { current, .. }) => assert_eq!(current.modified, model.now()[key].2),
                other => panic!("{other:?}"),
            }
        }
        Step::Update(k, value, right) => {
            let key = KEYS[k];
            let current = model.now().get(key).copied();
            let expected = current.map_or(1, |(_, _, modified)| if right { modified } else { modified + 1 });
            match (store.update(key, expected, value_of(value)).await, current) {
                (Ok(revision), Some((_, created, _))) if right => {
                    model.push(|state, now| {
                        state.insert(key, (value, created, now));
                    });
                    assert_eq!(revision, model.revision());
                }
                (Err(WriteError::Missing { .. }), None) => {}
                (Err(WriteError::Conflict { .. }), Some(_)) if !right => {}
                other => panic!("{other:?}"),
            }
        }
        Step::Delete(k, right) => {
            let key = KEYS[k];
            let current = model.now().get(key).copied();
            let expected = current.map_or(1, |(_, _, modified)| if right { modified } else { modified + 1 });
            match (store.delete(key, expected).await, current) {
                (Ok(revision), Some(_)) if right => {
                    model.push(|state, _| {
                        state.remove(key);
                    });
                    assert_eq!(revision, model.revision());
                }
                (Err(WriteError::Missing { .. }), None) => {}
                (Err(WriteError::Conflict { .. }), Some(_)) if !right => {}
                other => panic!("{other:?}"),
            }
        }
        Step::List(p, at) => {
            let at = (at > 0).then_some(at);
            let requested = at.unwrap_or(model.revision());
            // Some lists have a limit, and some start in the middle.
            let limit = (requested % 3 == 0).then_some(2);
            let from = (requested % 5 == 0).then_some(KEYS[1]);
            match store.list(Range { prefix: PREFIXES[p], from, at, limit }).await {
                Ok(snapshot) => {
                    assert!(requested >= model.compacted && requested <= model.revision());
                    assert_eq!(snapshot.revision, requested);
                    let found: Vec<(String, ModelEntry)> = snapshot
                        .entries()
                        .map(|e| (e.key.to_string(), (number_of(&e.value), e.created, e.modified)))
                        .collect();
                    let want = model.at(requested).iter().filter(|(k, _)| k.starts_with(PREFIXES[p]));
                    let want: Vec<_> = want
                        .filter(|(k, _)| from.is_none_or(|f| **k >= f))
                        .map(|(k, v)| ((*k).to_owned(), *v))
                        .collect();
                    let cut = limit.unwrap_or(want.len()).min(want.len());
                    assert_eq!(found, want[..cut]);
                    assert_eq!(snapshot.remaining, want.len() - cut);
                }
                Err(ListError::TooOld { .. }) => assert!(requested < model.compacted),
                Err(ListError::Future { .. }) => assert!(requested > model.revision()),
                other => panic!("{other:?}"),
            }
        }
        Step::Watch(p, after) => match store.watch(PREFIXES[p], after).await {
            Ok(mut watch) => {
                for (revision, key, old, new) in model.changes(PREFIXES[p], after) {
                    let event = watch.next().await.unwrap();
                    let value = |e: &Option<cleat_store::Entry>| e.as_ref().map(|e| number_of(&e.value));
                    assert_eq!(
                        (event.revision, event.key(), value(&event.old), value(&event.new)),
                        (revision, key.as_str(), old, new)
                    );
                }
                assert_eq!(watch.progress(), model.revision(), "no further event is pending");
            }
            Err(WatchError::TooOld { .. }) => assert!(after < model.compacted),
            Err(WatchError::Future { .. }) => assert!(after > model.revision()),
            Err(other) => panic!("{other:?}"),
        },
        Step::Compact(revision) => {
            store.compact(revision);
            model.compacted = model.compacted.max(revision.min(model.revision()));
        }
        Step::Reopen => unreachable!("handled by the caller"),
    }
    for key in KEYS {
        let found = store.get(key).await.unwrap().map(|e| (number_of(&e.value), e.created, e.modified));
        assert_eq!(found, model.now().get(key).copied());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn the_store_behaves_like_a_map_with_history(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        let open = || EmbeddedStore::open(&path, HistoryLimits::default()).unwrap();
        let mut store = Some(open());
        let mut model = Model { states: vec![BTreeMap::new()], compacted: 1 };
        let runtime = runtime();
        for step in &steps {
            if let Step::Reopen = step {
                drop(store.take());
                store = Some(open());
                model.compacted = model.revision();
            } else {
                runtime.block_on(check(store.as_ref().unwrap(), &mut model, step));
            }
        }
    }
}

/// An object that is long and similar to the others.
fn object(n: usize) -> Bytes {
    let fields: Vec<String> = (0..80).map(|field| format!("\"field-{}\":{{}}", field * 7919 % 997)).collect();
    format!("{{\"name\":\"object-{n}\",\"uid\":\"{:032x}\",{}}}", n * 104_729, fields.join(",")).into()
}

#[test]
fn similar_values_are_stored_compressed_and_survive_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let open = || EmbeddedStore::open(&path, HistoryLimits::default()).unwrap();
    let plain: usize = (0..2000).map(|n| object(n).len()).sum();
    runtime().block_on(async {
        for part in 0..4 {
            let store = open();
            for n in part * 500..(part + 1) * 500 {
                store.create(&format!("/registry/things/{n}"), object(n)).await.unwrap();
            }
        }
        let store = open();
        for n in 0..2000 {
            let found = store.get(&format!("/registry/things/{n}")).await.unwrap().unwrap();
            assert_eq!(found.value, object(n), "{n}");
        }
    });
    let stored = std::fs::metadata(&path).unwrap().len() as usize;
    assert!(stored * 2 < plain, "{stored} bytes for {plain}");
}
