//! A binder or a provisioner with its own caches. It works on up to three keys at a time, one write per step.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use cleat_api::claim::{claim_class, claim_ref, claim_ref_key, volume_class, volume_name};
use cleat_api::key::Meta as _;
use cleat_api::names;
use cleat_api::well_known::finalizer;
use cleat_controllers::bind::decide::{self as bind, ReferencedClaim};
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
enum ActorKey {
    Claim(String),
    /// A claim by its uid, which may be deleted, whose CreateVolume call is uncertain.
    Uid(String),
    Volume(String),
}

/// The remaining steps for one key.
#[derive(Debug)]
struct Task {
    key: ActorKey,
    claim: Option<PersistentVolumeClaim>,
    volume: Option<PersistentVolume>,
    steps: Vec<Step>,
    failed: bool,
    /// The first two steps may run in either order, and each runs even if the other fails.
    concurrent_writes: bool,
}

#[derive(Debug)]
enum Step {
    ReserveVolume(bind::ChosenBy),
    MarkVolume(&'static str),
    PointClaim(bind::ChosenBy),
    MarkClaim,
    SetPending,
    SetLost,
    RequestProvisioning { provisioner: String, hold: bool },
    Unbind(bind::ClaimRefRemoval),
    HoldClaim,
    CreateVolume(Arc<ProvisionPlan>),
    RecordVolume(Arc<ProvisionPlan>),
    ReleaseClaim,
    HoldVolume,
    DeleteVolume,
    DeleteRecord,
    ReleaseVolume,
}

pub(crate) struct Actor {
    role: Role,
    claims: BTreeMap<String, PersistentVolumeClaim>,
    volumes: BTreeMap<String, PersistentVolume>,
    claim_log_position: usize,
    volume_log_position: usize,
    wakeups: BTreeSet<ActorKey>,
    tasks: Vec<Task>,
    /// The provisioner's uncertain calls, by the claim's uid.
    pending: HashMap<String, (PersistentVolumeClaim, Arc<ProvisionPlan>)>,
    /// Uids of the claims that a previous process of the provisioner held.
    inherited: HashSet<String>,
}

impl Actor {
    pub(crate) fn new(role: Role) -> Self {
        Self {
            role,
            claims: BTreeMap::new(),
            volumes: BTreeMap::new(),
            claim_log_position: 0,
            volume_log_position: 0,
            wakeups: BTreeSet::new(),
            tasks: Vec::new(),
            pending: HashMap::new(),
            inherited: HashSet::new(),
        }
    }

    pub(crate) fn pending_work(&self) -> String {
        format!("{:?}: {:?} {:?}", self.role, self.wakeups, self.tasks)
    }

    pub(crate) fn is_busy(&self, server: &Server) -> bool {
        let has_unread =
            self.claim_log_position < server.claim_log.len() || self.volume_log_position < server.volume_log.len();
        has_unread || !self.wakeups.is_empty() || !self.tasks.is_empty()
    }

    /// Delivers up to four events of claims, of volumes, or of both; all events for `usize::MAX`.
    pub(crate) fn receive_events(&mut self, server: &Server, choice: usize) {
        let all = choice == usize::MAX;
        let events = if all { usize::MAX } else { choice / 4 % 4 + 1 };
        if all || !choice.is_multiple_of(3) {
            let end = server.claim_log.len().min(self.claim_log_position.saturating_add(events));
            for event in &server.claim_log[self.claim_log_position..end] {
                self.apply_event(event.clone());
            }
            self.claim_log_position = end;
        }
        if all || choice % 3 != 1 {
            let end = server.volume_log.len().min(self.volume_log_position.saturating_add(events));
            for event in &server.volume_log[self.volume_log_position..end] {
                self.apply_event(event.clone());
            }
            self.volume_log_position = end;
        }
    }

    pub(crate) fn lose_wakeup(&mut self, which: usize) {
        let at = which % self.wakeups.len().max(1);
        if let Some(key) = self.wakeups.iter().nth(at).cloned() {
            self.wakeups.remove(&key);
        }
    }

