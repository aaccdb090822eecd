//! Decides what to do with a claim and with a volume. Pure.

use std::sync::Arc;

use cleat_api::claim::{
    self, claim_class, claim_phase, is_reserved_for, volume_name, volume_phase, waits_for_consumer,
};
use cleat_api::key::Meta as _;
use cleat_api::migrate;
use cleat_api::well_known::{annotation, finalizer};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::edit;
use super::matching::{self, CandidateFilter};

#[cfg(test)]
mod tests;

/// The prefix of the names of in-tree volume plugins.
const IN_TREE_PREFIX: &str = "kubernetes.io/";

/// The annotations that name a claim's provisioner. The first one that is present counts.
const PROVISIONER_ANNOTATIONS: [&str; 2] = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA];

/// Everything that the decision about one claim depends on.
#[derive(Clone, Debug)]
pub struct ClaimSnapshot {
    pub claim: Arc<PersistentVolumeClaim>,
    /// The volume that `spec.volumeName` names, if it exists.
    pub named: Option<Arc<PersistentVolume>>,
    /// Volumes reserved for this claim, and available ones of its class that the caller has reserved.
    pub candidates: Vec<Arc<PersistentVolume>>,
    /// The class that the claim names: `None` if it names none, `Some(None)` if the class does not exist.
    pub class: Option<Option<Arc<StorageClass>>>,
    /// The default class. Set only for claims that do not have `storageClassName`.
    pub default_class: Option<String>,
    /// Names of the pods without a node that use the claim.
    pub consumers: Vec<String>,
    /// A pod that has not terminated uses the claim.
    pub in_use: bool,
    /// The class's provisioner expects the claim to have the finalizer `cleat.dev/provisioning` from the request on.
    pub provisioner_holds: bool,
}

