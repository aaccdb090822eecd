//! Table tests of the scheduler's decisions: objects in, decisions out, one line of text per decision.

use super::*;
use cleat_testing::build;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

const NO_VOLUME: &str = "node(s) didn't find available persistent volumes to bind";

/// A scheduler's state, with functions that add objects. Each object gets a new revision, as from an API server.
struct TestCluster {
    state: SchedulerState,
    revision: u64,
    now: i64,
    /// Decisions whose outcome the state does not know yet.
    unwritten: Vec<(Key, ScheduleDecision)>,
}

fn merged<K: serde::Serialize + serde::de::DeserializeOwned>(object: &K, patch: &Value) -> K {
    fn merge(into: &mut Value, patch: &Value) {
        match (into, patch) {
            (Value::Object(into), Value::Object(patch)) => {
                for (key, value) in patch {
                    merge(into.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
            (into, patch) => *into = patch.clone(),
        }
    }
    let mut value = serde_json::to_value(object).unwrap();
    merge(&mut value, patch);
    serde_json::from_value(value).unwrap()
}

impl TestCluster {
    /// With three classes: `wait` and `local` wait for the first consumer, `local` without a provisioner; `fast` binds
    /// immediately. The driver is installed on every node.
    fn new() -> Self {
        let mut cluster = Self { state: SchedulerState::default(), revision: 1, now: 0, unwritten: Vec::new() };
        cluster.class("wait", json!({"volumeBindingMode": "WaitForFirstConsumer"}));
        cluster.class("fast", json!({}));
        cluster.class(
            "local",
            json!({
            "volumeBindingMode": "WaitForFirstConsumer", "provisioner": "kubernetes.io/no-provisioner"}),
        );
        cluster.driver(json!({}));
        cluster
    }

    fn with_nodes(names: &[&str]) -> Self {
        let mut cluster = Self::new();
        names.iter().for_each(|name| cluster.node(name, json!({})));
        cluster
    }

    fn set_revision(&mut self, meta: &mut ObjectMeta) {
        self.revision += 1;
        meta.resource_version = Some(self.revision.to_string());
    }

    /// Adds a node that can run ten pods with ten cpus and 10Gi of memory together.
    fn node(&mut self, name: &str, patch: Value) {
        let allocatable = json!({"metadata": {"labels": {"kubernetes.io/hostname": name}}, "status": {"allocatable":
            {"cpu": "10", "memory": "10Gi", "pods": "10"}}});
        let node = merged(&merged(&build::node(name), &allocatable), &patch);
        self.state.set_node(name, Some(Arc::new(node)));
        self.csi_node(name, json!([{"name": build::DRIVER, "nodeID": name}]));
    }

    fn csi_node(&mut self, name: &str, drivers: Value) {
        let object: CSINode = serde_json::from_value(json!({"metadata": {}, "spec": {"drivers": drivers}})).unwrap();
        self.state.set_csi_node(name, Some(&object));
    }

    fn class(&mut self, name: &str, patch: Value) {
        let class: StorageClass = merged(&build::class(name, build::DRIVER), &patch);
        self.state.set_class(name, Some(Arc::new(class)));
    }

    fn driver(&mut self, spec: Value) {
        let object: CSIDriver = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
        self.state.set_driver(build::DRIVER, Some(Arc::new(object)));
    }

    fn capacity(&mut self, name: &str, class: &str, patch: Value) {
        let object = json!({"metadata": {}, "storageClassName": class, "nodeTopology": {}});
        let object: CSIStorageCapacity = serde_json::from_value(object).unwrap();
        self.state.set_capacity(&Key::namespaced("ns", name), Some(Arc::new(merged(&object, &patch))));
    }

    fn claim(&mut self, name: &str, class: &str, patch: Value) {
        let claim = merged(&build::claim("ns", name, Some(class), "1Gi"), &patch);
        self.put_claim(claim);
    }

    fn put_claim(&mut self, mut claim: PersistentVolumeClaim) {
        self.set_revision(&mut claim.metadata);
        self.state.set_claim(&Key::of(&claim.metadata), Some(Arc::new(claim)));
    }

    fn volume(&mut self, name: &str, class: &str, size: &str, patch: Value) {
        let volume = merged(&build::volume(name, class, size), &patch);
        self.put_volume(volume);
    }

    fn put_volume(&mut self, mut volume: PersistentVolume) {
        self.set_revision(&mut volume.metadata);
        self.state.set_volume(&volume.metadata.name.clone().unwrap(), Some(Arc::new(volume)));
    }

    /// Adds a claim of class `fast` and its volume, bound to each other.
    fn bound(&mut self, name: &str, claim: Value, volume: Value) {
        let claim = merged(&build::claim("ns", name, Some("fast"), "1Gi"), &claim);
        let volume = merged(&build::volume(&format!("pv-{name}"), "fast", "1Gi"), &volume);
        let (claim, volume) = build::bound(claim, volume);
        self.put_volume(volume);
        self.put_claim(claim);
    }

    fn pod(&mut self, name: &str, claims: &[&str], patch: Value) {
        let mut pod = merged(&build::pod("ns", name, "", claims), &patch);
        self.set_revision(&mut pod.metadata);
        self.state.set_pod(&Key::namespaced("ns", name), Some(Arc::new(pod)));
    }

    fn delete_pod(&mut self, pod: &str) {
        self.state.set_pod(&Key::namespaced("ns", pod), None);
    }

    /// Decides about all queued pods, and describes each decision in a line.
    fn decide_all(&mut self) -> Vec<String> {
        let mut decisions = Vec::new();
        let now = Timestamp::from_second(self.now).unwrap();
        while let Some((pod, decision)) = self.state.next_decision(now) {
            decisions.push(format!("{}: {}", pod.metadata.name.clone().unwrap(), describe(&decision)));
            if !matches!(decision, ScheduleDecision::AwaitVolumes) {
                self.unwritten.push((Key::of(&pod.metadata), decision));
            }
        }
        decisions
    }

    /// Completes all decisions successfully.
    fn write_all(&mut self) {
        for (key, decision) in std::mem::take(&mut self.unwritten) {
            if let ScheduleDecision::Reserve { volumes, claims, .. } = &decision {
                volumes.iter().for_each(|volume| self.put_volume(volume.as_ref().clone()));
                claims.iter().for_each(|claim| self.put_claim(claim.as_ref().clone()));
            }
            self.state.complete(&key, &decision, DecisionOutcome::Done);
        }
    }

    /// Completes all decisions with a failure.
    fn fail_all(&mut self) {
        for (key, decision) in std::mem::take(&mut self.unwritten) {
            self.state.complete(&key, &decision, DecisionOutcome::Failed);
        }
    }

    fn current_claim(&self, name: &str) -> PersistentVolumeClaim {
        self.state.claim(&Key::namespaced("ns", name)).unwrap().as_ref().clone()
    }

    /// Does the work of the provisioner and the binder: the claim is bound to the volume.
    fn bind_claim(&mut self, name: &str, volume: PersistentVolume) {
        let (claim, volume) = build::bound(self.current_claim(name), volume);
        self.put_volume(volume);
        self.put_claim(claim);
    }
}

fn describe(decision: &ScheduleDecision) -> String {
    let names = |list: Vec<&ObjectMeta>| list.iter().filter_map(|m| m.name.clone()).collect::<Vec<_>>().join(",");
    match decision {
        ScheduleDecision::Reserve { node, volumes, claims } => format!(
            "reserve {node} volumes [{}] claims [{}]",
            names(volumes.iter().map(|v| &v.metadata).collect()),
            names(claims.iter().map(|c| &c.metadata).collect())
        ),
        ScheduleDecision::AwaitVolumes => "await".to_owned(),
        ScheduleDecision::Bind { node } => format!("bind {node}"),
        ScheduleDecision::MarkUnschedulable(why) => format!("wait {why}"),
        ScheduleDecision::ReleaseNode { message } => format!("give up {message}"),
    }
}

fn host_affinity(name: &str) -> Value {
    json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": [name]}]}]}}}})
}

fn cpu_request(cpu: &str) -> Value {
    json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}})
}

