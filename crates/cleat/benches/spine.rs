//! Measures each step of one claim, from its creation to its deletion: `cargo xtask bench spine`.
//!
//! The whole stack runs as in `cleat up`: all components in this process, the driver as a child process over a unix socket,
//! durable writes, real loop devices, mkfs and mounts. One claim at a time, so the times_by_step are latencies. A time is taken when
//! a watch of the in-process client shows the state, as a controller would see it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::up::objects::CLASS;
use cleat::up::{Stack, StackConfig};
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{VOLUMES_MOUNTED_CONDITION, annotation};
use cleat_api::{claim, condition, names};
use cleat_runtime::{Cache, Caches, write};
use cleat_testing::build;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, VolumeMount};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const ROUNDS: usize = 200;
/// Rounds before the measured ones.
const WARM_UP_ROUNDS: usize = 10;
/// A step that takes longer fails the benchmark.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() {
    let directory = tempfile::Builder::new().prefix("cb-").tempdir_in("/tmp").expect("a temporary directory");
    let config = StackConfig::scratch(directory.path(), 1, env!("CARGO_BIN_EXE_cleat"));
    let stack = Stack::start(config).await.expect("the stack starts");
    let bench = Bench::new(&stack).await;
    let mut times_by_step = StepTimes::default();
    for round in 0..WARM_UP_ROUNDS + ROUNDS {
        let times = bench.round(round).await;
        if round >= WARM_UP_ROUNDS {
            times.into_iter().for_each(|(stage, time)| times_by_step.add(stage, time));
        }
    }
    stack.stop().await;
    times_by_step.print();
}

struct Bench {
    client: cleat_runtime::Client,
    caches: Caches,
    changed: Arc<Notify>,
}

impl Bench {
    async fn new(stack: &Stack) -> Self {
        let client = cleat_runtime::Client::from(stack.client());
        let caches = Caches::new(client.clone(), CancellationToken::new());
        let changed = Arc::new(Notify::new());
        tokio::join!(
            follow(caches.claims(), &changed),
            follow(caches.pods(), &changed),
            follow(caches.nodes(), &changed),
            follow(caches.volumes(), &changed),
            follow(caches.attachments(), &changed),
        );
        let bench = Self { client, caches, changed };
        let registered = |b: &Self| {
            let node = b.caches.nodes().named("node-1")?;
            node.metadata.annotation(annotation::NODE_CSI_IDS)?;
            condition::node_is_ready(&node).then_some(())
        };
        bench.wait_until("the node registers", registered).await;
        bench
    }

    /// Creates and deletes one claim and one pod; returns the time of each step.
    async fn round(&self, round: usize) -> Vec<(&'static str, Duration)> {
        let name = format!("bench-{round}");
        let key = Key::namespaced("default", &name);
        let mut times = Vec::new();

        let started = Instant::now();
        let claim =
            write::create(&self.client, &without_server_fields(build::claim("default", &name, Some(CLASS), "1Gi")))
                .await
                .expect("claim");
        let volume = self.wait_until("the claim is bound", |b| {
            let claim = b.caches.claims().get(&key).filter(|c| claim::claim_phase(c) == "Bound")?;
            claim::volume_name(&claim).map(ToOwned::to_owned)
        });
        let volume = volume.await;
        times.push(("claim created → Bound", started.elapsed()));

        let started = Instant::now();
        let mut pod = without_server_fields(build::pod("default", &name, "node-1", &[&name]));
        mount_all(&mut pod);
        let pod = write::create(&self.client, &pod).await.expect("pod");
        self.wait_until("the volume is attached", |b| {
            let volume = b.caches.volumes().named(&volume)?;
            let csi = volume.spec.as_ref()?.csi.as_ref()?;
            let unique_name = names::unique_volume_name(&csi.driver, &csi.volume_handle);
            let node = b.caches.nodes().named("node-1")?;
            let attached = node.status.as_ref()?.volumes_attached.as_ref()?;
            attached.iter().any(|v| v.name == unique_name).then_some(())
        })
        .await;
        times.push(("pod created → attached", started.elapsed()));
        self.wait_until("the pod's volume is mounted", |b| {
            let pod = b.caches.pods().get(&key)?;
            condition::pod_condition(&pod, VOLUMES_MOUNTED_CONDITION).filter(|c| c.status == "True").map(drop)
        })
        .await;
        times.push(("pod created → mounted (with mkfs)", started.elapsed()));

        let started = Instant::now();
        write::delete(&self.client, &*pod).await.expect("pod deleted");
        self.wait_until("the pod is gone", |b| b.caches.pods().get(&key).is_none().then_some(())).await;
        times.push(("pod deleted → unmounted and gone", started.elapsed()));
        self.wait_until("the volume is detached", |b| b.caches.attachments().is_empty().then_some(())).await;
        times.push(("pod deleted → detached", started.elapsed()));
        let started = Instant::now();
        write::delete(&self.client, &*claim).await.expect("claim deleted");
        self.wait_until("the volume is gone", |b| b.caches.volumes().named(&volume).is_none().then_some(())).await;
        times.push(("claim deleted → volume gone", started.elapsed()));
        times
    }

