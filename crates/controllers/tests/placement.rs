//! The scheduler on a real API server, with its own user.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

use std::sync::Arc;

use cleat_api::condition::pod_condition;
use cleat_controllers::{Context, schedule};
use cleat_runtime::SystemClock;
use cleat_testing::TestApiServer;
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, PostParams};
use serde_json::json;

fn pod(name: &str, node: Option<&str>, cpu: &str) -> Pod {
    let spec = json!({"nodeName": node, "containers": [
        {"name": "main", "image": "busybox", "resources": {"requests": {"cpu": cpu}}}]});
    serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
}

/// The cluster has more pods than the scheduler reads in one batch, and some of them occupy the node.
#[tokio::test(flavor = "multi_thread")]
async fn all_running_pods_are_counted_before_the_first_pod_is_placed() {
    let server = TestApiServer::start().await;
    let (pods, create) = (server.api::<Pod>(), PostParams::default());
    server.create::<Node>(json!({"metadata": {"name": "n1"}})).await;
    let status = json!({"status": {"allocatable": {"cpu": "6", "memory": "1Gi", "pods": "9999"},
        "conditions": [{"type": "Ready", "status": "True"}]}});
    server.patch_status::<Node>("n1", status).await;
    server.patch::<Node>("n1", json!({"spec": {"taints": null}})).await;
    let placed: Vec<Pod> = (0..600).map(|n| pod(&format!("placed-{n}"), Some("n1"), "10m")).collect();
    let waiting: Vec<Pod> = (0..20).map(|n| pod(&format!("waiting-{n}"), None, "1m")).collect();
    for batch in placed.chunks(50).chain(waiting.chunks(50)) {
        join_all(batch.iter().map(|pod| pods.create(&create, pod)))
            .await
            .into_iter()
            .for_each(|created| drop(created.unwrap()));
    }

    let context = Context {
        client: server.component("system:cleat:scheduler").into(),
        caches: server.caches(server.stop()),
        clock: Arc::new(SystemClock),
    };
    tokio::spawn(schedule::run(context, server.stop().clone()));
    for n in 0..20 {
        let is_unschedulable = |pod: &Pod| pod_condition(pod, "PodScheduled").is_some();
        server.wait_until(&format!("waiting-{n}"), "has a condition PodScheduled", is_unschedulable).await;
    }
    for pod in pods.list(&ListParams::default()).await.unwrap() {
        if let Some(condition) = pod_condition(&pod, "PodScheduled").filter(|c| c.status == "False") {
            assert_eq!(condition.message.as_deref(), Some("0/1 nodes are available: 1 Insufficient cpu."));
        } else {
            assert!(pod.metadata.name.unwrap().starts_with("placed"), "the node was full");
        }
    }
}
