//! Measures how long volumes take to be attached and detached: `cargo xtask bench attach`.
//!
//! The whole stack runs as in `cleat up`, with the block driver's controller service as a child process and durable writes.
//! The nodes are simulated: Node and CSINode objects without an agent, announced to the driver, so that nothing is mounted
//! and a thousand nodes fit on one machine. A time is taken when a watch shows the state.
//!
//! First one attachment at a time, then bursts of pods. `CLEAT_BENCH_STORMS=50x5,100x10` (volumes x nodes) sets the sizes of the
//! bursts, `CLEAT_BENCH_ROUNDS=20` the number of single attachments.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::up::objects::CLASS;
use cleat::up::{Stack, StackConfig};
use cleat_api::Key;
use cleat_api::claim;
use cleat_api::well_known::annotation;
use cleat_drivers::block;
use cleat_runtime::write::Part;
use cleat_runtime::{Cache, Caches, Change, Clock as _, SystemClock, write};
use cleat_testing::build;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Toleration};
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, DeleteParams};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Volumes and nodes of each burst.
const BURSTS: [(usize, usize); 6] = [(500, 10), (1300, 10), (5000, 10), (500, 1000), (1300, 1000), (5000, 1000)];
const ROUNDS: usize = 200;
/// Rounds before the measured ones.
const WARM_UP_ROUNDS: usize = 10;
/// Concurrent requests of the benchmark itself.
const MAX_CONCURRENT_REQUESTS: usize = 128;
/// The interval at which node agents renew their leases.
const LEASE_RENEW_INTERVAL: Duration = Duration::from_secs(10);
/// A burst that takes longer fails the benchmark.
const BURST_TIMEOUT: Duration = Duration::from_secs(600);

