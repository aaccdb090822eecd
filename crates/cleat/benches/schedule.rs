//! Measures how long a burst of pods takes to be scheduled, with one volume provisioned for each: `cargo xtask bench schedule`.
//!
//! The whole stack runs as in `cleat up`, with durable writes and the block driver as a child process. The pods are scheduled to
//! nodes that are objects without an agent, where nothing is attached. The measured time ends when the pod is scheduled and its
//! claim is bound to an existing volume. `CLEAT_BENCH_PODS` and `CLEAT_BENCH_NODES` set the size.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::up::objects::{CLASS, WAIT_CLASS};
use cleat::up::{Stack, StackConfig};
use cleat_api::key::Key;
use cleat_api::{claim, pod};
use cleat_drivers::block;
use cleat_runtime::Client;
use cleat_runtime::write::{self, Part};
use cleat_runtime::{Caches, Change};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::CSINode;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Concurrent requests of the benchmark itself.
const MAX_CONCURRENT_REQUESTS: usize = 64;
/// A burst that takes longer fails the benchmark.
const BURST_TIMEOUT: Duration = Duration::from_secs(300);
const ROUNDS: usize = 5;

#[tokio::main]
async fn main() {
    let (pods, nodes) = (count("CLEAT_BENCH_PODS", 1000), count("CLEAT_BENCH_NODES", 100));
    println!("{pods} pods with a claim each, {nodes} nodes, {ROUNDS} rounds:\n");
    println!("| round | all created | p50 of a pod | p99 | all scheduled and bound |\n|---|---|---|---|---|");
    for round in 1..=ROUNDS {
        let directory = tempfile::Builder::new().prefix("cb-").tempdir().expect("a temporary directory");
        let config = StackConfig::scratch(directory.path(), 1, env!("CARGO_BIN_EXE_cleat"));
        let stack = Stack::start(config).await.expect("the stack starts");
        burst(&stack.client().into(), round, pods, nodes).await;
        stack.stop().await;
    }
}

fn count(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

async fn burst(client: &Client, round: usize, pods: usize, nodes: usize) {
    each(nodes, |n| create_node(client, n)).await;
    let stop = CancellationToken::new();
    let caches = Caches::new(client.clone(), stop.clone());
    let scheduled: Arc<Mutex<HashMap<Key, Instant>>> = Arc::default();
    let changed = Arc::new(Notify::new());
    let (all_pods, all_claims, all_nodes) = (caches.pods(), caches.claims(), caches.nodes());
    tokio::join!(all_pods.synced(), all_claims.synced(), all_nodes.synced());
    let (scheduled_at, wake) = (scheduled.clone(), changed.clone());
    all_pods.subscribe(move |change: &Change<Pod>| {
        let object = change.object();
        if pod::node_name(object).is_some() {
            scheduled_at.lock().entry(Key::of(&object.metadata)).or_insert_with(Instant::now);
        }
        wake.notify_one();
    });
    let wake = changed.clone();
    all_nodes.subscribe(move |_: &Change<Node>| wake.notify_one());
    // A node is schedulable when the taint that it was created with has been removed.
    let is_schedulable = |n: &Arc<Node>| n.spec.as_ref().is_none_or(|s| s.taints.iter().flatten().next().is_none());
    while all_nodes.all().iter().filter(|n| is_schedulable(n)).count() < nodes + 1 {
        changed.notified().await;
    }
    let bound: Arc<Mutex<HashSet<Key>>> = Arc::default();
    let (bound_keys, wake) = (bound.clone(), changed.clone());
    all_claims.subscribe(move |change: &Change<PersistentVolumeClaim>| {
        let object = change.object();
        if claim::claim_phase(object) == "Bound" {
            bound_keys.lock().insert(Key::of(&object.metadata));
        }
        wake.notify_one();
    });

    // When the first volume exists, the driver is running.
    let warm_up: PersistentVolumeClaim = object(claim_json("warm-up", CLASS));
    write::create(client, &warm_up).await.expect("a claim");
    while bound.lock().is_empty() {
        changed.notified().await;
    }

    let started = Instant::now();
    let created_at: Arc<Mutex<HashMap<Key, Instant>>> = Arc::default();
    each(pods, |n| create_pod(client, n, created_at.clone())).await;
    let created = started.elapsed();
    let all = async {
        while scheduled.lock().len() < pods || bound.lock().len() < pods + 1 {
            changed.notified().await;
        }
    };
    tokio::time::timeout(BURST_TIMEOUT, all).await.expect("all pods are scheduled and all claims bound");
    let total = started.elapsed();
    stop.cancel();
    let (created_at, scheduled) = (created_at.lock(), scheduled.lock());
    let mut times: Vec<Duration> =
        scheduled.iter().filter_map(|(key, at)| Some(at.duration_since(*created_at.get(key)?))).collect();
    times.sort();
    let percentile =
        |share: usize| times.get((times.len().max(1) - 1) * share / 100).copied().unwrap_or_default().as_secs_f64();
    println!(
        "| {round} | {:.2} s | {:.2} s | {:.2} s | {:.2} s |",
        created.as_secs_f64(),
        percentile(50),
        percentile(99),
        total.as_secs_f64()
    );
}

/// Runs `work` for 0 to `count - 1`, at most [`MAX_CONCURRENT_REQUESTS`] at a time.
async fn each<F: Future<Output = ()>>(count: usize, work: impl Fn(usize) -> F) {
    stream::iter((0..count).map(work)).buffer_unordered(MAX_CONCURRENT_REQUESTS).collect::<()>().await;
}

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("an object of its kind")
}

/// Creates a ready node with the driver registered, without an agent. It lacks the annotation of the attach/detach controller,
/// so that nothing is attached to it.
async fn create_node(client: &Client, n: usize) {
    let name = format!("sim-{n}");
    let resources = json!({"cpu": "32", "memory": "64Gi", "pods": "110"});
    let status = json!({"status": {"allocatable": resources, "capacity": resources, "conditions": [{"type": "Ready", "status": "True"}]}});
    let node: Node =
        object(json!({"metadata": {"name": name, "labels": {"sim": "yes", "kubernetes.io/hostname": name}}}));
    write::create(client, &node).await.expect("a node");
    write::merge::<Node>(client, Part::Status, &Key::cluster(&name), &status).await.expect("its status");
    let drivers = json!([{"name": block::NAME, "nodeID": name}]);
    let csi_node: CSINode = object(json!({"metadata": {"name": name}, "spec": {"drivers": drivers}}));
    write::create(client, &csi_node).await.expect("its drivers");
}

fn claim_json(name: &str, class: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}}},
    })
}

/// Creates a pod and its claim, and notes when the pod was sent.
async fn create_pod(client: &Client, n: usize, created_at: Arc<Mutex<HashMap<Key, Instant>>>) {
    let name = format!("p{n}");
    let claim: PersistentVolumeClaim = object(claim_json(&name, WAIT_CLASS));
    write::create(client, &claim).await.expect("a claim");
    let pod: Pod = object(json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodeSelector": {"sim": "yes"},
            "containers": [{"name": "main", "image": "busybox",
                "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}],
        },
    }));
    created_at.lock().insert(Key::namespaced("default", &name), Instant::now());
    write::create(client, &pod).await.expect("a pod");
}
