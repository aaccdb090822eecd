//! Property tests of the decisions in a simulated cluster: pods, nodes, node agents, the external attacher and the
//! driver, with caches that lag, lost replies, and restarts at any moment. The decisions are the real ones; everything
//! else is a model. The model's driver refuses no call, so that the invariants hold without its help.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleat_api::Key;
use proptest::prelude::*;

use crate::attach::decide::{
    self, AttachNodeSnapshot, AttachVolumeSnapshot, AttachmentSnapshot, AttachmentSource, AttachmentState,
    DetachCondition, Need, NodeAttachment, ReportedVolume, VolumeUsage, VolumeUser,
};

const NODES: usize = 3;
const VOLUMES: usize = 3;
const PODS: usize = 5;
/// The last volume allows many nodes.
const SHARED: usize = VOLUMES - 1;
const FORCE_AFTER: Duration = Duration::from_secs(360);

/// All versions of an object. The controller's cache has one of them.
#[derive(Clone, Debug)]
struct VersionedObject<T> {
    versions: Vec<T>,
    delivered: usize,
}

impl<T: Clone + PartialEq> VersionedObject<T> {
    fn new(first: T) -> Self {
        Self { versions: vec![first], delivered: 0 }
    }

    fn live(&self) -> &T {
        &self.versions[self.versions.len() - 1]
    }

    fn cached(&self) -> &T {
        &self.versions[self.delivered]
    }

    fn write(&mut self, value: T) {
        if *self.live() != value {
            self.versions.push(value);
        }
    }

    /// Delivers the newest version: with the reply to a write, or with a list.
    fn catch_up(&mut self) {
        self.delivered = self.versions.len() - 1;
    }

    fn has_undelivered(&self) -> bool {
        self.delivered + 1 < self.versions.len()
    }

