//! Property test of the scheduler's decisions in a simulated cluster: pods, nodes, claims and volumes are created and
//! deleted, writes fail, changes are delivered late and in any order, and provisioners reject nodes.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::claim::{claim_ref, is_reserved_for, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{annotation, label};
use cleat_api::{matching, pod};
use cleat_controllers::schedule::decide::{DecisionOutcome, ScheduleDecision, SchedulerState};
use cleat_testing::build;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proptest::prelude::*;
use serde_json::json;

/// What a node offers.
const NODE_CPU_MILLIS: i64 = 2000;
const MAX_PODS_PER_NODE: usize = 3;
const MAX_VOLUMES_PER_NODE: usize = 2;

#[derive(Clone, Debug)]
enum Action {
    AddNode(u8),
    RemoveNode(u8),
    Cordon(u8, bool),
    AddPod { name: u8, cpu: i64, claims: Vec<u8> },
    FinishPod(u8),
    DeletePod(u8),
    AddClaim { name: u8, local: bool, exclusive: bool },
    AddVolume { name: u8, node: u8, local: bool },
    BindClaim(u8),
    ReturnNode(u8),
    Decide,
    Write { which: u8, fails: bool },
    Deliver(u8),
}

fn action() -> impl Strategy<Value = Action> {
    let id = || 0_u8..4;
    prop_oneof![
        2 => id().prop_map(Action::AddNode),
        1 => id().prop_map(Action::RemoveNode),
        1 => (id(), any::<bool>()).prop_map(|(node, on)| Action::Cordon(node, on)),
        6 => (0_u8..8, prop_oneof![Just(0_i64), Just(700), Just(1500)], proptest::collection::vec(0_u8..6, 0..3))
            .prop_map(|(name, cpu, claims)| Action::AddPod { name, cpu, claims }),
        1 => (0_u8..8).prop_map(Action::FinishPod),
        2 => (0_u8..8).prop_map(Action::DeletePod),
        4 => (0_u8..6, any::<bool>(), any::<bool>())
            .prop_map(|(name, local, exclusive)| Action::AddClaim { name, local, exclusive }),
        3 => (id(), id(), any::<bool>()).prop_map(|(name, node, local)| Action::AddVolume { name, node, local }),
        6 => (0_u8..6).prop_map(Action::BindClaim),
        2 => (0_u8..6).prop_map(Action::ReturnNode),
        8 => Just(Action::Decide),
        8 => (any::<u8>(), prop::bool::weighted(0.2)).prop_map(|(which, fails)| Action::Write { which, fails }),
        12 => any::<u8>().prop_map(Action::Deliver),
    ]
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ChangedObject {
    Node(String),
    Pod(Key),
    Claim(Key),
    Volume(String),
}

/// The objects of the API server, and the scheduler's state, which may lag behind.
#[derive(Default)]
struct Cluster {
    state: SchedulerState,
    revision: u64,
    nodes: BTreeMap<String, Node>,
    pods: BTreeMap<Key, Pod>,
    claims: BTreeMap<Key, PersistentVolumeClaim>,
    volumes: BTreeMap<String, PersistentVolume>,
    undelivered: BTreeSet<ChangedObject>,
    unwritten: Vec<(Arc<Pod>, ScheduleDecision)>,
    /// The last decision about each pod.
    last_decisions: BTreeMap<Key, String>,
}

fn node_name_of(id: u8) -> String {
    format!("n{id}")
}

fn claim_key(id: u8) -> Key {
    Key::namespaced("ns", format!("c{id}"))
}

fn pod_key(id: u8) -> Key {
    Key::namespaced("ns", format!("p{id}"))
}

fn set_host_affinity(volume: &mut PersistentVolume, node: &str) {
    let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [
        {"key": label::HOSTNAME, "operator": "In", "values": [node]}]}]}});
    volume.spec.as_mut().unwrap().node_affinity = Some(serde_json::from_value(affinity).unwrap());
}

