//! Tables of the decisions about claims.

mod migrated;
mod plans;
mod sources;

use std::collections::HashMap;

use cleat_api::key::Key;
use cleat_csi::v1::Volume;
use cleat_testing::build::{self, DRIVER};
use serde_json::json;

use super::*;

pub(super) fn all_capabilities() -> DriverCapabilities {
    DriverCapabilities {
        name: DRIVER.to_owned(),
        creates_volumes: true,
        clones_volumes: true,
        takes_snapshots: true,
        modifies_volumes: true,
        single_node_multi_writer: false,
        supports_topology: false,
    }
}

pub(super) fn assigned_claim(class: &str) -> PersistentVolumeClaim {
    let mut claim = build::claim("ns", "c", Some(class), "5Gi");
    build::annotate(&mut claim.metadata, annotation::STORAGE_PROVISIONER, DRIVER);
    claim
}

pub(super) fn snapshot(claim: PersistentVolumeClaim, class: Option<StorageClass>) -> ClaimSnapshot {
    ClaimSnapshot {
        claim: Arc::new(claim),
        class: class.map(Arc::new),
        volume_exists: false,
        pending: None,
        inherited: false,
        source: DataSource::Unset,
        delays: RetryDelays::default(),
    }
}

fn fast() -> Option<StorageClass> {
    Some(build::class("fast", DRIVER))
}

fn with(parameters: &[(&str, &str)]) -> Option<StorageClass> {
    let mut class = build::class("fast", DRIVER);
    let pairs = parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    class.parameters = Some(pairs.collect());
    Some(class)
}

fn decide(snapshot: &ClaimSnapshot) -> ClaimDecision {
    claim(snapshot, &all_capabilities(), &ProvisionPolicy::default())
}

fn planned(
    snapshot: &ClaimSnapshot,
    fetched: FetchedObjects,
    driver: &DriverCapabilities,
    policy: &ProvisionPolicy,
) -> Result<ProvisionPlan, PlanError> {
    match claim(snapshot, driver, policy) {
        ClaimDecision::Provision(draft) => draft.complete(snapshot, fetched, driver, policy),
        ClaimDecision::Refuse(why) => Err(PlanError::Final(why)),
        other => panic!("{other:?}"),
    }
}

fn plan(snapshot: &ClaimSnapshot) -> Result<ProvisionPlan, PlanError> {
    planned(snapshot, FetchedObjects::default(), &all_capabilities(), &ProvisionPolicy::default())
}

