//! A binder or a provisioner with a cache of its own, working on several keys at a time, one write after the other.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use cleat_api::claim::{claim_class, claim_ref, claim_ref_key, volume_class, volume_name};
use cleat_api::key::Meta as _;
use cleat_api::keys::finalizer;
use cleat_api::names;
use cleat_controllers::bind::decide::{self as bind, Owner};
use cleat_controllers::bind::edit;
use cleat_sidecars::csi_provisioner::decide::reclaim::{self, ReclaimDecision, ReclaimSnapshot};
use cleat_sidecars::csi_provisioner::decide::{
    self as provision, DriverCapabilities, FetchedObjects, ProvisionPlan, ProvisionPolicy, persistent_volume,
};
use cleat_testing::build;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

use super::server::{Event, Part, Refused, Server};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Binder,
    Provisioner,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Claim(String),
    /// A claim that may be gone, of which a call is in doubt.
    Uid(String),
    Volume(String),
}

/// What is left to do for one key.
#[derive(Debug)]
struct Task {
    subject: Subject,
    claim: Option<PersistentVolumeClaim>,
    volume: Option<PersistentVolume>,
    todo: Vec<Step>,
    failed: bool,
    /// The first two steps may come in either order, and one does not wait for the other's success.
    together: bool,
}

#[derive(Debug)]
enum Step {
    Reserve(bind::Reserve),
    MarkVolume(&'static str),
    Point(bind::Point),
    MarkClaim,
    Pend,
    Lose,
    Ask { provisioner: String, hold: bool },
    Free(bind::Unbind),
    Hold,
    Create(Arc<ProvisionPlan>),
    Record(Arc<ProvisionPlan>),
    LetGo,
    HoldVolume,
    Destroy,
    DeleteRecord,
    ReleaseVolume,
}

pub(crate) struct Actor {
    role: Role,
    claims: BTreeMap<String, PersistentVolumeClaim>,
    volumes: BTreeMap<String, PersistentVolume>,
    heard_claims: usize,
    heard_volumes: usize,
    wakes: BTreeSet<Subject>,
    tasks: Vec<Task>,
    /// The provisioner's memory.
    pending: HashMap<String, (PersistentVolumeClaim, Arc<ProvisionPlan>)>,
    inherited: HashSet<String>,
}

impl Actor {
    pub(crate) fn new(role: Role) -> Self {
        Self {
            role,
            claims: BTreeMap::new(),
            volumes: BTreeMap::new(),
            heard_claims: 0,
            heard_volumes: 0,
            wakes: BTreeSet::new(),
            tasks: Vec::new(),
            pending: HashMap::new(),
            inherited: HashSet::new(),
        }
    }

    pub(crate) fn busy(&self) -> String {
        format!("{:?}: {:?} {:?}", self.role, self.wakes, self.tasks)
    }

    pub(crate) fn is_busy(&self, server: &Server) -> bool {
        let unheard = self.heard_claims < server.claim_log.len() || self.heard_volumes < server.volume_log.len();
        unheard || !self.wakes.is_empty() || !self.tasks.is_empty()
    }

    /// Some of what happened arrives: of claims, of volumes, or of both.
    pub(crate) fn hear(&mut self, server: &Server, how: usize) {
        let all = how == usize::MAX;
        let events = if all { usize::MAX } else { how / 4 % 4 + 1 };
        if all || !how.is_multiple_of(3) {
            let upto = server.claim_log.len().min(self.heard_claims.saturating_add(events));
            for event in &server.claim_log[self.heard_claims..upto] {
                self.learn(event.clone());
            }
            self.heard_claims = upto;
        }
        if all || how % 3 != 1 {
            let upto = server.volume_log.len().min(self.heard_volumes.saturating_add(events));
            for event in &server.volume_log[self.heard_volumes..upto] {
                self.learn(event.clone());
            }
            self.heard_volumes = upto;
        }
    }

