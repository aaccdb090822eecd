//! Tables of the binder's decisions about claims, and of those that concern claims and volumes.

mod volumes;

use std::sync::Arc;

use cleat_api::claim as about;
use cleat_api::well_known::{annotation, finalizer};
use cleat_testing::build;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::ClaimWaitReason as Reason;
use super::ReferencedClaim::{Exists, Gone, Unset};
use super::*;

fn snapshot(claim: PersistentVolumeClaim) -> ClaimSnapshot {
    ClaimSnapshot::minimal(Arc::new(claim), None)
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

fn with_class(mut snapshot: ClaimSnapshot, class: Option<StorageClass>) -> ClaimSnapshot {
    snapshot.class = Some(class.map(Arc::new));
    snapshot
}

fn delayed_class() -> StorageClass {
    let mut class = build::class("wait", build::DRIVER);
    class.volume_binding_mode = Some(about::WAIT_FOR_FIRST_CONSUMER.to_owned());
    class
}

fn named(claim: PersistentVolumeClaim, volume: PersistentVolume) -> ClaimSnapshot {
    ClaimSnapshot { named: Some(Arc::new(volume)), ..snapshot(claim) }
}

#[test]
fn a_claim_without_a_volume_waits_or_requests_one() {
    use ClaimBindDecision::{AssignClass, RequestProvisioning, Wait};
    let plain = || build::claim("ns", "c", None, "1Gi");
    let classed = |name: &str| build::claim("ns", "c", Some(name), "1Gi");
    let annotated = |mut c: PersistentVolumeClaim, key: &str, value: &str| {
        build::annotate(&mut c.metadata, key, value);
        c
    };
    let request = |annotate| RequestProvisioning { provisioner: build::DRIVER.to_owned(), annotate, hold: false };
    let request_and_hold = RequestProvisioning { provisioner: build::DRIVER.to_owned(), annotate: true, hold: true };
    let holding = |snapshot: ClaimSnapshot| ClaimSnapshot { provisioner_holds: true, ..snapshot };
    let cloning = {
        let mut c = classed("fast");
        let source = serde_json::json!({"kind": "PersistentVolumeClaim", "name": "src"});
        c.spec.as_mut().unwrap().data_source = Some(serde_json::from_value(source).unwrap());
        c
    };
    let deleting = {
        let mut c = classed("fast");
        c.metadata.deletion_timestamp = Some(build::time(9));
        c
    };
    let fast = || Some(build::class("fast", build::DRIVER));
    let scheduled = annotated(classed("wait"), annotation::SELECTED_NODE, "n1");
    let requested = annotated(classed("fast"), annotation::STORAGE_PROVISIONER, build::DRIVER);
    let classless =
        claim(&ClaimSnapshot { candidates: vec![Arc::new(build::volume("v", "", "1Gi"))], ..snapshot(plain()) });
    assert!(matches!(classless, ClaimBindDecision::Bind(_)), "{classless:?}");
    for (case, snapshot, want) in [
        ("no class and no default", snapshot(plain()), Wait(Reason::NoVolumeAndNoClass)),
        ("class explicitly none", snapshot(classed("")), Wait(Reason::NoVolumeAndNoClass)),
        (
            "the default class was created later",
            ClaimSnapshot { default_class: Some("std".to_owned()), ..snapshot(plain()) },
            AssignClass("std".to_owned()),
        ),
        (
            "the class does not exist",
            with_class(snapshot(classed("fast")), None),
            Wait(Reason::ClassMissing("fast".to_owned())),
        ),
        (
            "the class has no provisioner",
            with_class(snapshot(classed("l")), Some(build::class("l", "kubernetes.io/no-provisioner"))),
            Wait(Reason::NotDynamic("kubernetes.io/no-provisioner".to_owned())),
        ),
        (
            "the class names a migrated plugin",
            with_class(snapshot(classed("ebs")), Some(build::class("ebs", "kubernetes.io/aws-ebs"))),
            RequestProvisioning { provisioner: "ebs.csi.aws.com".to_owned(), annotate: true, hold: false },
        ),
        (
            "the class names a plugin that was not migrated",
            with_class(snapshot(classed("old")), Some(build::class("old", "kubernetes.io/glusterfs"))),
            Wait(Reason::NotDynamic("kubernetes.io/glusterfs".to_owned())),
        ),
        (
            "an available volume without a class is preferred to the default class",
            ClaimSnapshot {
                default_class: Some("std".to_owned()),
                candidates: vec![Arc::new(build::volume("v", "", "1Gi"))],
                ..snapshot(plain())
            },
            classless.clone(),
        ),
        ("not requested yet", with_class(snapshot(classed("fast")), fast()), request(true)),
        ("requested already", with_class(snapshot(requested), fast()), request(false)),
        ("the provisioner holds claims", holding(with_class(snapshot(classed("fast")), fast())), request_and_hold),
        ("the provisioner checks the data source first", holding(with_class(snapshot(cloning), fast())), request(true)),
        (
            "a claim that is being deleted gets no finalizer",
            holding(with_class(snapshot(deleting), fast())),
            request(true),
        ),
        (
            "no consumer yet",
            with_class(snapshot(classed("wait")), Some(delayed_class())),
            Wait(Reason::ForFirstConsumer),
        ),
        (
            "a consumer without a node",
            ClaimSnapshot {
                consumers: vec!["p".to_owned()],
                ..with_class(snapshot(classed("wait")), Some(delayed_class()))
            },
            Wait(Reason::ForPods(vec!["p".to_owned()])),
        ),
        (
            "the scheduler chooses among available volumes",
            ClaimSnapshot {
                candidates: vec![Arc::new(build::volume("v", "wait", "1Gi"))],
                ..with_class(snapshot(classed("wait")), Some(delayed_class()))
            },
            Wait(Reason::ForFirstConsumer),
        ),
        ("the scheduler chose a node", with_class(snapshot(scheduled), Some(delayed_class())), request(true)),
    ] {
        assert_eq!(claim(&snapshot), want, "{case}");
    }
}

#[test]
fn a_claim_that_names_its_volume_gets_that_one_or_none() {
    let c = || naming(build::claim("ns", "c", Some("fast"), "1Gi"), "v");
    let other = build::claim("ns", "other", None, "1Gi");
    let v = || build::volume("v", "fast", "1Gi");
    let small = build::volume("v", "fast", "1Mi");
    for (case, snapshot, want) in [
        ("the volume does not exist yet", snapshot(c()), Reason::NamedVolumeMissing),
        (
            "the volume is reserved for another claim",
            named(c(), reserved(v(), &other, Some("uid-other"))),
            Reason::NamedVolumeTaken("v".to_owned()),
        ),
        (
            "the volume is reserved for an earlier claim of the same name",
            named(c(), reserved(v(), &c(), Some("uid-before"))),
            Reason::NamedVolumeTaken("v".to_owned()),
        ),
        (
            "the volume is too small",
            named(c(), small),
            Reason::NamedVolumeUnfit { volume: "v".to_owned(), why: "requested PV is too small".to_owned() },
        ),
    ] {
        assert_eq!(claim(&snapshot), ClaimBindDecision::Wait(want), "{case}");
    }
}

#[test]
fn an_interrupted_bind_continues_with_the_missing_writes() {
    let free = build::claim("ns", "c", Some("fast"), "1Gi");
    let v = build::volume("v", "fast", "1Gi");
    let of_uid = reserved(v.clone(), &free, Some("uid-c"));
    let by_name = reserved(v.clone(), &free, None);
    let mut marked = of_uid.clone();
    marked.status.as_mut().unwrap().phase = Some("Bound".to_owned());
    let (done, _) = build::bound(free.clone(), v.clone());
    let mut pointed = done.clone();
    pointed.status.as_mut().unwrap().phase = Some("Pending".to_owned());
    let offered = |claim: &PersistentVolumeClaim, volume: &PersistentVolume| ClaimSnapshot {
        candidates: vec![Arc::new(volume.clone())],
        ..snapshot(claim.clone())
    };
    let naming_volume = naming(free.clone(), "v");
    let (us, user) = (Some(ChosenBy::Controller), Some(ChosenBy::User));
    for (case, snapshot, reserve_volume, mark_volume, point_claim, mark_claim) in [
        ("nothing written", offered(&free, &v), us, true, us, true),
        ("the user reserved the volume by name", offered(&free, &by_name), user, true, us, true),
        ("the provisioner reserved it", offered(&free, &of_uid), None, true, us, true),
        ("volume marked", offered(&free, &marked), None, false, us, true),
        ("claim pointed", named(pointed, marked.clone()), None, false, None, true),
        ("the user named the volume", named(naming_volume, v.clone()), us, true, user, true),
        ("the volume lost its reservation", named(done.clone(), v.clone()), us, true, None, false),
    ] {
        match claim(&snapshot) {
            ClaimBindDecision::Bind(b) => assert_eq!(
                (b.reserve_volume, b.mark_volume, b.point_claim, b.mark_claim),
                (reserve_volume, mark_volume, point_claim, mark_claim),
                "{case}"
            ),
            other => panic!("{case}: {other:?}"),
        }
    }
    assert_eq!(claim(&named(done.clone(), marked.clone())), ClaimBindDecision::Settled);
    marked.spec.as_mut().unwrap().access_modes = Some(vec!["ReadWriteMany".to_owned()]);
    let ClaimBindDecision::Bind(plan) = claim(&named(done, marked)) else { panic!("settled") };
    assert!(plan.mark_claim, "the volume's modes changed");
}

#[test]
fn a_bound_claim_is_lost_with_its_volume() {
    let (c, v) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
    let mut nameless = c.clone();
    nameless.spec.as_mut().unwrap().volume_name = None;
    let mut lost = c.clone();
    lost.status.as_mut().unwrap().phase = Some("Lost".to_owned());
    let foreign = reserved(v, &c, Some("uid-else"));
    for (case, snapshot, want) in [
        ("the volume is gone", snapshot(c.clone()), ClaimBindDecision::Lose(Loss::VolumeGone)),
        ("it names no volume", snapshot(nameless), ClaimBindDecision::Lose(Loss::NoVolumeNamed)),
        ("the volume is reserved for another claim", named(c, foreign), ClaimBindDecision::Lose(Loss::VolumeOfAnother)),
        ("already Lost", snapshot(lost), ClaimBindDecision::Settled),
    ] {
        assert_eq!(claim(&snapshot), want, "{case}");
    }
}

#[test]
fn every_mismatch_of_a_named_volume_is_reported() {
    let claim_with = |edit: fn(&mut PersistentVolumeClaim)| {
        let mut c = naming(build::claim("ns", "c", Some("fast"), "1Gi"), "v");
        edit(&mut c);
        c
    };
    let v = |edit: fn(&mut PersistentVolume)| {
        let mut v = build::volume("v", "fast", "1Gi");
        edit(&mut v);
        v
    };
    let fits = claim_with(|_| ());
    for (claim_, volume, why) in [
        (
            fits.clone(),
            v(|v| v.metadata.deletion_timestamp = Some(build::time(1))),
            "the volume is marked for deletion \"v\"",
        ),
        (
            claim_with(|c| *c = naming(build::claim("ns", "c", Some("fast"), "2Gi"), "v")),
            v(|_| ()),
            "requested PV is too small",
        ),
        (
            claim_with(|c| c.spec.as_mut().unwrap().storage_class_name = None),
            v(|_| ()),
            "storageClassName does not match",
        ),
        (
            claim_with(|c| c.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned())),
            v(|_| ()),
            "volumeAttributesClassName does not match",
        ),
        (
            fits.clone(),
            v(|v| v.spec.as_mut().unwrap().volume_mode = Some("Block".to_owned())),
            "incompatible volumeMode",
        ),
        (
            fits.clone(),
            v(|v| v.spec.as_mut().unwrap().access_modes = Some(vec!["ReadOnlyMany".to_owned()])),
            "incompatible accessMode",
        ),
    ] {
        let want = Reason::NamedVolumeUnfit { volume: "v".to_owned(), why: why.to_owned() };
        assert_eq!(claim(&named(claim_, volume)), ClaimBindDecision::Wait(want));
    }
    assert!(matches!(claim(&named(fits, v(|_| ()))), ClaimBindDecision::Bind(_)));
}