    pub(crate) fn repeat_wakeup(&mut self, which: usize) {
        let keys: Vec<_> = self
            .claims
            .keys()
            .cloned()
            .map(ActorKey::Claim)
            .chain(self.volumes.keys().cloned().map(ActorKey::Volume))
            .collect();
        if !keys.is_empty() {
            self.wakeups.insert(keys[which % keys.len()].clone());
        }
    }

    /// Replaces the process by a new one. Unfinished tasks and caches are lost.
    pub(crate) fn restart(&mut self, server: &Server) {
        *self = Self::new(self.role);
        self.relist(server);
        let held = self.claims.values().filter(|c| c.metadata.has_finalizer(finalizer::PROVISIONING));
        self.inherited = held.map(|c| c.metadata.uid().to_owned()).collect();
    }

    /// Replaces the caches by a complete list, as after a broken watch, and wakes every key.
    pub(crate) fn relist(&mut self, server: &Server) {
        self.claims = server.claims.clone();
        self.volumes = server.volumes.clone();
        (self.claim_log_position, self.volume_log_position) = (server.claim_log.len(), server.volume_log.len());
        self.wakeups.extend(self.claims.keys().cloned().map(ActorKey::Claim));
        self.wakeups.extend(self.volumes.keys().cloned().map(ActorKey::Volume));
        self.wakeups.extend(self.pending.keys().cloned().map(ActorKey::Uid));
    }

