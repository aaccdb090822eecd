//! The picture that pods are placed in, kept current change by change, and who has to look again at each change. Pure.
//!
//! A choice is assumed before it is written: the volume or claim as it will be stands over the one that is, for as long as that
//! one has not changed. So several pods decided in one go see each other's choices.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use cleat_api::claim::{claim_phase, volume_name};
use cleat_api::condition;
use cleat_api::key::{Key, Meta as _};
use cleat_api::{pod, selector};
use cleat_pack::{Compressor, MaybePacked, Packable};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};
use kube::Resource;

use super::demand::Demand;
use super::host::{self, Facts, Handle, Host};
use super::needs::is_bound;
use super::why::Causes;

/// Pods that name another scheduler are not ours.
pub const SCHEDULER: &str = "default-scheduler";

#[derive(Debug, Default)]
pub struct World {
    pub(super) hosts: BTreeMap<String, Host>,
    pub(super) claims: HashMap<Key, Assumable<PersistentVolumeClaim>>,
    pub(super) volumes: HashMap<String, Volume>,
    /// Free volumes by class and, where their affinity names hosts, by each host; the smallest first.
    pub(super) free: HashMap<String, HashMap<Option<String>, Sizes>>,
    /// Volumes by the claim they are set aside for.
    pub(super) reserved: HashMap<Key, Vec<String>>,
    pub(super) classes: HashMap<String, Arc<StorageClass>>,
    pub(super) drivers: HashMap<String, Arc<CSIDriver>>,
    pub(super) capacities: HashMap<Key, Report>,
    /// The node and the volume of each attachment.
    attachments: HashMap<String, (String, String)>,
    /// Attachments by their volume, and claims by the volume they point at.
    pub(super) attached: HashMap<String, BTreeSet<String>>,
    pub(super) naming: HashMap<String, BTreeSet<Key>>,
    pub(super) waiting: HashMap<Key, Waiting>,
    pub(super) placed: HashMap<Key, Placed>,
    /// Pods by the claims they use.
    pub(super) users: HashMap<Key, BTreeSet<Key>>,
    /// Waiting pods that something happened for, in the order of their turn.
    pub(super) ready: BTreeSet<Rank>,
    pub(super) acting: HashMap<Key, Acting>,
    /// Since when each pod waits at its place.
    pub(super) reserved_since: BTreeSet<(Timestamp, Key)>,
    /// What bound claims and their volumes look like: there may be many, and few are looked at.
    pub(super) claim_sort: Compressor,
    pub(super) volume_sort: Compressor,
}

#[derive(Debug)]
pub(super) struct Volume {
    pub(super) object: Assumable<PersistentVolume>,
    /// Its driver's name for it.
    pub(super) handle: Option<Box<str>>,
}

/// Volumes by size, then name.
pub(super) type Sizes = BTreeSet<(i64, String)>;

/// Important pods first, then the oldest.
pub(super) type Rank = (Reverse<i32>, Option<Timestamp>, Key);

/// A pod without a node.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) pod: Arc<Pod>,
    /// What could make it fit, once it was found not to.
    pub(super) causes: Causes,
    /// Nodes that a provisioner gave back.
    pub(super) returned: BTreeSet<String>,
}

/// A pod on a node, or on its way there.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) uid: String,
    pub(super) node: String,
    pub(super) demand: Demand,
    pub(super) volumes: Vec<Handle>,
    pub(super) pod: Arc<Pod>,
    /// Since when it waits there for its volumes.
    pub(super) reserved: Option<Timestamp>,
    /// Existing volumes taken for it, by claim.
    pub(super) taken: BTreeMap<Key, String>,
    /// Storage counted on for volumes that are still to be made: claim, report, bytes.
    pub(super) promises: Vec<(Key, Key, i64)>,
}

/// A pod whose decision is being carried out: it is not decided about meanwhile.
#[derive(Debug, Default)]
pub(super) struct Acting {
    pub(super) uid: String,
    pub(super) claims: Vec<Key>,
    pub(super) volumes: Vec<String>,
    /// Something happened for the pod meanwhile.
    pub(super) again: bool,
    /// The pod is bound; only the watch has not shown it yet.
    pub(super) is_bound: bool,
}

