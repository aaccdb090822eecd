//! Measures how fast claims are provisioned and deleted: `cargo xtask bench claims`.
//!
//! The whole stack runs as in `cleat up`: API server, controllers and sidecars in this process, the driver as a child process,
//! durable writes, one real image per volume. First one claim at a time. Then bursts: 64 senders create all claims, and the
//! time is taken until the last is Bound; then all are deleted, until no PersistentVolume and no image exists. Last, claims
//! and existing PersistentVolumes that are bound to each other.
//!
//! `CLEAT_BENCH_STORMS` and `CLEAT_BENCH_PAIRS` (numbers separated by commas) set other sizes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::up::objects::CLASS;
use cleat::up::{Stack, StackConfig};
use cleat_runtime::write;
use cleat_testing::build;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{Request, WatchEvent, WatchParams};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

const ROUNDS: usize = 200;
/// Rounds before the measured ones.
const WARM_UP_ROUNDS: usize = 20;
const MAX_CONCURRENT_REQUESTS: usize = 64;
/// How long the stack is idle before its memory is measured.
const IDLE_TIME: Duration = Duration::from_secs(2);
/// A step that takes longer fails the benchmark.
const STEP_TIMEOUT: Duration = Duration::from_secs(900);

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run());
}

async fn run() {
    let bursts = sizes("CLEAT_BENCH_STORMS", &[1_000, 10_000, 50_000]);
    let pairs = sizes("CLEAT_BENCH_PAIRS", &[10_000]);
    let bench = Bench::start().await;
    let idle = Usage::when_idle().await;
    println!("idle: {} MiB of this process, {} MiB with the drivers\n", idle.own_mib, idle.all_mib);
    bench.one_at_a_time().await;
    println!("| step | total | rate | CPU per object | RSS with drivers |\n|---|---|---|---|---|");
    for burst in bursts {
        bench.burst(burst).await;
    }
    for pairs in pairs {
        bench.static_pairs(pairs).await;
    }
    bench.stop().await;
}

fn sizes(variable: &str, default: &[usize]) -> Vec<usize> {
    match std::env::var(variable) {
        Ok(text) => text.split(',').filter_map(|size| size.parse().ok()).collect(),
        Err(_) => default.to_vec(),
    }
}

struct Bench {
    _directory: tempfile::TempDir,
    pool: PathBuf,
    stack: Stack,
    client: cleat_runtime::Client,
    claims: Arc<WatchedPhases>,
    volumes: Arc<WatchedPhases>,
    changed: Arc<Notify>,
}

impl Bench {
    async fn start() -> Self {
        let directory = tempfile::Builder::new().prefix("cb-").tempdir().expect("a temporary directory");
        let config = StackConfig::scratch(directory.path(), 1, env!("CARGO_BIN_EXE_cleat"));
        let stack = Stack::start(config).await.expect("the stack starts");
        let client = cleat_runtime::Client::from(stack.client());
        let changed = Arc::new(Notify::new());
        let claims = WatchedPhases::watch::<PersistentVolumeClaim>(client.kube(), &changed);
        let volumes = WatchedPhases::watch::<PersistentVolume>(client.kube(), &changed);
        Self { pool: stack.layout().pool(), _directory: directory, stack, client, claims, volumes, changed }
    }

    async fn stop(self) {
        self.stack.stop().await;
    }

    async fn one_at_a_time(&self) {
        let (mut bind_times, mut delete_times) = (Vec::new(), Vec::new());
        for round in 0..WARM_UP_ROUNDS + ROUNDS {
            let name = format!("one-{round}");
            let started = Instant::now();
            let claim = self.create(user_claim(&name, CLASS)).await;
            self.wait_until("the claim is bound", || self.claims.has_phase(&name, "Bound")).await;
            let bound = started.elapsed();
            let started = Instant::now();
            write::delete(&self.client, &*claim).await.expect("claim deleted");
            self.wait_until("the volume is gone", || self.volumes.is_empty()).await;
            if round >= WARM_UP_ROUNDS {
                bind_times.push(bound);
                delete_times.push(started.elapsed());
            }
        }
        println!("| one at a time | p50 | p99 | worst |\n|---|---|---|---|");
        for (what, times) in
            [("claim created → Bound", &mut bind_times), ("claim deleted → volume gone", &mut delete_times)]
        {
            times.sort();
            let percentile =
                |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1000.0;
            println!("| {what} | {:.2} ms | {:.2} ms | {:.2} ms |", percentile(0.5), percentile(0.99), percentile(1.0));
        }
        println!();
    }