    /// Waits until `find` returns a value.
    async fn wait_until<T>(&self, what: &str, find: impl Fn(&Self) -> Option<T>) -> T {
        let wait = async {
            loop {
                let changed = self.changed.notified();
                if let Some(found) = find(self) {
                    return found;
                }
                changed.await;
            }
        };
        match tokio::time::timeout(STEP_TIMEOUT, wait).await {
            Ok(found) => found,
            Err(_) => panic!("{what}: not within {STEP_TIMEOUT:?}"),
        }
    }
}

/// Mounts every volume in every container: the node agent ignores volumes that no container mounts.
fn mount_all(pod: &mut Pod) {
    let spec = pod.spec.get_or_insert_default();
    let volumes = spec.volumes.iter().flatten().map(|v| v.name.clone()).collect::<Vec<_>>();
    let mount = |name: String| VolumeMount { mount_path: format!("/{name}"), name, ..VolumeMount::default() };
    for container in &mut spec.containers {
        container.volume_mounts = Some(volumes.iter().cloned().map(mount).collect());
    }
}

/// An object as a user would create it, without what the server sets and without a status.
fn without_server_fields<K: kube::Resource + HasStatus>(mut object: K) -> K {
    let meta = object.meta_mut();
    meta.uid = None;
    meta.resource_version = None;
    meta.creation_timestamp = None;
    object.clear_status();
    object
}

trait HasStatus {
    fn clear_status(&mut self);
}

impl HasStatus for PersistentVolumeClaim {
    fn clear_status(&mut self) {
        self.status = None;
    }
}

impl HasStatus for Pod {
    fn clear_status(&mut self) {
        self.status = None;
    }
}

/// Waits until the cache is filled, and wakes waiters at every change from then on.
async fn follow<K>(cache: Cache<K>, changed: &Arc<Notify>)
where
    K: cleat_runtime::Cached,
{
    cache.synced().await;
    let changed = changed.clone();
    cache.subscribe(move |_| changed.notify_waiters());
}

/// The times of each step, in the order of the steps.
#[derive(Default)]
struct StepTimes(BTreeMap<usize, (&'static str, Vec<Duration>)>);

impl StepTimes {
    fn add(&mut self, stage: &'static str, time: Duration) {
        let next = self.0.len();
        let position = self.0.iter().find(|(_, (name, _))| *name == stage).map_or(next, |(position, _)| *position);
        self.0.entry(position).or_insert_with(|| (stage, Vec::new())).1.push(time);
    }

    fn print(&mut self) {
        println!("| stage | p50 | p99 | worst |\n|---|---|---|---|");
        for (stage, times) in self.0.values_mut() {
            times.sort();
            let percentile = |share: f64| {
                let index = ((times.len() - 1) as f64 * share).round() as usize;
                times[index].as_secs_f64() * 1000.0
            };
            println!(
                "| {stage} | {:.2} ms | {:.2} ms | {:.2} ms |",
                percentile(0.5),
                percentile(0.99),
                percentile(1.0)
            );
        }
        println!("\n{ROUNDS} rounds after {WARM_UP_ROUNDS} to warm up, one at a time.");
    }
}