#[test]
fn a_claim_is_served_by_the_driver_it_names_and_once() {
    let mut waiting = build::class("fast", DRIVER);
    waiting.volume_binding_mode = Some(claim::WAIT_FOR_FIRST_CONSUMER.to_owned());
    let mut pointing = assigned_claim("fast");
    pointing.spec.as_mut().unwrap().volume_name = Some("v".to_owned());
    let mut selecting = assigned_claim("fast");
    selecting.spec.as_mut().unwrap().selector = Some(Default::default());
    let mut unknown_mode = assigned_claim("fast");
    unknown_mode.spec.as_mut().unwrap().access_modes = Some(vec!["Sometimes".to_owned()]);
    let mut wanting = assigned_claim("fast");
    wanting.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
    let refuse = |why: &str| ClaimDecision::Refuse(why.to_owned());
    let without = |edit: fn(&mut DriverCapabilities)| {
        let mut driver = all_capabilities();
        edit(&mut driver);
        driver
    };
    let cloning = ClaimSnapshot {
        source: DataSource::Claim { name: "src".to_owned(), claim: None, volume: None },
        ..snapshot(assigned_claim("fast"), fast())
    };
    let restoring = ClaimSnapshot {
        source: DataSource::Snapshot(Key::namespaced("ns", "s")),
        ..snapshot(assigned_claim("fast"), fast())
    };
    for (case, driver, snapshot, want) in [
        (
            "no provisioner is named",
            all_capabilities(),
            snapshot(build::claim("ns", "c", Some("fast"), "1Gi"), fast()),
            ClaimDecision::Nothing,
        ),
        (
            "of another driver",
            without(|c| c.name = "other".to_owned()),
            snapshot(assigned_claim("fast"), fast()),
            ClaimDecision::Nothing,
        ),
        (
            "its class is of another driver",
            all_capabilities(),
            snapshot(assigned_claim("fast"), Some(build::class("fast", "other"))),
            ClaimDecision::Nothing,
        ),
        ("points at a volume", all_capabilities(), snapshot(pointing, fast()), ClaimDecision::Nothing),
        (
            "its PersistentVolume exists",
            all_capabilities(),
            ClaimSnapshot { volume_exists: true, ..snapshot(assigned_claim("fast"), fast()) },
            ClaimDecision::Nothing,
        ),
        (
            "its class is missing",
            all_capabilities(),
            snapshot(assigned_claim("fast"), None),
            ClaimDecision::Wait(WaitReason::ClassMissing),
        ),
        (
            "no consumer yet",
            all_capabilities(),
            snapshot(assigned_claim("fast"), Some(waiting)),
            ClaimDecision::Wait(WaitReason::ForFirstConsumer),
        ),
        (
            "an external populator fills it",
            all_capabilities(),
            ClaimSnapshot { source: DataSource::OtherKind, ..snapshot(assigned_claim("fast"), fast()) },
            ClaimDecision::Wait(WaitReason::ForPopulator),
        ),
        (
            "the source is in another namespace",
            all_capabilities(),
            ClaimSnapshot { source: DataSource::OtherNamespace, ..snapshot(assigned_claim("fast"), fast()) },
            refuse("sources in other namespaces are not supported"),
        ),
        (
            "a claim with a selector",
            all_capabilities(),
            snapshot(selecting, fast()),
            refuse("claim Selector is not supported"),
        ),
        (
            "an unknown access mode",
            all_capabilities(),
            snapshot(unknown_mode, fast()),
            refuse("access modes [Sometimes] cannot be offered together"),
        ),
        (
            "a driver that creates no volumes",
            without(|c| c.creates_volumes = false),
            snapshot(assigned_claim("fast"), fast()),
            refuse("driver \"block.cleat.dev\" does not create volumes"),
        ),
        (
            "a driver that cannot clone",
            without(|c| c.clones_volumes = false),
            cloning,
            refuse("driver \"block.cleat.dev\" does not clone volumes"),
        ),
        (
            "a driver without snapshots",
            without(|c| c.takes_snapshots = false),
            restoring,
            refuse("driver \"block.cleat.dev\" does not support snapshots"),
        ),
        (
            "a driver that modifies nothing",
            without(|c| c.modifies_volumes = false),
            snapshot(wanting, fast()),
            refuse("driver \"block.cleat.dev\" does not support VolumeAttributesClass"),
        ),
        (
            "an unknown parameter with the provisioner's prefix",
            all_capabilities(),
            snapshot(assigned_claim("fast"), with(&[("csi.storage.k8s.io/nonsense", "x")])),
            refuse("class \"fast\" has unknown parameter \"csi.storage.k8s.io/nonsense\""),
        ),
        (
            "two file system types",
            all_capabilities(),
            snapshot(assigned_claim("fast"), with(&[("csi.storage.k8s.io/fstype", "xfs"), ("fsType", "ext4")])),
            refuse("class \"fast\" gives the file system type more than once"),
        ),
        (
            "a secret without a namespace",
            all_capabilities(),
            snapshot(assigned_claim("fast"), with(&[("csi.storage.k8s.io/node-stage-secret-name", "s")])),
            refuse("class gives only one of name and namespace of its node-stage-secret"),
        ),
    ] {
        assert_eq!(claim(&snapshot, &driver, &ProvisionPolicy::default()), want, "{case}");
    }
}