#[test]
fn a_volume_reserved_for_the_claim_that_names_it_is_bound_whatever_its_class() {
    let c = naming(build::claim("ns", "c", Some("fast"), "1Gi"), "v");
    let by_name = reserved(build::volume("v", "slow", "1Mi"), &c, None);
    assert!(matches!(claim(&named(c, by_name)), ClaimBindDecision::Bind(_)));
}

#[test]
fn a_lost_claim_is_bound_again_when_its_volume_returns() {
    let (c, v) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
    let mut lost = c;
    lost.status.as_mut().unwrap().phase = Some("Lost".to_owned());
    let mut free = v.clone();
    free.spec.as_mut().unwrap().claim_ref = None;
    for (case, volume, reserve_volume) in [
        ("the volume exists again", v, None),
        ("the volume exists again, without a claimRef", free, Some(ChosenBy::Controller)),
    ] {
        let ClaimBindDecision::Bind(plan) = claim(&named(lost.clone(), volume)) else { panic!("{case}") };
        assert!(plan.mark_claim, "{case}");
        assert_eq!(plan.reserve_volume, reserve_volume, "{case}");
    }
}

#[test]
fn the_migrated_driver_is_recorded_on_claim_and_volume() {
    const EBS: &str = "ebs.csi.aws.com";
    let keys = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA];
    for (case, key, plugin, migrated_to, want) in [
        (
            "requested from the migrated plugin",
            keys[0],
            "kubernetes.io/aws-ebs",
            None,
            Some(MigrationAnnotation::Set(EBS)),
        ),
        (
            "requested with the beta annotation",
            keys[1],
            "kubernetes.io/aws-ebs",
            None,
            Some(MigrationAnnotation::Set(EBS)),
        ),
        (
            "the annotation names a wrong driver",
            keys[0],
            "kubernetes.io/aws-ebs",
            Some("x"),
            Some(MigrationAnnotation::Set(EBS)),
        ),
        ("recorded already", keys[0], "kubernetes.io/aws-ebs", Some(EBS), None),
        ("requested from the driver", keys[0], EBS, None, None),
        ("the plugin was not migrated", keys[0], EBS, Some(EBS), Some(MigrationAnnotation::Remove)),
    ] {
        let mut c = build::claim("ns", "c", None, "1Gi");
        build::annotate(&mut c.metadata, key, plugin);
        migrated_to.into_iter().for_each(|driver| build::annotate(&mut c.metadata, annotation::MIGRATED_TO, driver));
        let got = match claim(&snapshot(c)) {
            ClaimBindDecision::UpdateMigration(migration) => Some(migration),
            _ => None,
        };
        assert_eq!(got, want, "{case}");
    }
    let provisioned_by = |plugin: Option<&str>, migrated_to: Option<&str>, held: bool| {
        let mut v = build::volume("v", "", "1Gi");
        plugin.into_iter().for_each(|by| build::annotate(&mut v.metadata, annotation::PROVISIONED_BY, by));
        migrated_to.into_iter().for_each(|driver| build::annotate(&mut v.metadata, annotation::MIGRATED_TO, driver));
        v.metadata.finalizers = held.then(|| vec![finalizer::IN_TREE_PV_CONTROLLER.to_owned()]);
        v
    };
    let update = VolumeBindDecision::UpdateMigration;
    let plugin = Some("kubernetes.io/aws-ebs");
    for (case, v, want) in [
        (
            "provisioned by the migrated plugin",
            provisioned_by(plugin, None, false),
            update(MigrationAnnotation::Set(EBS)),
        ),
        (
            "the plugin's finalizer is still there",
            provisioned_by(plugin, Some(EBS), true),
            update(MigrationAnnotation::Set(EBS)),
        ),
        ("recorded already", provisioned_by(plugin, Some(EBS), false), VolumeBindDecision::Settled),
        (
            "provisioned by a plugin that was not migrated",
            provisioned_by(Some("x"), Some(EBS), false),
            update(MigrationAnnotation::Remove),
        ),
        ("created by an administrator", provisioned_by(None, Some(EBS), false), VolumeBindDecision::Settled),
        (
            "the finalizer of a plugin that was not migrated",
            provisioned_by(Some("x"), None, true),
            VolumeBindDecision::Settled,
        ),
    ] {
        assert_eq!(volume(&v, &Unset), want, "{case}");
    }
}

