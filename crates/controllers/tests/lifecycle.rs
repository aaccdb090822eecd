//! Nodes that stop reporting, are out of service or are deleted, on a real API server. The controller has its own user
//! and a clock that the test sets.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

use std::sync::Arc;
use std::time::Duration;

use cleat_api::condition::node_ready;
use cleat_api::well_known::taint;
use cleat_apiserver::{ApiServer, Config};
use cleat_controllers::{Context, lifecycle};
use cleat_runtime::{Caches, Clock};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);

#[derive(Clone)]
struct ManualClock(Arc<Mutex<Timestamp>>);

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        *self.0.lock()
    }
}

struct Rig {
    client: Client,
    clock: ManualClock,
    stop: CancellationToken,
    touch_count: u32,
    _server: ApiServer,
    _dir: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Rig {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::open(Config::new(dir.path(), ([127, 0, 0, 1], 0).into())).await.unwrap();
        let stop = CancellationToken::new();
        let clock = ManualClock(Arc::new(Mutex::new(Timestamp::now())));
        let caches = Caches::new(server.component("system:cleat:caches"), stop.clone());
        let client = server.component("system:cleat:node-lifecycle");
        let context = Context { client: client.into(), caches, clock: Arc::new(clock.clone()) };
        tokio::spawn(lifecycle::run(context, stop.clone()));
        let client = server.client("system:admin");
        Self { client, clock, stop, touch_count: 0, _server: server, _dir: dir }
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.client.clone())
    }

    async fn add_node(&self) {
        let node = serde_json::from_value(json!({"metadata": {"name": "n1"}})).unwrap();
        self.nodes().create(&PostParams::default(), &node).await.unwrap();
        self.report_ready("True").await;
    }

    async fn report_ready(&self, status: &str) {
        let heartbeat = Timestamp::now().to_string();
        let status =
            json!({"status": {"conditions": [{"type": "Ready", "status": status, "lastHeartbeatTime": heartbeat}]}});
        self.nodes().patch_status("n1", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    async fn add_pod(&self, name: &str) -> Pod {
        let pod = json!({"metadata": {"name": name}, "spec": {"nodeName": "n1", "containers":
            [{"name": "main", "image": "busybox"}]}});
        self.pods().create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
    }

    /// Advances the clock and changes an annotation of the node, so that the controller reconciles it.
    async fn advance(&mut self, seconds: i64) {
        *self.clock.0.lock() += SignedDuration::from_secs(seconds);
        self.touch_count += 1;
        self.patch_node(json!({"metadata": {"annotations": {"touched": self.touch_count.to_string()}}})).await;
    }

    async fn patch_node(&self, patch: Value) {
        self.nodes().patch("n1", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    async fn node_until(&self, what: &str, met: impl Fn(&Node) -> bool) {
        let met = |node: Option<&Node>| node.is_some_and(&met);
        let reached = await_condition(self.nodes(), "n1", met);
        tokio::time::timeout(WAIT, reached).await.unwrap_or_else(|_| panic!("{what}")).unwrap();
    }

    async fn expect_eviction(&self, pod: &Pod) {
        let met = |pod: Option<&Pod>| pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some());
        let name = pod.name_any();
        let reached = await_condition(self.pods(), &name, met);
        tokio::time::timeout(WAIT, reached).await.expect("the pod is deleted").unwrap();
    }

    async fn expect_removal(&self, pod: &Pod) {
        let (name, uid) = (pod.name_any(), pod.uid().unwrap());
        let reached = await_condition(self.pods(), &name, conditions::is_deleted(&uid));
        tokio::time::timeout(WAIT, reached).await.expect("the pod is removed").unwrap();
    }

    async fn expect_unchanged(&self, pod: &Pod) {
        let now = self.pods().get(&pod.name_any()).await.unwrap();
        assert!(now.metadata.deletion_timestamp.is_none(), "{} is not deleted", pod.name_any());
    }
}

fn taints(node: &Node) -> Vec<(&str, &str)> {
    let taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    taints.map(|t| (t.key.as_str(), t.effect.as_str())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_silent_node_are_evicted_when_their_toleration_expires() {
    let mut rig = Rig::new().await;
    rig.add_node().await;
    rig.node_until("a ready node has no taint", |n| taints(n).is_empty()).await;
    let pod = rig.add_pod("p").await;
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Up"}, {"type": "Mine",
        "status": "True"}]}});
    rig.pods().patch_status("p", &PatchParams::default(), &Patch::Merge(ready)).await.unwrap();
    rig.advance(lifecycle::decide::NODE_MONITOR_GRACE_PERIOD.as_secs() + 5).await;
    let unready = |pod: Option<&Pod>| {
        let conditions = pod.and_then(|pod| pod.status.as_ref()?.conditions.clone()).unwrap_or_default();
        let reported = conditions.iter().map(|c| (c.type_.as_str(), c.status.as_str(), c.reason.as_deref()));
        reported.eq([("Ready", "False", Some("Up")), ("Mine", "True", None)])
    };
    let reached = await_condition(rig.pods(), "p", unready);
    tokio::time::timeout(WAIT, reached).await.expect("the pod is marked not ready").unwrap();
    let unreachable = [(taint::UNREACHABLE, "NoSchedule"), (taint::UNREACHABLE, "NoExecute")];
    rig.node_until("a silent node is unreachable", |n| taints(n) == unreachable).await;
    rig.node_until("and Unknown", |n| node_ready(n) == Some("Unknown")).await;
    rig.advance(200).await;
    rig.expect_unchanged(&pod).await;
    rig.advance(101).await;
    rig.expect_eviction(&pod).await;

    // No node agent terminates the pod. It stays until an administrator declares the node out of service.
    let out_of_service = json!({"key": taint::OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"});
    let all: Vec<Value> =
        unreachable.iter().map(|(key, effect)| json!({"key": key, "effect": effect})).chain([out_of_service]).collect();
    rig.patch_node(json!({"spec": {"taints": all}})).await;
    rig.expect_removal(&pod).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_reports_again_keeps_its_pods() {
    let mut rig = Rig::new().await;
    rig.add_node().await;
    let pod = rig.add_pod("p").await;
    rig.advance(lifecycle::decide::NODE_MONITOR_GRACE_PERIOD.as_secs() + 5).await;
    rig.node_until("a silent node is unreachable", |n| !taints(n).is_empty()).await;
    // The heartbeat carries the real time, which is before the time of the manual clock. Only the Lease shows that the
    // node is alive.
    let lease = json!({"metadata": {"name": "n1"}, "spec": {"holderIdentity": "n1", "leaseDurationSeconds": 40,
        "renewTime": (rig.clock.now() + SignedDuration::from_secs(1000)).to_string()}});
    let leases: Api<k8s_openapi::api::coordination::v1::Lease> = Api::namespaced(rig.client.clone(), "kube-node-lease");
    leases.create(&PostParams::default(), &serde_json::from_value(lease).unwrap()).await.unwrap();
    rig.report_ready("True").await;
    rig.node_until("it is reachable again", |n| taints(n).is_empty() && node_ready(n) == Some("True")).await;
    rig.advance(900).await;
    rig.report_ready("False").await;
    let not_ready = [(taint::NOT_READY, "NoSchedule"), (taint::NOT_READY, "NoExecute")];
    rig.node_until("not ready is another taint", |n| taints(n) == not_ready).await;
    rig.expect_unchanged(&pod).await;
    rig.patch_node(json!({"spec": {"unschedulable": true}})).await;
    rig.node_until("a cordon is a taint", |n| taints(n).contains(&(taint::UNSCHEDULABLE, "NoSchedule"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_missing_node_are_removed() {
    let mut rig = Rig::new().await;
    rig.add_node().await;
    let pod = rig.add_pod("p").await;
    rig.advance(1000).await;
    let early = json!({"metadata": {"name": "early"}, "spec": {"nodeName": "later", "containers":
        [{"name": "main", "image": "busybox"}]}});
    let early = rig.pods().create(&PostParams::default(), &serde_json::from_value(early).unwrap()).await.unwrap();
    rig.nodes().delete("n1", &DeleteParams::default()).await.unwrap();
    // A running node agent creates its Node again.
    rig.add_node().await;
    rig.advance(lifecycle::decide::MISSING_NODE_GRACE_PERIOD.as_secs() - 1).await;
    rig.expect_unchanged(&pod).await;
    // Its node was never registered, and may register soon.
    rig.expect_unchanged(&early).await;
    rig.nodes().delete("n1", &DeleteParams::default()).await.unwrap();
    rig.expect_unchanged(&pod).await;
    for round in 0..600 {
        *rig.clock.0.lock() += lifecycle::decide::MISSING_NODE_GRACE_PERIOD;
        let touch = Patch::Merge(json!({"metadata": {"annotations": {"touched": round.to_string()}}}));
        if rig.pods().patch("p", &PatchParams::default(), &touch).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    rig.expect_removal(&pod).await;
}