#[tokio::main]
async fn main() {
    let bursts = burst_sizes();
    let rounds = std::env::var("CLEAT_BENCH_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(ROUNDS);
    let directory = tempfile::Builder::new().prefix("cb-").tempdir().expect("a temporary directory");
    let config = StackConfig::scratch(directory.path(), 1, env!("CARGO_BIN_EXE_cleat"));
    let stack = Stack::start(config).await.expect("the stack starts");
    let bench = Bench::new(&stack).await;
    bench.simulate_nodes(&stack, 0..1).await;
    bench.create_claims(0..1).await;
    let mut single = StageTimes::default();
    for round in 0..WARM_UP_ROUNDS + rounds {
        let times = bench.burst(1, 1).await;
        if round >= WARM_UP_ROUNDS {
            single.add(times);
        }
    }
    single.print(rounds);
    println!(
        "\n| storm | nodes | attached | in node.status | detached | out of node.status |\n|---|---|---|---|---|---|"
    );
    let (mut claims, mut simulated) = (1, 1);
    for (volumes, nodes) in bursts {
        // Only the nodes and claims of this burst: others would change its times.
        bench.simulate_nodes(&stack, simulated..nodes).await;
        bench.create_claims(claims..volumes).await;
        (claims, simulated) = (claims.max(volumes), simulated.max(nodes));
        let [attached, reported, detached, unreported] =
            bench.burst(volumes, nodes).await.map(|time| time.as_secs_f64());
        println!("| {volumes} | {nodes} | {attached:.2} s | {reported:.2} s | {detached:.2} s | {unreported:.2} s |");
    }
    stack.stop().await;
}

fn burst_sizes() -> Vec<(usize, usize)> {
    let Ok(text) = std::env::var("CLEAT_BENCH_STORMS") else { return BURSTS.to_vec() };
    let parse = |part: &str| {
        let (volumes, nodes) = part.split_once('x')?;
        Some((volumes.parse().ok()?, nodes.parse().ok()?))
    };
    text.split(',').map(|part| parse(part).unwrap_or_else(|| panic!("{part:?} is not VOLUMESxNODES"))).collect()
}

/// A number for each object of a kind, and their sum.
#[derive(Default)]
struct ObjectCounts {
    by_name: HashMap<String, usize>,
    sum: usize,
}

impl ObjectCounts {
    fn set(&mut self, name: String, number: Option<usize>) {
        let before = match number {
            Some(number) => self.by_name.insert(name, number),
            None => self.by_name.remove(&name),
        };
        self.sum = self.sum + number.unwrap_or(0) - before.unwrap_or(0);
    }
}

/// The state that the watches have reported.
#[derive(Default)]
struct ObservedCounts {
    /// VolumeAttachments: 1 for those that are attached, 0 for others.
    attached: ObjectCounts,
    /// Nodes: the number of volumes in `status.volumesAttached`.
    reported: ObjectCounts,
    /// Claims: 1 for those that are bound, 0 for others.
    bound: ObjectCounts,
}

/// The lease that a node's agent renews.
fn lease(n: usize) -> Lease {
    let mut lease = Lease::default();
    lease.metadata.name = Some(node_name(n));
    lease.metadata.namespace = Some("kube-node-lease".to_owned());
    lease.spec = Some(LeaseSpec { renew_time: Some(MicroTime(SystemClock.now())), ..LeaseSpec::default() });
    lease
}

/// Renews the leases of simulated nodes until the stack stops.
async fn renew_leases(client: cleat_runtime::Client, which: Range<usize>) {
    loop {
        tokio::time::sleep(LEASE_RENEW_INTERVAL).await;
        for n in which.clone() {
            let renewed = lease(n);
            let key = Key::of(&renewed.metadata);
            let patch = serde_json::json!({ "spec": renewed.spec });
            // The stack has stopped.
            if write::merge::<Lease>(&client, Part::Whole, &key, &patch).await.is_err() {
                return;
            }
        }
    }
}

struct Bench {
    client: cleat_runtime::Client,
    counts: Arc<Mutex<ObservedCounts>>,
    changed: Arc<Notify>,
    _caches: Caches,
}

impl Bench {
    async fn new(stack: &Stack) -> Self {
        let client = cleat_runtime::Client::from(stack.client());
        let caches = Caches::new(client.clone(), CancellationToken::new());
        let (counts, changed) = (Arc::new(Mutex::new(ObservedCounts::default())), Arc::new(Notify::new()));
        count(caches.attachments(), &counts, &changed, |counts, name, attachment: Option<&VolumeAttachment>| {
            let attached = attachment.map(|a| usize::from(a.status.as_ref().is_some_and(|s| s.attached)));
            counts.attached.set(name, attached);
        });
        count(caches.nodes(), &counts, &changed, |counts, name, node: Option<&Node>| {
            let attached = |n: &Node| n.status.as_ref().and_then(|s| s.volumes_attached.as_ref()).map_or(0, Vec::len);
            counts.reported.set(name, node.map(attached));
        });
        count(caches.claims(), &counts, &changed, |counts, name, claim: Option<&PersistentVolumeClaim>| {
            counts.bound.set(name, claim.map(|c| usize::from(claim::claim_phase(c) == "Bound")));
        });
        caches.attachments().synced().await;
        caches.nodes().synced().await;
        caches.claims().synced().await;
        Self { client, counts, changed, _caches: caches }
    }

    /// Creates nodes with leases that are renewed, so that the node lifecycle controller treats them as alive.
    async fn simulate_nodes(&self, stack: &Stack, which: Range<usize>) {
        if which.is_empty() {
            return;
        }
        let pool = stack.layout().pool();
        for n in which.clone() {
            block::register_node(&pool, &node_name(n), i64::MAX).expect("the node is announced");
        }
        stream::iter(which.clone())
            .for_each_concurrent(MAX_CONCURRENT_REQUESTS, |n| async move {
                let mut node = build::node(&node_name(n));
                clear_server_fields(&mut node.metadata);
                node.status = None;
                build::annotate(&mut node.metadata, annotation::CONTROLLER_MANAGED_ATTACH, "true");
                let driver =
                    CSINodeDriver { name: block::NAME.to_owned(), node_id: node_name(n), ..CSINodeDriver::default() };
                let mut csi = CSINode { spec: CSINodeSpec { drivers: vec![driver] }, ..CSINode::default() };
                csi.metadata.name = Some(node_name(n));
                write::create(&self.client, &node).await.expect("node");
                write::create(&self.client, &csi).await.expect("CSI node");
                write::create(&self.client, &lease(n)).await.expect("lease");
            })
            .await;
        tokio::spawn(renew_leases(self.client.clone(), which));
    }

    async fn create_claims(&self, which: Range<usize>) {
        if which.is_empty() {
            return;
        }
        let count = which.end;
        stream::iter(which)
            .for_each_concurrent(MAX_CONCURRENT_REQUESTS, |n| async move {
                let mut claim = build::claim("default", &claim_name(n), Some(CLASS), "1Gi");
                clear_server_fields(&mut claim.metadata);
                claim.status = None;
                write::create(&self.client, &claim).await.expect("claim");
            })
            .await;
        self.wait_until("the claims are bound", |c| c.bound.sum == count).await;
    }

    /// Creates one pod per volume and deletes them all. Returns the times until all volumes are attached, until the nodes list
    /// them, until all are detached, and until no node lists one.
    async fn burst(&self, volumes: usize, nodes: usize) -> [Duration; 4] {
        let started = Instant::now();
        let create = stream::iter(0..volumes).for_each_concurrent(MAX_CONCURRENT_REQUESTS, |n| async move {
            let mut pod = build::pod("default", &pod_name(n), &node_name(n % nodes), &[&claim_name(n)]);
            clear_server_fields(&mut pod.metadata);
            pod.status = None;
            // The nodes never become ready; without the toleration their pods would be evicted.
            let tolerate_all = Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() };
            pod.spec.get_or_insert_default().tolerations = Some(vec![tolerate_all]);
            write::create(&self.client, &pod).await.expect("pod");
        });
        let attached = self.time_until(started, "all are attached", |c| c.attached.sum == volumes);
        let reported = self.time_until(started, "the nodes list all volumes", |c| c.reported.sum == volumes);
        let ((), attached, reported) = tokio::join!(create, attached, reported);

        let pods: Api<Pod> = Api::namespaced(self.client.kube().clone(), "default");
        let started = Instant::now();
        let immediately = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let delete = stream::iter(0..volumes).for_each_concurrent(MAX_CONCURRENT_REQUESTS, |n| {
            let (pods, immediately) = (pods.clone(), immediately.clone());
            async move { drop(pods.delete(&pod_name(n), &immediately).await.expect("pod deleted")) }
        });
        let detached = self.time_until(started, "all are detached", |c| c.attached.by_name.is_empty());
        let unreported = self.time_until(started, "the nodes list no volume", |c| c.reported.sum == 0);
        let ((), detached, unreported) = tokio::join!(delete, detached, unreported);
        [attached, reported, detached, unreported]
    }

    async fn time_until(&self, started: Instant, what: &str, holds: impl Fn(&ObservedCounts) -> bool) -> Duration {
        self.wait_until(what, holds).await;
        started.elapsed()
    }

    async fn wait_until(&self, what: &str, holds: impl Fn(&ObservedCounts) -> bool) {
        let wait = async {
            loop {
                let changed = self.changed.notified();
                if holds(&self.counts.lock()) {
                    return;
                }
                changed.await;
            }
        };
        if tokio::time::timeout(BURST_TIMEOUT, wait).await.is_err() {
            let counts = self.counts.lock();
            panic!(
                "{what}: not within {BURST_TIMEOUT:?}; attached {}, reported {}",
                counts.attached.sum, counts.reported.sum
            );
        }
    }
}

