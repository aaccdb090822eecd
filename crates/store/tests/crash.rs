//! Kills a process during concurrent writes, repeatedly: every acknowledged write survives, and no value is torn. In
//! every second round the process kills itself right after a checkpoint.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use cleat_store::embedded::HistoryLimits;
use cleat_store::{EmbeddedStore, Range, Store};

const CHILD_VARIABLE: &str = "CLEAT_STORE_CRASH_CHILD";
const ROUNDS: usize = 8;
const WRITERS: usize = 8;

fn open(path: &Path) -> EmbeddedStore {
    EmbeddedStore::open(path, HistoryLimits::default()).unwrap()
}

/// A value that follows from the number in its first bytes, so that a torn one is recognised. Every twentieth is so
/// large that the log fills up, and all are random, so that they do not compress.
fn value(count: u64) -> Bytes {
    let length = if count.is_multiple_of(20) { 200_000 } else { (count % 3000) as usize };
    let mut state = count;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    [&count.to_le_bytes()[..], &(0..length).map(|_| noise()).collect::<Vec<u8>>()].concat().into()
}

fn is_intact(value: &Bytes) -> bool {
    value.first_chunk().is_some_and(|count| *value == self::value(u64::from_le_bytes(*count)))
}

/// Not a test by itself: the process that is killed. It prints each write after its acknowledgement.
#[test]
fn child() {
    let Ok(path) = std::env::var(CHILD_VARIABLE) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = Arc::new(open(Path::new(&path)));
        let writers: Vec<_> = (0..WRITERS).map(|w| tokio::spawn(write_forever(store.clone(), w))).collect();
        for writer in writers {
            writer.await.unwrap();
        }
    });
}

async fn write_forever(store: Arc<EmbeddedStore>, writer: usize) {
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
        // A release build has no crash points.
        let kills_itself = cfg!(debug_assertions) && round % 2 == 1;
        let mut child = match kills_itself {
            true => child.env(cleat_crash::VARIABLE, "store:checkpointed"),
            false => &mut child,
        }
        .args(["child", "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD_VARIABLE, &path)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
        let mut acknowledged: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        // A different number of writes each round, so that the kill hits different moments.
        let kill_after = if kills_itself { usize::MAX } else { 50 + 37 * round };
        let mut received = 0;
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while lines.read_line(&mut line).unwrap() > 0 {
            // The kill may cut the last line. A write without a complete line does not count as acknowledged.
            let complete = line.ends_with('\n');
            if let ["ack", key, count, revision] = line.split_whitespace().collect::<Vec<_>>()[..]
                && complete
            {
                acknowledged.insert(key.into(), (count.parse().unwrap(), revision.parse().unwrap()));
                received += 1;
            }
            if received == kill_after {
                child.kill().unwrap();
            }
            line.clear();
        }
        child.wait().unwrap();
        assert!(kills_itself || received >= kill_after, "the child wrote until it was killed");

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
                let intact = is_intact(&entry.value) && entry.modified <= current;
                assert!(intact, "round {round}: {} is torn", entry.key);
            }
            assert!(current >= newest, "revisions never go back");
            newest = current;
        });
    }
}
