//! What should become of a claim, and of a volume. Pure.

use std::sync::Arc;

use cleat_api::claim::{
    self, claim_class, claim_phase, is_reserved_for, volume_name, volume_phase, waits_for_consumer,
};
use cleat_api::key::Meta as _;
use cleat_api::keys::{annotation, finalizer};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::matching::{self, Choice};

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
    /// The class's provisioner takes a claim to be held from the moment it is asked.
    pub provisioner_holds: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ClaimDecision {
    /// Everything is as it should be.
    Settled,
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
    if seen.claim.metadata.annotation(annotation::BIND_COMPLETED).is_some() { bound(seen) } else { unbound(seen) }
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
        Some(Some(class)) if class.provisioner.starts_with("kubernetes.io/") => {
            ClaimDecision::Wait(Wait::NotDynamic(class.provisioner.clone()))
        }
        Some(Some(class)) => {
            let named = seen.claim.metadata.annotation(annotation::STORAGE_PROVISIONER);
            ClaimDecision::RequestProvisioning {
                provisioner: class.provisioner.clone(),
                annotate: named != Some(&class.provisioner),
                // With a source there is more to wait for before a volume can be in the making.
                hold: seen.provisioner_holds && !claim::has_source(&seen.claim) && !seen.claim.metadata.is_deleting(),
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
    let completed = claim.metadata.annotation(annotation::BIND_COMPLETED).is_some();
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
    /// A claim was named, and a live look showed that it is gone.
    Gone,
}

#[derive(Clone, Debug, PartialEq)]
pub enum VolumeDecision {
    Settled,
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
    match owner {
        Owner::Nobody => phase(volume, "Available"),
        Owner::Gone => match release(volume) {
            VolumeDecision::Settled if volume_phase(volume) == "Released" => reclaim(volume),
            decision => decision,
        },
        Owner::Claim(claim) => match volume_name(claim) {
            None if claim::volume_mode(volume) != claim::claim_mode(claim) => VolumeDecision::WrongMode(claim.clone()),
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
    let theirs = [annotation::MIGRATED_TO, annotation::PROVISIONED_BY].iter().any(|key| meta.annotation(key).is_some());
    let spec = volume.spec.as_ref();
    let is_csi = spec.is_some_and(|s| s.csi.is_some());
    match spec.and_then(|s| s.persistent_volume_reclaim_policy.as_deref()).unwrap_or("Retain") {
        "Retain" => VolumeDecision::Settled,
        "Delete" if theirs || is_csi => VolumeDecision::Settled,
        "Delete" => VolumeDecision::Fail(Failure::Delete),
        "Recycle" if meta.annotation(annotation::MIGRATED_TO).is_some() => VolumeDecision::Settled,
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

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::build;

    fn seen(claim: PersistentVolumeClaim) -> ClaimSeen {
        ClaimSeen {
            claim: Arc::new(claim),
            named: None,
            candidates: Vec::new(),
            class: None,
            default_class: None,
            consumers: Vec::new(),
            provisioner_holds: false,
        }
    }

    fn naming(mut claim: PersistentVolumeClaim, volume: &str) -> PersistentVolumeClaim {
        claim.spec.as_mut().unwrap().volume_name = Some(volume.to_owned());
        claim
    }

    fn reserved(mut volume: PersistentVolume, claim: &PersistentVolumeClaim, uid: Option<&str>) -> PersistentVolume {
        let mut reference = build::reference(claim);
        reference.uid = uid.map(ToOwned::to_owned);
        volume.spec.as_mut().unwrap().claim_ref = Some(reference);
        volume
    }

    fn with_class(mut seen: ClaimSeen, class: Option<StorageClass>) -> ClaimSeen {
        seen.class = Some(class.map(Arc::new));
        seen
    }

    fn waiting_class() -> StorageClass {
        let mut class = build::class("wait", build::DRIVER);
        class.volume_binding_mode = Some(claim::WAIT_FOR_FIRST_CONSUMER.to_owned());
        class
    }

    fn named(claim: PersistentVolumeClaim, volume: PersistentVolume) -> ClaimSeen {
        ClaimSeen { named: Some(Arc::new(volume)), ..seen(claim) }
    }

    #[test]
    fn a_claim_without_a_volume_waits_or_asks_for_one() {
        use ClaimDecision::{AssignClass, RequestProvisioning, Wait as Waits};
        let plain = || build::claim("ns", "c", None, "1Gi");
        let classed = |name: &str| build::claim("ns", "c", Some(name), "1Gi");
        let annotated = |mut c: PersistentVolumeClaim, key: &str, value: &str| {
            build::annotate(&mut c.metadata, key, value);
            c
        };
        let ask = |annotate| RequestProvisioning { provisioner: build::DRIVER.to_owned(), annotate, hold: false };
        let ask_and_hold = RequestProvisioning { provisioner: build::DRIVER.to_owned(), annotate: true, hold: true };
        let holding = |seen: ClaimSeen| ClaimSeen { provisioner_holds: true, ..seen };
        let copying = {
            let mut c = classed("fast");
            let source = serde_json::json!({"kind": "PersistentVolumeClaim", "name": "src"});
            c.spec.as_mut().unwrap().data_source = Some(serde_json::from_value(source).unwrap());
            c
        };
        let going = {
            let mut c = classed("fast");
            c.metadata.deletion_timestamp = Some(build::time(9));
            c
        };
        let fast = || Some(build::class("fast", build::DRIVER));
        let chosen = annotated(classed("wait"), annotation::SELECTED_NODE, "n1");
        let asked = annotated(classed("fast"), annotation::STORAGE_PROVISIONER, build::DRIVER);
        for (case, seen, want) in [
            ("no class and no default", seen(plain()), Waits(Wait::NoVolumeAndNoClass)),
            ("class explicitly none", seen(classed("")), Waits(Wait::NoVolumeAndNoClass)),
            (
                "the default class appeared later",
                ClaimSeen { default_class: Some("std".to_owned()), ..seen(plain()) },
                AssignClass("std".to_owned()),
            ),
            (
                "a class nobody made",
                with_class(seen(classed("fast")), None),
                Waits(Wait::ClassMissing("fast".to_owned())),
            ),
            (
                "a class for administrators' volumes",
                with_class(seen(classed("l")), Some(build::class("l", "kubernetes.io/no-provisioner"))),
                Waits(Wait::NotDynamic("kubernetes.io/no-provisioner".to_owned())),
            ),
            ("not asked yet", with_class(seen(classed("fast")), fast()), ask(true)),
            ("asked already", with_class(seen(asked), fast()), ask(false)),
            ("the provisioner holds claims", holding(with_class(seen(classed("fast")), fast())), ask_and_hold),
            ("it looks at the source first", holding(with_class(seen(copying), fast())), ask(true)),
            ("a claim that goes cannot be held", holding(with_class(seen(going), fast())), ask(true)),
            (
                "no consumer yet",
                with_class(seen(classed("wait")), Some(waiting_class())),
                Waits(Wait::ForFirstConsumer),
            ),
            (
                "a consumer without a node",
                ClaimSeen {
                    consumers: vec!["p".to_owned()],
                    ..with_class(seen(classed("wait")), Some(waiting_class()))
                },
                Waits(Wait::ForPods(vec!["p".to_owned()])),
            ),
            ("the scheduler chose a node", with_class(seen(chosen), Some(waiting_class())), ask(true)),
        ] {
            assert_eq!(claim(&seen), want, "{case}");
        }
    }

    #[test]
    fn a_claim_that_names_its_volume_gets_that_one_or_none() {
        let c = || naming(build::claim("ns", "c", Some("fast"), "1Gi"), "v");
        let other = build::claim("ns", "other", None, "1Gi");
        let v = || build::volume("v", "fast", "1Gi");
        let small = build::volume("v", "fast", "1Mi");
        for (case, seen, want) in [
            ("the volume does not exist yet", seen(c()), Wait::NamedVolumeMissing),
            (
                "the volume is somebody else's",
                named(c(), reserved(v(), &other, Some("uid-other"))),
                Wait::NamedVolumeTaken("v".to_owned()),
            ),
            (
                "the volume was an earlier claim's of the same name",
                named(c(), reserved(v(), &c(), Some("uid-before"))),
                Wait::NamedVolumeTaken("v".to_owned()),
            ),
            (
                "the volume is too small",
                named(c(), small),
                Wait::NamedVolumeUnfit { volume: "v".to_owned(), why: "requested PV is too small".to_owned() },
            ),
        ] {
            assert_eq!(claim(&seen), ClaimDecision::Wait(want), "{case}");
        }
    }

    /// What is left to write, wherever an earlier bind stopped.
    #[test]
    fn a_bind_goes_on_where_it_stopped() {
        let free = build::claim("ns", "c", Some("fast"), "1Gi");
        let v = build::volume("v", "fast", "1Gi");
        let of_uid = reserved(v.clone(), &free, Some("uid-c"));
        let by_name = reserved(v.clone(), &free, None);
        let mut marked = of_uid.clone();
        marked.status.as_mut().unwrap().phase = Some("Bound".to_owned());
        let (done, _) = build::bound(free.clone(), v.clone());
        let mut pointed = done.clone();
        pointed.status.as_mut().unwrap().phase = Some("Pending".to_owned());
        let offered = |claim: &PersistentVolumeClaim, volume: &PersistentVolume| ClaimSeen {
            candidates: vec![Arc::new(volume.clone())],
            ..seen(claim.clone())
        };
        let asks = naming(free.clone(), "v");
        let (us, user) = (Some(Reserve::AsController), Some(Reserve::ForUser));
        for (case, seen, reserve, mark_volume, point_claim, mark_claim) in [
            ("nothing written", offered(&free, &v), us, true, Some(Point::AsController), true),
            (
                "the user reserved the volume by name",
                offered(&free, &by_name),
                user,
                true,
                Some(Point::AsController),
                true,
            ),
            ("the provisioner reserved it", offered(&free, &of_uid), None, true, Some(Point::AsController), true),
            ("volume marked", offered(&free, &marked), None, false, Some(Point::AsController), true),
            ("claim pointed", named(pointed, marked.clone()), None, false, None, true),
            ("the user named the volume", named(asks, v.clone()), us, true, Some(Point::ForUser), true),
            ("the volume lost its reservation", named(done.clone(), v.clone()), us, true, None, false),
        ] {
            match claim(&seen) {
                ClaimDecision::Bind(b) => assert_eq!(
                    (b.reserve, b.mark_volume, b.point_claim, b.mark_claim),
                    (reserve, mark_volume, point_claim, mark_claim),
                    "{case}"
                ),
                other => panic!("{case}: {other:?}"),
            }
        }
        assert_eq!(claim(&named(done.clone(), marked.clone())), ClaimDecision::Settled);
        marked.spec.as_mut().unwrap().access_modes = Some(vec!["ReadWriteMany".to_owned()]);
        let ClaimDecision::Bind(told) = claim(&named(done, marked)) else { panic!("settled") };
        assert!(told.mark_claim, "the volume's modes changed");
    }

    #[test]
    fn a_bound_claim_is_lost_with_its_volume() {
        let (c, v) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
        let mut nameless = c.clone();
        nameless.spec.as_mut().unwrap().volume_name = None;
        let mut lost = c.clone();
        lost.status.as_mut().unwrap().phase = Some("Lost".to_owned());
        let foreign = reserved(v, &c, Some("uid-else"));
        for (case, seen, want) in [
            ("the volume is gone", seen(c.clone()), ClaimDecision::Lose(Loss::VolumeGone)),
            ("it points nowhere", seen(nameless), ClaimDecision::Lose(Loss::NoVolumeNamed)),
            ("the volume is another's", named(c, foreign), ClaimDecision::Lose(Loss::VolumeOfAnother)),
            ("said already", seen(lost), ClaimDecision::Settled),
        ] {
            assert_eq!(claim(&seen), want, "{case}");
        }
    }

    #[test]
    fn a_volume_follows_its_claim() {
        let c = build::claim("ns", "c", None, "1Gi");
        let elsewhere = naming(c.clone(), "w");
        let here = naming(c.clone(), "v");
        let mut settled = here.clone();
        settled.status.as_mut().unwrap().phase = Some("Bound".to_owned());
        let with = |phase: &str, annotations: &[&str]| {
            let mut v = reserved(build::volume("v", "", "1Gi"), &c, Some("uid-c"));
            v.status.as_mut().unwrap().phase = Some(phase.to_owned());
            annotations.iter().for_each(|key| build::annotate(&mut v.metadata, key, "x"));
            v
        };
        let ours = [annotation::BOUND_BY_CONTROLLER];
        let made = [annotation::PROVISIONED_BY];
        let owner = |c: &PersistentVolumeClaim| Owner::Claim(Arc::new(c.clone()));
        let policy = |policy: &str, csi: bool| {
            let mut v = with("Released", &[]);
            let spec = v.spec.as_mut().unwrap();
            spec.persistent_volume_reclaim_policy = Some(policy.to_owned());
            spec.csi = spec.csi.take().filter(|_| csi);
            v
        };
        let mut block = c.clone();
        block.spec.as_mut().unwrap().volume_mode = Some(claim::BLOCK.to_owned());
        use VolumeDecision::{Fail, LeaveToClaim, SetPhase, Settled, Unbind as Give, WrongMode};
        for (case, v, owner, want) in [
            ("new and free", with("Pending", &[]), Owner::Nobody, SetPhase("Available")),
            ("free", with("Available", &[]), Owner::Nobody, Settled),
            ("made for a claim that does not point here yet", with("Pending", &made), owner(&c), LeaveToClaim),
            (
                "made for a claim of another mode",
                with("Pending", &made),
                owner(&block),
                WrongMode(Arc::new(block.clone())),
            ),
            ("its claim begins to point here", with("Available", &[]), owner(&here), LeaveToClaim),
            ("its claim is bound to it", with("Available", &[]), owner(&settled), SetPhase("Bound")),
            ("bound", with("Bound", &[]), owner(&settled), Settled),
            ("its claim is gone", with("Bound", &[]), Owner::Gone, SetPhase("Released")),
            ("released", with("Released", &[]), Owner::Gone, Settled),
            ("released, to be kept", policy("Retain", false), Owner::Gone, Settled),
            ("released, its driver deletes it", policy("Delete", true), Owner::Gone, Settled),
            ("released, nobody can delete it", policy("Delete", false), Owner::Gone, Fail(Failure::Delete)),
            ("released, nobody scrubs it", policy("Recycle", true), Owner::Gone, Fail(Failure::Recycle)),
            ("released, its policy means nothing", policy("Burn", true), Owner::Gone, Fail(Failure::UnknownPolicy)),
            ("a failed deletion stays visible", with("Failed", &[]), Owner::Gone, Settled),
            (
                "its claim took another, we had reserved it",
                with("Available", &ours),
                owner(&elsewhere),
                Give(Unbind::Clear),
            ),
            (
                "its claim took another, a user had reserved it",
                with("Available", &[]),
                owner(&elsewhere),
                Give(Unbind::KeepName),
            ),
            (
                "its claim took another, it was made for it",
                with("Pending", &made),
                owner(&elsewhere),
                SetPhase("Released"),
            ),
        ] {
            assert_eq!(volume(&v, &owner), want, "{case}");
        }
    }
}