    async fn burst(&self, count: usize) {
        let step = Step::begin(format!("{count} claims created → Bound"), count);
        self.send((0..count).map(|n| user_claim(&format!("storm-{n}"), CLASS))).await;
        self.wait_all_bound(count).await;
        step.end().await;
        let step = Step::begin(format!("{count} claims deleted → volumes and images gone"), count);
        self.delete_all().await;
        self.wait_until("no volume is left", || self.volumes.is_empty()).await;
        step.end().await;
        assert_eq!(count_images(&self.pool), 0, "images are left");
    }

    /// Creates existing volumes of one class and then as many claims, all of one size.
    async fn static_pairs(&self, count: usize) {
        let volume = |n: usize| {
            let mut volume = build::volume(&format!("static-{n}"), "static", "1Gi");
            volume.spec.get_or_insert_default().persistent_volume_reclaim_policy = Some("Retain".to_owned());
            volume.status = None;
            clear_server_fields(volume)
        };
        self.send((0..count).map(volume)).await;
        self.wait_until("the volumes are available", || self.volumes.count("Available") == count).await;
        let step = Step::begin(format!("{count} static pairs, claims created → Bound"), count);
        self.send((0..count).map(|n| user_claim(&format!("pair-{n}"), "static"))).await;
        self.wait_all_bound(count).await;
        step.end().await;
        self.delete_all().await;
        for name in self.volumes.names() {
            let volume = clear_server_fields(build::volume(&name, "static", "1Gi"));
            write::delete(&self.client, &volume).await.expect("volume deleted");
        }
        self.wait_until("no volume is left", || self.volumes.is_empty()).await;
    }

    async fn wait_all_bound(&self, count: usize) {
        self.wait_until("all claims are bound", || self.claims.len() == count && self.claims.count("Bound") == count)
            .await;
    }

    async fn create<K: write::ApiObject>(&self, object: K) -> Arc<K> {
        write::create(&self.client, &object).await.expect("created")
    }

    async fn send<K: write::ApiObject + Send + Sync>(&self, objects: impl Iterator<Item = K>) {
        let permits = Arc::new(Semaphore::new(MAX_CONCURRENT_REQUESTS));
        let mut senders = JoinSet::new();
        for object in objects {
            let permit = permits.clone().acquire_owned().await.expect("the semaphore is not closed");
            let client = self.client.clone();
            senders.spawn(async move {
                write::create_without_reply(&client, &object).await.expect("created");
                drop(permit);
            });
        }
        senders.join_all().await;
    }

    async fn delete_all(&self) {
        let permits = Arc::new(Semaphore::new(MAX_CONCURRENT_REQUESTS));
        let mut senders = JoinSet::new();
        for name in self.claims.names() {
            let claim = user_claim(&name, CLASS);
            let permit = permits.clone().acquire_owned().await.expect("the semaphore is not closed");
            let client = self.client.clone();
            senders.spawn(async move {
                write::delete(&client, &claim).await.expect("deleted");
                drop(permit);
            });
        }
        senders.join_all().await;
    }