impl Cluster {
    fn new() -> Self {
        let mut cluster = Self::default();
        cluster.add_class_and_driver();
        cluster
    }

    fn add_class_and_driver(&mut self) {
        for (name, provisioner) in [("wait", build::DRIVER), ("local", "kubernetes.io/no-provisioner")] {
            let mut class = build::class(name, provisioner);
            class.volume_binding_mode = Some("WaitForFirstConsumer".to_owned());
            self.state.set_class(name, Some(Arc::new(class)));
        }
        let driver: CSIDriver = serde_json::from_value(json!({"metadata": {}, "spec": {}})).unwrap();
        self.state.set_driver(build::DRIVER, Some(Arc::new(driver)));
    }

    fn set_revision(&mut self, meta: &mut ObjectMeta) {
        self.revision += 1;
        meta.resource_version = Some(self.revision.to_string());
    }

    fn put_node(&mut self, mut node: Node) {
        self.set_revision(&mut node.metadata);
        let name = node.metadata.name.clone().unwrap();
        self.nodes.insert(name.clone(), node);
        self.undelivered.insert(ChangedObject::Node(name));
    }

    fn put_pod(&mut self, mut pod: Pod) {
        self.set_revision(&mut pod.metadata);
        let key = Key::of(&pod.metadata);
        self.pods.insert(key.clone(), pod);
        self.undelivered.insert(ChangedObject::Pod(key));
    }

    fn put_claim(&mut self, mut claim: PersistentVolumeClaim) {
        self.set_revision(&mut claim.metadata);
        let key = Key::of(&claim.metadata);
        self.claims.insert(key.clone(), claim);
        self.undelivered.insert(ChangedObject::Claim(key));
    }

    fn put_volume(&mut self, mut volume: PersistentVolume) {
        self.set_revision(&mut volume.metadata);
        let name = volume.metadata.name.clone().unwrap();
        self.volumes.insert(name.clone(), volume);
        self.undelivered.insert(ChangedObject::Volume(name));
    }

    fn deliver(&mut self, change: &ChangedObject) {
        deliver(&mut self.state, &self.nodes, &self.pods, &self.claims, &self.volumes, change);
    }

    fn run(&mut self, action: &Action) {
        match action {
            Action::AddNode(id) => {
                let name = node_name_of(*id);
                let mut node = build::node(&name);
                node.metadata.labels = Some([(label::HOSTNAME.to_owned(), name)].into());
                let allocatable = json!({"cpu": format!("{NODE_CPU_MILLIS}m"), "memory": "8Gi", "pods": MAX_PODS_PER_NODE.to_string()});
                node.status.as_mut().unwrap().allocatable = Some(serde_json::from_value(allocatable).unwrap());
                self.put_node(node);
            }
            Action::RemoveNode(id) => {
                self.nodes.remove(&node_name_of(*id));
                self.undelivered.insert(ChangedObject::Node(node_name_of(*id)));
            }
            Action::Cordon(id, on) => {
                if let Some(mut node) = self.nodes.get(&node_name_of(*id)).cloned() {
                    node.spec.get_or_insert_default().unschedulable = Some(*on);
                    self.put_node(node);
                }
            }
            Action::AddPod { name, cpu, claims } => self.add_pod(*name, *cpu, claims),
            Action::FinishPod(id) => {
                let assigned = self.pods.get(&pod_key(*id)).filter(|p| pod::node_name(p).is_some()).cloned();
                if let Some(mut pod) = assigned {
                    pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
                    self.put_pod(pod);
                }
            }
            Action::DeletePod(id) => {
                self.pods.remove(&pod_key(*id));
                self.undelivered.insert(ChangedObject::Pod(pod_key(*id)));
            }
            Action::AddClaim { name, local, exclusive } => {
                let key = claim_key(*name);
                if !self.claims.contains_key(&key) {
                    let class = if *local { "local" } else { "wait" };
                    let mut claim = build::claim("ns", &key.name, Some(class), "1Gi");
                    if *exclusive {
                        claim.spec.as_mut().unwrap().access_modes = Some(vec!["ReadWriteOncePod".to_owned()]);
                    }
                    self.put_claim(claim);
                }
            }
            Action::AddVolume { name, node, local } => {
                let name = format!("v{name}");
                if !self.volumes.contains_key(&name) {
                    let mut volume = build::volume(&name, if *local { "local" } else { "wait" }, "1Gi");
                    let spec = volume.spec.as_mut().unwrap();
                    spec.access_modes.as_mut().unwrap().push("ReadWriteOncePod".to_owned());
                    set_host_affinity(&mut volume, &node_name_of(*node));
                    self.put_volume(volume);
                }
            }
            Action::BindClaim(id) => self.bind_claim(&claim_key(*id)),
            Action::ReturnNode(id) => {
                let chosen = self.claims.get(&claim_key(*id)).filter(|c| volume_name(c).is_none()).cloned();
                if let Some(mut claim) = chosen.filter(|c| c.metadata.annotation(annotation::SELECTED_NODE).is_some()) {
                    claim.metadata.annotations = None;
                    self.put_claim(claim);
                }
            }
            Action::Decide => self.decide(),
            Action::Write { which, fails } => {
                if !self.unwritten.is_empty() {
                    let (pod, decision) = self.unwritten.remove(usize::from(*which) % self.unwritten.len());
                    self.write(&pod, &decision, *fails);
                }
            }
            Action::Deliver(which) => {
                let change = self.undelivered.iter().nth(usize::from(*which) % self.undelivered.len().max(1)).cloned();
                if let Some(change) = change {
                    self.undelivered.remove(&change);
                    self.deliver(&change);
                }
            }
        }
    }

