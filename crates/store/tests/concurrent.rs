//! Concurrent writers and watchers, slow watchers, restarts and damaged files.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cleat_store::embedded::HistoryLimits;
use cleat_store::{EmbeddedStore, OpenError, Range, Store, WatchError, WriteError};

const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

fn open(dir: &tempfile::TempDir) -> EmbeddedStore {
    EmbeddedStore::open(&dir.path().join("store.redb"), HistoryLimits::default()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exactly_one_of_many_concurrent_updates_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(open(&dir));
    let mut expected = store.create("/k", Bytes::from("0")).await.unwrap();
    for round in 0..20 {
        let tasks: Vec<_> = (0..16)
            .map(|i| {
                let store = store.clone();
                tokio::spawn(async move { store.update("/k", expected, format!("{round}-{i}").into()).await })
            })
            .collect();
        let mut succeeded = Vec::new();
        for task in tasks {
            match task.await.unwrap() {
                Ok(revision) => succeeded.push(revision),
                Err(WriteError::Conflict { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(succeeded.len(), 1);
        expected = succeeded[0];
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_receive_every_change_once_and_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(open(&dir));
    const WRITERS: usize = 8;
    const WRITES: usize = 100;
    let writers: Vec<_> = (0..WRITERS)
        .map(|w| {
            let store = store.clone();
            tokio::spawn(async move {
                for i in 0..WRITES {
                    let prefix = if i % 2 == 0 { "even" } else { "odd" };
                    store.create(&format!("/{prefix}/{w}-{i}"), Bytes::from("x")).await.unwrap();
                }
            })
        })
        .collect();
    let watchers: Vec<_> = (0..6)
        .map(|i| {
            let store = store.clone();
            tokio::spawn(async move {
                let prefix = if i % 2 == 0 { "/even/" } else { "/odd/" };
                // A list and a watch from its revision together deliver every change.
                let snapshot = store.list(Range { prefix, ..Range::default() }).await.unwrap();
                let mut revisions: BTreeMap<String, u64> =
                    snapshot.stored.iter().map(|e| (e.key.to_string(), e.modified)).collect();
                let mut watch = store.watch(prefix, snapshot.revision).await.unwrap();
                let mut last = snapshot.revision;
                while revisions.len() < WRITERS * WRITES / 2 {
                    let event = tokio::time::timeout(EVENT_TIMEOUT, watch.next()).await.unwrap().unwrap();
                    assert!(event.revision > last, "in order");
                    last = event.revision;
                    assert!(revisions.insert(event.key().to_owned(), event.revision).is_none(), "no duplicate");
                    assert!(watch.progress() >= last);
                }
            })
        })
        .collect();
    for task in writers.into_iter().chain(watchers) {
        task.await.unwrap();
    }
}

#[tokio::test]
async fn a_slow_watcher_catches_up_or_fails_with_too_old() {
    let dir = tempfile::tempdir().unwrap();
    let history = HistoryLimits { events: 3000, ..HistoryLimits::default() };
    let store = Arc::new(EmbeddedStore::open(&dir.path().join("s"), history).unwrap());
    let start = store.revision().await.unwrap();
    let mut slow = store.watch("/", start).await.unwrap();
    let write = |count: usize| {
        let store = store.clone();
        async move {
            let all = (0..count).map(|i| {
                let store = store.clone();
                tokio::spawn(async move {
                    store
                        .create(
                            &format!("/{}-{i}", unique_number()),
                            Bytes::from(format!("{i} {}", "much like the others ".repeat(9))),
                        )
                        .await
                        .unwrap()
                })
            });
            for task in all.collect::<Vec<_>>() {
                task.await.unwrap();
            }
        }
    };
    write(2500).await;
    for i in 1..=2500 {
        assert_eq!(slow.next().await.unwrap().revision, start + i, "more than its queue, less than the history");
    }
    write(5000).await;
    let mut last = start + 2500;
    let error = loop {
        match slow.next().await {
            Ok(event) => {
                assert_eq!(event.revision, last + 1);
                last = event.revision;
            }
            Err(error) => break error,
        }
    };
    assert!(matches!(error, WatchError::TooOld { .. }), "{error}");
}

fn unique_number() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[tokio::test]
async fn accepted_writes_survive_a_restart_and_a_caller_that_stops_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    for i in 0..50 {
        // The future is dropped after its first poll, when the request is queued.
        let key = format!("/dropped/{i}");
        let mut write = Box::pin(store.create(&key, Bytes::from("x")));
        let _ = std::future::poll_fn(|cx| std::task::Poll::Ready(write.as_mut().poll(cx))).await;
    }
    let last = store.create("/kept", Bytes::from("y")).await.unwrap();
    drop(store);
    let store = open(&dir);
    assert_eq!(store.revision().await.unwrap(), last);
    assert_eq!(store.get("/kept").await.unwrap().unwrap().value, "y");
    let snapshot = store.list(Range { prefix: "/dropped/", ..Range::default() }).await.unwrap();
    assert_eq!(snapshot.stored.len(), 50);
    assert!(matches!(store.watch("/", last - 1).await.err(), Some(WatchError::TooOld { .. })));
    assert_eq!(store.create("/next", Bytes::from("z")).await.unwrap(), last + 1);
}

#[tokio::test]
async fn a_file_in_use_or_damaged_is_refused_and_not_modified() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    let store = open(&dir);
    store.create("/k", Bytes::from("x")).await.unwrap();
    let error = EmbeddedStore::open(&path, HistoryLimits::default()).err().unwrap();
    assert!(matches!(error, OpenError::Locked { .. }), "{error}");
    drop(store);

    let intact = std::fs::read(&path).unwrap();
    let mut header = intact.clone();
    header[..64].fill(0xff);
    let half = intact[..intact.len() / 2].to_vec();
    for (case, bytes) in
        [("empty", Vec::new()), ("header overwritten", header), ("no store", b"hello".to_vec()), ("cut in half", half)]
    {
        std::fs::write(&path, &bytes).unwrap();
        let error = EmbeddedStore::open(&path, HistoryLimits::default()).err().expect(case);
        assert!(!matches!(error, OpenError::Locked { .. }), "{case}: {error}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{case}: not modified");
    }
    std::fs::write(&path, &intact).unwrap();
    assert!(open(&dir).get("/k").await.unwrap().is_some());
}

#[tokio::test]
async fn closing_the_store_ends_its_watches() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    let mut watch = store.watch("/", 1).await.unwrap();
    drop(store);
    assert!(matches!(tokio::time::timeout(EVENT_TIMEOUT, watch.next()).await.unwrap(), Err(WatchError::Closed)));
}