/// An object, and how it will be if the write under way succeeds.
#[derive(Debug)]
pub(super) struct Assumable<K> {
    base: MaybePacked<K>,
    pub(super) assumed: Option<Arc<K>>,
}

impl<K: Resource + Packable> Assumable<K> {
    pub(super) fn new(base: Arc<K>) -> Self {
        Self { base: MaybePacked::Unpacked(base), assumed: None }
    }

    pub(super) fn now(&self) -> Arc<K> {
        self.assumed.clone().unwrap_or_else(|| self.base.object())
    }

    pub(super) fn update(self, base: Arc<K>) -> Self {
        let same = |_: &Arc<K>| {
            let before = self.base.object();
            before.meta().resource_version == base.meta().resource_version && before.meta().uid == base.meta().uid
        };
        Self { assumed: self.assumed.filter(same), base: MaybePacked::Unpacked(base) }
    }

    /// Nothing is expected to happen to it soon.
    pub(super) fn packed(self, sort: &mut Compressor) -> Self {
        Self { base: self.base.packed(sort), ..self }
    }
}

/// What a driver says it has free somewhere.
#[derive(Debug)]
pub(super) struct Report {
    object: Arc<CSIStorageCapacity>,
    /// Counted on by pods that wait for their volumes.
    promised: i64,
}

impl Report {
    pub(super) fn holds(&self, bytes: i64) -> bool {
        let fits = largest(&self.object).is_some_and(|limit| limit >= bytes);
        fits && self.left().is_none_or(|left| self.promised == 0 || left >= bytes)
    }

    pub(super) fn left(&self) -> Option<i64> {
        Some(size(self.object.capacity.as_ref())? - self.promised)
    }
}

fn size(quantity: Option<&k8s_openapi::apimachinery::pkg::api::resource::Quantity>) -> Option<i64> {
    quantity?.0.parse::<cleat_api::Quantity>().ok().map(cleat_api::Quantity::to_bytes)
}

/// The largest volume that can be made.
fn largest(report: &CSIStorageCapacity) -> Option<i64> {
    size(report.maximum_volume_size.as_ref()).or_else(|| size(report.capacity.as_ref()))
}

