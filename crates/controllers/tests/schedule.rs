//! The scheduler against a cluster that does anything at any time: pods, nodes, claims and volumes come and go, writes
//! lose races, news arrive late and in any order, and provisioners give nodes back.

#![allow(clippy::unwrap_used, reason = "a test ends where its steps fail")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cleat_api::claim::{claim_ref, is_reserved_for, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{annotation, label};
use cleat_api::{matching, pod};
use cleat_controllers::schedule::decide::{Decision, Outcome, World};
use cleat_testing::build;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proptest::prelude::*;
use serde_json::json;

const CPU: i64 = 2000;
const PODS: usize = 3;
const VOLUMES: usize = 2;

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
    Serve(u8),
    GiveBack(u8),
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
        6 => (0_u8..6).prop_map(Action::Serve),
        2 => (0_u8..6).prop_map(Action::GiveBack),
        8 => Just(Action::Decide),
        8 => (any::<u8>(), prop::bool::weighted(0.2)).prop_map(|(which, fails)| Action::Write { which, fails }),
        12 => any::<u8>().prop_map(Action::Deliver),
    ]
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    Node(String),
    Pod(Key),
    Claim(Key),
    Volume(String),
}

/// What the API server has, and what the scheduler has heard of it.
#[derive(Default)]
struct Cluster {
    world: World,
    revision: u64,
    nodes: BTreeMap<String, Node>,
    pods: BTreeMap<Key, Pod>,
    claims: BTreeMap<Key, PersistentVolumeClaim>,
    volumes: BTreeMap<String, PersistentVolume>,
    news: BTreeSet<News>,
    acting: Vec<(Arc<Pod>, Decision)>,
    /// The last word about each pod.
    last: BTreeMap<Key, String>,
}

fn node_of(id: u8) -> String {
    format!("n{id}")
}

fn claim_of(id: u8) -> Key {
    Key::namespaced("ns", format!("c{id}"))
}

fn pod_of(id: u8) -> Key {
    Key::namespaced("ns", format!("p{id}"))
}

fn only_on(volume: &mut PersistentVolume, node: &str) {
    let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [
        {"key": label::HOSTNAME, "operator": "In", "values": [node]}]}]}});
    volume.spec.as_mut().unwrap().node_affinity = Some(serde_json::from_value(affinity).unwrap());
}

impl Cluster {
    fn new() -> Self {
        let mut cluster = Self::default();
        cluster.furnish();
        cluster
    }

    fn furnish(&mut self) {
        for (name, provisioner) in [("wait", build::DRIVER), ("local", "kubernetes.io/no-provisioner")] {
            let mut class = build::class(name, provisioner);
            class.volume_binding_mode = Some("WaitForFirstConsumer".to_owned());
            self.world.set_class(name, Some(Arc::new(class)));
        }
        let driver: CSIDriver = serde_json::from_value(json!({"metadata": {}, "spec": {}})).unwrap();
        self.world.set_driver(build::DRIVER, Some(Arc::new(driver)));
    }

    fn stamp(&mut self, meta: &mut ObjectMeta) {
        self.revision += 1;
        meta.resource_version = Some(self.revision.to_string());
    }

    fn put_node(&mut self, mut node: Node) {
        self.stamp(&mut node.metadata);
        let name = node.metadata.name.clone().unwrap();
        self.nodes.insert(name.clone(), node);
        self.news.insert(News::Node(name));
    }

    fn put_pod(&mut self, mut pod: Pod) {
        self.stamp(&mut pod.metadata);
        let key = Key::of(&pod.metadata);
        self.pods.insert(key.clone(), pod);
        self.news.insert(News::Pod(key));
    }

    fn put_claim(&mut self, mut claim: PersistentVolumeClaim) {
        self.stamp(&mut claim.metadata);
        let key = Key::of(&claim.metadata);
        self.claims.insert(key.clone(), claim);
        self.news.insert(News::Claim(key));
    }

