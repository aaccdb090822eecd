//! Nodes that stop reporting, are out of service or are deleted, on a real API server. The controller has its own user
//! and a clock that the test sets.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

use std::sync::Arc;

use cleat_api::condition::node_ready;
use cleat_api::well_known::taint;
use cleat_controllers::{Context, lifecycle};
use cleat_runtime::Clock as _;
use cleat_testing::wait::within_timeout;
use cleat_testing::{ManualClock, TestApiServer};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

struct LifecycleFixture {
    server: TestApiServer,
    clock: ManualClock,
    touch_count: u32,
}

impl LifecycleFixture {
    async fn new() -> Self {
        let (server, clock) = (TestApiServer::start().await, ManualClock::default());
        let context = Context {
            client: server.component("system:cleat:node-lifecycle").into(),
            caches: server.caches(server.stop()),
            clock: Arc::new(clock.clone()),
        };
        tokio::spawn(lifecycle::run(context, server.stop().clone()));
        Self { server, clock, touch_count: 0 }
    }

    fn pods(&self) -> Api<Pod> {
        self.server.api()
    }

    async fn add_node(&self) {
        self.server.create::<Node>(json!({"metadata": {"name": "n1"}})).await;
        self.report_ready("True").await;
    }

    async fn report_ready(&self, status: &str) {
        let heartbeat = Timestamp::now().to_string();
        let status =
            json!({"status": {"conditions": [{"type": "Ready", "status": status, "lastHeartbeatTime": heartbeat}]}});
        self.server.patch_status::<Node>("n1", status).await;
    }

    async fn add_pod(&self, name: &str) -> Pod {
        let pod = json!({"metadata": {"name": name}, "spec": {"nodeName": "n1", "containers":
            [{"name": "main", "image": "busybox"}]}});
        self.server.create(pod).await
    }

    /// Advances the clock and changes an annotation of the node, so that the controller reconciles it.
    async fn advance(&mut self, seconds: i64) {
        self.clock.advance(seconds);
        self.touch_count += 1;
        self.patch_node(json!({"metadata": {"annotations": {"touched": self.touch_count.to_string()}}})).await;
    }

    async fn patch_node(&self, patch: Value) {
        self.server.patch::<Node>("n1", patch).await;
    }

    async fn wait_for_node(&self, what: &str, holds: impl Fn(&Node) -> bool) {
        self.server.wait_until("n1", what, holds).await;
    }