impl World {
    pub(super) fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.get(key).map(Assumable::now)
    }

    pub(super) fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.volumes.get(name).map(|known| known.object.now())
    }

    pub fn set_pod(&mut self, key: &Key, object: Option<Arc<Pod>>) {
        let uid = object.as_ref().map(|p| p.metadata.uid().to_owned());
        let known =
            self.waiting.get(key).map(|w| w.pod.clone()).or_else(|| self.placed.get(key).map(|p| p.pod.clone()));
        if self.placed.get(key).is_some_and(|placed| Some(&placed.uid) != uid.as_ref()) {
            self.vacate(key);
        }
        if let Some(known) = known.filter(|known| Some(known.metadata.uid()) != uid.as_deref()) {
            self.forget_user(key, &known);
            self.remove_waiting(key);
        }
        let Some(pod) = object else { return };
        for used in pod::claim_volumes(&pod) {
            self.users.entry(used.claim).or_default().insert(key.clone());
        }
        match pod::node_name(&pod) {
            Some(node) if !is_finished(&pod) => {
                self.remove_waiting(key);
                if self.placed.get(key).is_some_and(|placed| placed.node == node) {
                    self.confirm(key);
                } else {
                    self.vacate(key);
                    self.occupy(key, &pod, node, None);
                }
            }
            None if is_ours(&pod) => {
                let Some(waiting) = self.waiting.get_mut(key) else {
                    let fresh = Waiting { pod, causes: Causes::NONE, returned: BTreeSet::new() };
                    self.waiting.insert(key.clone(), fresh);
                    return self.wake_pod(key);
                };
                let is_changed = waiting.pod.spec != pod.spec;
                waiting.pod = pod;
                if is_changed {
                    self.wake_pod(key);
                }
            }
            // Finished, or not for us to place: it takes nothing.
            Some(_) | None => {
                self.remove_waiting(key);
                self.vacate(key);
                self.forget_user(key, &pod);
            }
        }
    }

    fn remove_waiting(&mut self, key: &Key) {
        if let Some(waiting) = self.waiting.remove(key) {
            self.ready.remove(&rank(key, &waiting.pod));
        }
        if self.acting.get(key).is_some_and(|acting| acting.is_bound) {
            self.acting.remove(key);
        }
    }

    /// The pod is where it was to go.
    fn confirm(&mut self, key: &Key) {
        let Some(placed) = self.placed.get_mut(key) else { return };
        if let Some(since) = placed.reserved.take() {
            self.reserved_since.remove(&(since, key.clone()));
        }
        for (_, report, bytes) in std::mem::take(&mut placed.promises) {
            self.unpromise(&report, bytes);
        }
    }

    fn forget_user(&mut self, key: &Key, pod: &Pod) {
        for used in pod::claim_volumes(pod) {
            if let Some(users) = self.users.get_mut(&used.claim) {
                users.remove(key);
                if users.is_empty() {
                    self.users.remove(&used.claim);
                }
            }
        }
    }

    pub(super) fn occupy(&mut self, key: &Key, pod: &Arc<Pod>, node: &str, reserved: Option<Timestamp>) {
        let placed = Placed {
            uid: pod.metadata.uid().to_owned(),
            node: node.to_owned(),
            demand: Demand::of(pod),
            volumes: self.handles(pod),
            pod: pod.clone(),
            reserved,
            taken: BTreeMap::new(),
            promises: Vec::new(),
        };
        let load = &mut self.hosts.entry(node.to_owned()).or_default().load;
        load.take(key, &placed.demand);
        load.take_volumes(&placed.volumes);
        self.reserved_since.extend(reserved.map(|since| (since, key.clone())));
        self.placed.insert(key.clone(), placed);
    }

    /// The pod no longer takes anything anywhere.
    pub(super) fn vacate(&mut self, key: &Key) {
        self.confirm(key);
        let Some(placed) = self.placed.remove(key) else { return };
        if let Some(host) = self.hosts.get_mut(&placed.node) {
            host.load.give_back(key, &placed.demand);
            host.load.give_back_volumes(&placed.volumes);
        }
        self.prune(&placed.node);
        self.wake(Causes::ROOM | Causes::EXCLUSIVE);
    }

    /// A name that nothing is known under any more.
    fn prune(&mut self, node: &str) {
        let is_empty = |host: &Host| {
            host.facts.is_none() && host.load.pods.is_empty() && host.drivers.is_empty() && host.attached.is_empty()
        };
        if self.hosts.get(node).is_some_and(is_empty) {
            self.hosts.remove(node);
        }
    }

    pub(super) fn promise(&mut self, pod: &Key, claim: &Key, class: &str, bytes: i64) {
        let Some(placed) = self.placed.get_mut(pod) else { return };
        let facts = self.hosts.get(&placed.node).and_then(|host| host.facts.as_ref());
        for report in facts.and_then(|f| f.capacities.get(class)).into_iter().flatten() {
            if let Some(known) = self.capacities.get_mut(report) {
                known.promised += bytes;
                placed.promises.push((claim.clone(), report.clone(), bytes));
            }
        }
    }

    fn unpromise(&mut self, report: &Key, bytes: i64) {
        if let Some(report) = self.capacities.get_mut(report) {
            report.promised -= bytes;
        }
    }

    pub fn set_node(&mut self, name: &str, object: Option<Arc<Node>>) {
        let mut facts = object.map(Facts::of);
        if let Some(facts) = &mut facts {
            for (key, report) in &self.capacities {
                note_report(facts, key, &report.object);
            }
        }
        let host = self.hosts.entry(name.to_owned()).or_default();
        let news = facts.as_ref().map_or(Causes::NONE, |facts| facts.news(host.facts.as_ref()));
        let is_gone = facts.is_none();
        host.facts = facts;
        if is_gone || news.meets(Causes::LABELS) {
            // Those on their way may not be able to go there any more.
            let there: Vec<Key> =
                host.load.pods.iter().filter(|pod| self.waiting.contains_key(*pod)).cloned().collect();
            there.iter().for_each(|pod| self.wake_pod(pod));
        }
        self.prune(name);
        self.wake(news);
    }

    pub fn set_csi_node(&mut self, name: &str, object: Option<&CSINode>) {
        let drivers = object.map(host::drivers).unwrap_or_default();
        let migrated = object.map(host::migrated).unwrap_or_default();
        let host = self.hosts.entry(name.to_owned()).or_default();
        let news = Causes::DRIVERS.when(host.drivers != drivers) | Causes::VOLUMES.when(host.migrated != migrated);
        host.drivers = drivers;
        host.migrated = migrated;
        self.wake(news);
        self.prune(name);
    }

    pub fn set_attachment(&mut self, name: &str, object: Option<&VolumeAttachment>) {
        if let Some((node, volume)) = self.attachments.remove(name) {
            drop_from(&mut self.attached, &volume, name);
            if let Some(host) = self.hosts.get_mut(&node) {
                host.attached.remove(name);
                self.prune(&node);
            }
        }
        match object.and_then(|a| Some((a, a.spec.source.persistent_volume_name.clone()?))) {
            Some((attachment, volume)) => {
                let spec = &attachment.spec;
                self.attachments.insert(name.to_owned(), (spec.node_name.clone(), volume.clone()));
                self.attached.entry(volume.clone()).or_default().insert(name.to_owned());
                let host = self.hosts.entry(spec.node_name.clone()).or_default();
                host.attached.insert(name.to_owned(), (spec.attacher.clone(), volume));
            }
            None => self.wake(Causes::DRIVERS),
        }
    }

    pub fn set_claim(&mut self, key: &Key, object: Option<Arc<PersistentVolumeClaim>>) {
        let known = self.claims.remove(key);
        let before = known.as_ref().map(|known| known.base.object());
        if let Some(volume) = before.as_deref().and_then(volume_name) {
            drop_from(&mut self.naming, volume, key);
        }
        if let Some(object) = object {
            if let Some(volume) = volume_name(&object) {
                self.naming.entry(volume.to_owned()).or_default().insert(key.clone());
            }
            let is_settled = is_bound(&object) && claim_phase(&object) == "Bound";
            let next = match known {
                Some(known) => known.update(object),
                None => Assumable::new(object),
            };
            let next = if is_settled { next.packed(&mut self.claim_sort) } else { next };
            self.claims.insert(key.clone(), next);
        }
        self.claim_changed(key);
    }

    pub(super) fn attached_volume(&self, attachment: &str) -> Option<String> {
        self.attachments.get(attachment).map(|(_, volume)| volume.clone())
    }

    /// The claim as it will be, until it changes or [`World::revert_claim`] says that it will not.
    pub(super) fn assume_claim(&mut self, key: &Key, claim: Arc<PersistentVolumeClaim>) {
        if let Some(known) = self.claims.get_mut(key) {
            known.assumed = Some(claim);
        }
    }

    pub(super) fn revert_claim(&mut self, key: &Key) {
        if let Some(known) = self.claims.get_mut(key) {
            known.assumed = None;
        }
    }

    /// The pods that share a claim with this one.
    pub(super) fn wake_other_users(&mut self, claim: &Key, than: &Key) {
        let users = self.users.get(claim).cloned().unwrap_or_default();
        users.iter().filter(|user| *user != than).for_each(|user| self.wake_pod(user));
    }

    pub(super) fn claim_changed(&mut self, key: &Key) {
        for user in self.users.get(key).cloned().unwrap_or_default() {
            self.recount(&user);
            self.keep_promises(&user, key);
            self.wake_pod(&user);
        }
    }

    /// The pod's volumes may have other handles now.
    pub(super) fn recount(&mut self, pod: &Key) {
        let Some(placed) = self.placed.get(pod) else { return };
        let volumes = self.handles(&placed.pod);
        let Some(placed) = self.placed.get_mut(pod) else { return };
        if let Some(host) = self.hosts.get_mut(&placed.node).filter(|_| volumes != placed.volumes) {
            host.load.give_back_volumes(&placed.volumes);
            host.load.take_volumes(&volumes);
            placed.volumes = volumes;
        }
    }

    /// A claim that has its volume counts on no storage any more.
    fn keep_promises(&mut self, pod: &Key, claim: &Key) {
        if !self.claim(claim).is_none_or(|claim| is_bound(&claim)) {
            return;
        }
        let Some(placed) = self.placed.get_mut(pod) else { return };
        let promises = std::mem::take(&mut placed.promises);
        let (kept, met): (Vec<_>, Vec<_>) = promises.into_iter().partition(|(of, _, _)| of != claim);
        placed.promises = kept;
        met.iter().for_each(|(_, report, bytes)| self.unpromise(report, *bytes));
    }

    pub fn set_class(&mut self, name: &str, object: Option<Arc<StorageClass>>) {
        match object {
            Some(class) => {
                let before = self.classes.insert(name.to_owned(), class.clone());
                if before.is_none_or(|before| before.allowed_topologies != class.allowed_topologies) {
                    self.wake(Causes::VOLUMES);
                }
            }
            None => drop(self.classes.remove(name)),
        }
    }

    pub fn set_driver(&mut self, name: &str, object: Option<Arc<CSIDriver>>) {
        let tracks = |driver: Option<&Arc<CSIDriver>>| driver.is_some_and(|d| d.spec.storage_capacity == Some(true));
        let (before, now) = (tracks(self.drivers.get(name)), tracks(object.as_ref()));
        let is_gone = object.is_none();
        match object {
            Some(driver) => drop(self.drivers.insert(name.to_owned(), driver)),
            None => drop(self.drivers.remove(name)),
        }
        if is_gone || before && !now {
            self.wake(Causes::VOLUMES | Causes::DRIVERS);
        }
    }

    pub fn set_capacity(&mut self, key: &Key, object: Option<Arc<CSIStorageCapacity>>) {
        let before = self.capacities.remove(key);
        for facts in self.hosts.values_mut().filter_map(|host| host.facts.as_mut()) {
            if let Some(before) = &before
                && let Some(keys) = facts.capacities.get_mut(&before.object.storage_class_name)
            {
                keys.remove(key);
            }
            if let Some(object) = &object {
                note_report(facts, key, object);
            }
        }
        let Some(object) = object else { return };
        let grew = before
            .as_ref()
            .is_none_or(|b| largest(&object) > largest(&b.object) || object.node_topology != b.object.node_topology);
        let promised = before.map_or(0, |b| b.promised);
        self.capacities.insert(key.clone(), Report { object, promised });
        if grew {
            self.wake(Causes::VOLUMES);
        }
    }

    /// Gives everyone another turn whom such a change may help.
    pub(super) fn wake(&mut self, causes: Causes) {
        if causes == Causes::NONE {
            return;
        }
        let helped = self.waiting.iter().filter(|(_, waiting)| waiting.causes.meets(causes));
        let helped: Vec<Key> = helped.map(|(key, _)| key.clone()).collect();
        helped.iter().for_each(|key| self.wake_pod(key));
    }

    pub(super) fn wake_pod(&mut self, key: &Key) {
        let Some(waiting) = self.waiting.get(key) else { return };
        match self.acting.get_mut(key) {
            Some(acting) => acting.again = true,
            None => drop(self.ready.insert(rank(key, &waiting.pod))),
        }
    }
}