    fn put_volume(&mut self, mut volume: PersistentVolume) {
        self.stamp(&mut volume.metadata);
        let name = volume.metadata.name.clone().unwrap();
        self.volumes.insert(name.clone(), volume);
        self.news.insert(News::Volume(name));
    }

    fn deliver(&mut self, news: &News) {
        deliver(&mut self.world, &self.nodes, &self.pods, &self.claims, &self.volumes, news);
    }

    fn run(&mut self, action: &Action) {
        match action {
            Action::AddNode(id) => {
                let name = node_of(*id);
                let mut node = build::node(&name);
                node.metadata.labels = Some([(label::HOSTNAME.to_owned(), name)].into());
                let room = json!({"cpu": format!("{CPU}m"), "memory": "8Gi", "pods": PODS.to_string()});
                node.status.as_mut().unwrap().allocatable = Some(serde_json::from_value(room).unwrap());
                self.put_node(node);
            }
            Action::RemoveNode(id) => {
                self.nodes.remove(&node_of(*id));
                self.news.insert(News::Node(node_of(*id)));
            }
            Action::Cordon(id, on) => {
                if let Some(mut node) = self.nodes.get(&node_of(*id)).cloned() {
                    node.spec.get_or_insert_default().unschedulable = Some(*on);
                    self.put_node(node);
                }
            }
            Action::AddPod { name, cpu, claims } => self.add_pod(*name, *cpu, claims),
            Action::FinishPod(id) => {
                let placed = self.pods.get(&pod_of(*id)).filter(|p| pod::node_name(p).is_some()).cloned();
                if let Some(mut pod) = placed {
                    pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
                    self.put_pod(pod);
                }
            }
            Action::DeletePod(id) => {
                self.pods.remove(&pod_of(*id));
                self.news.insert(News::Pod(pod_of(*id)));
            }
            Action::AddClaim { name, local, exclusive } => {
                let key = claim_of(*name);
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
                    only_on(&mut volume, &node_of(*node));
                    self.put_volume(volume);
                }
            }
            Action::Serve(id) => self.serve(&claim_of(*id)),
            Action::GiveBack(id) => {
                let chosen = self.claims.get(&claim_of(*id)).filter(|c| volume_name(c).is_none()).cloned();
                if let Some(mut claim) = chosen.filter(|c| c.metadata.annotation(annotation::SELECTED_NODE).is_some()) {
                    claim.metadata.annotations = None;
                    self.put_claim(claim);
                }
            }
            Action::Decide => self.decide(),
            Action::Write { which, fails } => {
                if !self.acting.is_empty() {
                    let (pod, decision) = self.acting.remove(usize::from(*which) % self.acting.len());
                    self.write(&pod, &decision, *fails);
                }
            }
            Action::Deliver(which) => {
                let news = self.news.iter().nth(usize::from(*which) % self.news.len().max(1)).cloned();
                if let Some(news) = news {
                    self.news.remove(&news);
                    self.deliver(&news);
                }
            }
        }
    }

    fn add_pod(&mut self, name: u8, cpu: i64, claims: &[u8]) {
        let key = pod_of(name);
        if self.pods.contains_key(&key) {
            return;
        }
        let names: BTreeSet<String> = claims.iter().map(|id| claim_of(*id).name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut pod = build::pod("ns", &key.name, "", &names);
        pod.metadata.uid = Some(format!("uid-{}", self.revision));
        let requests = json!({"requests": {"cpu": format!("{cpu}m")}});
        pod.spec.as_mut().unwrap().containers[0].resources = Some(serde_json::from_value(requests).unwrap());
        self.put_pod(pod);
    }

    /// The binder's and the provisioner's work on one claim.
    fn serve(&mut self, key: &Key) {
        let Some(claim) = self.claims.get(key).filter(|c| volume_name(c).is_none()).cloned() else { return };
        let reserved = self.volumes.values().find(|v| is_reserved_for(v, &claim)).cloned();
        let volume = reserved.or_else(|| {
            let node = claim.metadata.annotation(annotation::SELECTED_NODE)?;
            let mut volume = build::volume(&format!("pvc-{}", key.name), "wait", "1Gi");
            volume.spec.as_mut().unwrap().access_modes = claim.spec.as_ref().unwrap().access_modes.clone();
            only_on(&mut volume, node);
            Some(volume)
        });
        if let Some(volume) = volume {
            let (claim, volume) = build::bound(claim, volume);
            self.put_volume(volume);
            self.put_claim(claim);
        }
    }

    fn decide(&mut self) {
        while let Some((pod, decision)) = self.world.next(Timestamp::UNIX_EPOCH) {
            let key = Key::of(&pod.metadata);
            let word = match &decision {
                Decision::Wait(why) => format!("wait {why}"),
                Decision::Await => "await".to_owned(),
                Decision::Reserve { node, .. } => format!("reserve {node}"),
                Decision::Bind { node } => format!("bind {node}"),
                Decision::GiveUp { message } => format!("give up {message}"),
            };
            assert!(word.len() > 4, "a reason is given");
            self.last.insert(key, word);
            if !matches!(decision, Decision::Await) {
                self.acting.push((pod, decision));
            }
        }
    }

    /// Carries a decision out as the server would let it: conditionally.
    fn write(&mut self, pod: &Pod, decision: &Decision, fails: bool) {
        let key = &Key::of(&pod.metadata);
        let done = !fails && self.written(pod, decision);
        self.world.finished(key, decision, if done { Outcome::Done } else { Outcome::Failed });
        if !done || matches!(decision, Decision::GiveUp { .. }) {
            self.world.retry(key);
        }
        self.check();
    }

    fn written(&mut self, about: &Pod, decision: &Decision) -> bool {
        match decision {
            Decision::Reserve { volumes, claims, .. } => {
                for volume in volumes {
                    let is = self.volumes.get(volume.metadata.name.as_deref().unwrap());
                    if is.is_none_or(|is| is.metadata.resource_version != volume.metadata.resource_version) {
                        return false;
                    }
                    self.put_volume(volume.as_ref().clone());
                }
                for claim in claims {
                    let is = self.claims.get(&Key::of(&claim.metadata));
                    if is.is_none_or(|is| is.metadata.resource_version != claim.metadata.resource_version) {
                        return false;
                    }
                    self.put_claim(claim.as_ref().clone());
                }
                true
            }
            Decision::Bind { node } => {
                let Some(mut pod) = self.pods.get(&Key::of(&about.metadata)).cloned() else { return true };
                if pod.metadata.uid != about.metadata.uid || pod::node_name(&pod).is_some() {
                    return false;
                }
                let spec = pod.spec.as_mut().unwrap();
                spec.node_name = Some(node.clone());
                self.put_pod(pod);
                true
            }
            Decision::Wait(_) | Decision::GiveUp { .. } | Decision::Await => true,
        }
    }

    /// What must hold of the server's objects at any time.
    fn check(&self) {
        let mut cpu: BTreeMap<&str, i64> = BTreeMap::new();
        let mut pods: BTreeMap<&str, usize> = BTreeMap::new();
        let mut handles: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut exclusive = BTreeSet::new();
        for placed in self.pods.values().filter(|p| p.status.as_ref().unwrap().phase.as_deref() == Some("Pending")) {
            let Some(node) = pod::node_name(placed) else { continue };
            let spec = placed.spec.as_ref().unwrap();
            let asked = &spec.containers[0].resources.as_ref().unwrap().requests.as_ref().unwrap()["cpu"].0;
            *cpu.entry(node).or_default() += asked.parse::<cleat_api::Quantity>().unwrap().to_millis();
            *pods.entry(node).or_default() += 1;
            for used in pod::claim_volumes(placed) {
                let claim = &self.claims[&used.claim];
                let volume = &self.volumes[volume_name(claim).expect("a pod is bound only when its claims are")];
                assert!(is_reserved_for(volume, claim), "the volume is the claim's");
                if let Some(node) = self.nodes.get(node) {
                    assert!(matching::is_accessible_from(volume, node), "the volume is where the pod is");
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
        assert!(cpu.values().all(|used| *used <= CPU), "cpu: {cpu:?}");
        assert!(pods.values().all(|count| *count <= PODS), "pods: {pods:?}");
        assert!(handles.values().all(|volumes| volumes.len() <= VOLUMES), "volumes: {handles:?}");
        let mut owners = BTreeSet::new();
        for volume in self.volumes.values().filter(|v| claim_ref(v).is_some()) {
            let claim = cleat_api::claim::claim_ref_key(claim_ref(volume).unwrap());
            assert!(owners.insert(claim.clone()), "{claim} has two volumes");
        }
    }

    /// Nothing fails any more and all news arrive: does it come to rest?
    fn settle(&mut self) {
        for _ in 0..200 {
            for news in std::mem::take(&mut self.news) {
                self.deliver(&news);
            }
            for (pod, decision) in std::mem::take(&mut self.acting) {
                self.write(&pod, &decision, false);
            }
            (0..6).for_each(|id| self.serve(&claim_of(id)));
            self.decide();
            if self.news.is_empty() && self.acting.is_empty() {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    fn pending(&self) -> impl Iterator<Item = &Key> {
        let open = |p: &&Pod| pod::node_name(p).is_none();
        self.pods.iter().filter(move |(_, p)| open(p)).map(|(key, _)| key)
    }
}

fn deliver(
    world: &mut World,
    nodes: &BTreeMap<String, Node>,
    pods: &BTreeMap<Key, Pod>,
    claims: &BTreeMap<Key, PersistentVolumeClaim>,
    volumes: &BTreeMap<String, PersistentVolume>,
    news: &News,
) {
    match news {
        News::Node(name) => {
            let drivers = json!([{"name": build::DRIVER, "nodeID": name, "allocatable": {"count": VOLUMES}}]);
            let object: CSINode =
                serde_json::from_value(json!({"metadata": {}, "spec": {"drivers": drivers}})).unwrap();
            world.set_csi_node(name, Some(&object));
            world.set_node(name, nodes.get(name).cloned().map(Arc::new));
        }
        News::Pod(key) => world.set_pod(key, pods.get(key).cloned().map(Arc::new)),
        News::Claim(key) => world.set_claim(key, claims.get(key).cloned().map(Arc::new)),
        News::Volume(name) => world.set_volume(name, volumes.get(name).cloned().map(Arc::new)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nobody_gets_what_another_has_and_nobody_waits_without_a_reason(
        actions in proptest::collection::vec(action(), 1..120)
    ) {
        let mut cluster = Cluster::new();
        // Two nodes are soon full, which is where it becomes interesting.
        [Action::AddNode(0), Action::AddNode(1)].iter().for_each(|action| cluster.run(action));
        for action in &actions {
            cluster.run(action);
            cluster.check();
        }
        cluster.settle();
        // Whoever still waits would not be placed by somebody who sees everything for the first time either: no change
        // that could have helped was missed.
        let mut afresh = Cluster { nodes: cluster.nodes.clone(), pods: cluster.pods.clone(),
            claims: cluster.claims.clone(), volumes: cluster.volumes.clone(), ..Cluster::default() };
        afresh.furnish();
        let all: Vec<News> = afresh.nodes.keys().cloned().map(News::Node)
            .chain(afresh.claims.keys().cloned().map(News::Claim))
            .chain(afresh.volumes.keys().cloned().map(News::Volume))
            .chain(afresh.pods.keys().cloned().map(News::Pod)).collect();
        all.iter().for_each(|news| afresh.deliver(news));
        afresh.decide();
        for key in cluster.pending() {
            let word = cluster.last.get(key).expect("every pod is decided about");
            prop_assert!(word.starts_with("wait "), "{key} came to rest at {word:?}");
            prop_assert!(afresh.last[key].starts_with("wait "), "{key}: {word:?}, but afresh {:?}", afresh.last[key]);
        }
    }
}