    async fn expect_eviction(&self, pod: &Pod) {
        let evicted = |pod: Option<&Pod>| pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some()).then_some(());
        self.server.wait_for(&pod.name_any(), "is deleted", evicted).await;
    }

    async fn expect_removal(&self, pod: &Pod) {
        let (name, uid) = (pod.name_any(), pod.uid().unwrap());
        let reached = await_condition(self.pods(), &name, conditions::is_deleted(&uid));
        within_timeout("the pod is removed", reached).await.unwrap();
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
    let mut fixture = LifecycleFixture::new().await;
    fixture.add_node().await;
    fixture.wait_for_node("a ready node has no taint", |n| taints(n).is_empty()).await;
    let pod = fixture.add_pod("p").await;
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Up"}, {"type": "Mine",
        "status": "True"}]}});
    fixture.server.patch_status::<Pod>("p", ready).await;
    fixture.advance(lifecycle::decide::NODE_MONITOR_GRACE_PERIOD.as_secs() + 5).await;
    let unready = |pod: Option<&Pod>| {
        let conditions = pod.and_then(|pod| pod.status.as_ref()?.conditions.clone()).unwrap_or_default();
        let reported = conditions.iter().map(|c| (c.type_.as_str(), c.status.as_str(), c.reason.as_deref()));
        reported.eq([("Ready", "False", Some("Up")), ("Mine", "True", None)])
    };
    let reached = await_condition(fixture.pods(), "p", unready);
    within_timeout("the pod is marked not ready", reached).await.unwrap();
    let unreachable = [(taint::UNREACHABLE, "NoSchedule"), (taint::UNREACHABLE, "NoExecute")];
    fixture.wait_for_node("a silent node is unreachable", |n| taints(n) == unreachable).await;
    fixture.wait_for_node("and Unknown", |n| node_ready(n) == Some("Unknown")).await;
    fixture.advance(200).await;
    fixture.expect_unchanged(&pod).await;
    fixture.advance(101).await;
    fixture.expect_eviction(&pod).await;

    // No node agent terminates the pod. It stays until an administrator declares the node out of service.
    let out_of_service = json!({"key": taint::OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"});
    let all: Vec<Value> =
        unreachable.iter().map(|(key, effect)| json!({"key": key, "effect": effect})).chain([out_of_service]).collect();
    fixture.patch_node(json!({"spec": {"taints": all}})).await;
    fixture.expect_removal(&pod).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_reports_again_keeps_its_pods() {
    let mut fixture = LifecycleFixture::new().await;
    fixture.add_node().await;
    let pod = fixture.add_pod("p").await;
    fixture.advance(lifecycle::decide::NODE_MONITOR_GRACE_PERIOD.as_secs() + 5).await;
    fixture.wait_for_node("a silent node is unreachable", |n| !taints(n).is_empty()).await;
    // The heartbeat carries the real time, which is before the time of the manual clock. Only the Lease shows that the
    // node is alive.
    let lease = json!({"metadata": {"name": "n1"}, "spec": {"holderIdentity": "n1", "leaseDurationSeconds": 40,
        "renewTime": (fixture.clock.now() + SignedDuration::from_secs(1000)).to_string()}});
    let leases: Api<k8s_openapi::api::coordination::v1::Lease> =
        Api::namespaced(fixture.server.client(), "kube-node-lease");
    leases.create(&PostParams::default(), &serde_json::from_value(lease).unwrap()).await.unwrap();
    fixture.report_ready("True").await;
    fixture.wait_for_node("it is reachable again", |n| taints(n).is_empty() && node_ready(n) == Some("True")).await;
    fixture.advance(900).await;
    fixture.report_ready("False").await;
    let not_ready = [(taint::NOT_READY, "NoSchedule"), (taint::NOT_READY, "NoExecute")];
    fixture.wait_for_node("not ready is another taint", |n| taints(n) == not_ready).await;
    fixture.expect_unchanged(&pod).await;
    fixture.patch_node(json!({"spec": {"unschedulable": true}})).await;
    fixture.wait_for_node("a cordon is a taint", |n| taints(n).contains(&(taint::UNSCHEDULABLE, "NoSchedule"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_missing_node_are_removed() {
    let mut fixture = LifecycleFixture::new().await;
    fixture.add_node().await;
    let pod = fixture.add_pod("p").await;
    fixture.advance(1000).await;
    let early = json!({"metadata": {"name": "early"}, "spec": {"nodeName": "later", "containers":
        [{"name": "main", "image": "busybox"}]}});
    let early: Pod = fixture.server.create(early).await;
    fixture.server.delete::<Node>("n1").await;
    // A running node agent creates its Node again.
    fixture.add_node().await;
    fixture.advance(lifecycle::decide::MISSING_NODE_GRACE_PERIOD.as_secs() - 1).await;
    fixture.expect_unchanged(&pod).await;
    // Its node was never registered, and may register soon.
    fixture.expect_unchanged(&early).await;
    fixture.server.delete::<Node>("n1").await;
    fixture.expect_unchanged(&pod).await;
    for round in 0..600 {
        fixture.clock.advance(lifecycle::decide::MISSING_NODE_GRACE_PERIOD.as_secs());
        let touch = Patch::Merge(json!({"metadata": {"annotations": {"touched": round.to_string()}}}));
        if fixture.pods().patch("p", &PatchParams::default(), &touch).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    fixture.expect_removal(&pod).await;
}
