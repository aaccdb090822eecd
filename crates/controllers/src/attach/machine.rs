//! The whole machine, with everything around it as a model: pods, nodes, the attacher, the driver, caches that lag, replies
//! that get lost, restarts at any moment. The decisions are the real ones; the driver refuses nothing, so that what holds
//! here holds without its help.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cleat_api::Key;
use proptest::prelude::*;

use super::decide::{
    self, Attached, Check, Need, NodeSeen, NodeVolume, Source, State, Told, Usage, VolumeSeen, Wanted,
};

const NODES: usize = 3;
const VOLUMES: usize = 3;
const PODS: usize = 5;
/// The last one may be on many nodes.
const SHARED: usize = VOLUMES - 1;
const LIMIT: Duration = Duration::from_secs(360);

/// An object with its history. The controller has seen it up to some point.
#[derive(Clone, Debug)]
struct Object<T> {
    versions: Vec<T>,
    seen: usize,
}

impl<T: Clone + PartialEq> Object<T> {
    fn new(first: T) -> Self {
        Self { versions: vec![first], seen: 0 }
    }

    fn live(&self) -> &T {
        &self.versions[self.versions.len() - 1]
    }

    fn cached(&self) -> &T {
        &self.versions[self.seen]
    }

    fn write(&mut self, value: T) {
        if *self.live() != value {
            self.versions.push(value);
        }
    }

    /// The newest state reaches the controller: a reply to its own write, or a list.
    fn catch_up(&mut self) {
        self.seen = self.versions.len() - 1;
    }