/// Updates `counts` with every change of the cache, and wakes waiters.
fn count<K>(
    cache: Cache<K>,
    counts: &Arc<Mutex<ObservedCounts>>,
    changed: &Arc<Notify>,
    update: impl Fn(&mut ObservedCounts, String, Option<&K>) + Send + Sync + 'static,
) where
    K: cleat_runtime::Cached,
{
    let (counts, changed) = (counts.clone(), changed.clone());
    cache.subscribe(move |change| {
        let name = change.object().meta().name.clone().unwrap_or_default();
        let object = match change {
            Change::Applied { new, .. } => Some(new.as_ref()),
            Change::Deleted(_) => None,
        };
        update(&mut counts.lock(), name, object);
        changed.notify_waiters();
    });
}

fn node_name(n: usize) -> String {
    format!("simulated-{n}")
}

fn claim_name(n: usize) -> String {
    format!("storm-{n}")
}

fn pod_name(n: usize) -> String {
    format!("storm-{n}")
}

/// Removes what the server sets: uid, resourceVersion and creationTimestamp.
fn clear_server_fields(meta: &mut k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) {
    (meta.uid, meta.resource_version, meta.creation_timestamp) = (None, None, None);
}

#[derive(Default)]
struct StageTimes([Vec<Duration>; 4]);

impl StageTimes {
    fn add(&mut self, times: [Duration; 4]) {
        self.0.iter_mut().zip(times).for_each(|(all, time)| all.push(time));
    }

    fn print(&mut self, rounds: usize) {
        println!("| one at a time | p50 | p99 | worst |\n|---|---|---|---|");
        let stages = [
            "pod created → VolumeAttachment attached",
            "pod created → in node.status",
            "pod deleted → VolumeAttachment gone",
            "pod deleted → out of node.status",
        ];
        for (stage, times) in stages.into_iter().zip(&mut self.0) {
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
        println!("\n{rounds} rounds after {WARM_UP_ROUNDS} to warm up.");
    }
}
