//! The state of the node: the volumes that its pods need, the volumes that are mounted, and the volumes that the server has
//! acknowledged as in use. Plain data behind one lock: it must not wait and must not access a cache.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use cleat_api::Key;

use crate::actual::{ActualVolume, MountState, Presence, Provenance};
use crate::condition::VolumeStatus;
use crate::decide::{AttachState, DriverState, ObservedPod, ObservedVolume, Plan, PodNeed, Step, WaitReason, decide};
use crate::desired::{DesiredPod, PodLifecycle, ResolveError, VolumeSpec};
use crate::layout::{PodUid, VolumeId};

#[derive(Default)]
pub(crate) struct NodeState {
    pods: HashMap<PodUid, PodEntry>,
    /// The volumes in use on this node: mounted, or needed by a pod.
    volumes: HashMap<VolumeId, VolumeEntry>,
    /// The unique names of the volumes that the server has acknowledged in `volumesInUse`.
    reported: BTreeSet<String>,
    /// The keys of the pods on this node.
    pub(crate) pod_keys: HashMap<PodUid, Key>,
    pub(crate) pods_by_claim: PodIndex<Key>,
    pub(crate) pods_by_volume: PodIndex<String>,
    /// By the name of the VolumeAttachment.
    volume_by_attachment: HashMap<String, VolumeId>,
}

/// What the agent knows of a pod.
enum PodEntry {
    Resolved(DesiredPod),
    /// Reconstructed from disk, and not read from a cache or the server yet.
    Unconfirmed,
    /// The server has confirmed that the pod does not exist.
    Gone,
}

#[derive(Default)]
struct VolumeEntry {
    actual: ActualVolume,
    needed_by: BTreeSet<PodUid>,
    waiting: BTreeMap<PodUid, WaitReason>,
    /// The message of the last failed step for each pod.
    errors: BTreeMap<PodUid, String>,
}

/// Which pods refer to an object.
pub(crate) struct PodIndex<K>(HashMap<K, BTreeSet<PodUid>>);

impl<K> Default for PodIndex<K> {
    fn default() -> Self {
        PodIndex(HashMap::new())
    }
}

impl<K: Hash + Eq> PodIndex<K> {
    pub(crate) fn add(&mut self, object: K, uid: &str) {
        self.0.entry(object).or_default().insert(uid.to_owned());
    }

    pub(crate) fn pods(&self, object: &K) -> Vec<PodUid> {
        self.0.get(object).into_iter().flatten().cloned().collect()
    }

    fn remove_pod(&mut self, uid: &str) {
        self.0.retain(|_, uids| {
            uids.remove(uid);
            !uids.is_empty()
        });
    }
}

/// A step with everything that is needed to carry it out.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Stage { volume: Arc<VolumeSpec>, before: MountState, uid: PodUid },
    Publish { volume: Arc<VolumeSpec>, before: MountState, uid: PodUid, key: Key, service_account: String },
    Unpublish { uid: PodUid, spec_name: String },
    Unstage,
    Forget,
}

impl NodeState {
    /// Adds the volumes that earlier runs left mounted.
    pub(crate) fn load_reconstructed(&mut self, reconstructed: BTreeMap<VolumeId, ActualVolume>, node: &str) {
        for (id, actual) in reconstructed {
            for uid in actual.pods.keys() {
                self.pods.entry(uid.clone()).or_insert(PodEntry::Unconfirmed);
            }
            self.volume_by_attachment.insert(id.attachment_name(node), id.clone());
            self.volumes.insert(id, VolumeEntry { actual, ..VolumeEntry::default() });
        }
    }

