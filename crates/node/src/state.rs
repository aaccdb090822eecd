//! What the agent knows: what its pods want, what is mounted, what the server has acknowledged. Plain data behind one lock;
//! never waits, never reads a cache (a cache's subscribers take this lock).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use cleat_api::Key;

use crate::actual::{Actual, Effect, Origin, Presence};
use crate::decide::{Attach, Desire, Driver, Plan, PodView, Seen, Step, Wait, decide};
use crate::desired::{PodWants, Stage, Wanted};
use crate::layout::{PodUid, VolumeId};
use crate::report::Standing;

#[derive(Default)]
pub(crate) struct State {
    pods: HashMap<PodUid, PodEntry>,
    /// Every volume here is in use on this node, be it only wanted.
    volumes: HashMap<VolumeId, VolumeEntry>,
    /// The volumes that the server has acknowledged as in use.
    reported: BTreeSet<String>,
    pub(crate) names: HashMap<PodUid, Key>,
    pub(crate) by_claim: Interest<Key>,
    pub(crate) by_volume: Interest<String>,
    by_attachment: HashMap<String, VolumeId>,
}

/// What is known of a pod.
enum PodEntry {
    Wants(PodWants),
    /// Found on disk, or lost from the cache; the server has not been asked yet.
    Unconfirmed,
    /// The server says there is no such pod.
    Gone,
}

#[derive(Default)]
struct VolumeEntry {
    actual: Actual,
    wanted_by: BTreeSet<PodUid>,
    waiting: BTreeMap<PodUid, Wait>,
    errors: BTreeMap<PodUid, String>,
}

/// Which pods care about an object.
pub(crate) struct Interest<K>(HashMap<K, BTreeSet<PodUid>>);

impl<K> Default for Interest<K> {
    fn default() -> Self {
        Interest(HashMap::new())
    }
}

impl<K: Hash + Eq> Interest<K> {
    pub(crate) fn add(&mut self, object: K, uid: &str) {
        self.0.entry(object).or_default().insert(uid.to_owned());
    }

    pub(crate) fn of(&self, object: &K) -> Vec<PodUid> {
        self.0.get(object).into_iter().flatten().cloned().collect()
    }

    fn forget(&mut self, uid: &str) {
        self.0.retain(|_, uids| {
            uids.remove(uid);
            !uids.is_empty()
        });
    }
}

/// What the next step is to be carried out with.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    Stage { volume: Arc<Wanted>, before: Effect, uid: PodUid },
    Publish { volume: Arc<Wanted>, before: Effect, uid: PodUid, key: Key, service_account: String },
    Unpublish { uid: PodUid, spec_name: String },
    Unstage,
    Forget,
}

impl State {
    pub(crate) fn adopt(&mut self, found: BTreeMap<VolumeId, Actual>, node: &str) {
        for (id, actual) in found {
            for uid in actual.pods.keys() {
                self.pods.entry(uid.clone()).or_insert(PodEntry::Unconfirmed);
            }
            self.by_attachment.insert(id.attachment_name(node), id.clone());
            self.volumes.insert(id, VolumeEntry { actual, ..VolumeEntry::default() });
        }
    }

    /// Takes in what a pod wants now. Returns the volumes for which that may change something.
    pub(crate) fn set_pod(&mut self, mut wants: PodWants, node: &str) -> Vec<VolumeId> {
        let uid = wants.uid.clone();
        if let Some(PodEntry::Wants(old)) = self.pods.get(&uid) {
            // A claim or volume that vanishes under a pod does not take the mount with it: the pod's end does.
            for volume in wants.volumes.iter_mut().filter(|v| v.want.is_err()) {
                if let Some(Ok(kept)) = old.volumes.iter().find(|o| o.name == volume.name).map(|o| &o.want) {
                    volume.want = Ok(kept.clone());
                }
            }
            if *old == wants {
                return Vec::new();
            }
        }
        let mut touched: BTreeSet<VolumeId> = BTreeSet::new();
        for (id, entry) in &mut self.volumes {
            if entry.wanted_by.remove(&uid) || entry.actual.pods.contains_key(&uid) {
                touched.insert(id.clone());
            }
        }
        if wants.stage != Stage::Ended {
            for wanted in wants.volumes.iter().filter_map(|v| v.want.as_ref().ok()) {
                let entry = self.volumes.entry(wanted.id.clone()).or_insert_with(|| {
                    self.by_attachment.insert(wanted.id.attachment_name(node), wanted.id.clone());
                    VolumeEntry::default()
                });
                entry.wanted_by.insert(uid.clone());
                touched.insert(wanted.id.clone());
            }
        }
        self.pods.insert(uid, PodEntry::Wants(wants));
        touched.into_iter().collect()
    }

    /// The server says the pod is gone. Returns the volumes that it may still have here.
    pub(crate) fn pod_is_gone(&mut self, uid: &str) -> Vec<VolumeId> {
        self.by_claim.forget(uid);
        self.by_volume.forget(uid);
        self.names.remove(uid);
        let mut touched = Vec::new();
        for (id, entry) in &mut self.volumes {
            if entry.wanted_by.remove(uid) || entry.actual.pods.contains_key(uid) {
                touched.push(id.clone());
            }
        }
        if self.has_volumes(uid) {
            self.pods.insert(uid.to_owned(), PodEntry::Gone);
        } else {
            self.pods.remove(uid);
        }
        touched
    }

