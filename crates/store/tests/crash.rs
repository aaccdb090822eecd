//! The process is killed in the middle of concurrent writes, again and again: every acknowledged write is there
//! afterwards, and nothing is half there. At times it is killed where the log goes into the container.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use cleat_store::embedded::History;
use cleat_store::{EmbeddedStore, Range, Store};

const CHILD: &str = "CLEAT_STORE_CRASH_CHILD";
const ROUNDS: usize = 8;
const WRITERS: usize = 8;

fn open(path: &Path) -> EmbeddedStore {
    EmbeddedStore::open(path, History::default()).unwrap()
}

/// The value tells its own length, so that a torn one shows. Some are so large that they fill the log, and no two of
/// these are alike.
fn value(count: u64) -> Bytes {
    let length = if count.is_multiple_of(20) { 200_000 } else { (count % 3000) as usize };
    let mut state = count;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    [&count.to_le_bytes()[..], &(0..length).map(|_| noise()).collect::<Vec<u8>>()].concat().into()
}

fn is_whole(value: &Bytes) -> bool {
    value.first_chunk().is_some_and(|count| *value == self::value(u64::from_le_bytes(*count)))
}

/// Not a test by itself: the process that gets killed. It prints each write after its acknowledgement.
#[test]
fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = Arc::new(open(Path::new(&path)));
        let writers: Vec<_> = (0..WRITERS).map(|w| tokio::spawn(write_for_ever(store.clone(), w))).collect();
        for writer in writers {
            writer.await.unwrap();
        }
    });
}

async fn write_for_ever(store: Arc<EmbeddedStore>, writer: usize) {
    for count in 0u64.. {
        let key = format!("/w{writer}/{}", count % 7);
        let revision = match store.get(&key).await.unwrap() {
            None => store.create(&key, value(count)).await,
            Some(found) => store.update(&key, found.modified, value(count)).await,
        };
        let line = format!("ack {key} {count} {}\n", revision.unwrap());
        std::io::stdout().write_all(line.as_bytes()).unwrap();
    }
}

#[test]
fn acknowledged_writes_survive_sigkill() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut newest = 0;
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap());
        // By itself, when the container has what the log has. A release build has no such points.
        let by_itself = cfg!(debug_assertions) && round % 2 == 1;
        let mut child = match by_itself {
            true => child.env(cleat_crash::VARIABLE, "store:checkpointed"),
            false => &mut child,
        }
        .args(["child", "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, &path)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
        let mut acknowledged: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        // A different number of writes each round; the kill then falls wherever the child happens to be.
        let enough = if by_itself { usize::MAX } else { 50 + 37 * round };
        let mut seen = 0;
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while lines.read_line(&mut line).unwrap() > 0 {
            // The last line may be cut by the kill; what was not read whole was not acknowledged to us.
            let complete = line.ends_with('\n');
            if let ["ack", key, count, revision] = line.split_whitespace().collect::<Vec<_>>()[..]
                && complete
            {
                acknowledged.insert(key.into(), (count.parse().unwrap(), revision.parse().unwrap()));
                seen += 1;
            }
            if seen == enough {
                child.kill().unwrap();
            }
            line.clear();
        }
        child.wait().unwrap();
        assert!(by_itself || seen >= enough, "the child wrote until it was killed");

        let store = open(&path);
        runtime.block_on(async {
            let current = store.revision().await.unwrap();
            let snapshot = store.list(Range { prefix: "/", ..Range::default() }).await.unwrap();
            let found: BTreeMap<_, _> = snapshot.entries().map(|e| (e.key.to_string(), e)).collect();
            for (key, (count, revision)) in &acknowledged {
                let entry = &found[key];
                assert!(entry.modified >= *revision && *revision <= current, "round {round}: {key} went back");
                if entry.modified == *revision {
                    assert_eq!(entry.value, value(*count), "round {round}: {key} has another value");
                }
            }
            for entry in found.values() {
                let whole = is_whole(&entry.value) && entry.modified <= current;
                assert!(whole, "round {round}: {} is torn", entry.key);
            }
            assert!(current >= newest, "revisions never go back");
            newest = current;
        });
    }
}