    pub(crate) fn forget_a_wake_up(&mut self, which: usize) {
        let at = which % self.wakes.len().max(1);
        if let Some(subject) = self.wakes.iter().nth(at).cloned() {
            self.wakes.remove(&subject);
        }
    }

    pub(crate) fn wake_twice(&mut self, which: usize) {
        let keys: Vec<_> = self
            .claims
            .keys()
            .cloned()
            .map(Subject::Claim)
            .chain(self.volumes.keys().cloned().map(Subject::Volume))
            .collect();
        if !keys.is_empty() {
            self.wakes.insert(keys[which % keys.len()].clone());
        }
    }

    /// The process ends wherever it was, and another begins.
    pub(crate) fn die(&mut self, server: &Server) {
        *self = Self::new(self.role);
        self.look_at_everything(server);
        let held = self.claims.values().filter(|c| c.metadata.has_finalizer(finalizer::PROVISIONING));
        self.inherited = held.map(|c| c.metadata.uid().to_owned()).collect();
    }

    /// A list of everything, as after a broken watch.
    pub(crate) fn look_at_everything(&mut self, server: &Server) {
        self.claims = server.claims.clone();
        self.volumes = server.volumes.clone();
        (self.heard_claims, self.heard_volumes) = (server.claim_log.len(), server.volume_log.len());
        self.wakes.extend(self.claims.keys().cloned().map(Subject::Claim));
        self.wakes.extend(self.volumes.keys().cloned().map(Subject::Volume));
        self.wakes.extend(self.pending.keys().cloned().map(Subject::Uid));
    }

    /// One write of one task, or the beginning of another.
    pub(crate) fn act(&mut self, server: &mut Server, choice: usize) {
        let startable = self.tasks.len() < 3 && !self.wakes.is_empty();
        if self.tasks.is_empty() || (startable && choice.is_multiple_of(2)) {
            let free: Vec<_> =
                self.wakes.iter().filter(|s| self.tasks.iter().all(|t| t.subject != **s)).cloned().collect();
            if let Some(subject) = free.get(choice / 2 % free.len().max(1)).cloned() {
                self.wakes.remove(&subject);
                if let Some(task) = self.begin(&subject, server) {
                    self.tasks.push(task);
                }
                return;
            }
        }
        if self.tasks.is_empty() {
            return;
        }
        let at = choice / 2 % self.tasks.len();
        let mut task = self.tasks.remove(at);
        let both = task.together && matches!(&task.todo[..], [Step::MarkVolume(_), Step::Point(_), ..]);
        let first = usize::from(both && choice % 4 > 1);
        let step = task.todo.remove(first);
        if self.execute(&mut task, step, server).is_err() {
            task.failed = true;
            if !both {
                task.todo.clear();
            } else {
                task.todo.truncate(1);
            }
        } else if task.failed {
            task.todo.clear();
        }
        if task.todo.is_empty() {
            if task.failed {
                self.wakes.insert(task.subject);
            }
        } else {
            self.tasks.push(task);
        }
    }

    fn begin(&mut self, subject: &Subject, server: &Server) -> Option<Task> {
        let mut task = match (self.role, subject) {
            (Role::Binder, Subject::Claim(name)) => self.bind_claim(name, server),
            (Role::Binder, Subject::Volume(name)) => self.bind_volume(name, server),
            (Role::Provisioner, Subject::Claim(name)) => {
                let claim = self.claims.get(name)?.clone();
                self.provision_claim(claim)
            }
            (Role::Provisioner, Subject::Uid(uid)) => {
                let remembered = self.pending.get(uid)?.0.clone();
                let now = self.claims.values().find(|c| c.metadata.uid() == uid).cloned();
                self.provision_claim(now.unwrap_or(remembered))
            }
            (Role::Provisioner, Subject::Volume(name)) => self.reclaim(name),
            (Role::Binder, Subject::Uid(_)) => None,
        }?;
        task.subject = subject.clone();
        (!task.todo.is_empty()).then_some(task)
    }