/// A claim that is deleted while it carries the finalizer disappears only when no volume is being created for it.
#[test]
fn the_finalizer_is_removed_when_the_outcome_is_certain() {
    let claim_with = |deleting: bool, edit: fn(&mut PersistentVolumeClaim)| {
        let mut c = assigned_claim("fast");
        c.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
        c.metadata.deletion_timestamp = deleting.then(|| build::time(1));
        edit(&mut c);
        c
    };
    let plain = |deleting| claim_with(deleting, |_| {});
    let point: fn(&mut PersistentVolumeClaim) = |c| c.spec.as_mut().unwrap().volume_name = Some("v".to_owned());
    let of_another: fn(&mut PersistentVolumeClaim) =
        |c| build::annotate(&mut c.metadata, annotation::STORAGE_PROVISIONER, "other");
    let free = |deleting| {
        let mut c = plain(deleting);
        c.metadata.finalizers = None;
        c
    };
    let inherited = |snapshot: ClaimSnapshot| ClaimSnapshot { inherited: true, ..snapshot };
    let existing = |snapshot: ClaimSnapshot| ClaimSnapshot { volume_exists: true, ..snapshot };
    let pending_plan = Arc::new(plan(&snapshot(assigned_claim("fast"), fast())).unwrap());
    let pending = |snapshot: ClaimSnapshot| ClaimSnapshot { pending: Some(pending_plan.clone()), ..snapshot };
    let mut waiting = build::class("fast", DRIVER);
    waiting.volume_binding_mode = Some(claim::WAIT_FOR_FIRST_CONSUMER.to_owned());
    let selecting = claim_with(true, |c| c.spec.as_mut().unwrap().selector = Some(Default::default()));
    for (case, snapshot, want) in [
        (
            "bound by a binder that does not know the finalizer",
            existing(snapshot(claim_with(false, point), fast())),
            "remove finalizer",
        ),
        ("bound to another volume, never called", snapshot(claim_with(false, point), fast()), "remove finalizer"),
        ("bound to another volume, a call pending", pending(snapshot(claim_with(false, point), fast())), "repeat"),
        ("bound to another volume, inherited", inherited(snapshot(claim_with(false, point), fast())), "provision"),
        (
            "not deleted, volume exists: the binder removes the finalizer",
            existing(snapshot(plain(false), fast())),
            "nothing",
        ),
        ("deleting, volume exists", existing(snapshot(plain(true), fast())), "remove finalizer"),
        ("deleting, never called", snapshot(plain(true), fast()), "remove finalizer"),
        ("deleting, without finalizer", snapshot(free(true), fast()), "nothing"),
        (
            "deleting, finalizer of another driver's provisioner",
            snapshot(claim_with(true, of_another), fast()),
            "nothing",
        ),
        ("the same, inherited", inherited(snapshot(claim_with(true, of_another), fast())), "nothing"),
        ("deleting, without finalizer, inherited", inherited(snapshot(free(true), fast())), "nothing"),
        ("deleting, a call pending", pending(snapshot(plain(true), fast())), "repeat"),
        (
            "deleting, a call pending, volume exists",
            existing(pending(snapshot(plain(true), fast()))),
            "remove finalizer",
        ),
        ("deleting, inherited", inherited(snapshot(plain(true), fast())), "provision"),
        ("deleting, inherited, volume exists", existing(inherited(snapshot(plain(true), fast()))), "remove finalizer"),
        ("deleting, inherited, would be refused", inherited(snapshot(selecting, fast())), "remove finalizer"),
        ("deleting, inherited, no node selected", inherited(snapshot(plain(true), Some(waiting))), "remove finalizer"),
        ("deleting, inherited, class missing", inherited(snapshot(plain(true), None)), "wait"),
        ("not deleted, inherited", inherited(snapshot(plain(false), fast())), "provision"),
    ] {
        let got = match decide(&snapshot) {
            ClaimDecision::Nothing => "nothing",
            ClaimDecision::RemoveFinalizer => "remove finalizer",
            ClaimDecision::RepeatCall(_) => "repeat",
            ClaimDecision::Provision(_) => "provision",
            ClaimDecision::Wait(WaitReason::OutcomeUnknown) => "wait",
            ClaimDecision::Wait(_) | ClaimDecision::Refuse(_) | ClaimDecision::Compete => "other",
        };
        assert_eq!(got, want, "{case}");
    }
}

#[test]
fn a_pending_call_is_repeated_unchanged_until_its_volume_exists() {
    let pending = Arc::new(plan(&snapshot(assigned_claim("fast"), fast())).unwrap());
    let mut elsewhere = assigned_claim("fast");
    elsewhere.spec.as_mut().unwrap().volume_name = Some("another".to_owned());
    for (case, snapshot) in [
        ("its class is missing", snapshot(assigned_claim("fast"), None)),
        ("its class has other parameters now", snapshot(assigned_claim("fast"), with(&[("tier", "new")]))),
        ("its claim points at another volume", snapshot(elsewhere, fast())),
    ] {
        let snapshot = ClaimSnapshot { pending: Some(pending.clone()), ..snapshot };
        assert_eq!(decide(&snapshot), ClaimDecision::RepeatCall(pending.clone()), "{case}");
        let recorded = ClaimSnapshot { volume_exists: true, ..snapshot };
        assert_eq!(decide(&recorded), ClaimDecision::Nothing, "{case}, and the volume exists");
    }
}

