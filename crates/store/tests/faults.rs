//! The store when the disk fails: writes fail, reads are served, and writes succeed again once the disk works.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use cleat_store::embedded::HistoryLimits;
use cleat_store::{EmbeddedStore, OpenError, Range, Store, WriteError};

const CHILD_VARIABLE: &str = "CLEAT_STORE_FAULTS_CHILD";

/// A small file system; unmounted on drop.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(dir.path());
        let status = mount.status().expect("mount is part of util-linux: apt-get install util-linux");
        assert!(status.success(), "mounting a tmpfs needs root: run the tests as root (sudo)");
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

fn open(path: &Path) -> EmbeddedStore {
    EmbeddedStore::open(path, HistoryLimits::default()).unwrap()
}

/// Writes until a write fails. Returns the number of acknowledged writes and the error.
async fn fill(store: &EmbeddedStore) -> (usize, WriteError) {
    for i in 0.. {
        if let Err(error) = store.create(&format!("/k/{i:05}"), noise(i, 64 << 10)).await {
            return (i, error);
        }
    }
    unreachable!()
}

async fn keys(store: &EmbeddedStore) -> Vec<String> {
    let listed = store.list(Range { prefix: "/k/", ..Range::default() }).await.unwrap();
    listed.stored.iter().map(|e| e.key.to_string()).collect()
}

/// Checks that the store refuses writes, serves reads and watches, and accepts writes again after `relieve` has freed
/// space.
async fn check_disk_failure(path: &Path, relieve: impl FnOnce()) {
    let store = open(path);
    let mut watch = store.watch("/k/", 1).await.unwrap();
    let (acknowledged, error) = fill(&store).await;
    assert!(acknowledged > 0, "{error}");
    assert!(matches!(error, WriteError::Uncertain { .. }), "{error}");
    assert_eq!(store.statistics().failures.load(Ordering::Relaxed), 1);
    // Later writes fail too, and do not hang.
    assert!(store.create("/k/more", noise(0, 64 << 10)).await.is_err());
    assert_eq!(keys(&store).await.len(), acknowledged, "every acknowledged write is listed, and no other");
    assert_eq!(store.get("/k/00000").await.unwrap().unwrap().value, noise(0, 64 << 10));
    for _ in 0..acknowledged {
        watch.next().await.unwrap();
    }
    relieve();
    store.create("/k/after", noise(0, 64 << 10)).await.expect("there is space again");
    assert_eq!(watch.next().await.unwrap().key(), "/k/after");
    let before = keys(&store).await;
    let revision = store.revision().await.unwrap();
    drop(store);
    let again = open(path);
    assert_eq!(keys(&again).await, before, "the file and the memory agree");
    assert_eq!(again.revision().await.unwrap(), revision);
}

#[tokio::test]
async fn a_full_disk_refuses_writes_and_serves_reads() {
    let disk = SmallDisk::new("8M");
    let ballast = disk.path().join("ballast");
    std::fs::write(&ballast, vec![1; 3 << 20]).unwrap();
    check_disk_failure(&disk.path().join("store.redb"), || std::fs::remove_file(&ballast).unwrap()).await;
}

#[tokio::test]
async fn a_store_opens_on_a_full_disk_for_readers() {
    let disk = SmallDisk::new("8M");
    let path = disk.path().join("store.redb");
    let store = open(&path);
    store.create("/k/a", noise(1, 1000)).await.unwrap();
    drop(store);
    let ballast = disk.path().join("ballast");
    assert!(std::fs::write(&ballast, vec![1; 16 << 20]).is_err(), "it is full");
    let store = open(&path);
    assert_eq!(keys(&store).await, ["/k/a"]);
    assert!(store.create("/k/b", noise(2, 64 << 10)).await.is_err());
    std::fs::remove_file(&ballast).unwrap();
    // The checkpointer retries.
    let mut tries = 0;
    while store.create("/k/b", noise(2, 64 << 10)).await.is_err() {
        tries += 1;
        assert!(tries < 1000, "there is space again");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    drop(store);
    assert_eq!(keys(&open(&path)).await, ["/k/a", "/k/b"]);
}

/// Not a test by itself: runs in a process with a limit on the size of its files, which is an error other than a full
/// disk.
#[test]
fn child() {
    let Ok(path) = std::env::var(CHILD_VARIABLE) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // Without a handler the signal that comes with the error ends the process.
        const SIGXFSZ: i32 = 25;
        let _handled = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::from_raw(SIGXFSZ)).unwrap();
        let raise = || {
            let pid = std::process::id().to_string();
            let status = Command::new("prlimit").args(["--pid", &pid, "--fsize=unlimited"]).status();
            assert!(status.unwrap().success());
        };
        check_disk_failure(Path::new(&path), raise).await;
    });
}