fn drop_from<T: Ord + Borrow<Q>, Q: Ord + ?Sized>(sets: &mut HashMap<String, BTreeSet<T>>, of: &str, item: &Q) {
    if let Some(set) = sets.get_mut(of) {
        set.remove(item);
        if set.is_empty() {
            sets.remove(of);
        }
    }
}

fn rank(key: &Key, pod: &Pod) -> Rank {
    let priority = pod.spec.as_ref().and_then(|s| s.priority).unwrap_or(0);
    (Reverse(priority), pod.metadata.creation_timestamp.as_ref().map(|t| t.0), key.clone())
}

fn is_finished(pod: &Pod) -> bool {
    matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"))
}

fn is_ours(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let scheduler = spec.and_then(|s| s.scheduler_name.as_deref()).unwrap_or(SCHEDULER);
    let is_gated = spec.and_then(|s| s.scheduling_gates.as_ref()).is_some_and(|gates| !gates.is_empty());
    scheduler == SCHEDULER && !is_gated && !pod.metadata.is_deleting() && !is_finished(pod)
}

fn note_report(facts: &mut Facts, key: &Key, report: &CSIStorageCapacity) {
    let labels = facts.node.metadata.labels.as_ref();
    if report.node_topology.as_ref().is_some_and(|topology| selector::labels_match(topology, labels)) {
        facts.capacities.entry(report.storage_class_name.clone()).or_default().insert(key.clone());
    }
}

/// A pod that was found not to fit and says so already.
pub(super) fn says(pod: &Pod, message: &str) -> bool {
    condition::pod_condition(pod, "PodScheduled")
        .is_some_and(|c| c.status == "False" && c.message.as_deref() == Some(message))
}