    fn bind_claim(&self, name: &str, server: &Server) -> Option<Task> {
        let claim = Arc::new(self.claims.get(name)?.clone());
        let class = match claim_class(&claim) {
            Some("dynamic") => Some(Some(Arc::new(build::class("dynamic", build::DRIVER)))),
            _ => Some(None),
        };
        let seen = bind::ClaimSeen {
            named: volume_name(&claim).and_then(|v| self.volumes.get(v)).cloned().map(Arc::new),
            candidates: self.volumes.values().cloned().map(Arc::new).collect(),
            class,
            default_class: None,
            provisioner_holds: true,
            consumers: Vec::new(),
            in_use: false,
            claim: claim.clone(),
        };
        let mut task = Task::of(Some(claim.as_ref().clone()), None);
        let mut decision = bind::claim(&seen);
        if let (bind::ClaimDecision::Lose(_), Some(name)) = (&decision, volume_name(&claim)) {
            let named = server.volumes.get(name).cloned().map(Arc::new);
            decision = bind::claim(&bind::ClaimSeen { named, ..seen });
        }
        match decision {
            bind::ClaimDecision::Settled => {}
            bind::ClaimDecision::Wait(_) => {
                if cleat_api::claim::claim_phase(&claim) != "Pending" {
                    task.todo.push(Step::Pend);
                }
            }
            bind::ClaimDecision::AssignClass(_) => unreachable!("every claim has a class"),
            bind::ClaimDecision::HandOver(_) => unreachable!("no plugin here has moved"),
            bind::ClaimDecision::RequestProvisioning { provisioner, annotate, hold } => {
                if annotate {
                    task.todo.push(Step::Ask { provisioner, hold });
                }
            }
            bind::ClaimDecision::Bind(binding) => {
                task.volume = Some(binding.volume.as_ref().clone());
                task.todo.extend(binding.reserve.map(Step::Reserve));
                task.together = binding.together;
                if binding.mark_volume {
                    task.todo.push(Step::MarkVolume("Bound"));
                }
                task.todo.extend(binding.point_claim.map(Step::Point));
                if binding.mark_claim {
                    task.todo.push(Step::MarkClaim);
                }
            }
            bind::ClaimDecision::Lose(_) => task.todo.push(Step::Lose),
        }
        Some(task)
    }

    fn bind_volume(&self, name: &str, server: &Server) -> Option<Task> {
        let volume = self.volumes.get(name)?.clone();
        let owner = match claim_ref(&volume) {
            Some(reference) if reference.uid.as_deref().is_some_and(|uid| !uid.is_empty()) => {
                let (key, uid) = (claim_ref_key(reference).name, reference.uid.clone().unwrap_or_default());
                let ours = |c: &&PersistentVolumeClaim| c.metadata.uid() == uid;
                let found = self.claims.get(&key).filter(ours).or_else(|| server.claims.get(&key).filter(ours));
                found.map_or(Owner::Gone, |claim| Owner::Claim(Arc::new(claim.clone())))
            }
            _ => Owner::Nobody,
        };
        let mut task = Task::of(None, Some(volume.clone()));
        match bind::volume(&volume, &owner) {
            bind::VolumeDecision::Settled | bind::VolumeDecision::LeaveToClaim | bind::VolumeDecision::WrongMode(_) => {
            }
            bind::VolumeDecision::SetPhase(phase) => task.todo.push(Step::MarkVolume(phase)),
            bind::VolumeDecision::Unbind(unbind) => {
                task.todo.extend([Step::Free(unbind), Step::MarkVolume("Available")])
            }
            bind::VolumeDecision::HandOver(_) => unreachable!("no plugin here has moved"),
            bind::VolumeDecision::Fail(failure) => panic!("nobody can reclaim {name}: {failure:?}"),
        }
        Some(task)
    }