#[test]
fn a_file_size_limit_refuses_writes_and_serves_reads() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("prlimit")
        .args(["--fsize=6000000:unlimited"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD_VARIABLE, dir.path().join("store.redb"))
        .output()
        .expect("prlimit is part of util-linux: apt-get install util-linux");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}\n{}", String::from_utf8_lossy(&output.stdout));
}

/// Every second value is random; the others are similar to each other.
fn value(i: usize) -> Bytes {
    match i % 2 {
        0 => noise(i, 2000),
        _ => [&noise(1, 2000)[..], format!("{i}").as_bytes()].concat().into(),
    }
}

/// Random bytes, which do not compress.
fn noise(seed: usize, length: usize) -> Bytes {
    let mut state = seed as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect::<Vec<u8>>().into()
}

const OBJECTS: usize = 500;

/// Creates a store with `OBJECTS` objects, closes it and returns the bytes of its file.
async fn create_store(path: &Path) -> Vec<u8> {
    let store = open(path);
    for i in 0..OBJECTS {
        store.create(&format!("/k/{i}"), value(i)).await.unwrap();
    }
    drop(store);
    std::fs::read(path).unwrap()
}

#[tokio::test]
async fn a_truncated_or_overwritten_file_is_refused_and_not_modified() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    let intact = create_store(&path).await;
    let mut overwritten = intact.clone();
    overwritten[..4096].fill(0xAA);
    for (case, bytes) in [
        ("cut to half", intact[..intact.len() / 2].to_vec()),
        ("cut inside the first page", intact[..100].to_vec()),
        ("another file altogether", b"this is not a store at all".repeat(500)),
        ("its header overwritten", overwritten),
    ] {
        std::fs::write(&path, &bytes).unwrap();
        match EmbeddedStore::open(&path, HistoryLimits::default()) {
            Err(OpenError::Corrupt { path: named, what }) => {
                assert_eq!(named, path, "{case}");
                assert!(!what.is_empty(), "{case}");
            }
            Err(other) => panic!("{case}: {other}"),
            Ok(_) => panic!("{case}: it was opened"),
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), bytes.len() as u64, "{case}: not modified");
    }
    std::fs::write(&path, &intact).unwrap();
    assert_eq!(keys(&open(&path)).await.len(), OBJECTS);
}

/// Damage may go unnoticed only if every value that the store returns is exactly the one that was stored.
#[tokio::test]
async fn damage_anywhere_is_refused_or_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    let intact = create_store(&path).await;
    let mut refused = 0;
    // One bit is inverted, at offsets spread over the whole file.
    for at in (0..intact.len()).step_by(intact.len() / 97) {
        let mut bytes = intact.clone();
        bytes[at] ^= 0x20;
        std::fs::write(&path, &bytes).unwrap();
        match EmbeddedStore::open(&path, HistoryLimits::default()) {
            Err(OpenError::Corrupt { .. }) => refused += 1,
            Err(other) => panic!("byte {at}: {other}"),
            Ok(store) => {
                let listed = store.list(Range { prefix: "/", ..Range::default() }).await.unwrap();
                assert_eq!(listed.stored.len(), OBJECTS, "byte {at}");
                for entry in listed.entries() {
                    let i = entry.key.trim_start_matches("/k/").parse().unwrap();
                    assert_eq!(entry.value, value(i), "byte {at}: a value was changed");
                }
            }
        }
    }
    assert!(refused > 20, "most of the file is data: {refused}");
}
