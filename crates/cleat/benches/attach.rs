//! How long volumes take to be attached and detached: `cargo xtask bench attach`.
//!
//! The whole stack runs as in `cleat up`, with the block driver's controller as a child over its socket and every write
//! durable. The nodes are simulated: Node and CSINode objects that no agent serves, announced to the driver, so that
//! nothing is mounted and ten or a thousand of them fit on one machine. Time is taken when a watch shows the state.
//!
//! `CLEAT_BENCH_STORMS=50x5,100x10` (volumes x nodes) and `CLEAT_BENCH_ROUNDS=20` choose other sizes.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::up::objects::CLASS;
use cleat::up::{Config, Stack};
use cleat_api::Key;
use cleat_api::claim;
use cleat_api::keys::annotation;
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

const STORMS: [(usize, usize); 6] = [(500, 10), (1300, 10), (5000, 10), (500, 1000), (1300, 1000), (5000, 1000)];
const ROUNDS: usize = 200;
const WARM_UP: usize = 10;
/// Requests that the benchmark itself has under way.
const AT_ONCE: usize = 128;
/// As often as node agents renew their leases.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// A storm that takes this long is broken, not slow.
const PATIENCE: Duration = Duration::from_secs(600);

#[tokio::main]
async fn main() {
    let storms = storms();
    let rounds = std::env::var("CLEAT_BENCH_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(ROUNDS);
    let directory = tempfile::Builder::new().prefix("cb-").tempdir().expect("a temporary directory");
    let config = Config::scratch(directory.path(), 1, env!("CARGO_BIN_EXE_cleat"));
    let stack = Stack::start(config).await.expect("the stack starts");
    let bench = Bench::new(&stack).await;
    bench.simulate_nodes(&stack, 0..1).await;
    bench.make_claims(0..1).await;
    let mut one = Times::default();
    for round in 0..WARM_UP + rounds {
        let times = bench.storm(1, 1).await;
        if round >= WARM_UP {
            one.add(times);
        }
    }
    one.print(rounds);
    println!(
        "\n| storm | nodes | attached | in node.status | detached | out of node.status |\n|---|---|---|---|---|---|"
    );
    let (mut claims, mut simulated) = (1, 1);
    for (volumes, nodes) in storms {
        // What a storm does not need is not there yet.
        bench.simulate_nodes(&stack, simulated..nodes).await;
        bench.make_claims(claims..volumes).await;
        (claims, simulated) = (claims.max(volumes), simulated.max(nodes));
        let [attached, told, detached, untold] = bench.storm(volumes, nodes).await.map(|time| time.as_secs_f64());
        println!("| {volumes} | {nodes} | {attached:.2} s | {told:.2} s | {detached:.2} s | {untold:.2} s |");
    }
    stack.stop().await;
}

fn storms() -> Vec<(usize, usize)> {
    let Ok(text) = std::env::var("CLEAT_BENCH_STORMS") else { return STORMS.to_vec() };
    let storm = |part: &str| {
        let (volumes, nodes) = part.split_once('x')?;
        Some((volumes.parse().ok()?, nodes.parse().ok()?))
    };
    text.split(',').map(|part| storm(part).unwrap_or_else(|| panic!("{part:?} is not VOLUMESxNODES"))).collect()
}

/// A number for each object of a kind, and their sum.
#[derive(Default)]
struct Tally {
    each: HashMap<String, usize>,
    sum: usize,
}

impl Tally {
    fn set(&mut self, name: String, number: Option<usize>) {
        let before = match number {
            Some(number) => self.each.insert(name, number),
            None => self.each.remove(&name),
        };
        self.sum = self.sum + number.unwrap_or(0) - before.unwrap_or(0);
    }
}

/// What the watches have shown.
#[derive(Default)]
struct Counts {
    /// Attachments, 1 for those that are attached.
    attached: Tally,
    /// Nodes, with how many volumes they are told of.
    told: Tally,
    /// Claims, 1 for those that are bound.
    bound: Tally,
}

/// What a node's agent renews to show that it lives.
fn lease(n: usize) -> Lease {
    let mut lease = Lease::default();
    lease.metadata.name = Some(node_name(n));
    lease.metadata.namespace = Some("kube-node-lease".to_owned());
    lease.spec = Some(LeaseSpec { renew_time: Some(MicroTime(SystemClock.now())), ..LeaseSpec::default() });
    lease
}

async fn keep_alive(client: kube::Client, which: Range<usize>) {
    loop {
        tokio::time::sleep(HEARTBEAT).await;
        for n in which.clone() {
            let renewed = lease(n);
            let key = Key::of(&renewed.metadata);
            let patch = serde_json::json!({ "spec": renewed.spec });
            // The stack goes before this task does.
            if write::merge::<Lease>(&client, Part::Whole, &key, &patch).await.is_err() {
                return;
            }
        }
    }
}

struct Bench {
    client: kube::Client,
    counts: Arc<Mutex<Counts>>,
    changed: Arc<Notify>,
    _caches: Caches,
}

impl Bench {
    async fn new(stack: &Stack) -> Self {
        let client = stack.client();
        let caches = Caches::new(client.clone(), CancellationToken::new());
        let (counts, changed) = (Arc::new(Mutex::new(Counts::default())), Arc::new(Notify::new()));
        count(caches.attachments(), &counts, &changed, |counts, name, attachment: Option<&VolumeAttachment>| {
            let attached = attachment.map(|a| usize::from(a.status.as_ref().is_some_and(|s| s.attached)));
            counts.attached.set(name, attached);
        });
        count(caches.nodes(), &counts, &changed, |counts, name, node: Option<&Node>| {
            let told = |n: &Node| n.status.as_ref().and_then(|s| s.volumes_attached.as_ref()).map_or(0, Vec::len);
            counts.told.set(name, node.map(told));
        });
        count(caches.claims(), &counts, &changed, |counts, name, claim: Option<&PersistentVolumeClaim>| {
            counts.bound.set(name, claim.map(|c| usize::from(claim::claim_phase(c) == "Bound")));
        });
        caches.attachments().synced().await;
        caches.nodes().synced().await;
        caches.claims().synced().await;
        Self { client, counts, changed, _caches: caches }
    }

    /// Nodes that are alive as far as anybody can tell.
    async fn simulate_nodes(&self, stack: &Stack, which: Range<usize>) {
        if which.is_empty() {
            return;
        }
        let pool = stack.layout().pool();
        for n in which.clone() {
            block::register_node(&pool, &node_name(n), i64::MAX).expect("the node is announced");
        }
        stream::iter(which.clone())
            .for_each_concurrent(AT_ONCE, |n| async move {
                let mut node = build::node(&node_name(n));
                bare(&mut node.metadata);
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
        tokio::spawn(keep_alive(self.client.clone(), which));
    }

    async fn make_claims(&self, which: Range<usize>) {
        if which.is_empty() {
            return;
        }
        let count = which.end;
        stream::iter(which)
            .for_each_concurrent(AT_ONCE, |n| async move {
                let mut claim = build::claim("default", &claim_name(n), Some(CLASS), "1Gi");
                bare(&mut claim.metadata);
                claim.status = None;
                write::create(&self.client, &claim).await.expect("claim");
            })
            .await;
        self.until("the claims are bound", |c| c.bound.sum == count).await;
    }

    /// As many pods as volumes, there and back: until all are attached, until the nodes are told, and the same for none.
    async fn storm(&self, volumes: usize, nodes: usize) -> [Duration; 4] {
        let begun = Instant::now();
        let create = stream::iter(0..volumes).for_each_concurrent(AT_ONCE, |n| async move {
            let mut pod = build::pod("default", &pod_name(n), &node_name(n % nodes), &[&claim_name(n)]);
            bare(&mut pod.metadata);
            pod.status = None;
            // These nodes never say that they are ready, and such nodes lose their pods.
            let any = Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() };
            pod.spec.get_or_insert_default().tolerations = Some(vec![any]);
            write::create(&self.client, &pod).await.expect("pod");
        });
        let attached = self.until_then(begun, "all are attached", |c| c.attached.sum == volumes);
        let told = self.until_then(begun, "the nodes are told", |c| c.told.sum == volumes);
        let ((), attached, told) = tokio::join!(create, attached, told);

        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "default");
        let begun = Instant::now();
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let delete = stream::iter(0..volumes).for_each_concurrent(AT_ONCE, |n| {
            let (pods, now) = (pods.clone(), now.clone());
            async move { drop(pods.delete(&pod_name(n), &now).await.expect("pod deleted")) }
        });
        let detached = self.until_then(begun, "all are detached", |c| c.attached.each.is_empty());
        let untold = self.until_then(begun, "the nodes are told so", |c| c.told.sum == 0);
        let ((), detached, untold) = tokio::join!(delete, detached, untold);
        [attached, told, detached, untold]
    }

    async fn until_then(&self, begun: Instant, what: &str, holds: impl Fn(&Counts) -> bool) -> Duration {
        self.until(what, holds).await;
        begun.elapsed()
    }

    async fn until(&self, what: &str, holds: impl Fn(&Counts) -> bool) {
        let wait = async {
            loop {
                let changed = self.changed.notified();
                if holds(&self.counts.lock()) {
                    return;
                }
                changed.await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            let counts = self.counts.lock();
            panic!("{what}: not within {PATIENCE:?}; attached {}, told {}", counts.attached.sum, counts.told.sum);
        }
    }
}

fn count<K>(
    cache: Cache<K>,
    counts: &Arc<Mutex<Counts>>,
    changed: &Arc<Notify>,
    keep: impl Fn(&mut Counts, String, Option<&K>) + Send + Sync + 'static,
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
        keep(&mut counts.lock(), name, object);
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

/// What a user would write has no identity yet.
fn bare(meta: &mut k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) {
    (meta.uid, meta.resource_version, meta.creation_timestamp) = (None, None, None);
}

#[derive(Default)]
struct Times([Vec<Duration>; 4]);

impl Times {
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
            let at = |share: f64| {
                let index = ((times.len() - 1) as f64 * share).round() as usize;
                times[index].as_secs_f64() * 1000.0
            };
            println!("| {stage} | {:.2} ms | {:.2} ms | {:.2} ms |", at(0.5), at(0.99), at(1.0));
        }
        println!("\n{rounds} rounds after {WARM_UP} to warm up.");
    }
}
