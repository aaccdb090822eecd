//! The rights of a node: its own objects, the pods assigned to it, and the objects that those pods use.

#![allow(clippy::unwrap_used)]

use cleat_apiserver::{ApiServer, Config};
use kube::Client;
use serde_json::{Value, json};

const PODS: &str = "/api/v1/namespaces/default/pods";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
const CSI_NODES: &str = "/apis/storage.k8s.io/v1/csinodes";

async fn send(client: &Client, method: &str, path: &str, body: Value) -> (u16, Value) {
    let media = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
    let request = http::Request::builder().method(method).uri(path).header("content-type", media).body(body).unwrap();
    let response = client.send(request.map(Into::into)).await.unwrap();
    let code = response.status().as_u16();
    let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    (code, serde_json::from_slice(&bytes).unwrap_or_default())
}

struct Cluster {
    _dir: tempfile::TempDir,
    _server: ApiServer,
    admin: Client,
    one: Client,
}

/// Two nodes, `one` and `two`. Each has a pod with its own secret, claim and volume.
async fn cluster() -> Cluster {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let (admin, one) = (server.client("admin"), server.component("system:node:one"));
    for name in ["one", "two"] {
        let node = json!({ "metadata": { "name": name } });
        assert_eq!(send(&admin, "POST", "/api/v1/nodes", node).await.0, 201);
        let secret = json!({ "metadata": { "name": format!("secret-{name}") } });
        assert_eq!(send(&admin, "POST", "/api/v1/namespaces/default/secrets", secret).await.0, 201);
        let claim = json!({ "metadata": { "name": format!("claim-{name}") }, "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } },
            "storageClassName": "", "volumeName": format!("volume-{name}") } });
        assert_eq!(send(&admin, "POST", "/api/v1/namespaces/default/persistentvolumeclaims", claim).await.0, 201);
        let volume = json!({ "metadata": { "name": format!("volume-{name}") }, "spec": {
            "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteOnce"],
            "claimRef": { "namespace": "default", "name": format!("claim-{name}") },
            "csi": { "driver": "d.example.com", "volumeHandle": name,
                "nodeStageSecretRef": { "namespace": "kube-system", "name": format!("stage-{name}") } } } });
        assert_eq!(send(&admin, "POST", "/api/v1/persistentvolumes", volume).await.0, 201);
        let secret = json!({ "metadata": { "name": format!("stage-{name}") } });
        assert_eq!(send(&admin, "POST", "/api/v1/namespaces/kube-system/secrets", secret).await.0, 201);
        let pod = json!({ "metadata": { "name": format!("pod-{name}") }, "spec": {
            "nodeName": name, "containers": [{ "name": "c", "image": "i" }], "volumes": [
                { "name": "s", "secret": { "secretName": format!("secret-{name}") } },
                { "name": "c", "persistentVolumeClaim": { "claimName": format!("claim-{name}") } },
            ] } });
        assert_eq!(send(&admin, "POST", PODS, pod).await.0, 201);
    }
    Cluster { _dir: dir, _server: server, admin, one }
}

#[tokio::test]
async fn a_node_reads_only_the_objects_its_pods_use() {
    let cluster = cluster().await;
    let in_default = |kind: &str, name: &str| format!("/api/v1/namespaces/default/{kind}/{name}");
    for (path, want) in [
        (in_default("secrets", "secret-one"), 200),
        (in_default("secrets", "secret-two"), 403),
        ("/api/v1/namespaces/default/secrets".into(), 403),
        ("/api/v1/namespaces/default/secrets?fieldSelector=metadata.name%3Dsecret-one".into(), 200),
        ("/api/v1/namespaces/kube-system/secrets/stage-one".into(), 200),
        ("/api/v1/namespaces/kube-system/secrets/stage-two".into(), 403),
        (in_default("persistentvolumeclaims", "claim-one"), 200),
        (in_default("persistentvolumeclaims", "claim-two"), 403),
        ("/api/v1/persistentvolumes/volume-one".into(), 200),
        ("/api/v1/persistentvolumes/volume-two".into(), 403),
        (in_default("pods", "pod-one"), 200),
        (in_default("pods", "pod-two"), 403),
        ("/api/v1/pods".into(), 403),
        ("/api/v1/pods?fieldSelector=spec.nodeName%3Done".into(), 200),
        ("/api/v1/pods?fieldSelector=spec.nodeName%3Dtwo".into(), 403),
        ("/api/v1/pods?fieldSelector=spec.nodeName!%3Done".into(), 403),
        ("/api/v1/nodes/one".into(), 200),
        ("/api/v1/nodes/two".into(), 403),
        ("/api/v1/nodes".into(), 403),
    ] {
        assert_eq!(send(&cluster.one, "GET", &path, Value::Null).await.0, want, "{path}");
    }
    let gone = json!({ "gracePeriodSeconds": 0 });
    assert_eq!(send(&cluster.admin, "DELETE", &in_default("pods", "pod-one"), gone).await.0, 200);
    let path = in_default("secrets", "secret-one");
    assert_eq!(send(&cluster.one, "GET", &path, Value::Null).await.0, 403, "no pod of the node uses it any more");
}