    fn provision_claim(&mut self, claim: PersistentVolumeClaim) -> Option<Task> {
        let uid = claim.metadata.uid().to_owned();
        let dynamic = claim_class(&claim) == Some("dynamic");
        let class = dynamic.then(|| Arc::new(build::class("dynamic", build::DRIVER)));
        let seen = provision::ClaimSnapshot {
            claim: Arc::new(claim.clone()),
            class,
            volume_exists: self.volumes.contains_key(&names::provisioned_volume(&uid)),
            pending: self.pending.get(&uid).map(|(_, plan)| plan.clone()),
            inherited: self.inherited.contains(&uid),
            source: provision::DataSource::Unset,
            delays: provision::RetryDelays::default(),
        };
        let there = self.claims.values().any(|c| c.metadata.uid() == uid);
        let held = there && claim.metadata.has_finalizer(finalizer::PROVISIONING);
        let mut task = Task::of(Some(claim), None);
        let call = |task: &mut Task, plan: Arc<ProvisionPlan>| {
            if there && !held {
                task.todo.push(Step::Hold);
            }
            task.todo.extend([Step::Create(plan.clone()), Step::Record(plan)]);
        };
        match provision::claim(&seen, &able(), &ProvisionPolicy::default()) {
            provision::ClaimDecision::Nothing => {
                self.pending.remove(&uid);
                self.inherited.remove(&uid);
            }
            provision::ClaimDecision::Wait(_) | provision::ClaimDecision::Refuse(_) => {}
            provision::ClaimDecision::Compete => unreachable!("one provisioner serves all nodes"),
            provision::ClaimDecision::RemoveFinalizer => task.todo.push(Step::LetGo),
            provision::ClaimDecision::RepeatCall(plan) => call(&mut task, plan),
            provision::ClaimDecision::Provision(outline) => {
                let plan = outline.complete(&seen, FetchedObjects::default(), &able(), &ProvisionPolicy::default());
                call(&mut task, Arc::new(plan.expect("nothing is in the way")));
            }
        }
        Some(task)
    }

    fn reclaim(&self, name: &str) -> Option<Task> {
        let volume = self.volumes.get(name)?.clone();
        let seen = ReclaimSnapshot {
            volume: Arc::new(volume.clone()),
            attached_to: Vec::new(),
            class: None,
            driver: build::DRIVER.to_owned(),
            deletes_volumes: true,
            local: None,
        };
        let mut task = Task::of(None, Some(volume));
        match reclaim::reclaim(&seen) {
            ReclaimDecision::Nothing | ReclaimDecision::WaitForDetach(_) | ReclaimDecision::Refuse(_) => {}
            ReclaimDecision::AddFinalizer => task.todo.push(Step::HoldVolume),
            ReclaimDecision::RemoveFinalizer => task.todo.push(Step::ReleaseVolume),
            ReclaimDecision::Delete { .. } => {
                task.todo.extend([Step::Destroy, Step::DeleteRecord, Step::ReleaseVolume]);
            }
        }
        Some(task)
    }

