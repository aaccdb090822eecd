//! How fast claims become volumes and are given back: `cargo xtask bench claims`.
//!
//! The whole stack as in `cleat up`, except that it is in this process: API server, controllers and sidecars here, the
//! driver as a child over its socket, every write durable, one real image per volume. First one claim at a time, then
//! storms: all claims of one are sent at once by 64 senders, and the time is taken until the last is Bound; then
//! all are deleted, until no PersistentVolume and no image is left. Last, pairs of claims and volumes that exist already.
//!
//! `CLEAT_BENCH_STORMS` (numbers with commas) and `CLEAT_BENCH_PAIRS` choose other sizes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::up::objects::CLASS;
use cleat::up::{Config, Stack};
use cleat_runtime::write;
use cleat_testing::build;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{Request, WatchEvent, WatchParams};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

const ROUNDS: usize = 200;
const WARM_UP: usize = 20;
const SENDERS: usize = 64;
const REST: Duration = Duration::from_secs(2);
/// A step that takes this long is broken, not slow.
const PATIENCE: Duration = Duration::from_secs(900);

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run());
}

async fn run() {
    let storms = sizes("CLEAT_BENCH_STORMS", &[1_000, 10_000, 50_000]);
    let pairs = sizes("CLEAT_BENCH_PAIRS", &[10_000]);
    let bench = Bench::start().await;
    let idle = Usage::at_rest().await;
    println!("idle: {} MiB of this process, {} MiB with the drivers\n", idle.own_mib, idle.all_mib);
    bench.one_at_a_time().await;
    println!("| step | total | rate | CPU per object | RSS with drivers |\n|---|---|---|---|---|");
    for storm in storms {
        bench.storm(storm).await;
    }
    for pairs in pairs {
        bench.pairs(pairs).await;
    }
    bench.stop().await;
}

fn sizes(variable: &str, usual: &[usize]) -> Vec<usize> {
    match std::env::var(variable) {
        Ok(text) => text.split(',').filter_map(|size| size.parse().ok()).collect(),
        Err(_) => usual.to_vec(),
    }
}

struct Bench {
    _directory: tempfile::TempDir,
    pool: PathBuf,
    stack: Stack,
    client: kube::Client,
    claims: Arc<Tally>,
    volumes: Arc<Tally>,
    changed: Arc<Notify>,
}

impl Bench {
    async fn start() -> Self {
        let directory = tempfile::Builder::new().prefix("cb-").tempdir().expect("a temporary directory");
        let config = Config::scratch(directory.path(), 1, env!("CARGO_BIN_EXE_cleat"));
        let stack = Stack::start(config).await.expect("the stack starts");
        let client = stack.client();
        let changed = Arc::new(Notify::new());
        let claims = Tally::of::<PersistentVolumeClaim>(&client, &changed);
        let volumes = Tally::of::<PersistentVolume>(&client, &changed);
        Self { pool: stack.layout().pool(), _directory: directory, stack, client, claims, volumes, changed }
    }

    async fn stop(self) {
        self.stack.stop().await;
    }

    async fn one_at_a_time(&self) {
        let (mut made, mut gone) = (Vec::new(), Vec::new());
        for round in 0..WARM_UP + ROUNDS {
            let name = format!("one-{round}");
            let begun = Instant::now();
            let claim = self.create(wanted(&name, CLASS)).await;
            self.until("the claim is bound", || self.claims.is(&name, "Bound")).await;
            let bound = begun.elapsed();
            let begun = Instant::now();
            write::delete(&self.client, &*claim).await.expect("claim deleted");
            self.until("the volume is gone", || self.volumes.is_empty()).await;
            if round >= WARM_UP {
                made.push(bound);
                gone.push(begun.elapsed());
            }
        }
        println!("| one at a time | p50 | p99 | worst |\n|---|---|---|---|");
        for (what, times) in [("claim created → Bound", &mut made), ("claim deleted → volume gone", &mut gone)] {
            times.sort();
            let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1000.0;
            println!("| {what} | {:.2} ms | {:.2} ms | {:.2} ms |", at(0.5), at(0.99), at(1.0));
        }
        println!();
    }

