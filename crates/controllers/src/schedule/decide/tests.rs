//! Before and after: what is there, and what becomes of the pods.

use super::*;
use cleat_testing::build;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

/// A small cluster. Whatever is put in gets a revision of its own, as a server would give it.
struct Scene {
    world: World,
    revision: u64,
    now: i64,
    acting: Vec<(Key, Decision)>,
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

impl Scene {
    /// One class that waits for pods and one that does not, of a driver that is on every node.
    fn new() -> Self {
        let mut scene = Self { world: World::default(), revision: 1, now: 0, acting: Vec::new() };
        scene.class("wait", json!({"volumeBindingMode": "WaitForFirstConsumer"}));
        scene.class("fast", json!({}));
        scene.class(
            "local",
            json!({
            "volumeBindingMode": "WaitForFirstConsumer", "provisioner": "kubernetes.io/no-provisioner"}),
        );
        scene.driver(json!({}));
        scene
    }

    fn with_nodes(names: &[&str]) -> Self {
        let mut scene = Self::new();
        names.iter().for_each(|name| scene.node(name, json!({})));
        scene
    }

    fn stamp(&mut self, meta: &mut ObjectMeta) {
        self.revision += 1;
        meta.resource_version = Some(self.revision.to_string());
    }

    /// Room for ten pods, ten cpus and 10Gi.
    fn node(&mut self, name: &str, patch: Value) {
        let room = json!({"metadata": {"labels": {"kubernetes.io/hostname": name}}, "status": {"allocatable":
            {"cpu": "10", "memory": "10Gi", "pods": "10"}}});
        let node = merged(&merged(&build::node(name), &room), &patch);
        self.world.set_node(name, Some(Arc::new(node)));
        self.csi_node(name, json!([{"name": build::DRIVER, "nodeID": name}]));
    }

    fn csi_node(&mut self, name: &str, drivers: Value) {
        let object: CSINode = serde_json::from_value(json!({"metadata": {}, "spec": {"drivers": drivers}})).unwrap();
        self.world.set_csi_node(name, Some(&object));
    }

    fn class(&mut self, name: &str, patch: Value) {
        let class: StorageClass = merged(&build::class(name, build::DRIVER), &patch);
        self.world.set_class(name, Some(Arc::new(class)));
    }

    fn driver(&mut self, spec: Value) {
        let object: CSIDriver = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
        self.world.set_driver(build::DRIVER, Some(Arc::new(object)));
    }

    fn capacity(&mut self, name: &str, class: &str, patch: Value) {
        let object = json!({"metadata": {}, "storageClassName": class, "nodeTopology": {}});
        let object: CSIStorageCapacity = serde_json::from_value(object).unwrap();
        self.world.set_capacity(&Key::namespaced("ns", name), Some(Arc::new(merged(&object, &patch))));
    }

    fn claim(&mut self, name: &str, class: &str, patch: Value) {
        let claim = merged(&build::claim("ns", name, Some(class), "1Gi"), &patch);
        self.put_claim(claim);
    }

    fn put_claim(&mut self, mut claim: PersistentVolumeClaim) {
        self.stamp(&mut claim.metadata);
        self.world.set_claim(&Key::of(&claim.metadata), Some(Arc::new(claim)));
    }

    fn volume(&mut self, name: &str, class: &str, size: &str, patch: Value) {
        let volume = merged(&build::volume(name, class, size), &patch);
        self.put_volume(volume);
    }

    fn put_volume(&mut self, mut volume: PersistentVolume) {
        self.stamp(&mut volume.metadata);
        self.world.set_volume(&volume.metadata.name.clone().unwrap(), Some(Arc::new(volume)));
    }

    /// A claim and its volume, bound.
    fn bound(&mut self, name: &str, claim: Value, volume: Value) {
        let claim = merged(&build::claim("ns", name, Some("fast"), "1Gi"), &claim);
        let volume = merged(&build::volume(&format!("pv-{name}"), "fast", "1Gi"), &volume);
        let (claim, volume) = build::bound(claim, volume);
        self.put_volume(volume);
        self.put_claim(claim);
    }

    fn pod(&mut self, name: &str, claims: &[&str], patch: Value) {
        let mut pod = merged(&build::pod("ns", name, "", claims), &patch);
        self.stamp(&mut pod.metadata);
        self.world.set_pod(&Key::namespaced("ns", name), Some(Arc::new(pod)));
    }

    fn gone(&mut self, pod: &str) {
        self.world.set_pod(&Key::namespaced("ns", pod), None);
    }

    /// Decides about everyone who is ready, and tells each decision in a line.
    fn turn(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        let now = Timestamp::from_second(self.now).unwrap();
        while let Some((pod, decision)) = self.world.next(now) {
            said.push(format!("{}: {}", pod.metadata.name.clone().unwrap(), told(&decision)));
            if !matches!(decision, Decision::Await) {
                self.acting.push((Key::of(&pod.metadata), decision));
            }
        }
        said
    }