    fn execute(&mut self, task: &mut Task, step: Step, server: &mut Server) -> Result<(), Refused> {
        let claim = || task.claim.clone().ok_or(Refused);
        let volume = || task.volume.clone().ok_or(Refused);
        match step {
            Step::Reserve(reserve) => {
                task.volume =
                    Some(self.put_volume(server, Part::Whole, edit::reserved(volume()?, &claim()?, reserve))?)
            }
            Step::MarkVolume(phase) => {
                task.volume = Some(self.put_volume(server, Part::Status, edit::in_phase(volume()?, phase, None))?)
            }
            Step::Free(unbind) => {
                task.volume = Some(self.put_volume(server, Part::Whole, edit::freed(volume()?, unbind))?)
            }
            Step::Point(point) => {
                let name = volume()?.metadata.name.unwrap();
                task.claim = Some(self.put_claim(server, Part::Whole, edit::pointed(claim()?, &name, point))?);
            }
            Step::MarkClaim => {
                task.claim = Some(self.put_claim(server, Part::Status, edit::bound(claim()?, &volume()?))?)
            }
            Step::Pend => task.claim = Some(self.put_claim(server, Part::Status, edit::pending(claim()?))?),
            Step::Lose => task.claim = Some(self.put_claim(server, Part::Status, edit::lost(claim()?))?),
            Step::Ask { provisioner, hold } => {
                task.claim = Some(self.put_claim(server, Part::Whole, edit::asked(claim()?, &provisioner, hold))?);
            }
            Step::Hold => {
                let mut held = claim()?;
                held.metadata.finalizers = Some(held.metadata.finalizers_with(finalizer::PROVISIONING));
                task.claim = Some(self.put_claim(server, Part::Whole, held)?);
            }
            Step::Create(plan) => {
                let claim = claim()?;
                self.pending.insert(claim.metadata.uid().to_owned(), (claim, plan.clone()));
                server.backend.insert(plan.request.name.clone());
            }
            Step::Record(plan) => {
                let claim = claim()?;
                let made = cleat_csi::v1::Volume { volume_id: plan.request.name.clone(), ..Default::default() };
                let record = persistent_volume::build(&claim, &plan, build::DRIVER, "model", made)
                    .expect("no plugin here has moved");
                if let Some(written) = server.create_volume(record) {
                    self.learn(Event::Volume(written));
                }
                self.pending.remove(claim.metadata.uid());
                self.inherited.remove(claim.metadata.uid());
                let now = self.claims.values().find(|c| c.metadata.uid() == claim.metadata.uid()).cloned();
                if let Some(now) = now.filter(|c| {
                    let over = c.metadata.is_deleting() || volume_name(c).is_some();
                    over && c.metadata.has_finalizer(finalizer::PROVISIONING)
                }) {
                    task.claim = Some(now);
                    task.todo.push(Step::LetGo);
                }
            }
            Step::LetGo => {
                let mut free = claim()?;
                free.metadata.finalizers = Some(free.metadata.finalizers_without(finalizer::PROVISIONING));
                let gone = !server.claims.values().any(|c| c.metadata.uid() == free.metadata.uid());
                if !gone {
                    self.put_claim(server, Part::Whole, free.clone())?;
                }
                self.pending.remove(free.metadata.uid());
                self.inherited.remove(free.metadata.uid());
            }
            Step::HoldVolume => {
                let mut held = volume()?;
                held.metadata.finalizers = Some(held.metadata.finalizers_with(finalizer::PROVISIONER));
                task.volume = Some(self.put_volume(server, Part::Whole, held)?);
            }
            Step::Destroy => {
                let handle = volume()?.spec.and_then(|s| s.csi).unwrap().volume_handle;
                server.backend.remove(&handle);
            }
            Step::DeleteRecord => {
                let name = volume()?.metadata.name.unwrap();
                server.delete_volume(&name);
                task.volume = server.volumes.get(&name).cloned();
            }
            Step::ReleaseVolume => {
                let Ok(mut free) = volume() else { return Ok(()) };
                free.metadata.finalizers = Some(free.metadata.finalizers_without(finalizer::PROVISIONER));
                self.put_volume(server, Part::Whole, free)?;
            }
        }
        Ok(())
    }

    fn put_claim(
        &mut self,
        server: &mut Server,
        part: Part,
        claim: PersistentVolumeClaim,
    ) -> Result<PersistentVolumeClaim, Refused> {
        let written = server.write_claim(part, &claim)?;
        if server.claims.contains_key(written.metadata.name.as_ref().unwrap()) {
            self.learn(Event::Claim(written.clone()));
        }
        Ok(written)
    }

