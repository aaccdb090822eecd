//! Tables of the decisions about volumes.

use super::super::ReclaimFailure::{NoDeleter, NoRecycler, UnknownPolicy};
use super::*;

#[test]
fn the_phase_of_a_volume_follows_its_claim() {
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
    let by_controller = [annotation::BOUND_BY_CONTROLLER];
    let provisioned = [annotation::PROVISIONED_BY];
    let exists = |c: &PersistentVolumeClaim| Exists(Arc::new(c.clone()));
    let policy = |policy: &str, csi: bool| {
        let mut v = with("Released", &[]);
        let spec = v.spec.as_mut().unwrap();
        spec.persistent_volume_reclaim_policy = Some(policy.to_owned());
        spec.csi = spec.csi.take().filter(|_| csi);
        v
    };
    let mut retained = with("Available", &provisioned);
    retained.spec.as_mut().unwrap().persistent_volume_reclaim_policy = Some("Retain".to_owned());
    let mut block = c.clone();
    block.spec.as_mut().unwrap().volume_mode = Some(about::BLOCK.to_owned());
    use VolumeBindDecision::{Fail, LeaveToClaim, SetPhase, Settled, Unbind, WrongMode};
    for (case, v, claim, want) in [
        ("new, without a claimRef", with("Pending", &[]), Unset, SetPhase("Available")),
        ("available", with("Available", &[]), Unset, Settled),
        ("provisioned for a claim that does not name it yet", with("Pending", &provisioned), exists(&c), LeaveToClaim),
        (
            "provisioned for a claim of another volume mode",
            with("Pending", &provisioned),
            exists(&block),
            WrongMode(Arc::new(block.clone())),
        ),
        ("its claim names it and is not Bound yet", with("Available", &[]), exists(&here), LeaveToClaim),
        ("its claim is bound to it", with("Available", &[]), exists(&settled), SetPhase("Bound")),
        ("bound", with("Bound", &[]), exists(&settled), Settled),
        ("its claim is gone", with("Bound", &[]), Gone, SetPhase("Released")),
        ("released", with("Released", &[]), Gone, Settled),
        ("released, the policy is Retain", policy("Retain", false), Gone, Settled),
        ("released, its CSI driver deletes it", policy("Delete", true), Gone, Settled),
        ("released, without a deleter", policy("Delete", false), Gone, Fail(NoDeleter)),
        ("released, without a recycler", policy("Recycle", true), Gone, Fail(NoRecycler)),
        ("released, the policy is unknown", policy("Burn", true), Gone, Fail(UnknownPolicy)),
        ("a failed deletion stays Failed", with("Failed", &[]), Gone, Settled),
        (
            "its claim has another, the controller had reserved it",
            with("Available", &by_controller),
            exists(&elsewhere),
            Unbind(ClaimRefRemoval::Whole),
        ),
        (
            "its claim has another, a user had reserved it",
            with("Available", &[]),
            exists(&elsewhere),
            Unbind(ClaimRefRemoval::UidOnly),
        ),
        (
            "its claim has another, it was provisioned for the claim",
            with("Pending", &provisioned),
            exists(&elsewhere),
            SetPhase("Released"),
        ),
        ("the same, already Released", with("Released", &provisioned), exists(&elsewhere), Settled),
        ("the same, its deletion failed", with("Failed", &provisioned), exists(&elsewhere), Settled),
        (
            "its claim has another, it was provisioned with the policy Retain",
            retained,
            exists(&elsewhere),
            Unbind(ClaimRefRemoval::UidOnly),
        ),
    ] {
        assert_eq!(volume(&v, &claim), want, "{case}");
    }
}

#[test]
fn a_released_volume_without_a_deleter_fails() {
    let released = |by: Option<&str>, migrated: bool, csi: bool, policy: &str| {
        let mut v = reserved(build::volume("v", "", "1Gi"), &build::claim("ns", "c", None, "1Gi"), Some("uid-c"));
        v.status.as_mut().unwrap().phase = Some("Released".to_owned());
        let spec = v.spec.as_mut().unwrap();
        spec.persistent_volume_reclaim_policy = Some(policy.to_owned());
        spec.csi = spec.csi.take().filter(|_| csi);
        by.into_iter().for_each(|by| build::annotate(&mut v.metadata, annotation::PROVISIONED_BY, by));
        if migrated {
            build::annotate(&mut v.metadata, annotation::MIGRATED_TO, "ebs.csi.aws.com");
        }
        v
    };
    let failed = VolumeBindDecision::Fail(NoDeleter);
    let ebs = Some("kubernetes.io/aws-ebs");
    for (case, v, want) in [
        ("of an external provisioner", released(Some("x"), false, false, "Delete"), VolumeBindDecision::Settled),
        (
            "of a plugin that was removed",
            released(Some("kubernetes.io/gluster"), false, true, "Delete"),
            failed.clone(),
        ),
        ("of an administrator, with a CSI driver", released(None, false, true, "Delete"), VolumeBindDecision::Settled),
        ("of an administrator, without a CSI driver", released(None, false, false, "Delete"), failed),
        ("of a migrated plugin", released(ebs, true, false, "Delete"), VolumeBindDecision::Settled),
        ("of a migrated plugin, to be recycled", released(ebs, true, false, "Recycle"), VolumeBindDecision::Settled),
    ] {
        assert_eq!(volume(&v, &Gone), want, "{case}");
    }
}