    /// Starts a task, or executes one step of a running task.
    pub(crate) fn act(&mut self, server: &mut Server, choice: usize) {
        let can_start = self.tasks.len() < 3 && !self.wakeups.is_empty();
        if self.tasks.is_empty() || (can_start && choice.is_multiple_of(2)) {
            let idle: Vec<_> =
                self.wakeups.iter().filter(|s| self.tasks.iter().all(|t| t.key != **s)).cloned().collect();
            if let Some(key) = idle.get(choice / 2 % idle.len().max(1)).cloned() {
                self.wakeups.remove(&key);
                if let Some(task) = self.start_task(&key, server) {
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
        let is_pair =
            task.concurrent_writes && matches!(&task.steps[..], [Step::MarkVolume(_), Step::PointClaim(_), ..]);
        let first = usize::from(is_pair && choice % 4 > 1);
        let step = task.steps.remove(first);
        if self.execute(&mut task, step, server).is_err() {
            task.failed = true;
            if !is_pair {
                task.steps.clear();
            } else {
                task.steps.truncate(1);
            }
        } else if task.failed {
            task.steps.clear();
        }
        if task.steps.is_empty() {
            if task.failed {
                self.wakeups.insert(task.key);
            }
        } else {
            self.tasks.push(task);
        }
    }

    fn start_task(&mut self, key: &ActorKey, server: &Server) -> Option<Task> {
        let mut task = match (self.role, key) {
            (Role::Binder, ActorKey::Claim(name)) => self.bind_claim(name, server),
            (Role::Binder, ActorKey::Volume(name)) => self.bind_volume(name, server),
            (Role::Provisioner, ActorKey::Claim(name)) => {
                let claim = self.claims.get(name)?.clone();
                self.provision_claim(claim)
            }
            (Role::Provisioner, ActorKey::Uid(uid)) => {
                let remembered = self.pending.get(uid)?.0.clone();
                let now = self.claims.values().find(|c| c.metadata.uid() == uid).cloned();
                self.provision_claim(now.unwrap_or(remembered))
            }
            (Role::Provisioner, ActorKey::Volume(name)) => self.reclaim(name),
            (Role::Binder, ActorKey::Uid(_)) => None,
        }?;
        task.key = key.clone();
        (!task.steps.is_empty()).then_some(task)
    }

    fn bind_claim(&self, name: &str, server: &Server) -> Option<Task> {
        let claim = Arc::new(self.claims.get(name)?.clone());
        let class = match claim_class(&claim) {
            Some("dynamic") => Some(Some(Arc::new(build::class("dynamic", build::DRIVER)))),
            _ => Some(None),
        };
        let snapshot = bind::ClaimSnapshot {
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
        let mut decision = bind::claim(&snapshot);
        if let (bind::ClaimBindDecision::Lose(_), Some(name)) = (&decision, volume_name(&claim)) {
            let named = server.volumes.get(name).cloned().map(Arc::new);
            decision = bind::claim(&bind::ClaimSnapshot { named, ..snapshot });
        }
        match decision {
            bind::ClaimBindDecision::Settled => {}
            bind::ClaimBindDecision::Wait(_) => {
                if cleat_api::claim::claim_phase(&claim) != "Pending" {
                    task.steps.push(Step::SetPending);
                }
            }
            bind::ClaimBindDecision::AssignClass(_) => unreachable!("every claim has a class"),
            bind::ClaimBindDecision::UpdateMigration(_) => unreachable!("no plugin is migrated"),
            bind::ClaimBindDecision::RequestProvisioning { provisioner, annotate, hold } => {
                if annotate {
                    task.steps.push(Step::RequestProvisioning { provisioner, hold });
                }
            }
            bind::ClaimBindDecision::Bind(plan) => {
                task.volume = Some(plan.volume.as_ref().clone());
                task.steps.extend(plan.reserve_volume.map(Step::ReserveVolume));
                task.concurrent_writes = plan.concurrent_writes;
                if plan.mark_volume {
                    task.steps.push(Step::MarkVolume("Bound"));
                }
                task.steps.extend(plan.point_claim.map(Step::PointClaim));
                if plan.mark_claim {
                    task.steps.push(Step::MarkClaim);
                }
            }
            bind::ClaimBindDecision::Lose(_) => task.steps.push(Step::SetLost),
        }
        Some(task)
    }

    fn bind_volume(&self, name: &str, server: &Server) -> Option<Task> {
        let volume = self.volumes.get(name)?.clone();
        let referenced = match claim_ref(&volume) {
            Some(reference) if reference.uid.as_deref().is_some_and(|uid| !uid.is_empty()) => {
                let (key, uid) = (claim_ref_key(reference).name, reference.uid.clone().unwrap_or_default());
                let has_uid = |c: &&PersistentVolumeClaim| c.metadata.uid() == uid;
                let found = self.claims.get(&key).filter(has_uid).or_else(|| server.claims.get(&key).filter(has_uid));
                found.map_or(ReferencedClaim::Gone, |claim| ReferencedClaim::Exists(Arc::new(claim.clone())))
            }
            _ => ReferencedClaim::Unset,
        };
        let mut task = Task::of(None, Some(volume.clone()));
        match bind::volume(&volume, &referenced) {
            bind::VolumeBindDecision::Settled
            | bind::VolumeBindDecision::LeaveToClaim
            | bind::VolumeBindDecision::WrongMode(_) => {}
            bind::VolumeBindDecision::SetPhase(phase) => task.steps.push(Step::MarkVolume(phase)),
            bind::VolumeBindDecision::Unbind(removal) => {
                task.steps.extend([Step::Unbind(removal), Step::MarkVolume("Available")])
            }
            bind::VolumeBindDecision::UpdateMigration(_) => unreachable!("no plugin is migrated"),
            bind::VolumeBindDecision::Fail(failure) => panic!("{name} cannot be reclaimed: {failure:?}"),
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
        let exists = self.claims.values().any(|c| c.metadata.uid() == uid);
        let is_held = exists && claim.metadata.has_finalizer(finalizer::PROVISIONING);
        let mut task = Task::of(Some(claim), None);
        let call = |task: &mut Task, plan: Arc<ProvisionPlan>| {
            if exists && !is_held {
                task.steps.push(Step::HoldClaim);
            }
            task.steps.extend([Step::CreateVolume(plan.clone()), Step::RecordVolume(plan)]);
        };
        match provision::claim(&seen, &able(), &ProvisionPolicy::default()) {
            provision::ClaimDecision::Nothing => {
                self.pending.remove(&uid);
                self.inherited.remove(&uid);
            }
            provision::ClaimDecision::Wait(_) | provision::ClaimDecision::Refuse(_) => {}
            provision::ClaimDecision::Compete => unreachable!("one provisioner serves all nodes"),
            provision::ClaimDecision::RemoveFinalizer => task.steps.push(Step::ReleaseClaim),
            provision::ClaimDecision::RepeatCall(plan) => call(&mut task, plan),
            provision::ClaimDecision::Provision(draft) => {
                let plan = draft.complete(&seen, FetchedObjects::default(), &able(), &ProvisionPolicy::default());
                call(&mut task, Arc::new(plan.expect("the plan is complete")));
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
            ReclaimDecision::AddFinalizer => task.steps.push(Step::HoldVolume),
            ReclaimDecision::RemoveFinalizer => task.steps.push(Step::ReleaseVolume),
            ReclaimDecision::Delete { .. } => {
                task.steps.extend([Step::DeleteVolume, Step::DeleteRecord, Step::ReleaseVolume]);
            }
        }
        Some(task)
    }

    fn execute(&mut self, task: &mut Task, step: Step, server: &mut Server) -> Result<(), Refused> {
        let claim = || task.claim.clone().ok_or(Refused);
        let volume = || task.volume.clone().ok_or(Refused);
        match step {
            Step::ReserveVolume(chosen_by) => {
                task.volume =
                    Some(self.put_volume(server, Part::Whole, edit::with_claim_ref(volume()?, &claim()?, chosen_by))?)
            }
            Step::MarkVolume(phase) => {
                task.volume = Some(self.put_volume(server, Part::Status, edit::with_phase(volume()?, phase, None))?)
            }
            Step::Unbind(removal) => {
                task.volume = Some(self.put_volume(server, Part::Whole, edit::without_claim_ref(volume()?, removal))?)
            }
            Step::PointClaim(chosen_by) => {
                let name = volume()?.metadata.name.unwrap();
                task.claim =
                    Some(self.put_claim(server, Part::Whole, edit::with_volume_name(claim()?, &name, chosen_by))?);
            }
            Step::MarkClaim => {
                task.claim =
                    Some(self.put_claim(server, Part::Status, edit::with_bound_status(claim()?, &volume()?))?)
            }
            Step::SetPending => {
                task.claim = Some(self.put_claim(server, Part::Status, edit::with_pending_status(claim()?))?)
            }
            Step::SetLost => {
                task.claim = Some(self.put_claim(server, Part::Status, edit::with_lost_status(claim()?))?)
            }
            Step::RequestProvisioning { provisioner, hold } => {
                task.claim =
                    Some(self.put_claim(server, Part::Whole, edit::with_provisioner(claim()?, &provisioner, hold))?);
            }
            Step::HoldClaim => {
                let mut held = claim()?;
                held.metadata.finalizers = Some(held.metadata.finalizers_with(finalizer::PROVISIONING));
                task.claim = Some(self.put_claim(server, Part::Whole, held)?);
            }
            Step::CreateVolume(plan) => {
                let claim = claim()?;
                self.pending.insert(claim.metadata.uid().to_owned(), (claim, plan.clone()));
                server.backend.insert(plan.request.name.clone());
            }
            Step::RecordVolume(plan) => {
                let claim = claim()?;
                let created = cleat_csi::v1::Volume { volume_id: plan.request.name.clone(), ..Default::default() };
                let record = persistent_volume::build(&claim, &plan, build::DRIVER, "model", created)
                    .expect("no plugin is migrated");
                if let Some(written) = server.create_volume(record) {
                    self.apply_event(Event::Volume(written));
                }
                self.pending.remove(claim.metadata.uid());
                self.inherited.remove(claim.metadata.uid());
                let now = self.claims.values().find(|c| c.metadata.uid() == claim.metadata.uid()).cloned();
                if let Some(now) = now.filter(|c| {
                    let is_finished = c.metadata.is_deleting() || volume_name(c).is_some();
                    is_finished && c.metadata.has_finalizer(finalizer::PROVISIONING)
                }) {
                    task.claim = Some(now);
                    task.steps.push(Step::ReleaseClaim);
                }
            }
            Step::ReleaseClaim => {
                let mut free = claim()?;
                free.metadata.finalizers = Some(free.metadata.finalizers_without(finalizer::PROVISIONING));
                let exists = server.claims.values().any(|c| c.metadata.uid() == free.metadata.uid());
                if exists {
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
            Step::DeleteVolume => {
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
            self.apply_event(Event::Claim(written.clone()));
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
            self.apply_event(Event::Volume(written.clone()));
        }
        Ok(written)
    }

    /// Applies an event, or the reply to a write, to the cache unless the cache is newer. Wakes the keys that it
    /// concerns.
    fn apply_event(&mut self, event: Event) {
        let is_newer = |old: Option<u64>, new: u64| old.is_none_or(|old| old < new);
        match event {
            Event::Claim(claim) => {
                let name = claim.metadata.name.clone().unwrap();
                if is_newer(self.claims.get(&name).map(|c| c.metadata.revision()), claim.metadata.revision()) {
                    self.wake_for_claim(&claim, false);
                    self.claims.insert(name, claim);
                }
            }
            Event::ClaimGone(claim) => {
                let name = claim.metadata.name.clone().unwrap();
                if is_newer(self.claims.get(&name).map(|c| c.metadata.revision()), claim.metadata.revision()) {
                    self.wake_for_claim(&claim, true);
                    self.claims.remove(&name);
                }
            }
            Event::Volume(volume) => {
                let name = volume.metadata.name.clone().unwrap();
                if is_newer(self.volumes.get(&name).map(|v| v.metadata.revision()), volume.metadata.revision()) {
                    self.volumes.insert(name, volume.clone());
                    self.wake_for_volume(&volume);
                }
            }
            Event::VolumeGone(volume) => {
                let name = volume.metadata.name.clone().unwrap();
                if is_newer(self.volumes.get(&name).map(|v| v.metadata.revision()), volume.metadata.revision()) {
                    self.volumes.remove(&name);
                    self.wake_for_volume(&volume);
                }
            }
        }
    }

    fn wake_for_claim(&mut self, claim: &PersistentVolumeClaim, is_deleted: bool) {
        let name = claim.metadata.name.clone().unwrap();
        if !is_deleted {
            self.wakeups.insert(ActorKey::Claim(name.clone()));
        }
        if self.pending.contains_key(claim.metadata.uid()) {
            self.wakeups.insert(ActorKey::Uid(claim.metadata.uid().to_owned()));
        }
        if let Some(volume) = volume_name(claim) {
            self.wakeups.insert(ActorKey::Volume(volume.to_owned()));
        }
        if is_deleted || volume_name(claim).is_some() {
            let reserved =
                self.volumes.values().filter(|v| claim_ref(v).is_some_and(|r| claim_ref_key(r).name == name));
            self.wakeups.extend(reserved.map(|v| ActorKey::Volume(v.metadata.name.clone().unwrap())));
        }
    }

    fn wake_for_volume(&mut self, volume: &PersistentVolume) {
        let name = volume.metadata.name.clone().unwrap();
        let naming = self.claims.values().filter(|c| volume_name(c) == Some(&name));
        self.wakeups.extend(naming.map(|c| ActorKey::Claim(c.metadata.name.clone().unwrap())));
        match claim_ref(volume) {
            Some(reference) => {
                self.wakeups.insert(ActorKey::Claim(claim_ref_key(reference).name));
            }
            None => {
                let class = volume_class(volume);
                let waiting =
                    self.claims.values().filter(|c| claim_class(c) == Some(class) && volume_name(c).is_none());
                self.wakeups.extend(waiting.map(|c| ActorKey::Claim(c.metadata.name.clone().unwrap())));
            }
        }
        self.wakeups.insert(ActorKey::Volume(name));
    }
}

impl Task {
    fn of(claim: Option<PersistentVolumeClaim>, volume: Option<PersistentVolume>) -> Self {
        Self {
            key: ActorKey::Volume(String::new()),
            claim,
            volume,
            steps: Vec::new(),
            failed: false,
            concurrent_writes: false,
        }
    }
}

fn able() -> DriverCapabilities {
    DriverCapabilities { name: build::DRIVER.to_owned(), creates_volumes: true, ..DriverCapabilities::default() }
}