/// The decisions about the pods of a cluster that `prepare` fills.
fn decide_with(prepare: impl FnOnce(&mut TestCluster)) -> String {
    let mut cluster = TestCluster::new();
    prepare(&mut cluster);
    cluster.decide_all().join("; ")
}

#[test]
fn a_node_must_admit_the_pod_and_have_enough_resources() {
    let tolerant = json!({"spec": {"tolerations": [{"operator": "Exists"}]}});
    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let unknown = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
    let tainted = json!({"spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}});
    let no_execute = json!({"spec": {"taints": [{"key": "old", "effect": "NoExecute"}]}});
    let cordoned = json!({"spec": {"unschedulable": true}});
    let affinity = json!({"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
        {"nodeSelectorTerms": [{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}]}}}}});
    let port = json!({"spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 80}]}]}});
    let disk = json!({"spec": {"volumes": [{"name": "v", "gcePersistentDisk": {"pdName": "d"}}]}});
    let both = json!({"spec": {"containers": [{"name": "c", "resources": {"requests":
        {"cpu": "11", "memory": "11Gi", "example.com/gpu": "1"}}}]}});
    let other = |patch: &Value| merged(&json!({"spec": {"nodeName": "n1"}}), patch);
    for (case, node, before, pod, want) in [
        ("an open node", json!({}), None, json!({}), "bind n1"),
        ("cordoned", cordoned.clone(), None, json!({}), "wait 0/1 nodes are available: 1 node(s) were unschedulable."),
        ("cordoned, tolerated", cordoned, None, tolerant.clone(), "bind n1"),
        (
            "not ready",
            unready.clone(),
            None,
            json!({}),
            "wait 0/1 nodes are available: 1 node(s) had untolerated taint(s).",
        ),
        ("not ready, tolerated", unready, None, tolerant.clone(), "bind n1"),
        (
            "unknown readiness",
            unknown,
            None,
            json!({}),
            "wait 0/1 nodes are available: 1 node(s) had untolerated taint(s).",
        ),
        (
            "tainted",
            tainted.clone(),
            None,
            json!({}),
            "wait 0/1 nodes are available: 1 node(s) had untolerated taint(s).",
        ),
        ("tainted, tolerated", tainted, None, tolerant, "bind n1"),
        (
            "with a NoExecute taint",
            no_execute,
            None,
            json!({}),
            "wait 0/1 nodes are available: 1 node(s) had untolerated taint(s).",
        ),
        (
            "another label",
            json!({}),
            None,
            json!({"spec": {"nodeSelector": {"disk": "ssd"}}}),
            "wait 0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
        ),
        (
            "the label",
            json!({"metadata": {"labels": {"disk": "ssd"}}}),
            None,
            json!({"spec": {"nodeSelector": {"disk": "ssd"}}}),
            "bind n1",
        ),
        (
            "affinity",
            json!({}),
            None,
            affinity.clone(),
            "wait 0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
        ),
        ("affinity, met", json!({"metadata": {"labels": {"disk": "ssd"}}}), None, affinity, "bind n1"),
        (
            "a port in use",
            json!({}),
            Some(other(&port)),
            port,
            "wait 0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.",
        ),
        (
            "a disk in use",
            json!({}),
            Some(other(&disk)),
            disk,
            "wait 0/1 nodes are available: 1 node(s) had no available disk.",
        ),
        ("enough beside another pod", json!({}), Some(other(&cpu_request("9"))), cpu_request("1"), "bind n1"),
        (
            "not enough beside another pod",
            json!({}),
            Some(other(&cpu_request("9"))),
            cpu_request("1001m"),
            "wait 0/1 nodes are available: 1 Insufficient cpu.",
        ),
        (
            "a finished pod uses nothing",
            json!({}),
            Some(merged(&other(&cpu_request("9")), &json!({"status": {"phase": "Succeeded"}}))),
            cpu_request("5"),
            "bind n1",
        ),
        (
            "a pod that is being deleted still uses its resources",
            json!({}),
            Some(merged(
                &other(&cpu_request("9")),
                &json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
            )),
            cpu_request("5"),
            "wait 0/1 nodes are available: 1 Insufficient cpu.",
        ),
        (
            "every missing resource is reported",
            json!({}),
            None,
            both,
            "wait 0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient example.com/gpu, 1 Insufficient memory.",
        ),
        (
            "too many pods",
            json!({"status": {"allocatable": {"pods": "1"}}}),
            Some(other(&json!({}))),
            json!({}),
            "wait 0/1 nodes are available: 1 Too many pods.",
        ),
    ] {
        let decisions = decide_with(|s| {
            s.node("n1", node);
            if let Some(other) = before {
                s.pod("other", &[], other);
            }
            s.pod("p", &[], pod);
        });
        assert_eq!(decisions, format!("p: {want}"), "{case}");
    }
    assert_eq!(decide_with(|s| s.pod("p", &[], json!({}))), "p: wait no nodes available to schedule pods");
}

#[test]
fn rejections_are_counted_over_the_nodes() {
    let decisions = decide_with(|s| {
        s.node("a", json!({"spec": {"unschedulable": true}}));
        s.node("b", json!({"spec": {"unschedulable": true}}));
        s.node("c", json!({"status": {"allocatable": {"cpu": "1"}}}));
        s.pod("p", &[], cpu_request("2"));
    });
    assert_eq!(decisions, "p: wait 0/3 nodes are available: 1 Insufficient cpu, 2 node(s) were unschedulable.");
}

#[test]
fn some_pods_are_ignored() {
    for (case, patch) in [
        ("created with a node", json!({"spec": {"nodeName": "n1"}})),
        ("with another schedulerName", json!({"spec": {"schedulerName": "other"}})),
        ("with a scheduling gate", json!({"spec": {"schedulingGates": [{"name": "g"}]}})),
        ("being deleted", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})),
        ("finished", json!({"status": {"phase": "Failed"}})),
    ] {
        let decisions = decide_with(|s| {
            s.node("n1", json!({}));
            s.pod("p", &[], patch);
        });
        assert_eq!(decisions, "", "{case}");
    }
}