    /// Sets the resolved volumes of a pod. Returns the volumes whose next step may change.
    pub(crate) fn update_pod(&mut self, mut desired: DesiredPod, node: &str) -> Vec<VolumeId> {
        let uid = desired.uid.clone();
        if let Some(PodEntry::Resolved(old)) = self.pods.get(&uid) {
            // A deleted claim or volume does not unmount the volume of a running pod; only the end of the pod does.
            for volume in desired.volumes.iter_mut().filter(|v| v.spec.is_err()) {
                if let Some(Ok(resolved)) = old.volumes.iter().find(|o| o.name == volume.name).map(|o| &o.spec) {
                    volume.spec = Ok(resolved.clone());
                }
            }
            if *old == desired {
                return Vec::new();
            }
        }
        let mut affected: BTreeSet<VolumeId> = BTreeSet::new();
        for (id, entry) in &mut self.volumes {
            if entry.needed_by.remove(&uid) || entry.actual.pods.contains_key(&uid) {
                affected.insert(id.clone());
            }
        }
        if desired.lifecycle != PodLifecycle::Terminated {
            for spec in desired.volumes.iter().filter_map(|v| v.spec.as_ref().ok()) {
                let entry = self.volumes.entry(spec.id.clone()).or_insert_with(|| {
                    self.volume_by_attachment.insert(spec.id.attachment_name(node), spec.id.clone());
                    VolumeEntry::default()
                });
                entry.needed_by.insert(uid.clone());
                affected.insert(spec.id.clone());
            }
        }
        self.pods.insert(uid, PodEntry::Resolved(desired));
        affected.into_iter().collect()
    }

    /// The server has confirmed that the pod does not exist. Returns the volumes that may still be mounted for it or that it
    /// needed.
    pub(crate) fn confirm_pod_gone(&mut self, uid: &str) -> Vec<VolumeId> {
        self.pods_by_claim.remove_pod(uid);
        self.pods_by_volume.remove_pod(uid);
        self.pod_keys.remove(uid);
        let mut affected = Vec::new();
        for (id, entry) in &mut self.volumes {
            if entry.needed_by.remove(uid) || entry.actual.pods.contains_key(uid) {
                affected.push(id.clone());
            }
        }
        if self.has_volumes(uid) {
            self.pods.insert(uid.to_owned(), PodEntry::Gone);
        } else {
            self.pods.remove(uid);
        }
        affected
    }

    pub(crate) fn is_confirmed_gone(&self, uid: &str) -> bool {
        matches!(self.pods.get(uid), Some(PodEntry::Gone))
    }

    /// Whether a volume is, or may be, mounted for the pod.
    pub(crate) fn has_volumes(&self, uid: &str) -> bool {
        self.volumes.values().any(|v| v.actual.pods.contains_key(uid))
    }