    /// Everything decided is written.
    fn carry_out(&mut self) {
        for (key, decision) in std::mem::take(&mut self.acting) {
            if let Decision::Reserve { volumes, claims, .. } = &decision {
                volumes.iter().for_each(|volume| self.put_volume(volume.as_ref().clone()));
                claims.iter().for_each(|claim| self.put_claim(claim.as_ref().clone()));
            }
            self.world.finished(&key, &decision, Outcome::Done);
        }
    }

    fn fail(&mut self) {
        for (key, decision) in std::mem::take(&mut self.acting) {
            self.world.finished(&key, &decision, Outcome::Failed);
        }
    }

    fn claim_now(&self, name: &str) -> PersistentVolumeClaim {
        self.world.claim(&Key::namespaced("ns", name)).unwrap().as_ref().clone()
    }

    /// The binder's and the provisioner's part: the claim gets a volume.
    fn serve(&mut self, name: &str, volume: PersistentVolume) {
        let (claim, volume) = build::bound(self.claim_now(name), volume);
        self.put_volume(volume);
        self.put_claim(claim);
    }
}

fn told(decision: &Decision) -> String {
    let names = |list: Vec<&ObjectMeta>| list.iter().filter_map(|m| m.name.clone()).collect::<Vec<_>>().join(",");
    match decision {
        Decision::Reserve { node, volumes, claims } => format!(
            "reserve {node} volumes [{}] claims [{}]",
            names(volumes.iter().map(|v| &v.metadata).collect()),
            names(claims.iter().map(|c| &c.metadata).collect())
        ),
        Decision::Await => "await".to_owned(),
        Decision::Bind { node } => format!("bind {node}"),
        Decision::Wait(why) => format!("wait {why}"),
        Decision::GiveUp { message } => format!("give up {message}"),
    }
}

fn on_host(name: &str) -> Value {
    json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": [name]}]}]}}}})
}

fn asks(cpu: &str) -> Value {
    json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}})
}

/// What becomes of a pod `p` in a world prepared by `prepare`.
fn alone(prepare: impl FnOnce(&mut Scene)) -> String {
    let mut scene = Scene::new();
    prepare(&mut scene);
    scene.turn().join("; ")
}

#[test]
fn a_node_must_admit_the_pod_and_have_room() {
    let tolerant = json!({"spec": {"tolerations": [{"operator": "Exists"}]}});
    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let silent = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
    let tainted = json!({"spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}});
    let leaving = json!({"spec": {"taints": [{"key": "old", "effect": "NoExecute"}]}});
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
        ("silent", silent, None, json!({}), "wait 0/1 nodes are available: 1 node(s) had untolerated taint(s)."),
        (
            "tainted",
            tainted.clone(),
            None,
            json!({}),
            "wait 0/1 nodes are available: 1 node(s) had untolerated taint(s).",
        ),
        ("tainted, tolerated", tainted, None, tolerant, "bind n1"),
        ("to be left", leaving, None, json!({}), "wait 0/1 nodes are available: 1 node(s) had untolerated taint(s)."),
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
        ("room beside another", json!({}), Some(other(&asks("9"))), asks("1"), "bind n1"),
        (
            "no room beside another",
            json!({}),
            Some(other(&asks("9"))),
            asks("1001m"),
            "wait 0/1 nodes are available: 1 Insufficient cpu.",
        ),
        (
            "a finished pod takes nothing",
            json!({}),
            Some(merged(&other(&asks("9")), &json!({"status": {"phase": "Succeeded"}}))),
            asks("5"),
            "bind n1",
        ),
        (
            "one that is being deleted still does",
            json!({}),
            Some(merged(&other(&asks("9")), &json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))),
            asks("5"),
            "wait 0/1 nodes are available: 1 Insufficient cpu.",
        ),
        (
            "every shortage is told",
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
        let said = alone(|s| {
            s.node("n1", node);
            if let Some(other) = before {
                s.pod("other", &[], other);
            }
            s.pod("p", &[], pod);
        });
        assert_eq!(said, format!("p: {want}"), "{case}");
    }
    assert_eq!(alone(|s| s.pod("p", &[], json!({}))), "p: wait no nodes available to schedule pods");
}

#[test]
fn reasons_are_counted_over_the_nodes() {
    let said = alone(|s| {
        s.node("a", json!({"spec": {"unschedulable": true}}));
        s.node("b", json!({"spec": {"unschedulable": true}}));
        s.node("c", json!({"status": {"allocatable": {"cpu": "1"}}}));
        s.pod("p", &[], asks("2"));
    });
    assert_eq!(said, "p: wait 0/3 nodes are available: 1 Insufficient cpu, 2 node(s) were unschedulable.");
}

#[test]
fn some_pods_are_not_ours() {
    for (case, patch) in [
        ("placed by its author", json!({"spec": {"nodeName": "n1"}})),
        ("another scheduler's", json!({"spec": {"schedulerName": "other"}})),
        ("held by a gate", json!({"spec": {"schedulingGates": [{"name": "g"}]}})),
        ("leaving", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})),
        ("finished", json!({"status": {"phase": "Failed"}})),
    ] {
        let said = alone(|s| {
            s.node("n1", json!({}));
            s.pod("p", &[], patch);
        });
        assert_eq!(said, "", "{case}");
    }
}