impl ClaimSnapshot {
    /// Returns a snapshot without candidates, class and pods. It is complete for a claim whose bind was completed: the
    /// decision then depends only on the volume that it names.
    pub fn minimal(claim: Arc<PersistentVolumeClaim>, named: Option<Arc<PersistentVolume>>) -> Self {
        Self {
            claim,
            named,
            candidates: Vec::new(),
            class: None,
            default_class: None,
            consumers: Vec::new(),
            in_use: false,
            provisioner_holds: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum ClaimBindDecision {
    /// Nothing to do.
    Settled,
    /// The annotation `migrated-to` is missing or wrong.
    UpdateMigration(MigrationAnnotation),
    /// The claim stays Pending for this reason.
    Wait(ClaimWaitReason),
    /// The claim has no `storageClassName` and no volume satisfies it: set the default class.
    AssignClass(String),
    RequestProvisioning {
        provisioner: String,
        /// False if the claim already names the provisioner; then only the event is repeated.
        annotate: bool,
        /// Add the finalizer `cleat.dev/provisioning` with the same write. The provisioner would add it next.
        hold: bool,
    },
    Bind(Box<BindPlan>),
    Lose(Loss),
}

/// The correct value of the annotation `migrated-to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationAnnotation {
    /// The CSI driver that replaces the in-tree plugin.
    Set(&'static str),
    /// The plugin was not migrated.
    Remove,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimWaitReason {
    NoVolumeAndNoClass,
    ForFirstConsumer,
    /// These pods have no node yet, and the volume depends on the node.
    ForPods(Vec<String>),
    ClassMissing(String),
    /// The class has no provisioner: administrators create its volumes.
    NotDynamic(String),
    NamedVolumeMissing,
    NamedVolumeUnfit {
        volume: String,
        why: String,
    },
    NamedVolumeTaken(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    NoVolumeNamed,
    VolumeGone,
    VolumeOfAnother,
}

/// The writes that a bind still needs, in the order in which they are made.
#[derive(Clone, Debug, PartialEq)]
pub struct BindPlan {
    pub volume: Arc<PersistentVolume>,
    /// Set the volume's `claimRef`.
    pub reserve_volume: Option<ChosenBy>,
    /// Set the volume's phase to Bound.
    pub mark_volume: bool,
    /// Set the claim's `volumeName`.
    pub point_claim: Option<ChosenBy>,
    /// Update the claim's status.
    pub mark_claim: bool,
    /// `mark_volume` and `point_claim` may run concurrently. This is safe if the provisioner's finalizer is on the
    /// volume: otherwise the volume may be deleted before its phase protects it.
    pub concurrent_writes: bool,
    /// A pod uses the claim: written to the status together with the phase.
    pub in_use: bool,
}

/// Who chose the other side of a binding. The annotation `bound-by-controller` records the controller's choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenBy {
    Controller,
    /// The user wrote the name; at most the uid is missing.
    User,
}

pub fn claim(snapshot: &ClaimSnapshot) -> ClaimBindDecision {
    let meta = &snapshot.claim.metadata;
    if let Some(migration) = migration_update(meta, &PROVISIONER_ANNOTATIONS) {
        return ClaimBindDecision::UpdateMigration(migration);
    }
    if is_bind_completed(&snapshot.claim) { bound(snapshot) } else { unbound(snapshot) }
}

/// Returns true if the caller must reserve an available volume and add it to the candidates before it calls [`claim`]:
/// the claim was never bound, names no volume, has no candidate, and does not leave the choice to the scheduler.
pub fn needs_available_volume(snapshot: &ClaimSnapshot) -> bool {
    !is_bind_completed(&snapshot.claim)
        && volume_name(&snapshot.claim).is_none()
        && !is_binding_delayed(snapshot)
        && matching::find_best(&snapshot.claim, &snapshot.candidates, CandidateFilter::ReservedOnly).is_none()
}

/// Returns true if [`claim`] requests provisioning for `old`, `new` is what that request writes, and [`claim`] finds
/// nothing else to write for `new`.
pub fn is_request_written(old: &ClaimSnapshot, new: &Arc<PersistentVolumeClaim>) -> bool {
    let ClaimBindDecision::RequestProvisioning { provisioner, annotate: true, hold } = claim(old) else { return false };
    let mut expected = edit::with_provisioner(old.claim.as_ref().clone(), &provisioner, hold);
    expected.metadata.resource_version.clone_from(&new.metadata.resource_version);
    let done = ClaimBindDecision::RequestProvisioning { provisioner, annotate: false, hold };
    expected == **new && claim(&ClaimSnapshot { claim: new.clone(), ..old.clone() }) == done
}

/// Returns true if the class leaves the choice of a volume to the scheduler.
fn is_binding_delayed(snapshot: &ClaimSnapshot) -> bool {
    matches!(&snapshot.class, Some(Some(class)) if waits_for_consumer(class))
}

/// Returns true if the claim was bound once, even if it has lost its volume since.
pub fn is_bind_completed(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.annotation(annotation::BIND_COMPLETED).is_some()
}

/// Returns the correct `migrated-to` annotation for the plugin that the first of these annotations names; `None` if the
/// object has it already or names no plugin.
fn migration_update(meta: &ObjectMeta, plugin_annotations: &[&str]) -> Option<MigrationAnnotation> {
    let plugin = plugin_annotations.iter().find_map(|key| meta.annotation(key))?;
    match (migrate::driver_of(plugin), meta.annotation(annotation::MIGRATED_TO)) {
        (Some(driver), Some(current)) if driver == current => None,
        (Some(driver), _) => Some(MigrationAnnotation::Set(driver)),
        (None, Some(current)) if !current.is_empty() => Some(MigrationAnnotation::Remove),
        (None, _) => None,
    }
}

fn unbound(snapshot: &ClaimSnapshot) -> ClaimBindDecision {
    let Some(wanted) = volume_name(&snapshot.claim) else { return search(snapshot) };
    let Some(volume) = &snapshot.named else { return ClaimBindDecision::Wait(ClaimWaitReason::NamedVolumeMissing) };
    if is_reserved_for(volume, &snapshot.claim) {
        return bind(snapshot, volume);
    }
    if claim::claim_ref(volume).is_some() {
        return ClaimBindDecision::Wait(ClaimWaitReason::NamedVolumeTaken(wanted.to_owned()));
    }
    match matching::mismatch(volume, &snapshot.claim) {
        Some(why) => ClaimBindDecision::Wait(ClaimWaitReason::NamedVolumeUnfit { volume: wanted.to_owned(), why }),
        None => bind(snapshot, volume),
    }
}

fn search(snapshot: &ClaimSnapshot) -> ClaimBindDecision {
    let is_delayed = is_binding_delayed(snapshot);
    let filter = if is_delayed { CandidateFilter::ReservedOnly } else { CandidateFilter::Any };
    if let Some(volume) = matching::find_best(&snapshot.claim, &snapshot.candidates, filter) {
        return bind(snapshot, volume);
    }
    if let (None, Some(class)) = (claim_class(&snapshot.claim), &snapshot.default_class) {
        return ClaimBindDecision::AssignClass(class.clone());
    }
    if is_delayed && snapshot.claim.metadata.annotation(annotation::SELECTED_NODE).is_none() {
        let consumers = snapshot.consumers.clone();
        return ClaimBindDecision::Wait(match consumers.is_empty() {
            true => ClaimWaitReason::ForFirstConsumer,
            false => ClaimWaitReason::ForPods(consumers),
        });
    }
    match &snapshot.class {
        None => ClaimBindDecision::Wait(ClaimWaitReason::NoVolumeAndNoClass),
        Some(None) => {
            let name = claim_class(&snapshot.claim).unwrap_or_default().to_owned();
            ClaimBindDecision::Wait(ClaimWaitReason::ClassMissing(name))
        }
        Some(Some(class)) => {
            let provisioner = migrate::driver_of(&class.provisioner).unwrap_or(&class.provisioner);
            if provisioner.starts_with(IN_TREE_PREFIX) {
                return ClaimBindDecision::Wait(ClaimWaitReason::NotDynamic(class.provisioner.clone()));
            }
            let requested_from = snapshot.claim.metadata.annotation(annotation::STORAGE_PROVISIONER);
            ClaimBindDecision::RequestProvisioning {
                provisioner: provisioner.to_owned(),
                annotate: requested_from != Some(provisioner),
                // The provisioner checks a data source before it holds the claim. The server refuses new finalizers on
                // a claim that is being deleted.
                hold: snapshot.provisioner_holds
                    && !claim::has_data_source(&snapshot.claim)
                    && !snapshot.claim.metadata.is_deleting(),
            }
        }
    }
}

fn bound(snapshot: &ClaimSnapshot) -> ClaimBindDecision {
    let lose = |loss| {
        if claim_phase(&snapshot.claim) == "Lost" { ClaimBindDecision::Settled } else { ClaimBindDecision::Lose(loss) }
    };
    if volume_name(&snapshot.claim).is_none() {
        return lose(Loss::NoVolumeNamed);
    }
    let Some(volume) = &snapshot.named else { return lose(Loss::VolumeGone) };
    match claim::claim_ref(volume) {
        None => bind(snapshot, volume),
        Some(r) if r.uid.as_deref() == Some(snapshot.claim.metadata.uid()) => bind(snapshot, volume),
        Some(_) => lose(Loss::VolumeOfAnother),
    }
}

fn bind(snapshot: &ClaimSnapshot, volume: &Arc<PersistentVolume>) -> ClaimBindDecision {
    let claim = &snapshot.claim;
    let uid_matches = claim::claim_ref(volume).and_then(|r| r.uid.as_deref()) == Some(claim.metadata.uid());
    let reserve_volume = match (is_reserved_for(volume, claim), uid_matches) {
        (true, true) => None,
        (true, false) => Some(ChosenBy::User),
        (false, _) => Some(ChosenBy::Controller),
    };
    let names_volume = volume_name(claim) == volume.metadata.name.as_deref();
    let point_claim = match (names_volume, is_bind_completed(claim)) {
        (true, true) => None,
        (true, false) => Some(ChosenBy::User),
        (false, _) => Some(ChosenBy::Controller),
    };
    let plan = BindPlan {
        volume: volume.clone(),
        reserve_volume,
        mark_volume: volume_phase(volume) != "Bound",
        point_claim,
        mark_claim: claim_phase(claim) != "Bound" || !has_access_modes_of(claim, volume),
        concurrent_writes: volume.metadata.has_finalizer(finalizer::PROVISIONER),
        in_use: snapshot.in_use,
    };
    if plan.reserve_volume.is_none() && !plan.mark_volume && plan.point_claim.is_none() && !plan.mark_claim {
        return ClaimBindDecision::Settled;
    }
    ClaimBindDecision::Bind(Box::new(plan))
}

/// Returns true if the claim's status has the access modes of its volume.
fn has_access_modes_of(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    let reported = claim.status.as_ref().and_then(|s| s.access_modes.as_deref()).unwrap_or_default();
    reported == volume.spec.as_ref().and_then(|s| s.access_modes.as_deref()).unwrap_or_default()
}

/// The claim that a volume's `claimRef` identifies by uid.
#[derive(Clone, Debug)]
pub enum ReferencedClaim {
    /// There is no `claimRef`, or it has no uid.
    Unset,
    Exists(Arc<PersistentVolumeClaim>),
    /// The claim does not exist. Before a caller acts on this, it must have read the claim live.
    Gone,
}

#[derive(Clone, Debug, PartialEq)]
pub enum VolumeBindDecision {
    /// Nothing to do.
    Settled,
    /// The annotation `migrated-to` is missing or wrong, or the volume still has the in-tree plugin's finalizer.
    UpdateMigration(MigrationAnnotation),
    /// The reconcile of the claim writes both objects.
    LeaveToClaim,
    SetPhase(&'static str),
    /// The claim is bound to another volume: make this one available again.
    Unbind(ClaimRefRemoval),
    /// The reclaim policy cannot be carried out.
    Fail(ReclaimFailure),
    /// The volume modes of volume and claim differ, so they cannot be bound.
    WrongMode(Arc<PersistentVolumeClaim>),
}

impl VolumeBindDecision {
    /// Returns true if the reconcile of the volume itself has nothing to write or report.
    pub fn is_noop(&self) -> bool {
        matches!(self, Self::Settled | Self::LeaveToClaim)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReclaimFailure {
    /// The policy is Recycle, which is not supported.
    NoRecycler,
    /// The policy is Delete, and neither a CSI driver nor an external provisioner is responsible for the volume.
    NoDeleter,
    UnknownPolicy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimRefRemoval {
    /// The controller wrote the `claimRef`: remove it.
    Whole,
    /// A user wrote the `claimRef`: remove only what the controller added, the uid and the resource version.
    UidOnly,
}

pub fn volume(volume: &PersistentVolume, claim: &ReferencedClaim) -> VolumeBindDecision {
    let meta = &volume.metadata;
    if let Some(migration) = migration_update(meta, &[annotation::PROVISIONED_BY]) {
        return VolumeBindDecision::UpdateMigration(migration);
    }
    let migrated_to = meta.annotation(annotation::PROVISIONED_BY).and_then(migrate::driver_of);
    if let Some(driver) = migrated_to.filter(|_| meta.has_finalizer(finalizer::IN_TREE_PV_CONTROLLER)) {
        return VolumeBindDecision::UpdateMigration(MigrationAnnotation::Set(driver));
    }
    match claim {
        ReferencedClaim::Unset => set_phase(volume, "Available"),
        ReferencedClaim::Gone => match release(volume) {
            VolumeBindDecision::Settled if volume_phase(volume) == "Released" => reclaim(volume),
            decision => decision,
        },
        ReferencedClaim::Exists(claim) => match volume_name(claim) {
            None if claim::volume_mode(volume) != claim::claim_volume_mode(claim) => {
                VolumeBindDecision::WrongMode(claim.clone())
            }
            None => VolumeBindDecision::LeaveToClaim,
            // A bind is in progress if the claim is not Bound yet: the reconcile of the claim writes the volume too.
            Some(name) if Some(name) == volume.metadata.name.as_deref() => match claim_phase(claim) {
                "Bound" => set_phase(volume, "Bound"),
                _ => VolumeBindDecision::LeaveToClaim,
            },
            Some(_) => give_up(volume),
        },
    }
}

fn set_phase(volume: &PersistentVolume, want: &'static str) -> VolumeBindDecision {
    if volume_phase(volume) == want { VolumeBindDecision::Settled } else { VolumeBindDecision::SetPhase(want) }
}

/// A volume in the phase Failed stays Failed, because that phase reports a deletion that did not succeed.
fn release(volume: &PersistentVolume) -> VolumeBindDecision {
    if volume_phase(volume) == "Failed" { VolumeBindDecision::Settled } else { set_phase(volume, "Released") }
}

/// CSI drivers and external provisioners delete their own volumes. Cleat has no deleter for other volumes and no
/// recycler.
fn reclaim(volume: &PersistentVolume) -> VolumeBindDecision {
    let meta = &volume.metadata;
    if meta.annotation(annotation::MIGRATED_TO).is_some() {
        return VolumeBindDecision::Settled;
    }
    let spec = volume.spec.as_ref();
    let has_deleter = match meta.annotation(annotation::PROVISIONED_BY) {
        Some(provisioner) => !provisioner.starts_with(IN_TREE_PREFIX),
        None => spec.is_some_and(|s| s.csi.is_some()),
    };
    match spec.and_then(|s| s.persistent_volume_reclaim_policy.as_deref()).unwrap_or("Retain") {
        "Retain" => VolumeBindDecision::Settled,
        "Delete" if has_deleter => VolumeBindDecision::Settled,
        "Delete" => VolumeBindDecision::Fail(ReclaimFailure::NoDeleter),
        "Recycle" => VolumeBindDecision::Fail(ReclaimFailure::NoRecycler),
        _ => VolumeBindDecision::Fail(ReclaimFailure::UnknownPolicy),
    }
}

/// The claim is bound to another volume. A volume that was provisioned for this claim serves no other claim: it is
/// released, so that the provisioner deletes it. Any other volume becomes available again.
fn give_up(volume: &PersistentVolume) -> VolumeBindDecision {
    let is_provisioned = volume.metadata.annotation(annotation::PROVISIONED_BY).is_some();
    let policy = volume.spec.as_ref().and_then(|s| s.persistent_volume_reclaim_policy.as_deref());
    if is_provisioned && policy == Some("Delete") {
        return release(volume);
    }
    let bound_by_controller = volume.metadata.annotation(annotation::BOUND_BY_CONTROLLER).is_some();
    VolumeBindDecision::Unbind(if bound_by_controller { ClaimRefRemoval::Whole } else { ClaimRefRemoval::UidOnly })
}