#[test]
fn a_bind_plan_tells_concurrent_writes_and_use() {
    let c = build::claim("ns", "c", Some("wait"), "1Gi");
    let bound = |finalizers: &[&str], in_use: bool| {
        let mut v = reserved(build::volume("v", "wait", "1Gi"), &c, Some("uid-c"));
        v.metadata.finalizers = Some(finalizers.iter().map(ToString::to_string).collect());
        let snapshot = ClaimSnapshot {
            candidates: vec![Arc::new(v)],
            in_use,
            ..with_class(snapshot(c.clone()), Some(delayed_class()))
        };
        match claim(&snapshot) {
            ClaimBindDecision::Bind(plan) => plan,
            other => panic!("a reserved volume must be bound: {other:?}"),
        }
    };
    assert!(bound(&[finalizer::PROVISIONER], false).concurrent_writes, "the finalizer keeps the volume");
    assert!(!bound(&[finalizer::PV_PROTECTION], false).concurrent_writes);
    assert!(bound(&[], true).in_use && !bound(&[], false).in_use);
}

#[test]
fn a_bound_pair_without_missing_writes_is_settled() {
    let (c, v) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
    let is_settled = |c: &PersistentVolumeClaim, v: Option<&PersistentVolume>| {
        let complete = ClaimSnapshot::minimal(Arc::new(c.clone()), v.cloned().map(Arc::new));
        is_bind_completed(c) && claim(&complete) == ClaimBindDecision::Settled
    };
    let mut marked = v.clone();
    marked.status.as_mut().unwrap().phase = Some("Available".to_owned());
    let mut pending = c.clone();
    pending.status.as_mut().unwrap().phase = Some("Pending".to_owned());
    let mut open = c.clone();
    open.metadata.annotations = None;
    for (case, claim, volume, want) in [
        ("both are bound", &c, Some(&v), true),
        ("its volume is not in the cache", &c, None, false),
        ("its volume is not Bound", &c, Some(&marked), false),
        ("the claim is not Bound", &pending, Some(&v), false),
        ("it was never bound", &open, Some(&v), false),
    ] {
        assert_eq!(is_settled(claim, volume), want, "{case}");
    }
    let free = build::claim("ns", "c", None, "1Gi");
    let mut released = v.clone();
    released.status.as_mut().unwrap().phase = Some("Released".to_owned());
    for (case, v, claim, want) in [
        ("bound", &v, Exists(Arc::new(c.clone())), true),
        ("its claim names no volume yet", &marked, Exists(Arc::new(free)), true),
        ("its claim is Bound", &marked, Exists(Arc::new(c)), false),
        ("its claim is not in the cache", &v, Gone, false),
        ("released", &released, Gone, true),
    ] {
        assert_eq!(volume(v, &claim).is_noop(), want, "{case}");
    }
}