    pub(crate) fn volume_statuses(&self, uid: &str) -> Vec<(String, VolumeStatus)> {
        let Some(PodEntry::Resolved(desired)) = self.pods.get(uid) else { return Vec::new() };
        let volume_status = |want: &Result<Arc<VolumeSpec>, ResolveError>| match want {
            Err(blocked) => VolumeStatus::Unresolved(blocked.clone()),
            Ok(spec) => match self.volumes.get(&spec.id) {
                None => VolumeStatus::InProgress,
                Some(entry) => entry.volume_status(uid),
            },
        };
        desired.volumes.iter().map(|v| (v.name.clone(), volume_status(&v.spec))).collect()
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

    pub(crate) fn volume_by_attachment(&self, name: &str) -> Option<VolumeId> {
        self.volume_by_attachment.get(name).cloned()
    }

    pub(crate) fn is_reported(&self, id: &VolumeId) -> bool {
        self.reported.contains(&id.unique_name())
    }

    /// The Node was deleted, and with it its `volumesInUse`.
    pub(crate) fn clear_reported(&mut self) {
        self.reported.clear();
    }

    /// Returns all volumes in use, for a status write that is about to be sent. From now on only those count as reported: a
    /// volume that is missing in this write and is needed again later requires a new acknowledgement.
    pub(crate) fn begin_report(&mut self) -> Vec<VolumeId> {
        let all = self.all_volumes();
        let pod_keys: BTreeSet<String> = all.iter().map(VolumeId::unique_name).collect();
        self.reported.retain(|n| pod_keys.contains(n));
        all
    }

    /// The server has acknowledged the status write. Returns the volumes that were not acknowledged before.
    pub(crate) fn end_report(&mut self, acknowledged: &BTreeSet<String>) -> Vec<VolumeId> {
        let new = |id: &&VolumeId| {
            let name = id.unique_name();
            acknowledged.contains(&name) && !self.reported.contains(&name)
        };
        let acknowledged_now: Vec<VolumeId> = self.volumes.keys().filter(new).cloned().collect();
        self.reported.extend(acknowledged_now.iter().map(VolumeId::unique_name));
        acknowledged_now
    }

    /// Decides the next step for a volume and marks its call as started, under one lock: from then on
    /// [`NodeState::has_volumes`] counts a publish. Also returns the pods whose reason to wait has changed.
    pub(crate) fn plan(
        &mut self,
        id: &VolumeId,
        attach: AttachState,
        driver: DriverState,
        failed: &FailedSteps,
    ) -> (Option<Operation>, Vec<PodUid>) {
        let Some(entry) = self.volumes.get(id) else { return (None, Vec::new()) };
        let observed = ObservedVolume {
            pods: self.observed_pods(id, entry, failed),
            staged: entry.actual.staged.presence,
            stage_failed: failed.stage,
            attach,
            driver,
        };
        let Plan { next, waiting } = decide(&observed);
        let operation = next.and_then(|step| self.operation(id, step));
        let Some(entry) = self.volumes.get_mut(id) else { return (None, Vec::new()) };
        let mut changed: BTreeSet<PodUid> = BTreeSet::new();
        for uid in entry.waiting.keys().chain(waiting.keys()) {
            if entry.waiting.get(uid) != waiting.get(uid) {
                changed.insert(uid.clone());
            }
        }
        // An earlier error is reported only while the failed step is being repeated; otherwise the new reason to wait is.
        entry.errors.retain(|uid, _| {
            matches!(waiting.get(uid), None | Some(WaitReason::LastAttemptFailed | WaitReason::AnotherPodFirst))
        });
        entry.waiting = waiting;
        match &operation {
            Some(Operation::Stage { before, .. }) => entry.actual.staged = before.call_started(),
            Some(Operation::Publish { before, uid, volume, .. }) => {
                entry.actual.set_published(uid, &volume.spec_name, before.call_started());
            }
            Some(Operation::Forget) => {
                // A pod that needs the volume later starts from an empty entry, and the volume must be acknowledged again.
                self.volumes.remove(id);
                self.volume_by_attachment.retain(|_, other| other != id);
                self.reported.remove(&id.unique_name());
            }
            Some(Operation::Unpublish { .. } | Operation::Unstage) | None => {}
        }
        (operation, changed.into_iter().collect())
    }

    fn observed_pods(&self, id: &VolumeId, entry: &VolumeEntry, failed: &FailedSteps) -> Vec<ObservedPod> {
        let uids: BTreeSet<&PodUid> = entry.needed_by.iter().chain(entry.actual.pods.keys()).collect();
        let mut observed_pods: Vec<_> = uids
            .into_iter()
            .map(|uid| {
                let (need, spec, created) = self.need(id, uid);
                let pod = ObservedPod {
                    uid: uid.clone(),
                    need,
                    published: entry.actual.published(uid).presence,
                    exclusive: spec.is_some_and(|w| w.is_exclusive()),
                    failed: failed.pods.contains(uid),
                };
                (created, pod)
            })
            .collect();
        observed_pods.sort_by_key(|(created, _)| *created);
        observed_pods.into_iter().map(|(_, pod)| pod).collect()
    }

    fn need(&self, id: &VolumeId, uid: &str) -> (PodNeed, Option<&Arc<VolumeSpec>>, Option<i128>) {
        match self.pods.get(uid) {
            None | Some(PodEntry::Unconfirmed) => (PodNeed::Unconfirmed, None, None),
            Some(PodEntry::Gone) => (PodNeed::Release, None, None),
            Some(PodEntry::Resolved(desired)) => {
                let created = desired.created.as_ref().map(|t| t.0.as_nanosecond());
                let spec = spec_of(desired, id);
                let need = match (desired.lifecycle, spec) {
                    (PodLifecycle::Terminated, _) => PodNeed::Release,
                    (PodLifecycle::Running, Some(_)) => PodNeed::Mount,
                    // Without a spec: reconstructed for a running pod whose claim or volume cannot be resolved.
                    (PodLifecycle::Running, None) | (PodLifecycle::Terminating, _) => PodNeed::Keep,
                };
                (need, spec, created)
            }
        }
    }

    fn operation(&self, id: &VolumeId, step: Step) -> Option<Operation> {
        let entry = self.volumes.get(id)?;
        let pod = |uid: &str| match self.pods.get(uid) {
            Some(PodEntry::Resolved(desired)) => spec_of(desired, id).map(|volume| (desired, volume.clone())),
            _ => None,
        };
        Some(match step {
            Step::Stage(uid) => Operation::Stage { volume: pod(&uid)?.1, before: entry.actual.staged, uid },
            Step::Publish(uid) => {
                let (desired, volume) = pod(&uid)?;
                let (key, service_account) = (desired.key.clone(), desired.service_account.clone());
                Operation::Publish { volume, before: entry.actual.published(&uid), key, service_account, uid }
            }
            Step::Unpublish(uid) => {
                Operation::Unpublish { spec_name: entry.actual.pods.get(&uid)?.spec_name.clone(), uid }
            }
            Step::Unstage => Operation::Unstage,
            Step::Forget => Operation::Forget,
        })
    }

    pub(crate) fn set_staged(&mut self, id: &VolumeId, state: MountState) {
        if let Some(entry) = self.volumes.get_mut(id) {
            entry.actual.staged = state;
        }
    }

    pub(crate) fn set_published(&mut self, id: &VolumeId, uid: &str, spec_name: &str, state: MountState) {
        if let Some(entry) = self.volumes.get_mut(id) {
            entry.actual.set_published(uid, spec_name, state);
        }
    }

    /// An unpublish (with a pod) or unstage (without) has failed.
    pub(crate) fn undo_failed(&mut self, id: &VolumeId, uid: Option<&str>) {
        let Some(entry) = self.volumes.get_mut(id) else { return };
        match uid {
            None => entry.actual.staged = entry.actual.staged.undo_failed(),
            Some(uid) => {
                if let Some(published) = entry.actual.pods.get_mut(uid) {
                    published.state = published.state.undo_failed();
                }
            }
        }
    }

    /// Stores the last error for the pod's condition; `None` after a success.
    pub(crate) fn set_error(&mut self, id: &VolumeId, uid: &str, error: Option<String>) {
        let Some(entry) = self.volumes.get_mut(id) else { return };
        match error {
            Some(error) => entry.errors.insert(uid.to_owned(), error),
            None => entry.errors.remove(uid),
        };
    }
}

fn spec_of<'a>(desired: &'a DesiredPod, id: &VolumeId) -> Option<&'a Arc<VolumeSpec>> {
    desired.volumes.iter().filter_map(|v| v.spec.as_ref().ok()).find(|w| w.id == *id)
}

impl VolumeEntry {
    fn volume_status(&self, uid: &str) -> VolumeStatus {
        let state = self.actual.published(uid);
        match (state.presence, state.provenance) {
            (Presence::Present, _) => return VolumeStatus::Mounted,
            (Presence::Uncertain, Provenance::Reconstructed) if !self.errors.contains_key(uid) => {
                return VolumeStatus::Unconfirmed;
            }
            _ => {}
        }
        match (self.errors.get(uid), self.waiting.get(uid)) {
            (Some(error), _) => VolumeStatus::Failed(error.clone()),
            (None, Some(wait)) => VolumeStatus::Waiting(wait.clone()),
            (None, None) => VolumeStatus::InProgress,
        }
    }
}

/// The steps that failed in one reconcile of a volume.
#[derive(Default)]
pub(crate) struct FailedSteps {
    pub(crate) pods: BTreeSet<PodUid>,
    pub(crate) stage: bool,
}

#[cfg(test)]
mod tests;