    async fn wait_until(&self, what: &str, holds: impl Fn() -> bool) {
        let wait = async {
            loop {
                // Registered before the check, so that no change in between is missed.
                let changed = self.changed.notified();
                if holds() {
                    return;
                }
                changed.await;
                // A burst causes thousands of changes per second: checking after each would distort the measurement.
                if self.claims.len() + self.volumes.len() > 100 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        tokio::time::timeout(STEP_TIMEOUT, wait)
            .await
            .unwrap_or_else(|_| panic!("{what}: not within {STEP_TIMEOUT:?}"));
    }
}

/// A claim as a user would create it.
fn user_claim(name: &str, class: &str) -> PersistentVolumeClaim {
    let mut claim = build::claim("default", name, Some(class), "1Gi");
    claim.status = None;
    clear_server_fields(claim)
}

/// Removes what the server sets: uid, resourceVersion and creationTimestamp.
fn clear_server_fields<K: kube::Resource>(mut object: K) -> K {
    let meta = object.meta_mut();
    meta.uid = None;
    meta.resource_version = None;
    meta.creation_timestamp = None;
    object
}

/// The names and phases of all objects of one kind, from a watch that decodes nothing else, so that the benchmark itself costs
/// little.
#[derive(Default)]
struct WatchedPhases(Mutex<PhaseIndex>);

#[derive(Default)]
struct PhaseIndex {
    by_name: HashMap<String, String>,
    count_by_phase: HashMap<String, usize>,
}

#[derive(Clone, serde::Deserialize)]
struct WatchedObject {
    metadata: WatchedMetadata,
    #[serde(default)]
    status: WatchedStatus,
}

#[derive(Clone, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct WatchedMetadata {
    name: String,
    resource_version: String,
}

#[derive(Clone, Default, serde::Deserialize)]
struct WatchedStatus {
    #[serde(default)]
    phase: String,
}

impl WatchedPhases {
    fn watch<K: kube::Resource<DynamicType = ()>>(client: &kube::Client, changed: &Arc<Notify>) -> Arc<Self> {
        let phases = Arc::new(Self::default());
        let (index, client, changed) = (phases.clone(), client.clone(), changed.clone());
        let requests = Request::new(K::url_path(&(), None));
        tokio::spawn(async move {
            let mut revision = "0".to_owned();
            loop {
                let request = requests.watch(&WatchParams::default(), &revision).expect("a request");
                // The stack has stopped.
                let Ok(events) = client.request_events::<WatchedObject>(request).await else { return };
                let mut events = Box::pin(events);
                while let Some(Ok(event)) = events.next().await {
                    match event {
                        WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                            revision.clone_from(&object.metadata.resource_version);
                            index.0.lock().set(object.metadata.name, Some(object.status.phase));
                        }
                        WatchEvent::Deleted(object) => {
                            revision.clone_from(&object.metadata.resource_version);
                            index.0.lock().set(object.metadata.name, None);
                        }
                        WatchEvent::Bookmark(bookmark) => revision = bookmark.metadata.resource_version,
                        WatchEvent::Error(status) => panic!("the watch failed: {status}"),
                    }
                    changed.notify_waiters();
                }
            }
        });
        phases
    }

    fn len(&self) -> usize {
        self.0.lock().by_name.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn names(&self) -> Vec<String> {
        self.0.lock().by_name.keys().cloned().collect()
    }

    fn has_phase(&self, name: &str, phase: &str) -> bool {
        self.0.lock().by_name.get(name).is_some_and(|found| found == phase)
    }

    fn count(&self, phase: &str) -> usize {
        self.0.lock().count_by_phase.get(phase).copied().unwrap_or(0)
    }
}

impl PhaseIndex {
    fn set(&mut self, name: String, phase: Option<String>) {
        let before = match phase.clone() {
            Some(phase) => self.by_name.insert(name, phase),
            None => self.by_name.remove(&name),
        };
        if let Some(count) = before.and_then(|before| self.count_by_phase.get_mut(&before)) {
            *count -= 1;
        }
        if let Some(phase) = phase {
            *self.count_by_phase.entry(phase).or_default() += 1;
        }
    }
}

/// The number of volume images in the pool.
fn count_images(pool: &Path) -> usize {
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

/// A measured step: its duration, CPU time and memory.
struct Step {
    name: String,
    count: usize,
    started: Instant,
    cpu: Duration,
}

impl Step {
    fn begin(name: String, count: usize) -> Self {
        Self { name, count, started: Instant::now(), cpu: Usage::now().cpu }
    }

    async fn end(self) {
        let (took, usage) = (self.started.elapsed().as_secs_f64(), Usage::now());
        let all_mib = Usage::when_idle().await.all_mib;
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

/// CPU time and memory of this process and its children, the benchmark's own requests and watches included.
struct Usage {
    cpu: Duration,
    own_mib: u64,
    all_mib: u64,
}

impl Usage {
    /// Waits until the stack has been idle for [`IDLE_TIME`], so that memory that is only used during work is not counted.
    async fn when_idle() -> Self {
        tokio::time::sleep(IDLE_TIME).await;
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
        Self {
            cpu: all().map(cpu_time).sum(),
            own_mib: rss_kib(own) >> 10,
            all_mib: all().map(rss_kib).sum::<u64>() >> 10,
        }
    }
}

/// User and system time so far, with the usual clock tick of 10 ms.
fn cpu_time(pid: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The process name in parentheses may contain spaces; user and system time are the 12th and 13th fields after it.
    let fields: Vec<u64> =
        text.rsplit(") ").next().unwrap_or_default().split(' ').map(|f| f.parse().unwrap_or(0)).collect();
    let ticks = fields.get(11).unwrap_or(&0) + fields.get(12).unwrap_or(&0);
    Duration::from_millis(ticks * 10)
}

/// Resident memory in KiB.
fn rss_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}
