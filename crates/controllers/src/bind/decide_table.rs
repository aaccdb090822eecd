//! The binder's decisions, case by case.

use std::sync::Arc;

use cleat_api::claim as about;
use cleat_api::well_known::{annotation, finalizer};
use cleat_testing::build;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::decide::*;

fn seen(claim: PersistentVolumeClaim) -> ClaimSeen {
    ClaimSeen::complete(Arc::new(claim), None)
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
    class.volume_binding_mode = Some(about::WAIT_FOR_FIRST_CONSUMER.to_owned());
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
    let classless = claim(&ClaimSeen { candidates: vec![Arc::new(build::volume("v", "", "1Gi"))], ..seen(plain()) });
    assert!(matches!(classless, ClaimDecision::Bind(_)), "{classless:?}");
    for (case, seen, want) in [
        ("no class and no default", seen(plain()), Waits(Wait::NoVolumeAndNoClass)),
        ("class explicitly none", seen(classed("")), Waits(Wait::NoVolumeAndNoClass)),
        (
            "the default class appeared later",
            ClaimSeen { default_class: Some("std".to_owned()), ..seen(plain()) },
            AssignClass("std".to_owned()),
        ),
        ("a class nobody made", with_class(seen(classed("fast")), None), Waits(Wait::ClassMissing("fast".to_owned()))),
        (
            "a class for administrators' volumes",
            with_class(seen(classed("l")), Some(build::class("l", "kubernetes.io/no-provisioner"))),
            Waits(Wait::NotDynamic("kubernetes.io/no-provisioner".to_owned())),
        ),
        (
            "a class of a plugin that moved",
            with_class(seen(classed("ebs")), Some(build::class("ebs", "kubernetes.io/aws-ebs"))),
            RequestProvisioning { provisioner: "ebs.csi.aws.com".to_owned(), annotate: true, hold: false },
        ),
        (
            "a class of a plugin that nobody took over",
            with_class(seen(classed("old")), Some(build::class("old", "kubernetes.io/glusterfs"))),
            Waits(Wait::NotDynamic("kubernetes.io/glusterfs".to_owned())),
        ),
        (
            "a free volume without a class wins over the default class",
            ClaimSeen {
                default_class: Some("std".to_owned()),
                candidates: vec![Arc::new(build::volume("v", "", "1Gi"))],
                ..seen(plain())
            },
            classless.clone(),
        ),
        ("not asked yet", with_class(seen(classed("fast")), fast()), ask(true)),
        ("asked already", with_class(seen(asked), fast()), ask(false)),
        ("the provisioner holds claims", holding(with_class(seen(classed("fast")), fast())), ask_and_hold),
        ("it looks at the source first", holding(with_class(seen(copying), fast())), ask(true)),
        ("a claim that goes cannot be held", holding(with_class(seen(going), fast())), ask(true)),
        ("no consumer yet", with_class(seen(classed("wait")), Some(waiting_class())), Waits(Wait::ForFirstConsumer)),
        (
            "a consumer without a node",
            ClaimSeen { consumers: vec!["p".to_owned()], ..with_class(seen(classed("wait")), Some(waiting_class())) },
            Waits(Wait::ForPods(vec!["p".to_owned()])),
        ),
        (
            "a free volume is for the scheduler to choose",
            ClaimSeen {
                candidates: vec![Arc::new(build::volume("v", "wait", "1Gi"))],
                ..with_class(seen(classed("wait")), Some(waiting_class()))
            },
            Waits(Wait::ForFirstConsumer),
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
        ("the user reserved the volume by name", offered(&free, &by_name), user, true, Some(Point::AsController), true),
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
    let mut kept = with("Available", &made);
    kept.spec.as_mut().unwrap().persistent_volume_reclaim_policy = Some("Retain".to_owned());
    let mut block = c.clone();
    block.spec.as_mut().unwrap().volume_mode = Some(about::BLOCK.to_owned());
    use VolumeDecision::{Fail, LeaveToClaim, SetPhase, Settled, Unbind as Give, WrongMode};
    for (case, v, owner, want) in [
        ("new and free", with("Pending", &[]), Owner::Nobody, SetPhase("Available")),
        ("free", with("Available", &[]), Owner::Nobody, Settled),
        ("made for a claim that does not point here yet", with("Pending", &made), owner(&c), LeaveToClaim),
        ("made for a claim of another mode", with("Pending", &made), owner(&block), WrongMode(Arc::new(block.clone()))),
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
        ("its claim took another, it was made for it", with("Pending", &made), owner(&elsewhere), SetPhase("Released")),
        ("that, and it is released already", with("Released", &made), owner(&elsewhere), Settled),
        ("that, and it could not be deleted", with("Failed", &made), owner(&elsewhere), Settled),
        ("its claim took another, it was made to be kept", kept, owner(&elsewhere), Give(Unbind::KeepName)),
    ] {
        assert_eq!(volume(&v, &owner), want, "{case}");
    }
}

#[test]
fn every_misfit_of_a_named_volume_is_told() {
    let asks = |edit: fn(&mut PersistentVolumeClaim)| {
        let mut c = naming(build::claim("ns", "c", Some("fast"), "1Gi"), "v");
        edit(&mut c);
        c
    };
    let v = |edit: fn(&mut PersistentVolume)| {
        let mut v = build::volume("v", "fast", "1Gi");
        edit(&mut v);
        v
    };
    let fits = asks(|_| ());
    for (claim_, volume, why) in [
        (
            fits.clone(),
            v(|v| v.metadata.deletion_timestamp = Some(build::time(1))),
            "the volume is marked for deletion \"v\"",
        ),
        (
            asks(|c| *c = naming(build::claim("ns", "c", Some("fast"), "2Gi"), "v")),
            v(|_| ()),
            "requested PV is too small",
        ),
        (asks(|c| c.spec.as_mut().unwrap().storage_class_name = None), v(|_| ()), "storageClassName does not match"),
        (
            asks(|c| c.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned())),
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
        let want = Wait::NamedVolumeUnfit { volume: "v".to_owned(), why: why.to_owned() };
        assert_eq!(claim(&named(claim_, volume)), ClaimDecision::Wait(want));
    }
    assert!(matches!(claim(&named(fits, v(|_| ()))), ClaimDecision::Bind(_)));
}

#[test]
fn a_volume_meant_for_the_claim_that_names_it_is_bound_without_a_look_at_its_class() {
    let c = naming(build::claim("ns", "c", Some("fast"), "1Gi"), "v");
    let by_name = reserved(build::volume("v", "slow", "1Mi"), &c, None);
    assert!(matches!(claim(&named(c, by_name)), ClaimDecision::Bind(_)));
}

#[test]
fn a_lost_claim_is_found_again_with_its_volume() {
    let (c, v) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
    let mut lost = c;
    lost.status.as_mut().unwrap().phase = Some("Lost".to_owned());
    let mut free = v.clone();
    free.spec.as_mut().unwrap().claim_ref = None;
    for (case, volume, reserve) in [("it is back", v, None), ("it is back and free", free, Some(Reserve::AsController))]
    {
        let ClaimDecision::Bind(binding) = claim(&named(lost.clone(), volume)) else { panic!("{case}") };
        assert!(binding.mark_claim, "{case}");
        assert_eq!(binding.reserve, reserve, "{case}");
    }
}

#[test]
fn who_took_over_from_a_plugin_is_told_on_claim_and_volume() {
    const EBS: &str = "ebs.csi.aws.com";
    let keys = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA];
    for (case, key, plugin, said, want) in [
        ("asked of the old plugin", keys[0], "kubernetes.io/aws-ebs", None, Some(Handover::To(EBS))),
        ("asked by the older annotation", keys[1], "kubernetes.io/aws-ebs", None, Some(Handover::To(EBS))),
        ("the wrong driver", keys[0], "kubernetes.io/aws-ebs", Some("x"), Some(Handover::To(EBS))),
        ("told already", keys[0], "kubernetes.io/aws-ebs", Some(EBS), None),
        ("asked of the driver", keys[0], EBS, None, None),
        ("nobody has moved", keys[0], EBS, Some(EBS), Some(Handover::Nobody)),
    ] {
        let mut c = build::claim("ns", "c", None, "1Gi");
        build::annotate(&mut c.metadata, key, plugin);
        said.into_iter().for_each(|driver| build::annotate(&mut c.metadata, annotation::MIGRATED_TO, driver));
        let got = match claim(&seen(c)) {
            ClaimDecision::HandOver(to) => Some(to),
            _ => None,
        };
        assert_eq!(got, want, "{case}");
    }
    let made_by = |plugin: Option<&str>, said: Option<&str>, held: bool| {
        let mut v = build::volume("v", "", "1Gi");
        plugin.into_iter().for_each(|by| build::annotate(&mut v.metadata, annotation::PROVISIONED_BY, by));
        said.into_iter().for_each(|driver| build::annotate(&mut v.metadata, annotation::MIGRATED_TO, driver));
        v.metadata.finalizers = held.then(|| vec![finalizer::IN_TREE_PV_CONTROLLER.to_owned()]);
        v
    };
    let over = |to| VolumeDecision::HandOver(to);
    let plugin = Some("kubernetes.io/aws-ebs");
    for (case, v, want) in [
        ("made by the old plugin", made_by(plugin, None, false), over(Handover::To(EBS))),
        ("the old plugin holds it", made_by(plugin, Some(EBS), true), over(Handover::To(EBS))),
        ("told already", made_by(plugin, Some(EBS), false), VolumeDecision::Settled),
        ("made by nobody who moved", made_by(Some("x"), Some(EBS), false), over(Handover::Nobody)),
        ("made by an administrator", made_by(None, Some(EBS), false), VolumeDecision::Settled),
        ("held by a plugin that did not move", made_by(Some("x"), None, true), VolumeDecision::Settled),
    ] {
        assert_eq!(volume(&v, &Owner::Nobody), want, "{case}");
    }
}

#[test]
fn only_who_made_a_volume_deletes_it() {
    let released = |by: Option<&str>, moved: bool, csi: bool, policy: &str| {
        let mut v = reserved(build::volume("v", "", "1Gi"), &build::claim("ns", "c", None, "1Gi"), Some("uid-c"));
        v.status.as_mut().unwrap().phase = Some("Released".to_owned());
        let spec = v.spec.as_mut().unwrap();
        spec.persistent_volume_reclaim_policy = Some(policy.to_owned());
        spec.csi = spec.csi.take().filter(|_| csi);
        by.into_iter().for_each(|by| build::annotate(&mut v.metadata, annotation::PROVISIONED_BY, by));
        if moved {
            build::annotate(&mut v.metadata, annotation::MIGRATED_TO, "ebs.csi.aws.com");
        }
        v
    };
    let failed = VolumeDecision::Fail(Failure::Delete);
    let ebs = Some("kubernetes.io/aws-ebs");
    for (case, v, want) in [
        ("an external provisioner's", released(Some("x"), false, false, "Delete"), VolumeDecision::Settled),
        ("a plugin's that is gone", released(Some("kubernetes.io/gluster"), false, true, "Delete"), failed.clone()),
        ("an administrator's, of a driver", released(None, false, true, "Delete"), VolumeDecision::Settled),
        ("an administrator's, of no driver", released(None, false, false, "Delete"), failed),
        ("a plugin's that moved", released(ebs, true, false, "Delete"), VolumeDecision::Settled),
        ("a plugin's that moved, to be recycled", released(ebs, true, false, "Recycle"), VolumeDecision::Settled),
    ] {
        assert_eq!(volume(&v, &Owner::Gone), want, "{case}");
    }
}

#[test]
fn a_bind_says_what_else_its_writes_need_to_know() {
    let c = build::claim("ns", "c", Some("wait"), "1Gi");
    let bound = |finalizers: &[&str], in_use: bool| {
        let mut v = reserved(build::volume("v", "wait", "1Gi"), &c, Some("uid-c"));
        v.metadata.finalizers = Some(finalizers.iter().map(ToString::to_string).collect());
        let seen =
            ClaimSeen { candidates: vec![Arc::new(v)], in_use, ..with_class(seen(c.clone()), Some(waiting_class())) };
        match claim(&seen) {
            ClaimDecision::Bind(binding) => binding,
            other => panic!("set aside for it, whatever it waits for: {other:?}"),
        }
    };
    assert!(bound(&[finalizer::PROVISIONER], false).together, "it cannot vanish meanwhile");
    assert!(!bound(&[finalizer::PV_PROTECTION], false).together);
    assert!(bound(&[], true).in_use && !bound(&[], false).in_use);
}

#[test]
fn a_pair_rests_when_nothing_is_left_to_write_on_either_side() {
    let (c, v) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
    let rests = |c: &PersistentVolumeClaim, v: Option<&PersistentVolume>| {
        let complete = ClaimSeen::complete(Arc::new(c.clone()), v.cloned().map(Arc::new));
        is_complete(c) && claim(&complete) == ClaimDecision::Settled
    };
    let mut marked = v.clone();
    marked.status.as_mut().unwrap().phase = Some("Available".to_owned());
    let mut pending = c.clone();
    pending.status.as_mut().unwrap().phase = Some("Pending".to_owned());
    let mut open = c.clone();
    open.metadata.annotations = None;
    for (case, claim, volume, want) in [
        ("bound both ways", &c, Some(&v), true),
        ("its volume is not in the cache", &c, None, false),
        ("its volume is not marked", &c, Some(&marked), false),
        ("it is not marked itself", &pending, Some(&v), false),
        ("it was never bound", &open, Some(&v), false),
    ] {
        assert_eq!(rests(claim, volume), want, "{case}");
    }
    let free = build::claim("ns", "c", None, "1Gi");
    let mut released = v.clone();
    released.status.as_mut().unwrap().phase = Some("Released".to_owned());
    for (case, v, owner, want) in [
        ("bound", &v, Owner::Claim(Arc::new(c.clone())), true),
        ("its claim does not point anywhere yet", &marked, Owner::Claim(Arc::new(free)), true),
        ("its claim says it is bound", &marked, Owner::Claim(Arc::new(c)), false),
        ("its claim is not to be seen", &v, Owner::Gone, false),
        ("released", &released, Owner::Gone, true),
    ] {
        assert_eq!(volume(v, &owner).is_rest(), want, "{case}");
    }
}

#[test]
fn a_claim_that_was_just_asked_for_is_not_looked_at_again() {
    let plain = build::claim("ns", "c", Some("fast"), "1Gi");
    let asked = |by: &str| {
        let mut c = plain.clone();
        build::annotate(&mut c.metadata, annotation::STORAGE_PROVISIONER, by);
        build::annotate(&mut c.metadata, annotation::STORAGE_PROVISIONER_BETA, by);
        c.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
        c
    };
    let with = |edit: fn(&mut PersistentVolumeClaim)| {
        let mut c = asked(build::DRIVER);
        edit(&mut c);
        c
    };
    for (case, old, new, want) in [
        ("asked", plain.clone(), asked(build::DRIVER), true),
        ("asked of somebody else", plain.clone(), asked("other"), false),
        ("asked long ago", asked(build::DRIVER), asked(build::DRIVER), false),
        ("not asked", plain.clone(), plain.clone(), false),
        (
            "a node was chosen",
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
        ("it goes", plain.clone(), with(|c| c.metadata.deletion_timestamp = Some(build::time(1))), false),
        (
            "its phase changed",
            plain.clone(),
            with(|c| c.status.as_mut().unwrap().phase = Some("Lost".to_owned())),
            false,
        ),
        (
            "somebody took over",
            plain.clone(),
            with(|c| build::annotate(&mut c.metadata, annotation::MIGRATED_TO, "x")),
            false,
        ),
    ] {
        assert_eq!(was_just_asked(&old, &new, build::DRIVER), want, "{case}");
    }
}