#[test]
fn a_noop_claim_needs_nothing_in_any_context() {
    let mut noops = 0;
    for bits in 0..64_u32 {
        let has = |bit: u32| bits & (1 << bit) != 0;
        let mut c = if has(0) { assigned_claim("fast") } else { build::claim("ns", "c", Some("fast"), "5Gi") };
        c.spec.as_mut().unwrap().volume_name = has(1).then(|| "v".to_owned());
        c.metadata.deletion_timestamp = has(2).then(|| build::time(1));
        let finalizers =
            [(3, finalizer::PROVISIONING), (4, finalizer::CLONING_PROTECTION)].into_iter().filter(|(bit, _)| has(*bit));
        c.metadata.finalizers = Some(finalizers.map(|(_, name)| name.to_owned()).collect());
        let noop = is_noop(&Arc::new(c.clone()), &all_capabilities(), &ProvisionPolicy::default());
        noops += u32::from(noop);
        let source_decision = source_finalizer(&c, &[]);
        let decision = claim(
            &ClaimSnapshot { volume_exists: has(5), ..snapshot(c, fast()) },
            &all_capabilities(),
            &ProvisionPolicy::default(),
        );
        if noop {
            assert_eq!(
                (decision, source_decision),
                (ClaimDecision::Nothing, SourceFinalizerDecision::Nothing),
                "{bits:b}"
            );
        }
    }
    assert!(noops > 0);
    let mut served = assigned_claim("fast");
    served.spec.as_mut().unwrap().volume_name = Some("v".to_owned());
    for (case, c, want) in [
        ("no provisioner is named", build::claim("ns", "c", Some("fast"), "5Gi"), true),
        ("assigned", assigned_claim("fast"), false),
        ("served", served, true),
    ] {
        assert_eq!(is_noop(&Arc::new(c), &all_capabilities(), &ProvisionPolicy::default()), want, "{case}");
    }
}

#[test]
fn delays_turn_a_provision_or_an_attempt_into_a_wait() {
    let delayed = |delays: RetryDelays, edit: fn(&mut PersistentVolumeClaim)| {
        let mut c = assigned_claim("fast");
        edit(&mut c);
        ClaimSnapshot { delays, ..snapshot(c, fast()) }
    };
    let unchanged: fn(&mut PersistentVolumeClaim) = |_| {};
    let deleting: fn(&mut PersistentVolumeClaim) = |c| {
        c.metadata.deletion_timestamp = Some(build::time(1));
        c.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
    };
    let second = Duration::from_secs(1);
    let infeasible = RetryDelays { infeasible: Some(second), ..RetryDelays::default() };
    assert_eq!(decide(&delayed(infeasible, unchanged)), ClaimDecision::Wait(WaitReason::Infeasible(second)));
    let local = LocalNode { name: "n1".to_owned(), topology: None, immediate: true };
    let policy = ProvisionPolicy { local: Some(local), ..ProvisionPolicy::default() };
    for (case, competition, edit, want) in [
        ("first reconcile", Competition::NotScheduled, unchanged, ClaimDecision::Wait(WaitReason::ForOtherNodes(None))),
        (
            "before the attempt",
            Competition::Scheduled(second),
            unchanged,
            ClaimDecision::Wait(WaitReason::ForOtherNodes(Some(second))),
        ),
        ("the attempt is due", Competition::Due, unchanged, ClaimDecision::Compete),
        ("deleted before the attempt", Competition::Scheduled(second), deleting, ClaimDecision::RemoveFinalizer),
    ] {
        let snapshot = delayed(RetryDelays { competition, ..RetryDelays::default() }, edit);
        assert_eq!(claim(&snapshot, &all_capabilities(), &policy), want, "{case}");
    }
}