    fn deliver(&mut self) {
        self.delivered = (self.delivered + 1).min(self.versions.len() - 1);
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Pod {
    volume: usize,
    node: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Node {
    /// `status.volumesAttached`: device by volume.
    attached: BTreeMap<usize, usize>,
    in_use: BTreeSet<usize>,
    is_ready: bool,
    is_out_of_service: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Attachment {
    /// It has the attacher's finalizer.
    has_finalizer: bool,
    /// The device that the driver returned; `None` until it has confirmed.
    device: Option<usize>,
    is_deleting: bool,
}

#[derive(Debug, Default)]
struct Machine {
    is_on: bool,
    /// The agent runs, but makes no progress: an unmount hangs.
    is_stuck: bool,
    mounted: BTreeSet<usize>,
}

struct Simulation {
    pods: Vec<VersionedObject<Option<Pod>>>,
    nodes: Vec<VersionedObject<Option<Node>>>,
    attachments: BTreeMap<(usize, usize), VersionedObject<Option<Attachment>>>,
    machines: Vec<Machine>,
    /// The volumes that the driver has published, by node.
    published: BTreeSet<(usize, usize)>,
    /// The controller's memory; a restart clears it.
    unneeded_since: BTreeMap<(usize, usize), Duration>,
    uncertain_deletes: BTreeSet<(usize, usize)>,
    pending_creates: BTreeSet<(usize, usize)>,
    now: Duration,
    force_after: Option<Duration>,
    /// The number of devices that the driver has returned.
    devices: usize,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    CreatePod(usize, usize, usize),
    DeletePod(usize),
    DeliverPod(usize),
    DeliverNode(usize),
    DeliverAttachment(usize, usize),
    /// All caches are brought up to date.
    DeliverAll,
    /// The controller reconciles a volume; with `true` the reply to its write is lost.
    ReconcileVolume(usize, bool),
    /// The controller reconciles a node. Write k of the reconcile is lost if the number is 2k, and its reply if it is
    /// 2k + 1.
    ReconcileNode(usize, usize),
    RunAttacher(usize, usize, Call),
    /// The driver no longer has the volume attached there: the attacher clears `status.attached`, and attaches it
    /// again, with another device.
    Retract(usize, usize),
    RunAgent(usize, usize),
    Hang(usize),
    PowerOff(usize),
    PowerOn(usize),
    MarkOutOfService(usize),
    DeleteNode(usize),
    Restart,
    Minutes(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Succeeds,
    Fails,
    /// The driver does it, but its reply is lost.
    ReplyLost,
}

fn step() -> impl Strategy<Value = Step> {
    let (pod, node, volume) = (0..PODS, 0..NODES, 0..VOLUMES);
    let call = prop_oneof![4 => Just(Call::Succeeds), 1 => Just(Call::Fails), 1 => Just(Call::ReplyLost)];
    prop_oneof![
        4 => (pod.clone(), volume.clone(), node.clone()).prop_map(|(p, v, n)| Step::CreatePod(p, v, n)),
        4 => pod.clone().prop_map(Step::DeletePod),
        4 => pod.prop_map(Step::DeliverPod),
        4 => node.clone().prop_map(Step::DeliverNode),
        8 => (volume.clone(), node.clone()).prop_map(|(v, n)| Step::DeliverAttachment(v, n)),
        6 => Just(Step::DeliverAll),
        8 => (volume.clone(), any::<bool>()).prop_map(|(v, lost)| Step::ReconcileVolume(v, lost)),
        12 => (node.clone(), 0..8usize).prop_map(|(n, lost)| Step::ReconcileNode(n, lost)),
        12 => (volume.clone(), node.clone(), call).prop_map(|(v, n, c)| Step::RunAttacher(v, n, c)),
        1 => (volume.clone(), node.clone()).prop_map(|(v, n)| Step::Retract(v, n)),
        16 => (volume, node.clone()).prop_map(|(v, n)| Step::RunAgent(v, n)),
        1 => node.clone().prop_map(Step::Hang),
        1 => node.clone().prop_map(Step::PowerOff),
        2 => node.clone().prop_map(Step::PowerOn),
        1 => node.clone().prop_map(Step::MarkOutOfService),
        1 => node.prop_map(Step::DeleteNode),
        1 => Just(Step::Restart),
        4 => (1..8u64).prop_map(Step::Minutes),
    ]
}

impl Simulation {
    fn new(force_after: Option<Duration>) -> Self {
        let pairs = (0..VOLUMES).flat_map(|v| (0..NODES).map(move |n| (v, n)));
        Self {
            pods: vec![VersionedObject::new(None); PODS],
            nodes: vec![VersionedObject::new(Some(Node { is_ready: true, ..Node::default() })); NODES],
            attachments: pairs.map(|pair| (pair, VersionedObject::new(None))).collect(),
            machines: (0..NODES).map(|_| Machine { is_on: true, ..Machine::default() }).collect(),
            published: BTreeSet::new(),
            unneeded_since: BTreeMap::new(),
            uncertain_deletes: BTreeSet::new(),
            pending_creates: BTreeSet::new(),
            now: Duration::ZERO,
            force_after,
            devices: 0,
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::CreatePod(p, volume, node) if self.pods[p].live().is_none() => {
                self.pods[p].write(Some(Pod { volume, node }));
            }
            Step::CreatePod(..) => {}
            // Without grace period, while its volume may still be mounted: the worst that a user can do.
            Step::DeletePod(p) => self.pods[p].write(None),
            Step::DeliverPod(p) => self.pods[p].deliver(),
            Step::DeliverNode(n) => self.nodes[n].deliver(),
            Step::DeliverAttachment(v, n) => self.deliver_attachment(v, n),
            Step::DeliverAll => self.deliver_all(),
            Step::ReconcileVolume(v, lost) => self.reconcile_volume(v, lost),
            Step::ReconcileNode(n, lost) => self.reconcile_node(n, lost),
            Step::RunAttacher(v, n, call) => self.run_attacher(v, n, call),
            Step::Retract(v, n) => self.retract(v, n),
            Step::RunAgent(v, n) => self.run_agent(v, n),
            Step::Hang(n) => self.machines[n].is_stuck = true,
            Step::PowerOff(n) => {
                // A machine that is off writes nothing; its Node still lists what was in use.
                self.machines[n] = Machine::default();
                self.change_node(n, |node| node.is_ready = false);
            }
            Step::PowerOn(n) => self.power_on(n),
            Step::MarkOutOfService(n) if !self.machines[n].is_on => {
                self.change_node(n, |node| node.is_out_of_service = true)
            }
            Step::MarkOutOfService(_) => {}
            // Forced detach assumes that the machine of a deleted Node is off.
            Step::DeleteNode(n) if !self.machines[n].is_on || self.force_after.is_none() => self.nodes[n].write(None),
            Step::DeleteNode(_) => {}
            Step::Restart => self.restart(),
            Step::Minutes(minutes) => self.now += Duration::from_secs(60 * minutes),
        }
    }

    fn change_node(&mut self, n: usize, change: impl FnOnce(&mut Node)) {
        if let Some(mut node) = self.nodes[n].live().clone() {
            change(&mut node);
            self.nodes[n].write(Some(node));
        }
    }

    /// The agent registers again, with its mounted volumes as in use.
    fn power_on(&mut self, n: usize) {
        self.machines[n].is_on = true;
        self.machines[n].is_stuck = false;
        let mounted = self.machines[n].mounted.clone();
        match self.nodes[n].live().clone() {
            None => self.nodes[n].write(Some(Node { in_use: mounted, is_ready: true, ..Node::default() })),
            Some(node) => self.nodes[n].write(Some(Node { is_ready: true, is_out_of_service: false, ..node })),
        }
    }

    fn restart(&mut self) {
        self.pods.iter_mut().for_each(VersionedObject::catch_up);
        self.nodes.iter_mut().for_each(VersionedObject::catch_up);
        self.attachments.values_mut().for_each(VersionedObject::catch_up);
        self.unneeded_since.clear();
        self.uncertain_deletes.clear();
        self.pending_creates.clear();
    }

    fn deliver_attachment(&mut self, v: usize, n: usize) {
        if let Some(object) = self.attachments.get_mut(&(v, n)) {
            object.deliver();
            if object.cached().is_none() {
                self.uncertain_deletes.remove(&(v, n));
                self.unneeded_since.remove(&(v, n));
            }
        }
    }

    fn deliver_all(&mut self) {
        self.pods.iter_mut().for_each(VersionedObject::catch_up);
        self.nodes.iter_mut().for_each(VersionedObject::catch_up);
        for v in 0..VOLUMES {
            for n in 0..NODES {
                while self.attachments[&(v, n)].has_undelivered() {
                    self.deliver_attachment(v, n);
                }
            }
        }
    }

    fn cached_pods(&self) -> impl Iterator<Item = (usize, &Pod)> {
        self.pods.iter().enumerate().filter_map(|(p, object)| Some((p, object.cached().as_ref()?)))
    }

    fn state(&self, v: usize, n: usize) -> Option<AttachmentState> {
        let attachment = self.attachments[&(v, n)].cached().as_ref()?;
        Some(match (attachment.is_deleting || self.uncertain_deletes.contains(&(v, n)), attachment.device.is_some()) {
            (true, _) => AttachmentState::Detaching,
            (false, true) => AttachmentState::Attached,
            (false, false) => AttachmentState::Unconfirmed,
        })
    }

    fn reconcile_volume(&mut self, v: usize, reply_lost: bool) {
        let pending: Vec<usize> = (0..NODES).filter(|n| self.pending_creates.contains(&(v, *n))).collect();
        for n in pending {
            self.create(v, n, reply_lost);
            if reply_lost {
                return;
            }
        }
        let users = self.cached_pods().filter(|(_, pod)| pod.volume == v && self.nodes[pod.node].cached().is_some());
        let users = users.map(|(p, pod)| VolumeUser {
            created: None,
            pod: Key::namespaced("ns", p.to_string()),
            node: pod.node.to_string(),
            source: AttachmentSource::PersistentVolume(v.to_string()),
        });
        let attachments = (0..NODES).filter_map(|n| {
            Some(AttachmentSnapshot { node: n.to_string(), state: self.state(v, n)?, error: None, age: Duration::ZERO })
        });
        let snapshot = AttachVolumeSnapshot {
            unique_name: v.to_string(),
            allows_many_nodes: v == SHARED,
            needs_attach: true,
            users: users.collect(),
            attachments: attachments.collect(),
        };
        for decision in decide::volume(&snapshot) {
            let decide::AttachDecision::Attach { node, .. } = decision else { continue };
            let n: usize = node.parse().unwrap();
            self.create(v, n, reply_lost);
            if reply_lost {
                return;
            }
        }
    }

    fn create(&mut self, v: usize, n: usize, reply_lost: bool) {
        self.pending_creates.insert((v, n));
        let object = self.attachments.get_mut(&(v, n)).unwrap();
        if object.live().is_none() {
            object.write(Some(Attachment { has_finalizer: false, device: None, is_deleting: false }));
        }
        if !reply_lost {
            object.catch_up();
            self.pending_creates.remove(&(v, n));
        }
    }

    /// In the order of `act`: uncertain deletes, the report, a live read of the Node, the deletions.
    fn reconcile_node(&mut self, n: usize, lost: usize) {
        for v in 0..VOLUMES {
            if self.uncertain_deletes.contains(&(v, n)) && self.attachments[&(v, n)].live().is_some() {
                self.attachments.get_mut(&(v, n)).unwrap().catch_up();
                self.uncertain_deletes.remove(&(v, n));
            }
        }
        let snapshot = self.node_snapshot(n);
        let plan = decide::node(&snapshot, self.force_after);
        if let Some(report) = plan.report {
            if lost == 0 {
                return;
            }
            let entry =
                |volume: &ReportedVolume| (volume.unique_name.parse().unwrap(), volume.device_path.parse().unwrap());
            let report: BTreeMap<usize, usize> = report.iter().map(entry).collect();
            self.change_node(n, |node| node.attached = report);
            if lost == 1 {
                return;
            }
            self.nodes[n].catch_up();
        }
        if plan.detach.is_empty() {
            return;
        }
        let live = self.nodes[n].live().clone();
        self.nodes[n].catch_up();
        for (position, detach) in plan.detach.iter().enumerate() {
            let v: usize = detach.unique_name.parse().unwrap();
            let is_in_use = live.as_ref().is_some_and(|node| node.in_use.contains(&v));
            let is_reported = live.as_ref().is_some_and(|node| node.attached.contains_key(&v));
            if is_reported || (is_in_use && detach.condition == DetachCondition::IfNotInUse) {
                continue;
            }
            if lost == 2 + 2 * position {
                self.uncertain_deletes.insert((v, n));
                return;
            }
            let object = self.attachments.get_mut(&(v, n)).unwrap();
            let after = object.live().clone().filter(|attachment| attachment.has_finalizer);
            object.write(after.map(|attachment| Attachment { is_deleting: true, ..attachment }));
            if lost == 3 + 2 * position {
                self.uncertain_deletes.insert((v, n));
                return;
            }
            object.catch_up();
        }
    }

    fn node_snapshot(&mut self, n: usize) -> AttachNodeSnapshot {
        let node = self.nodes[n].cached().clone();
        // For a deleted Node, the last state that the controller has seen, if any.
        let history = &self.nodes[n].versions[..=self.nodes[n].delivered];
        let in_use = history.iter().rev().flatten().next().map(|node| node.in_use.clone());
        let mut attachments = Vec::new();
        for v in 0..VOLUMES {
            let Some(state) = self.state(v, n) else { continue };
            let is_needed = node.is_some() && self.cached_pods().any(|(_, pod)| (pod.volume, pod.node) == (v, n));
            let need = if is_needed {
                self.unneeded_since.remove(&(v, n));
                Need::Needed
            } else {
                Need::UnneededFor(self.now - *self.unneeded_since.entry((v, n)).or_insert(self.now))
            };
            let usage = match &in_use {
                None => VolumeUsage::Unknown,
                Some(in_use) if in_use.contains(&v) => VolumeUsage::InUse,
                Some(_) => VolumeUsage::NotInUse,
            };
            let device = self.attachments[&(v, n)].cached().as_ref().and_then(|attachment| attachment.device);
            let device_path = device.map(|device| device.to_string()).unwrap_or_default();
            let (name, unique_name) = (v.to_string(), v.to_string());
            attachments.push(NodeAttachment { name, unique_name, device_path, state, need, usage });
        }
        AttachNodeSnapshot {
            name: n.to_string(),
            reported: node.as_ref().map(|node| {
                let entry = |(v, device): (&usize, &usize)| ReportedVolume {
                    unique_name: v.to_string(),
                    device_path: device.to_string(),
                };
                node.attached.iter().map(entry).collect()
            }),
            is_managed: true,
            is_ready: node.as_ref().is_some_and(|node| node.is_ready),
            is_out_of_service: node.as_ref().is_some_and(|node| node.is_out_of_service),
            attachments,
        }
    }

    fn run_attacher(&mut self, v: usize, n: usize, call: Call) {
        let object = self.attachments.get_mut(&(v, n)).unwrap();
        let Some(attachment) = object.live().clone() else { return };
        let is_done = call != Call::Fails;
        match (attachment.is_deleting, attachment.has_finalizer, attachment.device.is_some()) {
            (false, false, _) => object.write(Some(Attachment { has_finalizer: true, ..attachment })),
            (false, true, false) => {
                if is_done {
                    self.published.insert((v, n));
                }
                if call == Call::Succeeds {
                    self.devices += 1;
                    object.write(Some(Attachment { device: Some(self.devices), ..attachment }));
                }
            }
            (false, true, true) => {}
            // A publish call that was in progress when the attachment was deleted succeeds late.
            (true, _, false) if call == Call::ReplyLost => {
                self.published.insert((v, n));
            }
            (true, _, _) => {
                if is_done {
                    self.published.remove(&(v, n));
                }
                if call == Call::Succeeds {
                    object.write(None);
                }
            }
        }
    }

    fn retract(&mut self, v: usize, n: usize) {
        let object = self.attachments.get_mut(&(v, n)).unwrap();
        if let Some(attachment) = object.live().clone().filter(|attachment| !attachment.is_deleting) {
            object.write(Some(Attachment { device: None, ..attachment }));
        }
    }

    /// The node agent adds the volume to `volumesInUse` before it reads `volumesAttached`, and removes it after the
    /// unmount.
    fn run_agent(&mut self, v: usize, n: usize) {
        if !self.machines[n].is_on || self.machines[n].is_stuck {
            return;
        }
        let Some(node) = self.nodes[n].live().clone() else { return };
        let is_needed = self.pods.iter().any(|object| *object.live() == Some(Pod { volume: v, node: n }));
        let is_mounted = self.machines[n].mounted.contains(&v);
        match (is_needed, is_mounted, node.in_use.contains(&v)) {
            (true, _, false) => self.change_node(n, |node| {
                node.in_use.insert(v);
            }),
            (true, false, true) if node.attached.contains_key(&v) => drop(self.machines[n].mounted.insert(v)),
            (true, _, true) | (false, false, false) => {}
            (false, true, _) => drop(self.machines[n].mounted.remove(&v)),
            (false, false, true) => self.change_node(n, |node| {
                node.in_use.remove(&v);
            }),
        }
    }

    fn check(&self, after: &str) {
        for v in (0..VOLUMES).filter(|v| *v != SHARED) {
            let on: Vec<usize> = (0..NODES).filter(|n| self.published.contains(&(v, *n))).collect();
            assert!(on.len() <= 1, "{after}: volume {v} is published to {on:?}");
        }
        for (n, machine) in self.machines.iter().enumerate() {
            for v in &machine.mounted {
                assert!(self.published.contains(&(*v, n)), "{after}: volume {v} is mounted on {n} and not published");
            }
            for (v, device) in self.nodes[n].live().iter().flat_map(|node| &node.attached) {
                let devices = self.attachments[&(*v, n)].versions.iter().flatten().filter_map(|a| a.device);
                assert!(
                    devices.clone().any(|returned| returned == *device),
                    "{after}: Node {n} lists volume {v} with device {device}, which the driver never returned"
                );
                assert!(
                    self.published.contains(&(*v, n)),
                    "{after}: Node {n} lists volume {v}, which is not published there"
                );
            }
        }
    }

    /// Runs all components until nothing changes any more, without failures, and checks the final state.
    fn settle(&mut self) {
        (0..NODES).for_each(|n| self.power_on(n));
        for _ in 0..40 {
            self.restart();
            for v in 0..VOLUMES {
                self.run(Step::ReconcileVolume(v, false));
                for n in 0..NODES {
                    self.run(Step::RunAgent(v, n));
                    self.run(Step::RunAttacher(v, n, Call::Succeeds));
                }
            }
            (0..NODES).for_each(|n| self.run(Step::ReconcileNode(n, usize::MAX)));
            self.check("settling");
        }
        for v in 0..VOLUMES {
            let is_needed =
                |n: usize| self.pods.iter().any(|object| *object.live() == Some(Pod { volume: v, node: n }));
            let nodes: Vec<usize> = (0..NODES).filter(|n| is_needed(*n)).collect();
            let mounted: Vec<usize> = (0..NODES).filter(|n| self.machines[*n].mounted.contains(&v)).collect();
            let attached: Vec<usize> = (0..NODES).filter(|n| self.attachments[&(v, *n)].live().is_some()).collect();
            assert_eq!(mounted, attached, "volume {v} is attached where it is mounted, and nowhere else");
            for n in &mounted {
                let device = self.attachments[&(v, *n)].live().as_ref().and_then(|attachment| attachment.device);
                let reported = self.nodes[*n].live().as_ref().and_then(|node| node.attached.get(&v).copied());
                assert_eq!(reported, device, "node {n} knows the device of volume {v}");
            }
            if v == SHARED {
                assert_eq!(mounted, nodes, "volume {v} is on every node that needs it");
            } else {
                assert_eq!(mounted.len(), nodes.len().min(1), "volume {v} is on one of {nodes:?}: {mounted:?}");
                assert!(mounted.iter().all(|n| nodes.contains(n)), "volume {v}");
            }
        }
    }
}

fn simulate(steps: &[Step], force_after: Option<Duration>) {
    let mut simulation = Simulation::new(force_after);
    for step in steps {
        simulation.run(*step);
        simulation.check(&format!("{step:?}"));
    }
    simulation.settle();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_for_any_order_of_events(steps in prop::collection::vec(step(), 0..400)) {
        simulate(&steps, None);
    }

    #[test]
    fn invariants_hold_with_forced_detach_if_unready_machines_are_off(steps in prop::collection::vec(step(), 0..400)) {
        simulate(&steps, Some(FORCE_AFTER));
    }
}

/// Random steps rarely reach this state: an unmount hangs on a ready node for longer than the limit.
#[test]
fn a_ready_node_keeps_a_volume_in_use_without_time_limit() {
    use Step::*;
    let all = usize::MAX;
    let attached = [CreatePod(0, 0, 0), DeliverAll, ReconcileVolume(0, false), RunAttacher(0, 0, Call::Succeeds)];
    let mounted =
        [RunAttacher(0, 0, Call::Succeeds), DeliverAll, ReconcileNode(0, all), RunAgent(0, 0), RunAgent(0, 0)];
    let unneeded = [Hang(0), DeletePod(0), DeliverAll, ReconcileNode(0, all), Minutes(60), ReconcileNode(0, all)];
    let detached =
        [RunAttacher(0, 0, Call::Succeeds), DeliverAll, ReconcileNode(0, all), RunAttacher(0, 0, Call::Succeeds)];
    simulate(&[&attached[..], &mounted, &unneeded, &detached].concat(), Some(FORCE_AFTER));
}
