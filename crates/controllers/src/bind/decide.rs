//! What should become of a claim, and of a volume. Pure.

use std::sync::Arc;

use cleat_api::claim::{
    self, claim_class, claim_phase, is_reserved_for, volume_name, volume_phase, waits_for_consumer,
};
use cleat_api::key::Meta as _;
use cleat_api::well_known::{annotation, finalizer};
use cleat_api::migrate;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::matching::{self, Choice};

/// How the names of plugins begin that Kubernetes had inside.
const IN_TREE: &str = "kubernetes.io/";

/// What there is to know about one claim.
#[derive(Clone, Debug)]
pub struct ClaimSeen {
    pub claim: Arc<PersistentVolumeClaim>,
    /// The volume that `spec.volumeName` names, if it exists.
    pub named: Option<Arc<PersistentVolume>>,
    /// Volumes reserved for this claim, and free ones of its class.
    pub candidates: Vec<Arc<PersistentVolume>>,
    /// The class the claim names: `None` if it names none, `Some(None)` if there is no such class.
    pub class: Option<Option<Arc<StorageClass>>>,
    /// The default class, looked up only for claims that say nothing about their class.
    pub default_class: Option<String>,
    /// Pods without a node that use the claim.
    pub consumers: Vec<String>,
    /// A pod that has not ended uses the claim.
    pub in_use: bool,
    /// The class's provisioner takes a claim to be held from the moment it is asked.
    pub provisioner_holds: bool,
}