    pub(crate) fn is_confirmed_gone(&self, uid: &str) -> bool {
        matches!(self.pods.get(uid), Some(PodEntry::Gone))
    }

    /// Whether anything is, or may be, mounted for the pod.
    pub(crate) fn has_volumes(&self, uid: &str) -> bool {
        self.volumes.values().any(|v| v.actual.pods.contains_key(uid))
    }

    pub(crate) fn standings(&self, uid: &str) -> Vec<(String, Standing)> {
        let Some(PodEntry::Wants(wants)) = self.pods.get(uid) else { return Vec::new() };
        let standing = |want: &Result<Arc<Wanted>, crate::desired::Blocked>| match want {
            Err(blocked) => Standing::Blocked(blocked.clone()),
            Ok(wanted) => match self.volumes.get(&wanted.id) {
                None => Standing::Working,
                Some(entry) => entry.standing(uid),
            },
        };
        wants.volumes.iter().map(|v| (v.name.clone(), standing(&v.want))).collect()
    }

    pub(crate) fn all_volumes(&self) -> Vec<VolumeId> {
        self.volumes.keys().cloned().collect()
    }

    pub(crate) fn all_pods(&self) -> Vec<PodUid> {
        self.pods.keys().cloned().collect()
    }

    pub(crate) fn volumes_of_driver(&self, driver: &str) -> Vec<VolumeId> {
        self.volumes.keys().filter(|id| id.driver == driver).cloned().collect()
    }

    pub(crate) fn by_attachment(&self, name: &str) -> Option<VolumeId> {
        self.by_attachment.get(name).cloned()
    }

    pub(crate) fn is_reported(&self, id: &VolumeId) -> bool {
        self.reported.contains(&id.unique_name())
    }

    /// The Node is gone, and with it all that was acknowledged.
    pub(crate) fn forget_reports(&mut self) {
        self.reported.clear();
    }

    /// All volumes in use, for a report about to be sent. From now on only those count as reported: a volume that comes back
    /// after it was left out needs a new acknowledgement.
    pub(crate) fn begin_report(&mut self) -> Vec<VolumeId> {
        let all = self.all_volumes();
        let names: BTreeSet<String> = all.iter().map(VolumeId::unique_name).collect();
        self.reported.retain(|n| names.contains(n));
        all
    }

    /// The server acknowledged the report. Returns the volumes that were waiting for it.
    pub(crate) fn end_report(&mut self, acknowledged: &BTreeSet<String>) -> Vec<VolumeId> {
        let new = |id: &&VolumeId| {
            let name = id.unique_name();
            acknowledged.contains(&name) && !self.reported.contains(&name)
        };
        let woken: Vec<VolumeId> = self.volumes.keys().filter(new).cloned().collect();
        self.reported.extend(woken.iter().map(VolumeId::unique_name));
        woken
    }

    /// Decides the next step for a volume and marks it as begun, in one: whoever looks afterwards sees it as possible.
    /// Also returns the pods whose reason to wait changed.
    pub(crate) fn plan(
        &mut self,
        id: &VolumeId,
        attach: Attach,
        driver: Driver,
        failed: &Failed,
    ) -> (Option<Order>, Vec<PodUid>) {
        let Some(entry) = self.volumes.get(id) else { return (None, Vec::new()) };
        let seen = Seen {
            pods: self.views(id, entry, failed),
            staged: entry.actual.staged.presence,
            stage_failed: failed.stage,
            attach,
            driver,
        };
        let Plan { next, waiting } = decide(&seen);
        let order = next.and_then(|step| self.order(id, step));
        let Some(entry) = self.volumes.get_mut(id) else { return (None, Vec::new()) };
        let mut changed: BTreeSet<PodUid> = BTreeSet::new();
        for uid in entry.waiting.keys().chain(waiting.keys()) {
            if entry.waiting.get(uid) != waiting.get(uid) {
                changed.insert(uid.clone());
            }
        }
        // What a pod waits for now counts; an error of before is told only while it is being retried.
        entry.errors.retain(|uid, _| matches!(waiting.get(uid), None | Some(Wait::Retry | Wait::Turn)));
        entry.waiting = waiting;
        match &order {
            Some(Order::Stage { before, .. }) => entry.actual.staged = before.begun(),
            Some(Order::Publish { before, uid, volume, .. }) => {
                entry.actual.set_published(uid, &volume.spec_name, before.begun());
            }
            Some(Order::Forget) => {
                // A pod that comes for it from now on starts from nothing, acknowledgement included.
                self.volumes.remove(id);
                self.by_attachment.retain(|_, other| other != id);
                self.reported.remove(&id.unique_name());
            }
            Some(Order::Unpublish { .. } | Order::Unstage) | None => {}
        }
        (order, changed.into_iter().collect())
    }