    async fn storm(&self, count: usize) {
        let step = Step::begin(format!("{count} claims created → Bound"), count);
        self.send((0..count).map(|n| wanted(&format!("storm-{n}"), CLASS))).await;
        self.all_bound(count).await;
        step.end().await;
        let step = Step::begin(format!("{count} claims deleted → volumes and images gone"), count);
        self.delete_all().await;
        self.until("no volume is left", || self.volumes.is_empty()).await;
        step.end().await;
        assert_eq!(images(&self.pool), 0, "images are left");
    }

    /// Volumes of one class and as many claims, all of one size.
    async fn pairs(&self, count: usize) {
        let volume = |n: usize| {
            let mut volume = build::volume(&format!("static-{n}"), "static", "1Gi");
            volume.spec.get_or_insert_default().persistent_volume_reclaim_policy = Some("Retain".to_owned());
            volume.status = None;
            bare(volume)
        };
        self.send((0..count).map(volume)).await;
        self.until("the volumes are available", || self.volumes.count("Available") == count).await;
        let step = Step::begin(format!("{count} static pairs, claims created → Bound"), count);
        self.send((0..count).map(|n| wanted(&format!("pair-{n}"), "static"))).await;
        self.all_bound(count).await;
        step.end().await;
        self.delete_all().await;
        for name in self.volumes.names() {
            let volume = bare(build::volume(&name, "static", "1Gi"));
            write::delete(&self.client, &volume).await.expect("volume deleted");
        }
        self.until("no volume is left", || self.volumes.is_empty()).await;
    }

    async fn all_bound(&self, count: usize) {
        self.until("all claims are bound", || self.claims.len() == count && self.claims.count("Bound") == count).await;
    }

    async fn create<K: write::ApiObject>(&self, object: K) -> Arc<K> {
        write::create(&self.client, &object).await.expect("created")
    }

    async fn send<K: write::ApiObject + Send + Sync>(&self, objects: impl Iterator<Item = K>) {
        let places = Arc::new(Semaphore::new(SENDERS));
        let mut senders = JoinSet::new();
        for object in objects {
            let place = places.clone().acquire_owned().await.expect("open");
            let client = self.client.clone();
            senders.spawn(async move {
                write::create_without_reply(&client, &object).await.expect("created");
                drop(place);
            });
        }
        senders.join_all().await;
    }

    async fn delete_all(&self) {
        let places = Arc::new(Semaphore::new(SENDERS));
        let mut senders = JoinSet::new();
        for name in self.claims.names() {
            let claim = wanted(&name, CLASS);
            let place = places.clone().acquire_owned().await.expect("open");
            let client = self.client.clone();
            senders.spawn(async move {
                write::delete(&client, &claim).await.expect("deleted");
                drop(place);
            });
        }
        senders.join_all().await;
    }

    async fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let wait = async {
            loop {
                // From here on no change is missed.
                let changed = self.changed.notified();
                if holds() {
                    return;
                }
                changed.await;
                // A storm brings thousands of changes a second; looking at each would cost more than the storm.
                if self.claims.len() + self.volumes.len() > 100 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"));
    }
}

/// What a user would write.
fn wanted(name: &str, class: &str) -> PersistentVolumeClaim {
    let mut claim = build::claim("default", name, Some(class), "1Gi");
    claim.status = None;
    bare(claim)
}

fn bare<K: kube::Resource>(mut object: K) -> K {
    let meta = object.meta_mut();
    meta.uid = None;
    meta.resource_version = None;
    meta.creation_timestamp = None;
    object
}

/// Names and phases of one kind, kept by a watch that decodes nothing else: the bench is not what is measured.
#[derive(Default)]
struct Tally(Mutex<Phases>);

#[derive(Default)]
struct Phases {
    of: HashMap<String, String>,
    counts: HashMap<String, usize>,
}

#[derive(Clone, serde::Deserialize)]
struct Seen {
    metadata: SeenMetadata,
    #[serde(default)]
    status: SeenStatus,
}

#[derive(Clone, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct SeenMetadata {
    name: String,
    resource_version: String,
}

#[derive(Clone, Default, serde::Deserialize)]
struct SeenStatus {
    #[serde(default)]
    phase: String,
}