    fn put_volume(
        &mut self,
        server: &mut Server,
        part: Part,
        volume: PersistentVolume,
    ) -> Result<PersistentVolume, Refused> {
        let written = server.write_volume(part, &volume)?;
        if server.volumes.contains_key(written.metadata.name.as_ref().unwrap()) {
            self.learn(Event::Volume(written.clone()));
        }
        Ok(written)
    }

    /// Takes an event or the reply to a write into the cache, unless something newer is there, and wakes whom it concerns.
    fn learn(&mut self, event: Event) {
        let newer = |old: Option<u64>, new: u64| old.is_none_or(|old| old < new);
        match event {
            Event::Claim(claim) => {
                let name = claim.metadata.name.clone().unwrap();
                if newer(self.claims.get(&name).map(|c| c.metadata.revision()), claim.metadata.revision()) {
                    self.wake_for_claim(&claim, false);
                    self.claims.insert(name, claim);
                }
            }
            Event::ClaimGone(claim) => {
                let name = claim.metadata.name.clone().unwrap();
                if newer(self.claims.get(&name).map(|c| c.metadata.revision()), claim.metadata.revision()) {
                    self.wake_for_claim(&claim, true);
                    self.claims.remove(&name);
                }
            }
            Event::Volume(volume) => {
                let name = volume.metadata.name.clone().unwrap();
                if newer(self.volumes.get(&name).map(|v| v.metadata.revision()), volume.metadata.revision()) {
                    self.volumes.insert(name, volume.clone());
                    self.wake_for_volume(&volume);
                }
            }
            Event::VolumeGone(volume) => {
                let name = volume.metadata.name.clone().unwrap();
                if newer(self.volumes.get(&name).map(|v| v.metadata.revision()), volume.metadata.revision()) {
                    self.volumes.remove(&name);
                    self.wake_for_volume(&volume);
                }
            }
        }
    }

    fn wake_for_claim(&mut self, claim: &PersistentVolumeClaim, gone: bool) {
        let name = claim.metadata.name.clone().unwrap();
        if !gone {
            self.wakes.insert(Subject::Claim(name.clone()));
        }
        if self.pending.contains_key(claim.metadata.uid()) {
            self.wakes.insert(Subject::Uid(claim.metadata.uid().to_owned()));
        }
        if let Some(volume) = volume_name(claim) {
            self.wakes.insert(Subject::Volume(volume.to_owned()));
        }
        if gone || volume_name(claim).is_some() {
            let reserved =
                self.volumes.values().filter(|v| claim_ref(v).is_some_and(|r| claim_ref_key(r).name == name));
            self.wakes.extend(reserved.map(|v| Subject::Volume(v.metadata.name.clone().unwrap())));
        }
    }

    fn wake_for_volume(&mut self, volume: &PersistentVolume) {
        let name = volume.metadata.name.clone().unwrap();
        let naming = self.claims.values().filter(|c| volume_name(c) == Some(&name));
        self.wakes.extend(naming.map(|c| Subject::Claim(c.metadata.name.clone().unwrap())));
        match claim_ref(volume) {
            Some(reference) => {
                self.wakes.insert(Subject::Claim(claim_ref_key(reference).name));
            }
            None => {
                let class = volume_class(volume);
                let waiting =
                    self.claims.values().filter(|c| claim_class(c) == Some(class) && volume_name(c).is_none());
                self.wakes.extend(waiting.map(|c| Subject::Claim(c.metadata.name.clone().unwrap())));
            }
        }
        self.wakes.insert(Subject::Volume(name));
    }
}

impl Task {
    fn of(claim: Option<PersistentVolumeClaim>, volume: Option<PersistentVolume>) -> Self {
        Self {
            subject: Subject::Volume(String::new()),
            claim,
            volume,
            todo: Vec::new(),
            failed: false,
            together: false,
        }
    }
}

fn able() -> DriverCapabilities {
    DriverCapabilities { name: build::DRIVER.to_owned(), creates_volumes: true, ..DriverCapabilities::default() }
}