#[test]
fn claims_are_checked_before_nodes() {
    let ephemeral = || json!({"spec": {"volumes": [{"name": "v", "ephemeral": {}}]}});
    let owner = |uid: &str| {
        json!({"metadata": {"ownerReferences":
        [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": true}]}})
    };
    type Prepare = Box<dyn FnOnce(&mut TestCluster)>;
    let cases: Vec<(&str, Prepare, &str)> = vec![
        (
            "not found",
            Box::new(|s| s.pod("p", &["c"], json!({}))),
            "wait 0/1 nodes are available: persistentvolumeclaim \"c\" not found.",
        ),
        (
            "lost",
            Box::new(|s| {
                s.bound("c", json!({}), json!({}));
                let lost = merged(&s.current_claim("c"), &json!({"status": {"phase": "Lost"}}));
                s.put_claim(lost);
                s.pod("p", &["c"], json!({}));
            }),
            "wait 0/1 nodes are available: persistentvolumeclaim \"c\" bound to non-existent persistentvolume \"pv-c\".",
        ),
        (
            "being deleted",
            Box::new(|s| {
                s.claim("c", "wait", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
                s.pod("p", &["c"], json!({}));
            }),
            "wait 0/1 nodes are available: persistentvolumeclaim \"c\" is being deleted.",
        ),
        (
            "unbound",
            Box::new(|s| {
                s.claim("c", "fast", json!({}));
                s.pod("p", &["c"], json!({}));
            }),
            "wait 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        ),
        (
            "of a class that does not exist",
            Box::new(|s| {
                s.claim("c", "nowhere", json!({}));
                s.pod("p", &["c"], json!({}));
            }),
            "wait 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        ),
        (
            "waiting for a consumer, but naming its volume",
            Box::new(|s| {
                s.claim("c", "wait", json!({"spec": {"volumeName": "v"}}));
                s.pod("p", &["c"], json!({}));
            }),
            "wait 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        ),
        (
            "ephemeral, not created yet",
            Box::new(move |s| s.pod("p", &[], ephemeral())),
            "wait 0/1 nodes are available: waiting for ephemeral volume controller to create the \
             persistentvolumeclaim \"p-v\".",
        ),
        (
            "ephemeral, of another owner",
            Box::new(move |s| {
                s.bound("p-v", owner("another"), json!({}));
                s.pod("p", &[], ephemeral());
            }),
            "wait 0/1 nodes are available: PVC ns/p-v was not created for pod ns/p (pod is not owner).",
        ),
        (
            "ephemeral, of the pod",
            Box::new(move |s| {
                s.bound("p-v", owner("uid-p"), json!({}));
                s.pod("p", &[], ephemeral());
            }),
            "bind n1",
        ),
        (
            "bound",
            Box::new(|s| {
                s.bound("c", json!({}), json!({}));
                s.pod("p", &["c"], json!({}));
            }),
            "bind n1",
        ),
    ];
    for (case, prepare, want) in cases {
        let decisions = decide_with(|s| {
            s.node("n1", json!({}));
            prepare(s);
        });
        assert_eq!(decisions, format!("p: {want}"), "{case}");
    }
}

#[test]
fn bound_volumes_must_reach_the_node() {
    let zone = |zone: &str| json!({"metadata": {"labels": {"topology.kubernetes.io/zone": zone}}});
    let old_zone = |zone: &str| json!({"metadata": {"labels": {"failure-domain.beta.kubernetes.io/zone": zone}}});
    let elsewhere = "wait 0/1 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity.";
    let no_zone = "wait 0/1 nodes are available: 1 node(s) had no available volume zone.";
    for (case, node, volume, want) in [
        ("here", json!({}), host_affinity("n1"), "bind n1"),
        ("elsewhere", json!({}), host_affinity("n2"), elsewhere),
        ("in the node's zone", zone("a"), zone("a"), "bind n1"),
        ("in one of several zones", zone("a"), zone("b__a"), "bind n1"),
        ("in another zone", zone("a"), zone("b"), no_zone),
        ("a beta label that does not match the node's current one", zone("a"), old_zone("b"), no_zone),
        ("a beta label that matches the node's current one", zone("a"), old_zone("a"), "bind n1"),
        ("the node has no zone", json!({}), zone("b"), "bind n1"),
        (
            "a region label that the node does not have",
            zone("a"),
            json!({"metadata": {"labels": {"topology.kubernetes.io/region": "r"}}}),
            no_zone,
        ),
        (
            "of a driver that is not installed",
            json!({}),
            json!({"spec": {"csi": {"driver": "other"}}}),
            "wait 0/1 nodes are available: 1 other CSI driver is not installed on the node.",
        ),
    ] {
        let decisions = decide_with(|s| {
            s.node("n1", node);
            s.bound("c", json!({}), volume);
            s.pod("p", &["c"], json!({}));
        });
        assert_eq!(decisions, format!("p: {want}"), "{case}");
    }
    let decisions = decide_with(|s| {
        s.node("n1", json!({}));
        s.bound("c", json!({}), json!({}));
        s.state.set_volume("pv-c", None);
        s.pod("p", &["c"], json!({}));
    });
    let gone = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)";
    assert_eq!(decisions, format!("p: wait 0/1 nodes are available: 1 {gone}."));
}

mod queue;
mod reservations;
mod volumes;