    fn add_pod(&mut self, name: u8, cpu: i64, claims: &[u8]) {
        let key = pod_key(name);
        if self.pods.contains_key(&key) {
            return;
        }
        let names: BTreeSet<String> = claims.iter().map(|id| claim_key(*id).name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut pod = build::pod("ns", &key.name, "", &names);
        pod.metadata.uid = Some(format!("uid-{}", self.revision));
        let requests = json!({"requests": {"cpu": format!("{cpu}m")}});
        pod.spec.as_mut().unwrap().containers[0].resources = Some(serde_json::from_value(requests).unwrap());
        self.put_pod(pod);
    }

    /// Does the work of the binder and the provisioner for one claim.
    fn bind_claim(&mut self, key: &Key) {
        let Some(claim) = self.claims.get(key).filter(|c| volume_name(c).is_none()).cloned() else { return };
        let reserved = self.volumes.values().find(|v| is_reserved_for(v, &claim)).cloned();
        let volume = reserved.or_else(|| {
            let node = claim.metadata.annotation(annotation::SELECTED_NODE)?;
            let mut volume = build::volume(&format!("pvc-{}", key.name), "wait", "1Gi");
            volume.spec.as_mut().unwrap().access_modes = claim.spec.as_ref().unwrap().access_modes.clone();
            set_host_affinity(&mut volume, node);
            Some(volume)
        });
        if let Some(volume) = volume {
            let (claim, volume) = build::bound(claim, volume);
            self.put_volume(volume);
            self.put_claim(claim);
        }
    }

    fn decide(&mut self) {
        while let Some((pod, decision)) = self.state.next_decision(Timestamp::UNIX_EPOCH) {
            let key = Key::of(&pod.metadata);
            let description = match &decision {
                ScheduleDecision::MarkUnschedulable(why) => format!("wait {why}"),
                ScheduleDecision::AwaitVolumes => "await".to_owned(),
                ScheduleDecision::Reserve { node, .. } => format!("reserve {node}"),
                ScheduleDecision::Bind { node } => format!("bind {node}"),
                ScheduleDecision::ReleaseNode { message } => format!("give up {message}"),
            };
            assert!(description.len() > 4, "a reason is given");
            self.last_decisions.insert(key, description);
            if !matches!(decision, ScheduleDecision::AwaitVolumes) {
                self.unwritten.push((pod, decision));
            }
        }
    }

    /// Writes a decision conditionally, as the API server does, and reports the outcome.
    fn write(&mut self, pod: &Pod, decision: &ScheduleDecision, fails: bool) {
        let key = &Key::of(&pod.metadata);
        let is_done = !fails && self.try_write(pod, decision);
        self.state.complete(key, decision, if is_done { DecisionOutcome::Done } else { DecisionOutcome::Failed });
        if !is_done || matches!(decision, ScheduleDecision::ReleaseNode { .. }) {
            self.state.enqueue(key);
        }
        self.check();
    }

    fn try_write(&mut self, decided: &Pod, decision: &ScheduleDecision) -> bool {
        match decision {
            ScheduleDecision::Reserve { volumes, claims, .. } => {
                for volume in volumes {
                    let current = self.volumes.get(volume.metadata.name.as_deref().unwrap());
                    if current
                        .is_none_or(|current| current.metadata.resource_version != volume.metadata.resource_version)
                    {
                        return false;
                    }
                    self.put_volume(volume.as_ref().clone());
                }
                for claim in claims {
                    let current = self.claims.get(&Key::of(&claim.metadata));
                    if current
                        .is_none_or(|current| current.metadata.resource_version != claim.metadata.resource_version)
                    {
                        return false;
                    }
                    self.put_claim(claim.as_ref().clone());
                }
                true
            }
            ScheduleDecision::Bind { node } => {
                let Some(mut pod) = self.pods.get(&Key::of(&decided.metadata)).cloned() else { return true };
                if pod.metadata.uid != decided.metadata.uid || pod::node_name(&pod).is_some() {
                    return false;
                }
                let spec = pod.spec.as_mut().unwrap();
                spec.node_name = Some(node.clone());
                self.put_pod(pod);
                true
            }
            ScheduleDecision::MarkUnschedulable(_)
            | ScheduleDecision::ReleaseNode { .. }
            | ScheduleDecision::AwaitVolumes => true,
        }
    }

    /// Checks the invariants of the server's objects.
    fn check(&self) {
        let mut cpu: BTreeMap<&str, i64> = BTreeMap::new();
        let mut pods: BTreeMap<&str, usize> = BTreeMap::new();
        let mut handles: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut exclusive = BTreeSet::new();
        for assigned in self.pods.values().filter(|p| p.status.as_ref().unwrap().phase.as_deref() == Some("Pending")) {
            let Some(node) = pod::node_name(assigned) else { continue };
            let spec = assigned.spec.as_ref().unwrap();
            let requested_cpu = &spec.containers[0].resources.as_ref().unwrap().requests.as_ref().unwrap()["cpu"].0;
            *cpu.entry(node).or_default() += requested_cpu.parse::<cleat_api::Quantity>().unwrap().to_millis();
            *pods.entry(node).or_default() += 1;
            for used in pod::claim_volumes(assigned) {
                let claim = &self.claims[&used.claim];
                let volume = &self.volumes[volume_name(claim).expect("a pod is bound only when its claims are")];
                assert!(is_reserved_for(volume, claim), "the volume is the claim's");
                if let Some(node) = self.nodes.get(node) {
                    assert!(matching::is_accessible_from(volume, node), "the node reaches the volume");
                }
                handles
                    .entry(node)
                    .or_default()
                    .insert(&volume.spec.as_ref().unwrap().csi.as_ref().unwrap().volume_handle);
                let modes = claim.spec.as_ref().unwrap().access_modes.as_ref().unwrap();
                if modes[0] == "ReadWriteOncePod" {
                    assert!(exclusive.insert(used.claim), "one pod has the exclusive claim");
                }
            }
        }
        assert!(cpu.values().all(|used| *used <= NODE_CPU_MILLIS), "cpu: {cpu:?}");
        assert!(pods.values().all(|count| *count <= MAX_PODS_PER_NODE), "pods: {pods:?}");
        assert!(handles.values().all(|volumes| volumes.len() <= MAX_VOLUMES_PER_NODE), "volumes: {handles:?}");
        let mut owners = BTreeSet::new();
        for volume in self.volumes.values().filter(|v| claim_ref(v).is_some()) {
            let claim = cleat_api::claim::claim_ref_key(claim_ref(volume).unwrap());
            assert!(owners.insert(claim.clone()), "{claim} has two volumes");
        }
    }

    /// Delivers all changes and writes all decisions, without failures, until nothing changes any more.
    fn settle(&mut self) {
        for _ in 0..200 {
            for change in std::mem::take(&mut self.undelivered) {
                self.deliver(&change);
            }
            for (pod, decision) in std::mem::take(&mut self.unwritten) {
                self.write(&pod, &decision, false);
            }
            (0..6).for_each(|id| self.bind_claim(&claim_key(id)));
            self.decide();
            if self.undelivered.is_empty() && self.unwritten.is_empty() {
                return;
            }
        }
        panic!("the scheduler does not settle");
    }

    fn pending(&self) -> impl Iterator<Item = &Key> {
        let is_unassigned = |p: &&Pod| pod::node_name(p).is_none();
        self.pods.iter().filter(move |(_, p)| is_unassigned(p)).map(|(key, _)| key)
    }
}

fn deliver(
    state: &mut SchedulerState,
    nodes: &BTreeMap<String, Node>,
    pods: &BTreeMap<Key, Pod>,
    claims: &BTreeMap<Key, PersistentVolumeClaim>,
    volumes: &BTreeMap<String, PersistentVolume>,
    change: &ChangedObject,
) {
    match change {
        ChangedObject::Node(name) => {
            let drivers =
                json!([{"name": build::DRIVER, "nodeID": name, "allocatable": {"count": MAX_VOLUMES_PER_NODE}}]);
            let object: CSINode =
                serde_json::from_value(json!({"metadata": {}, "spec": {"drivers": drivers}})).unwrap();
            state.set_csi_node(name, Some(&object));
            state.set_node(name, nodes.get(name).cloned().map(Arc::new));
        }
        ChangedObject::Pod(key) => state.set_pod(key, pods.get(key).cloned().map(Arc::new)),
        ChangedObject::Claim(key) => state.set_claim(key, claims.get(key).cloned().map(Arc::new)),
        ChangedObject::Volume(name) => state.set_volume(name, volumes.get(name).cloned().map(Arc::new)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn resources_are_assigned_once_and_no_pod_waits_without_a_reason(
        actions in proptest::collection::vec(action(), 1..120)
    ) {
        let mut cluster = Cluster::new();
        // Two nodes are soon full.
        [Action::AddNode(0), Action::AddNode(1)].iter().for_each(|action| cluster.run(action));
        for action in &actions {
            cluster.run(action);
            cluster.check();
        }
        cluster.settle();
        // A pod that is still pending must be unschedulable for a scheduler with a fresh state too: no change that
        // could have helped was missed.
        let mut fresh = Cluster { nodes: cluster.nodes.clone(), pods: cluster.pods.clone(),
            claims: cluster.claims.clone(), volumes: cluster.volumes.clone(), ..Cluster::default() };
        fresh.add_class_and_driver();
        let all: Vec<ChangedObject> = fresh.nodes.keys().cloned().map(ChangedObject::Node)
            .chain(fresh.claims.keys().cloned().map(ChangedObject::Claim))
            .chain(fresh.volumes.keys().cloned().map(ChangedObject::Volume))
            .chain(fresh.pods.keys().cloned().map(ChangedObject::Pod)).collect();
        all.iter().for_each(|change| fresh.deliver(change));
        fresh.decide();
        for key in cluster.pending() {
            let decision = cluster.last_decisions.get(key).expect("there is a decision about every pod");
            prop_assert!(decision.starts_with("wait "), "{key} ended with {decision:?}");
            prop_assert!(fresh.last_decisions[key].starts_with("wait "), "{key}: {decision:?}, but with a fresh state {:?}", fresh.last_decisions[key]);
        }
    }
}