impl Tally {
    fn of<K: kube::Resource<DynamicType = ()>>(client: &kube::Client, changed: &Arc<Notify>) -> Arc<Self> {
        let tally = Arc::new(Self::default());
        let (kept, client, changed) = (tally.clone(), client.clone(), changed.clone());
        let requests = Request::new(K::url_path(&(), None));
        tokio::spawn(async move {
            let mut revision = "0".to_owned();
            loop {
                let request = requests.watch(&WatchParams::default(), &revision).expect("a request");
                // The stack goes before this task does.
                let Ok(events) = client.request_events::<Seen>(request).await else { return };
                let mut events = Box::pin(events);
                while let Some(Ok(event)) = events.next().await {
                    match event {
                        WatchEvent::Added(seen) | WatchEvent::Modified(seen) => {
                            revision.clone_from(&seen.metadata.resource_version);
                            kept.0.lock().set(seen.metadata.name, Some(seen.status.phase));
                        }
                        WatchEvent::Deleted(seen) => {
                            revision.clone_from(&seen.metadata.resource_version);
                            kept.0.lock().set(seen.metadata.name, None);
                        }
                        WatchEvent::Bookmark(mark) => revision = mark.metadata.resource_version,
                        WatchEvent::Error(status) => panic!("the watch failed: {status}"),
                    }
                    changed.notify_waiters();
                }
            }
        });
        tally
    }

    fn len(&self) -> usize {
        self.0.lock().of.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn names(&self) -> Vec<String> {
        self.0.lock().of.keys().cloned().collect()
    }

    fn is(&self, name: &str, phase: &str) -> bool {
        self.0.lock().of.get(name).is_some_and(|found| found == phase)
    }

    fn count(&self, phase: &str) -> usize {
        self.0.lock().counts.get(phase).copied().unwrap_or(0)
    }
}

impl Phases {
    fn set(&mut self, name: String, phase: Option<String>) {
        let before = match phase.clone() {
            Some(phase) => self.of.insert(name, phase),
            None => self.of.remove(&name),
        };
        if let Some(count) = before.and_then(|before| self.counts.get_mut(&before)) {
            *count -= 1;
        }
        if let Some(phase) = phase {
            *self.counts.entry(phase).or_default() += 1;
        }
    }
}

/// The images of volumes in the pool.
fn images(pool: &Path) -> usize {
    let mut count = 0;
    let mut directories = vec![pool.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).expect("the pool").flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => directories.push(entry.path()),
                Ok(_) if entry.metadata().is_ok_and(|m| m.len() >= 1 << 30) => count += 1,
                Ok(_) | Err(_) => {}
            }
        }
    }
    count
}

struct Step {
    name: String,
    count: usize,
    begun: Instant,
    cpu: Duration,
}

impl Step {
    fn begin(name: String, count: usize) -> Self {
        Self { name, count, begun: Instant::now(), cpu: Usage::now().cpu }
    }

    async fn end(self) {
        let (took, usage) = (self.begun.elapsed().as_secs_f64(), Usage::now());
        let all_mib = Usage::at_rest().await.all_mib;
        let cpu = usage.cpu.saturating_sub(self.cpu).as_secs_f64();
        let count = self.count as f64;
        println!(
            "| {} | {took:.2} s | {:.0}/s | {:.2} ms ({cpu:.1} s) | {} MiB |",
            self.name,
            count / took,
            cpu * 1000.0 / count,
            all_mib
        );
    }
}

/// What this process and its children use. The senders and the bench's own watches are part of it.
struct Usage {
    cpu: Duration,
    own_mib: u64,
    all_mib: u64,
}

impl Usage {
    /// Memory is that of a stack that has had nothing to do for a while.
    async fn at_rest() -> Self {
        tokio::time::sleep(REST).await;
        Self::now()
    }

    fn now() -> Self {
        let own = std::process::id();
        let children: Vec<u32> = std::fs::read_dir(format!("/proc/{own}/task"))
            .expect("/proc")
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
            .flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
            .collect();
        let all = || std::iter::once(own).chain(children.iter().copied());
        Self { cpu: all().map(cpu).sum(), own_mib: rss(own) >> 10, all_mib: all().map(rss).sum::<u64>() >> 10 }
    }
}

fn cpu(pid: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets may contain blanks; user and system time are the 12th and 13th fields after it.
    let fields: Vec<u64> =
        text.rsplit(") ").next().unwrap_or_default().split(' ').map(|f| f.parse().unwrap_or(0)).collect();
    let ticks = fields.get(11).unwrap_or(&0) + fields.get(12).unwrap_or(&0);
    Duration::from_millis(ticks * 10)
}

/// In KiB.
fn rss(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}