#[test]
fn claims_must_be_in_order_before_any_node_is_looked_at() {
    let ephemeral = || json!({"spec": {"volumes": [{"name": "v", "ephemeral": {}}]}});
    let owner = |uid: &str| {
        json!({"metadata": {"ownerReferences":
        [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": true}]}})
    };
    type Prepare = Box<dyn FnOnce(&mut Scene)>;
    let cases: Vec<(&str, Prepare, &str)> = vec![
        (
            "none",
            Box::new(|s| s.pod("p", &["c"], json!({}))),
            "wait 0/1 nodes are available: persistentvolumeclaim \"c\" not found.",
        ),
        (
            "lost",
            Box::new(|s| {
                s.bound("c", json!({}), json!({}));
                let lost = merged(&s.claim_now("c"), &json!({"status": {"phase": "Lost"}}));
                s.put_claim(lost);
                s.pod("p", &["c"], json!({}));
            }),
            "wait 0/1 nodes are available: persistentvolumeclaim \"c\" bound to non-existent persistentvolume \"pv-c\".",
        ),
        (
            "leaving",
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
            "of no class that exists",
            Box::new(|s| {
                s.claim("c", "nowhere", json!({}));
                s.pod("p", &["c"], json!({}));
            }),
            "wait 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        ),
        (
            "waiting for a pod, but naming its volume",
            Box::new(|s| {
                s.claim("c", "wait", json!({"spec": {"volumeName": "v"}}));
                s.pod("p", &["c"], json!({}));
            }),
            "wait 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        ),
        (
            "not made yet",
            Box::new(move |s| s.pod("p", &[], ephemeral())),
            "wait 0/1 nodes are available: waiting for ephemeral volume controller to create the \
             persistentvolumeclaim \"p-v\".",
        ),
        (
            "somebody else's",
            Box::new(move |s| {
                s.bound("p-v", owner("another"), json!({}));
                s.pod("p", &[], ephemeral());
            }),
            "wait 0/1 nodes are available: PVC ns/p-v was not created for pod ns/p (pod is not owner).",
        ),
        (
            "its own",
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
        let said = alone(|s| {
            s.node("n1", json!({}));
            prepare(s);
        });
        assert_eq!(said, format!("p: {want}"), "{case}");
    }
}

#[test]
fn bound_volumes_must_reach_the_node() {
    let zone = |zone: &str| json!({"metadata": {"labels": {"topology.kubernetes.io/zone": zone}}});
    let old_zone = |zone: &str| json!({"metadata": {"labels": {"failure-domain.beta.kubernetes.io/zone": zone}}});
    let elsewhere = "wait 0/1 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity.";
    let no_zone = "wait 0/1 nodes are available: 1 node(s) had no available volume zone.";
    for (case, node, volume, want) in [
        ("here", json!({}), on_host("n1"), "bind n1"),
        ("elsewhere", json!({}), on_host("n2"), elsewhere),
        ("in the node's zone", zone("a"), zone("a"), "bind n1"),
        ("in one of several zones", zone("a"), zone("b__a"), "bind n1"),
        ("in another zone", zone("a"), zone("b"), no_zone),
        ("an old label, the node has the new one", zone("a"), old_zone("b"), no_zone),
        ("an old label met by the new one", zone("a"), old_zone("a"), "bind n1"),
        ("the node says nothing", json!({}), zone("b"), "bind n1"),
        (
            "a region the node does not tell",
            zone("a"),
            json!({"metadata": {"labels": {"topology.kubernetes.io/region": "r"}}}),
            no_zone,
        ),
        (
            "of a driver that is not there",
            json!({}),
            json!({"spec": {"csi": {"driver": "other"}}}),
            "wait 0/1 nodes are available: 1 other CSI driver is not installed on the node.",
        ),
    ] {
        let said = alone(|s| {
            s.node("n1", node);
            s.bound("c", json!({}), volume);
            s.pod("p", &["c"], json!({}));
        });
        assert_eq!(said, format!("p: {want}"), "{case}");
    }
    let said = alone(|s| {
        s.node("n1", json!({}));
        s.bound("c", json!({}), json!({}));
        s.world.set_volume("pv-c", None);
        s.pod("p", &["c"], json!({}));
    });
    let gone = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)";
    assert_eq!(said, format!("p: wait 0/1 nodes are available: 1 {gone}."));
}

mod turns;
mod volumes;