    fn views(&self, id: &VolumeId, entry: &VolumeEntry, failed: &Failed) -> Vec<PodView> {
        let uids: BTreeSet<&PodUid> = entry.wanted_by.iter().chain(entry.actual.pods.keys()).collect();
        let mut views: Vec<_> = uids
            .into_iter()
            .map(|uid| {
                let (desire, wanted, created) = self.desire(id, uid);
                let view = PodView {
                    uid: uid.clone(),
                    desire,
                    published: entry.actual.published(uid).presence,
                    exclusive: wanted.is_some_and(|w| w.exclusive()),
                    failed: failed.pods.contains(uid),
                };
                (created, view)
            })
            .collect();
        views.sort_by_key(|(created, _)| *created);
        views.into_iter().map(|(_, view)| view).collect()
    }

    fn desire(&self, id: &VolumeId, uid: &str) -> (Desire, Option<&Arc<Wanted>>, Option<i128>) {
        match self.pods.get(uid) {
            None | Some(PodEntry::Unconfirmed) => (Desire::Unconfirmed, None, None),
            Some(PodEntry::Gone) => (Desire::Release, None, None),
            Some(PodEntry::Wants(wants)) => {
                let created = wants.created.as_ref().map(|t| t.0.as_nanosecond());
                let wanted = wanted(wants, id);
                let desire = match (wants.stage, wanted) {
                    (Stage::Ended, _) => Desire::Release,
                    (Stage::Running, Some(_)) => Desire::Mount,
                    // Published for a pod that lives, though its objects do not say so any more.
                    (Stage::Running, None) | (Stage::Stopping, _) => Desire::Keep,
                };
                (desire, wanted, created)
            }
        }
    }

    fn order(&self, id: &VolumeId, step: Step) -> Option<Order> {
        let entry = self.volumes.get(id)?;
        let pod = |uid: &str| match self.pods.get(uid) {
            Some(PodEntry::Wants(wants)) => wanted(wants, id).map(|volume| (wants, volume.clone())),
            _ => None,
        };
        Some(match step {
            Step::Stage(uid) => Order::Stage { volume: pod(&uid)?.1, before: entry.actual.staged, uid },
            Step::Publish(uid) => {
                let (wants, volume) = pod(&uid)?;
                let (key, service_account) = (wants.key.clone(), wants.service_account.clone());
                Order::Publish { volume, before: entry.actual.published(&uid), key, service_account, uid }
            }
            Step::Unpublish(uid) => Order::Unpublish { spec_name: entry.actual.pods.get(&uid)?.spec_name.clone(), uid },
            Step::Unstage => Order::Unstage,
            Step::Forget => Order::Forget,
        })
    }

    pub(crate) fn set_staged(&mut self, id: &VolumeId, effect: Effect) {
        if let Some(entry) = self.volumes.get_mut(id) {
            entry.actual.staged = effect;
        }
    }

    pub(crate) fn set_published(&mut self, id: &VolumeId, uid: &str, spec_name: &str, effect: Effect) {
        if let Some(entry) = self.volumes.get_mut(id) {
            entry.actual.set_published(uid, spec_name, effect);
        }
    }

    /// Unstaging or unpublishing failed.
    pub(crate) fn undo_failed(&mut self, id: &VolumeId, uid: Option<&str>) {
        let Some(entry) = self.volumes.get_mut(id) else { return };
        match uid {
            None => entry.actual.staged = entry.actual.staged.undo_failed(),
            Some(uid) => {
                if let Some(published) = entry.actual.pods.get_mut(uid) {
                    published.effect = published.effect.undo_failed();
                }
            }
        }
    }

    /// Keeps the last failure for the pod's condition; `None` after a success.
    pub(crate) fn set_error(&mut self, id: &VolumeId, uid: &str, error: Option<String>) {
        let Some(entry) = self.volumes.get_mut(id) else { return };
        match error {
            Some(error) => entry.errors.insert(uid.to_owned(), error),
            None => entry.errors.remove(uid),
        };
    }
}

fn wanted<'a>(wants: &'a PodWants, id: &VolumeId) -> Option<&'a Arc<Wanted>> {
    wants.volumes.iter().filter_map(|v| v.want.as_ref().ok()).find(|w| w.id == *id)
}

impl VolumeEntry {
    fn standing(&self, uid: &str) -> Standing {
        let effect = self.actual.published(uid);
        match (effect.presence, effect.origin) {
            (Presence::Present, _) => return Standing::Mounted,
            (Presence::Uncertain, Origin::Found) if !self.errors.contains_key(uid) => return Standing::Found,
            _ => {}
        }
        match (self.errors.get(uid), self.waiting.get(uid)) {
            (Some(error), _) => Standing::Failed(error.clone()),
            (None, Some(wait)) => Standing::Waiting(wait.clone()),
            (None, None) => Standing::Working,
        }
    }
}

/// What failed in one visit to a volume.
#[derive(Default)]
pub(crate) struct Failed {
    pub(crate) pods: BTreeSet<PodUid>,
    pub(crate) stage: bool,
}

#[cfg(test)]
#[path = "state_test.rs"]
mod test;