impl ClaimSeen {
    /// A claim whose bind was completed once: nothing but its volume counts any more.
    pub fn complete(claim: Arc<PersistentVolumeClaim>, named: Option<Arc<PersistentVolume>>) -> Self {
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
pub enum ClaimDecision {
    /// Everything is as it should be.
    Settled,
    /// The annotation about the driver that took over is missing or no longer true.
    HandOver(Handover),
    /// Nothing can be done now; the claim stays Pending.
    Wait(Wait),
    /// The claim says nothing about its class and no volume suits it: give it the default class.
    AssignClass(String),
    /// Tell the provisioner that this claim is its to serve.
    RequestProvisioning {
        provisioner: String,
        annotate: bool,
        /// The provisioner would hold the claim next: the same write can do it.
        hold: bool,
    },
    Bind(Box<Binding>),
    Lose(Loss),
}

/// Who serves an object that an old plugin was in charge of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handover {
    /// The driver that took over from the plugin.
    To(&'static str),
    /// No plugin that moved.
    Nobody,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    NoVolumeAndNoClass,
    ForFirstConsumer,
    /// The claim's volume depends on where these pods go.
    ForPods(Vec<String>),
    ClassMissing(String),
    /// The class is for volumes that administrators make.
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

/// The parts of a bind that are still missing, in the order in which they are written.
#[derive(Clone, Debug, PartialEq)]
pub struct Binding {
    pub volume: Arc<PersistentVolume>,
    pub reserve: Option<Reserve>,
    pub mark_volume: bool,
    pub point_claim: Option<Point>,
    pub mark_claim: bool,
    /// The volume cannot vanish meanwhile, so the claim may be pointed at it before its phase protects it.
    pub together: bool,
    /// A pod uses the claim already: its status says so from the beginning.
    pub in_use: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// The volume was free: the reservation is ours, and marked so.
    AsController,
    /// The user reserved it by name: only the uid is missing.
    ForUser,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// We choose the volume, and mark the choice as ours.
    AsController,
    /// The claim named the volume itself.
    ForUser,
}

pub fn claim(seen: &ClaimSeen) -> ClaimDecision {
    let meta = &seen.claim.metadata;
    if let Some(to) = handover(meta, &[annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA]) {
        return ClaimDecision::HandOver(to);
    }
    if is_complete(&seen.claim) { bound(seen) } else { unbound(seen) }
}

/// Has the claim been asked for since, of the provisioner that serves it, and nothing else? Whoever asked has told of it.
pub fn was_just_asked(old: &PersistentVolumeClaim, new: &PersistentVolumeClaim, provisioner: &str) -> bool {
    const KEYS: [&str; 2] = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA];
    let (before, now) = (&old.metadata, &new.metadata);
    let others = |meta: &ObjectMeta| {
        let all = meta.annotations.clone().unwrap_or_default();
        all.into_iter().filter(|(key, _)| !KEYS.contains(&key.as_str())).collect::<Vec<_>>()
    };
    before.annotation(annotation::STORAGE_PROVISIONER).is_none()
        && now.annotation(annotation::STORAGE_PROVISIONER) == Some(provisioner)
        && handover(now, &KEYS).is_none()
        && (&old.spec, &old.status, before.is_deleting()) == (&new.spec, &new.status, now.is_deleting())
        && others(before) == others(now)
}

/// Was the claim bound once?
pub fn is_complete(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.annotation(annotation::BIND_COMPLETED).is_some()
}

/// What the object should say about who took over from the plugin that the first of these annotations names; `None` if it
/// says so already, or names nobody.
fn handover(meta: &ObjectMeta, named_by: &[&str]) -> Option<Handover> {
    let plugin = named_by.iter().find_map(|key| meta.annotation(key))?;
    match (migrate::driver_of(plugin), meta.annotation(annotation::MIGRATED_TO)) {
        (Some(driver), Some(said)) if driver == said => None,
        (Some(driver), _) => Some(Handover::To(driver)),
        (None, Some(said)) if !said.is_empty() => Some(Handover::Nobody),
        (None, _) => None,
    }
}

fn unbound(seen: &ClaimSeen) -> ClaimDecision {
    let Some(wanted) = volume_name(&seen.claim) else { return search(seen) };
    let Some(volume) = &seen.named else { return ClaimDecision::Wait(Wait::NamedVolumeMissing) };
    if is_reserved_for(volume, &seen.claim) {
        return bind(seen, volume);
    }
    if claim::claim_ref(volume).is_some() {
        return ClaimDecision::Wait(Wait::NamedVolumeTaken(wanted.to_owned()));
    }
    match matching::misfit(volume, &seen.claim) {
        Some(why) => ClaimDecision::Wait(Wait::NamedVolumeUnfit { volume: wanted.to_owned(), why }),
        None => bind(seen, volume),
    }
}

fn search(seen: &ClaimSeen) -> ClaimDecision {
    let delayed = matches!(&seen.class, Some(Some(class)) if waits_for_consumer(class));
    let choice = if delayed { Choice::ReservedOnly } else { Choice::Any };
    if let Some(volume) = matching::best(&seen.claim, &seen.candidates, choice) {
        return bind(seen, volume);
    }
    if let (None, Some(class)) = (claim_class(&seen.claim), &seen.default_class) {
        return ClaimDecision::AssignClass(class.clone());
    }
    if delayed && seen.claim.metadata.annotation(annotation::SELECTED_NODE).is_none() {
        let consumers = seen.consumers.clone();
        let wait = if consumers.is_empty() { Wait::ForFirstConsumer } else { Wait::ForPods(consumers) };
        return ClaimDecision::Wait(wait);
    }
    match &seen.class {
        None => ClaimDecision::Wait(Wait::NoVolumeAndNoClass),
        Some(None) => ClaimDecision::Wait(Wait::ClassMissing(claim_class(&seen.claim).unwrap_or_default().to_owned())),
        Some(Some(class)) => {
            let provisioner = migrate::driver_of(&class.provisioner).unwrap_or(&class.provisioner);
            if provisioner.starts_with(IN_TREE) {
                return ClaimDecision::Wait(Wait::NotDynamic(class.provisioner.clone()));
            }
            let named = seen.claim.metadata.annotation(annotation::STORAGE_PROVISIONER);
            ClaimDecision::RequestProvisioning {
                provisioner: provisioner.to_owned(),
                annotate: named != Some(provisioner),
                // With a source there is more to wait for before a volume can be in the making.
                hold: seen.provisioner_holds && !claim::has_data_source(&seen.claim) && !seen.claim.metadata.is_deleting(),
            }
        }
    }
}

fn bound(seen: &ClaimSeen) -> ClaimDecision {
    let lose = |loss| {
        if claim_phase(&seen.claim) == "Lost" { ClaimDecision::Settled } else { ClaimDecision::Lose(loss) }
    };
    if volume_name(&seen.claim).is_none() {
        return lose(Loss::NoVolumeNamed);
    }
    let Some(volume) = &seen.named else { return lose(Loss::VolumeGone) };
    match claim::claim_ref(volume) {
        None => bind(seen, volume),
        Some(r) if r.uid.as_deref() == Some(seen.claim.metadata.uid()) => bind(seen, volume),
        Some(_) => lose(Loss::VolumeOfAnother),
    }
}

fn bind(seen: &ClaimSeen, volume: &Arc<PersistentVolume>) -> ClaimDecision {
    let claim = &seen.claim;
    let uid_agrees = claim::claim_ref(volume).and_then(|r| r.uid.as_deref()) == Some(claim.metadata.uid());
    let reserve = match (is_reserved_for(volume, claim), uid_agrees) {
        (true, true) => None,
        (true, false) => Some(Reserve::ForUser),
        (false, _) => Some(Reserve::AsController),
    };
    let points_here = volume_name(claim) == volume.metadata.name.as_deref();
    let completed = is_complete(claim);
    let point_claim = match (points_here, completed) {
        (true, true) => None,
        (true, false) => Some(Point::ForUser),
        (false, _) => Some(Point::AsController),
    };
    let binding = Binding {
        volume: volume.clone(),
        reserve,
        mark_volume: volume_phase(volume) != "Bound",
        point_claim,
        mark_claim: claim_phase(claim) != "Bound" || !modes_told(claim, volume),
        together: volume.metadata.has_finalizer(finalizer::PROVISIONER),
        in_use: seen.in_use,
    };
    if binding.reserve.is_none() && !binding.mark_volume && binding.point_claim.is_none() && !binding.mark_claim {
        return ClaimDecision::Settled;
    }
    ClaimDecision::Bind(Box::new(binding))
}

/// The claim's status has the access modes of its volume.
fn modes_told(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    let told = claim.status.as_ref().and_then(|s| s.access_modes.as_deref()).unwrap_or_default();
    told == volume.spec.as_ref().and_then(|s| s.access_modes.as_deref()).unwrap_or_default()
}

/// Who stands behind a volume's reservation.
#[derive(Clone, Debug)]
pub enum Owner {
    /// No claim is named, or only by name.
    Nobody,
    Claim(Arc<PersistentVolumeClaim>),
    /// A claim was named that is not there. Whoever acts on that has looked live.
    Gone,
}

#[derive(Clone, Debug, PartialEq)]
pub enum VolumeDecision {
    Settled,
    /// As for a claim; and no plugin inside is left to hold the volume.
    HandOver(Handover),
    /// The claim's own reconcile writes both sides.
    LeaveToClaim,
    SetPhase(&'static str),
    /// The claim chose another volume: give this one back.
    Unbind(Unbind),
    /// Nobody can reclaim the volume the way its policy says.
    Fail(Failure),
    /// Block for a claim that wants a file system, or the other way round: they never come together.
    WrongMode(Arc<PersistentVolumeClaim>),
}

impl VolumeDecision {
    /// Is nothing to be done about the volume itself?
    pub fn is_rest(&self) -> bool {
        matches!(self, Self::Settled | Self::LeaveToClaim)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    Recycle,
    Delete,
    UnknownPolicy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unbind {
    /// The reservation was ours: it goes altogether.
    Clear,
    /// A user reserved it by name: only the uid goes.
    KeepName,
}

pub fn volume(volume: &PersistentVolume, owner: &Owner) -> VolumeDecision {
    let meta = &volume.metadata;
    if let Some(to) = handover(meta, &[annotation::PROVISIONED_BY]) {
        return VolumeDecision::HandOver(to);
    }
    let moved = meta.annotation(annotation::PROVISIONED_BY).and_then(migrate::driver_of);
    if let Some(driver) = moved.filter(|_| meta.has_finalizer(finalizer::IN_TREE_PV_CONTROLLER)) {
        return VolumeDecision::HandOver(Handover::To(driver));
    }
    match owner {
        Owner::Nobody => phase(volume, "Available"),
        Owner::Gone => match release(volume) {
            VolumeDecision::Settled if volume_phase(volume) == "Released" => reclaim(volume),
            decision => decision,
        },
        Owner::Claim(claim) => match volume_name(claim) {
            None if claim::volume_mode(volume) != claim::claim_volume_mode(claim) => VolumeDecision::WrongMode(claim.clone()),
            None => VolumeDecision::LeaveToClaim,
            // A claim that is not Bound yet is being bound: whoever does that writes this side too.
            Some(name) if Some(name) == volume.metadata.name.as_deref() => match claim_phase(claim) {
                "Bound" => phase(volume, "Bound"),
                _ => VolumeDecision::LeaveToClaim,
            },
            Some(_) => lost_race(volume),
        },
    }
}

fn phase(volume: &PersistentVolume, want: &'static str) -> VolumeDecision {
    if volume_phase(volume) == want { VolumeDecision::Settled } else { VolumeDecision::SetPhase(want) }
}

/// Failed is kept: it tells of a deletion that did not work.
fn release(volume: &PersistentVolume) -> VolumeDecision {
    if volume_phase(volume) == "Failed" { VolumeDecision::Settled } else { phase(volume, "Released") }
}

/// Volumes of CSI drivers and of external provisioners are theirs to delete. For any other kind there is no deleter here,
/// and nobody scrubs volumes for another use.
fn reclaim(volume: &PersistentVolume) -> VolumeDecision {
    let meta = &volume.metadata;
    if meta.annotation(annotation::MIGRATED_TO).is_some() {
        return VolumeDecision::Settled;
    }
    let spec = volume.spec.as_ref();
    let theirs = match meta.annotation(annotation::PROVISIONED_BY) {
        Some(provisioner) => !provisioner.starts_with(IN_TREE),
        None => spec.is_some_and(|s| s.csi.is_some()),
    };
    match spec.and_then(|s| s.persistent_volume_reclaim_policy.as_deref()).unwrap_or("Retain") {
        "Retain" => VolumeDecision::Settled,
        "Delete" if theirs => VolumeDecision::Settled,
        "Delete" => VolumeDecision::Fail(Failure::Delete),
        "Recycle" => VolumeDecision::Fail(Failure::Recycle),
        _ => VolumeDecision::Fail(Failure::UnknownPolicy),
    }
}

/// The claim is bound to another volume. One made for this claim alone is of no use to anybody: it is released, so
/// that the provisioner deletes it.
fn lost_race(volume: &PersistentVolume) -> VolumeDecision {
    let made_for_it = volume.metadata.annotation(annotation::PROVISIONED_BY).is_some();
    let policy = volume.spec.as_ref().and_then(|s| s.persistent_volume_reclaim_policy.as_deref());
    if made_for_it && policy == Some("Delete") {
        return release(volume);
    }
    let ours = volume.metadata.annotation(annotation::BOUND_BY_CONTROLLER).is_some();
    VolumeDecision::Unbind(if ours { Unbind::Clear } else { Unbind::KeepName })
}