    fn deliver(&mut self) {
        self.seen = (self.seen + 1).min(self.versions.len() - 1);
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Pod {
    volume: usize,
    node: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Node {
    /// With the device that the node is told.
    attached: BTreeMap<usize, usize>,
    in_use: BTreeSet<usize>,
    ready: bool,
    out_of_service: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Attachment {
    /// The attacher's finalizer is on it.
    held: bool,
    /// The device that the driver gave.
    confirmed: Option<usize>,
    leaving: bool,
}

#[derive(Debug, Default)]
struct Machine {
    on: bool,
    mounted: BTreeSet<usize>,
}

struct World {
    pods: Vec<Object<Option<Pod>>>,
    nodes: Vec<Object<Option<Node>>>,
    attachments: BTreeMap<(usize, usize), Object<Option<Attachment>>>,
    machines: Vec<Machine>,
    /// What the driver has where.
    published: BTreeSet<(usize, usize)>,
    /// The controller's memory.
    unwanted: BTreeMap<(usize, usize), Duration>,
    doubted: BTreeSet<(usize, usize)>,
    intended: BTreeSet<(usize, usize)>,
    now: Duration,
    force_after: Option<Duration>,
    /// The last device that the driver gave to anybody.
    device: usize,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    CreatePod(usize, usize, usize),
    DeletePod(usize),
    DeliverPod(usize),
    DeliverNode(usize),
    DeliverAttachment(usize, usize),
    /// The controller looks at a volume; the flag loses the reply to its write.
    Volume(usize, bool),
    /// The controller looks at a node; its n-th write gets lost, or its reply.
    Node(usize, usize),
    Attacher(usize, usize, Call),
    /// The driver denies that it has the volume there: the attacher says so, and attaches it anew, at another device.
    Retract(usize, usize),
    Agent(usize, usize),
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
    /// The driver does it, and nobody hears of it.
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
        8 => (volume.clone(), any::<bool>()).prop_map(|(v, lost)| Step::Volume(v, lost)),
        12 => (node.clone(), 0..8usize).prop_map(|(n, lost)| Step::Node(n, lost)),
        12 => (volume.clone(), node.clone(), call).prop_map(|(v, n, c)| Step::Attacher(v, n, c)),
        1 => (volume.clone(), node.clone()).prop_map(|(v, n)| Step::Retract(v, n)),
        16 => (volume, node.clone()).prop_map(|(v, n)| Step::Agent(v, n)),
        1 => node.clone().prop_map(Step::PowerOff),
        2 => node.clone().prop_map(Step::PowerOn),
        1 => node.clone().prop_map(Step::MarkOutOfService),
        1 => node.prop_map(Step::DeleteNode),
        1 => Just(Step::Restart),
        4 => (1..8u64).prop_map(Step::Minutes),
    ]
}

impl World {
    fn new(force_after: Option<Duration>) -> Self {
        let pairs = (0..VOLUMES).flat_map(|v| (0..NODES).map(move |n| (v, n)));
        Self {
            pods: vec![Object::new(None); PODS],
            nodes: vec![Object::new(Some(Node { ready: true, ..Node::default() })); NODES],
            attachments: pairs.map(|pair| (pair, Object::new(None))).collect(),
            machines: (0..NODES).map(|_| Machine { on: true, ..Machine::default() }).collect(),
            published: BTreeSet::new(),
            unwanted: BTreeMap::new(),
            doubted: BTreeSet::new(),
            intended: BTreeSet::new(),
            now: Duration::ZERO,
            force_after,
            device: 0,
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::CreatePod(p, volume, node) if self.pods[p].live().is_none() => {
                self.pods[p].write(Some(Pod { volume, node }));
            }
            Step::CreatePod(..) => {}
            // At once, though its volume may still be mounted: the worst that a user can do.
            Step::DeletePod(p) => self.pods[p].write(None),
            Step::DeliverPod(p) => self.pods[p].deliver(),
            Step::DeliverNode(n) => self.nodes[n].deliver(),
            Step::DeliverAttachment(v, n) => self.deliver_attachment(v, n),
            Step::Volume(v, lost) => self.volume(v, lost),
            Step::Node(n, lost) => self.node(n, lost),
            Step::Attacher(v, n, call) => self.attacher(v, n, call),
            Step::Retract(v, n) => self.retract(v, n),
            Step::Agent(v, n) => self.agent(v, n),
            Step::PowerOff(n) => {
                // What is off writes nothing any more; what it had in use it still says.
                self.machines[n] = Machine::default();
                self.change_node(n, |node| node.ready = false);
            }
            Step::PowerOn(n) => self.power_on(n),
            Step::MarkOutOfService(n) if !self.machines[n].on => self.change_node(n, |node| node.out_of_service = true),
            Step::MarkOutOfService(_) => {}
            // A node that may be taken by force is one whose machine is off: that is what forcing trusts in.
            Step::DeleteNode(n) if !self.machines[n].on || self.force_after.is_none() => self.nodes[n].write(None),
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

    /// The agent registers again, and says from the start what it has.
    fn power_on(&mut self, n: usize) {
        self.machines[n].on = true;
        let mounted = self.machines[n].mounted.clone();
        match self.nodes[n].live().clone() {
            None => self.nodes[n].write(Some(Node { in_use: mounted, ready: true, ..Node::default() })),
            Some(node) => self.nodes[n].write(Some(Node { ready: true, out_of_service: false, ..node })),
        }
    }

    fn restart(&mut self) {
        self.pods.iter_mut().for_each(Object::catch_up);
        self.nodes.iter_mut().for_each(Object::catch_up);
        self.attachments.values_mut().for_each(Object::catch_up);
        self.unwanted.clear();
        self.doubted.clear();
        self.intended.clear();
    }

    fn deliver_attachment(&mut self, v: usize, n: usize) {
        if let Some(object) = self.attachments.get_mut(&(v, n)) {
            object.deliver();
            if object.cached().is_none() {
                self.doubted.remove(&(v, n));
                self.unwanted.remove(&(v, n));
            }
        }
    }

    fn cached_pods(&self) -> impl Iterator<Item = (usize, &Pod)> {
        self.pods.iter().enumerate().filter_map(|(p, object)| Some((p, object.cached().as_ref()?)))
    }

    fn state(&self, v: usize, n: usize) -> Option<State> {
        let attachment = self.attachments[&(v, n)].cached().as_ref()?;
        Some(match (attachment.leaving || self.doubted.contains(&(v, n)), attachment.confirmed.is_some()) {
            (true, _) => State::Leaving,
            (false, true) => State::Confirmed,
            (false, false) => State::Unconfirmed,
        })
    }

    fn volume(&mut self, v: usize, reply_lost: bool) {
        let intended: Vec<usize> = (0..NODES).filter(|n| self.intended.contains(&(v, *n))).collect();
        for n in intended {
            self.request(v, n, reply_lost);
            if reply_lost {
                return;
            }
        }
        let wanted = self.cached_pods().filter(|(_, pod)| pod.volume == v && self.nodes[pod.node].cached().is_some());
        let wanted = wanted.map(|(p, pod)| Wanted {
            since: None,
            pod: Key::namespaced("ns", p.to_string()),
            node: pod.node.to_string(),
            source: Source::Volume(v.to_string()),
        });
        let attached = (0..NODES).filter_map(|n| {
            Some(Attached { node: n.to_string(), state: self.state(v, n)?, error: None, age: Duration::ZERO })
        });
        let seen = VolumeSeen {
            unique: v.to_string(),
            many_nodes: v == SHARED,
            attachable: true,
            wanted: wanted.collect(),
            attached: attached.collect(),
        };
        for decision in decide::volume(&seen) {
            let decide::VolumeDecision::Attach { node, .. } = decision else { continue };
            let n: usize = node.parse().unwrap();
            self.request(v, n, reply_lost);
            if reply_lost {
                return;
            }
        }
    }

    fn request(&mut self, v: usize, n: usize, reply_lost: bool) {
        self.intended.insert((v, n));
        let object = self.attachments.get_mut(&(v, n)).unwrap();
        if object.live().is_none() {
            object.write(Some(Attachment { held: false, confirmed: None, leaving: false }));
        }
        if !reply_lost {
            object.catch_up();
            self.intended.remove(&(v, n));
        }
    }

    /// As `act` does it: doubts first, then the report, then a live look, then the deletions.
    fn node(&mut self, n: usize, lost: usize) {
        for v in 0..VOLUMES {
            if self.doubted.contains(&(v, n)) && self.attachments[&(v, n)].live().is_some() {
                self.attachments.get_mut(&(v, n)).unwrap().catch_up();
                self.doubted.remove(&(v, n));
            }
        }
        let seen = self.node_seen(n);
        let decision = decide::node(&seen, self.force_after);
        if let Some(report) = decision.report {
            if lost == 0 {
                return;
            }
            let entry = |told: &Told| (told.unique.parse().unwrap(), told.device.parse().unwrap());
            let report: BTreeMap<usize, usize> = report.iter().map(entry).collect();
            self.change_node(n, |node| node.attached = report);
            if lost == 1 {
                return;
            }
            self.nodes[n].catch_up();
        }
        if decision.detach.is_empty() {
            return;
        }
        let live = self.nodes[n].live().clone();
        self.nodes[n].catch_up();
        for (position, detach) in decision.detach.iter().enumerate() {
            let v: usize = detach.unique.parse().unwrap();
            let used = live.as_ref().is_some_and(|node| node.in_use.contains(&v));
            let told = live.as_ref().is_some_and(|node| node.attached.contains_key(&v));
            if told || (used && detach.check == Check::NotInUse) {
                continue;
            }
            if lost == 2 + 2 * position {
                self.doubted.insert((v, n));
                return;
            }
            let object = self.attachments.get_mut(&(v, n)).unwrap();
            let after = object.live().clone().filter(|attachment| attachment.held);
            object.write(after.map(|attachment| Attachment { leaving: true, ..attachment }));
            if lost == 3 + 2 * position {
                self.doubted.insert((v, n));
                return;
            }
            object.catch_up();
        }
    }

    fn node_seen(&mut self, n: usize) -> NodeSeen {
        let node = self.nodes[n].cached().clone();
        // The last words of a node that is gone, if the controller saw any.
        let history = &self.nodes[n].versions[..=self.nodes[n].seen];
        let in_use = history.iter().rev().flatten().next().map(|node| node.in_use.clone());
        let mut volumes = Vec::new();
        for v in 0..VOLUMES {
            let Some(state) = self.state(v, n) else { continue };
            let wanted = node.is_some() && self.cached_pods().any(|(_, pod)| (pod.volume, pod.node) == (v, n));
            let wanted = if wanted {
                self.unwanted.remove(&(v, n));
                Need::Wanted
            } else {
                Need::Unwanted(self.now - *self.unwanted.entry((v, n)).or_insert(self.now))
            };
            let usage = match &in_use {
                None => Usage::Unknown,
                Some(in_use) if in_use.contains(&v) => Usage::InUse,
                Some(_) => Usage::NotInUse,
            };
            let device = self.attachments[&(v, n)].cached().as_ref().and_then(|attachment| attachment.confirmed);
            let device = device.map(|device| device.to_string()).unwrap_or_default();
            volumes.push(NodeVolume { attachment: v.to_string(), unique: v.to_string(), device, state, wanted, usage });
        }
        NodeSeen {
            name: n.to_string(),
            reported: node.as_ref().map(|node| {
                let told = |(v, device): (&usize, &usize)| Told { unique: v.to_string(), device: device.to_string() };
                node.attached.iter().map(told).collect()
            }),
            managed: true,
            ready: node.as_ref().is_some_and(|node| node.ready),
            out_of_service: node.as_ref().is_some_and(|node| node.out_of_service),
            volumes,
        }
    }

    fn attacher(&mut self, v: usize, n: usize, call: Call) {
        let object = self.attachments.get_mut(&(v, n)).unwrap();
        let Some(attachment) = object.live().clone() else { return };
        let done = call != Call::Fails;
        match (attachment.leaving, attachment.held, attachment.confirmed.is_some()) {
            (false, false, _) => object.write(Some(Attachment { held: true, ..attachment })),
            (false, true, false) => {
                if done {
                    self.published.insert((v, n));
                }
                if call == Call::Succeeds {
                    self.device += 1;
                    object.write(Some(Attachment { confirmed: Some(self.device), ..attachment }));
                }
            }
            (false, true, true) => {}
            // A publish that was under way when the attachment was deleted lands now.
            (true, _, false) if call == Call::ReplyLost => {
                self.published.insert((v, n));
            }
            (true, _, _) => {
                if done {
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
        if let Some(attachment) = object.live().clone().filter(|attachment| !attachment.leaving) {
            object.write(Some(Attachment { confirmed: None, ..attachment }));
        }
    }

    /// The node agent: in use is said before attached is read, and unsaid after the unmount.
    fn agent(&mut self, v: usize, n: usize) {
        if !self.machines[n].on {
            return;
        }
        let Some(node) = self.nodes[n].live().clone() else { return };
        let wants = self.pods.iter().any(|object| *object.live() == Some(Pod { volume: v, node: n }));
        let mounted = self.machines[n].mounted.contains(&v);
        match (wants, mounted, node.in_use.contains(&v)) {
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
                let confirmed = self.attachments[&(*v, n)].versions.iter().flatten().filter_map(|a| a.confirmed);
                assert!(
                    confirmed.clone().any(|confirmed| confirmed == *device),
                    "{after}: node {n} is told {device} of {v}"
                );
                assert!(self.published.contains(&(*v, n)), "{after}: node {n} is told that it has {v}");
            }
        }
    }

    /// Nothing fails any more, and everybody gets their turns.
    fn settle(&mut self) {
        (0..NODES).for_each(|n| self.power_on(n));
        for _ in 0..40 {
            self.restart();
            for v in 0..VOLUMES {
                self.take(Step::Volume(v, false));
                for n in 0..NODES {
                    self.take(Step::Agent(v, n));
                    self.take(Step::Attacher(v, n, Call::Succeeds));
                }
            }
            (0..NODES).for_each(|n| self.take(Step::Node(n, usize::MAX)));
            self.check("settling");
        }
        for v in 0..VOLUMES {
            let wanted = |n: usize| self.pods.iter().any(|object| *object.live() == Some(Pod { volume: v, node: n }));
            let nodes: Vec<usize> = (0..NODES).filter(|n| wanted(*n)).collect();
            let mounted: Vec<usize> = (0..NODES).filter(|n| self.machines[*n].mounted.contains(&v)).collect();
            let attached: Vec<usize> = (0..NODES).filter(|n| self.attachments[&(v, *n)].live().is_some()).collect();
            assert_eq!(mounted, attached, "volume {v} is attached where it is mounted, and nowhere else");
            for n in &mounted {
                let device = self.attachments[&(v, *n)].live().as_ref().and_then(|attachment| attachment.confirmed);
                let told = self.nodes[*n].live().as_ref().and_then(|node| node.attached.get(&v).copied());
                assert_eq!(told, device, "node {n} knows the device of volume {v}");
            }
            if v == SHARED {
                assert_eq!(mounted, nodes, "volume {v} is wherever it is wanted");
            } else {
                assert_eq!(mounted.len(), nodes.len().min(1), "volume {v} is on one of {nodes:?}: {mounted:?}");
                assert!(mounted.iter().all(|n| nodes.contains(n)), "volume {v}");
            }
        }
    }
}

fn play(steps: &[Step], force_after: Option<Duration>) {
    let mut world = World::new(force_after);
    for step in steps {
        world.take(*step);
        world.check(&format!("{step:?}"));
    }
    world.settle();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_breaks_what_is_promised(steps in prop::collection::vec(step(), 0..400)) {
        play(&steps, None);
    }

    #[test]
    fn nor_does_force_where_the_silent_machines_are_off(steps in prop::collection::vec(step(), 0..400)) {
        play(&steps, Some(LIMIT));
    }
}