#[test]
fn a_claim_is_not_reconciled_again_after_its_own_request_for_provisioning() {
    let plain = build::claim("ns", "c", Some("fast"), "1Gi");
    let requested = |by: &str| {
        let mut c = plain.clone();
        build::annotate(&mut c.metadata, annotation::STORAGE_PROVISIONER, by);
        build::annotate(&mut c.metadata, annotation::STORAGE_PROVISIONER_BETA, by);
        c.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
        c
    };
    let with = |edit: fn(&mut PersistentVolumeClaim)| {
        let mut c = requested(build::DRIVER);
        edit(&mut c);
        c
    };
    for (case, old, new, want) in [
        ("requested", plain.clone(), requested(build::DRIVER), true),
        ("requested from another provisioner", plain.clone(), requested("other"), false),
        ("requested before", requested(build::DRIVER), requested(build::DRIVER), false),
        ("not requested", plain.clone(), plain.clone(), false),
        (
            "a node was selected",
            plain.clone(),
            with(|c| build::annotate(&mut c.metadata, annotation::SELECTED_NODE, "n")),
            false,
        ),
        (
            "it names a volume",
            plain.clone(),
            with(|c| c.spec.as_mut().unwrap().volume_name = Some("v".to_owned())),
            false,
        ),
        ("it is being deleted", plain.clone(), with(|c| c.metadata.deletion_timestamp = Some(build::time(1))), false),
        (
            "its phase changed",
            plain.clone(),
            with(|c| c.status.as_mut().unwrap().phase = Some("Lost".to_owned())),
            false,
        ),
        (
            "the plugin was migrated",
            plain.clone(),
            with(|c| build::annotate(&mut c.metadata, annotation::MIGRATED_TO, "x")),
            false,
        ),
    ] {
        let old = with_class(snapshot(old), Some(build::class("fast", build::DRIVER)));
        let old = ClaimSnapshot { provisioner_holds: true, ..old };
        assert_eq!(is_request_written(&old, &Arc::new(new)), want, "{case}");
    }
}
