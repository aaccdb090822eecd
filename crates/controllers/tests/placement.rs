//! The scheduler on a real API server, with its own user.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

use std::sync::Arc;
use std::time::Duration;

use cleat_api::condition::pod_condition;
use cleat_apiserver::{ApiServer, Config};
use cleat_controllers::{Context, schedule};
use cleat_runtime::{Caches, SystemClock};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use serde_json::json;
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(120);

fn pod(name: &str, node: Option<&str>, cpu: &str) -> Pod {
    let spec = json!({"nodeName": node, "containers": [
        {"name": "main", "image": "busybox", "resources": {"requests": {"cpu": cpu}}}]});
    serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
}

/// The cluster has more pods than the scheduler reads in one batch, and some of them occupy the node.
#[tokio::test(flavor = "multi_thread")]
async fn all_running_pods_are_counted_before_the_first_pod_is_placed() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), ([127, 0, 0, 1], 0).into())).await.unwrap();
    let admin = server.client("system:admin");
    let (nodes, pods): (Api<Node>, Api<Pod>) = (Api::all(admin.clone()), Api::default_namespaced(admin));
    let create = PostParams::default();
    nodes.create(&create, &serde_json::from_value(json!({"metadata": {"name": "n1"}})).unwrap()).await.unwrap();
    let status = json!({"status": {"allocatable": {"cpu": "6", "memory": "1Gi", "pods": "9999"},
        "conditions": [{"type": "Ready", "status": "True"}]}});
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    nodes.patch("n1", &PatchParams::default(), &Patch::Merge(json!({"spec": {"taints": null}}))).await.unwrap();
    let placed: Vec<Pod> = (0..600).map(|n| pod(&format!("placed-{n}"), Some("n1"), "10m")).collect();
    let waiting: Vec<Pod> = (0..20).map(|n| pod(&format!("waiting-{n}"), None, "1m")).collect();
    for batch in placed.chunks(50).chain(waiting.chunks(50)) {
        join_all(batch.iter().map(|pod| pods.create(&create, pod)))
            .await
            .into_iter()
            .for_each(|created| drop(created.unwrap()));
    }

    let stop = CancellationToken::new();
    let caches = Caches::new(server.component("system:cleat:caches"), stop.clone());
    let client = server.component("system:cleat:scheduler");
    tokio::spawn(schedule::run(Context { client: client.into(), caches, clock: Arc::new(SystemClock) }, stop.clone()));
    for n in 0..20 {
        let name = format!("waiting-{n}");
        let is_unschedulable = |pod: Option<&Pod>| pod.and_then(|p| pod_condition(p, "PodScheduled")).is_some();
        tokio::time::timeout(WAIT, await_condition(pods.clone(), &name, is_unschedulable)).await.unwrap().unwrap();
    }
    for pod in pods.list(&ListParams::default()).await.unwrap() {
        if let Some(condition) = pod_condition(&pod, "PodScheduled").filter(|c| c.status == "False") {
            assert_eq!(condition.message.as_deref(), Some("0/1 nodes are available: 1 Insufficient cpu."));
        } else {
            assert!(pod.metadata.name.unwrap().starts_with("placed"), "the node was full");
        }
    }
    stop.cancel();
}