#[tokio::test]
async fn a_node_writes_only_its_own_objects_and_pods() {
    let cluster = cluster().await;
    let label = |key: &str| json!({ "metadata": { "labels": { key: "x" } } });
    let condition = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
    let mirror = |node: &str| {
        json!({ "metadata": { "name": "m", "annotations": { "kubernetes.io/config.mirror": "1" } },
            "spec": { "nodeName": node, "containers": [{ "name": "c", "image": "i" }] } })
    };
    let named = |name: &str| json!({ "metadata": { "name": name } });
    let csi = |name: &str| json!({ "metadata": { "name": name }, "spec": { "drivers": [] } });
    let taint = json!({ "spec": { "taints": [{ "key": "k", "effect": "NoSchedule" }] } });
    for (case, method, path, body, want) in [
        ("its own label", "PATCH", "/api/v1/nodes/one", label("example.com/a"), 200),
        ("a topology label", "PATCH", "/api/v1/nodes/one", label("topology.kubernetes.io/zone"), 200),
        ("a restricted label", "PATCH", "/api/v1/nodes/one", label("node-restriction.kubernetes.io/a"), 403),
        ("a taint", "PATCH", "/api/v1/nodes/one", taint, 403),
        ("another node", "PATCH", "/api/v1/nodes/two", label("example.com/a"), 403),
        ("its status", "PATCH", "/api/v1/nodes/one/status", condition.clone(), 200),
        ("another's status", "PATCH", "/api/v1/nodes/two/status", condition, 403),
        ("another's CSINode", "POST", CSI_NODES, csi("two"), 403),
        ("its CSINode", "POST", CSI_NODES, csi("one"), 201),
        ("another's lease", "POST", LEASES, named("two"), 403),
        ("its lease", "POST", LEASES, named("one"), 201),
        ("a lease elsewhere", "POST", "/apis/coordination.k8s.io/v1/namespaces/default/leases", named("one"), 403),
        (
            "its pod's status",
            "PATCH",
            "/api/v1/namespaces/default/pods/pod-one/status",
            json!({ "status": { "phase": "Running" } }),
            200,
        ),
        ("its pod itself", "PATCH", "/api/v1/namespaces/default/pods/pod-one", label("a"), 403),
        (
            "another's pod",
            "PATCH",
            "/api/v1/namespaces/default/pods/pod-two/status",
            json!({ "status": { "phase": "Failed" } }),
            403,
        ),
        ("deleting another's pod", "DELETE", "/api/v1/namespaces/default/pods/pod-two", Value::Null, 403),
        (
            "a pod that is no mirror",
            "POST",
            PODS,
            json!({ "metadata": { "name": "x" }, "spec": { "nodeName": "one", "containers": [{ "name": "c", "image": "i" }] } }),
            403,
        ),
        ("a mirror of another's", "POST", PODS, mirror("two"), 403),
        ("a mirror of its own", "POST", PODS, mirror("one"), 201),
        (
            "deleting its pod",
            "DELETE",
            "/api/v1/namespaces/default/pods/pod-one",
            json!({ "gracePeriodSeconds": 0 }),
            200,
        ),
        ("a role", "POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles", named("x"), 403),
    ] {
        let (code, reply) = send(&cluster.one, method, path, body).await;
        assert_eq!(code, want, "{case}: {reply}");
    }
}

#[tokio::test]
async fn a_node_gets_tokens_for_its_pods_only() {
    let cluster = cluster().await;
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let bound = |pod: &str| json!({ "spec": { "boundObjectRef": { "kind": "Pod", "apiVersion": "v1", "name": pod } } });
    for (case, body, want) in
        [("its pod", bound("pod-one"), 201), ("another's pod", bound("pod-two"), 403), ("no pod", json!({}), 403)]
    {
        let (code, reply) = send(&cluster.one, "POST", path, body).await;
        assert_eq!(code, want, "{case}: {reply}");
    }
}
