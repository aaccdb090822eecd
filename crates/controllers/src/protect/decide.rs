//! Decides whether an object needs, keeps or loses its protection finalizer, and whether a claim is in use. Pure.

use std::borrow::Borrow;

use cleat_api::claim::{claim_phase, volume_phase};
use cleat_api::key::Meta as _;
use cleat_api::well_known::finalizer;
use cleat_api::{condition, pod};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProtectionDecision {
    /// Nothing to do.
    Settled,
    /// The finalizer is missing: the object is older than protection, or a user removed the finalizer.
    AddFinalizer,
    /// Being deleted, and in use by the object of this name.
    Keep(String),
    /// Being deleted, and no given object uses it. Before a caller acts on this for a claim or a VolumeAttributesClass,
    /// it must have decided on a live list of users.
    RemoveFinalizer,
}

impl ProtectionDecision {
    pub fn needs_write(&self) -> bool {
        match self {
            Self::AddFinalizer | Self::RemoveFinalizer => true,
            Self::Settled | Self::Keep(_) => false,
        }
    }
}

pub fn claim<P: Borrow<Pod>>(claim: &PersistentVolumeClaim, pods: &[P]) -> ProtectionDecision {
    match (claim.metadata.is_deleting(), claim.metadata.has_finalizer(finalizer::PVC_PROTECTION)) {
        (false, true) | (true, false) => ProtectionDecision::Settled,
        (false, false) => ProtectionDecision::AddFinalizer,
        (true, true) => match find_user(claim, pods) {
            Some(name) => ProtectionDecision::Keep(name),
            None => ProtectionDecision::RemoveFinalizer,
        },
    }
}

/// Returns the name of a pod on a node that uses the claim. The pod's phase does not matter: until the pod is deleted,
/// the volume may be mounted. A pod without a node has nothing mounted.
fn find_user<P: Borrow<Pod>>(claim: &PersistentVolumeClaim, pods: &[P]) -> Option<String> {
    let uses = |pod: &&P| {
        let pod: &Pod = (*pod).borrow();
        // With foreground deletion, a terminated pod waits for the claim that it owns. If the claim waited for the pod,
        // neither would be deleted.
        let is_owner_waiting = is_shut_down(pod) && pod::owns_claim(pod, claim);
        pod::node_name(pod).is_some() && pod::uses_claim(pod, claim) && !is_owner_waiting
    };
    let user: &Pod = pods.iter().find(uses)?.borrow();
    user.metadata.name.clone()
}

/// Returns true if the node has terminated the pod, or a user has forced its deletion.
fn is_shut_down(pod: &Pod) -> bool {
    pod.metadata.is_deleting() && pod.metadata.deletion_grace_period_seconds == Some(0)
}

/// Returns whether pods use a bound claim, if its condition `Unused` is missing or wrong. A pod counts from its
/// creation until it has terminated, with or without a node.
pub fn usage_update<P: Borrow<Pod>>(claim: &PersistentVolumeClaim, pods: &[P]) -> Option<bool> {
    if claim_phase(claim) != "Bound" || claim.metadata.is_deleting() {
        return None;
    }
    let in_use = pods.iter().map(Borrow::borrow).any(|pod| !pod::is_terminated(pod) && pod::uses_claim(pod, claim));
    (condition::claim_in_use(claim) != Some(in_use)).then_some(in_use)
}

pub fn volume(volume: &PersistentVolume) -> ProtectionDecision {
    match (volume.metadata.is_deleting(), volume.metadata.has_finalizer(finalizer::PV_PROTECTION)) {
        (false, true) | (true, false) => ProtectionDecision::Settled,
        (false, false) => ProtectionDecision::AddFinalizer,
        (true, true) if volume_phase(volume) == "Bound" => {
            let claim = volume.spec.as_ref().and_then(|s| s.claim_ref.as_ref()).and_then(|r| r.name.clone());
            ProtectionDecision::Keep(claim.unwrap_or_default())
        }
        (true, true) => ProtectionDecision::RemoveFinalizer,
    }
}

/// A VolumeAttributesClass is in use while a claim requests it, has it or is being modified to it, or a volume has it.
pub fn attributes_class<C, V>(class: &VolumeAttributesClass, claims: &[C], volumes: &[V]) -> ProtectionDecision
where
    C: Borrow<PersistentVolumeClaim>,
    V: Borrow<PersistentVolume>,
{
    let meta = &class.metadata;
    match (meta.is_deleting(), meta.has_finalizer(finalizer::VAC_PROTECTION)) {
        (false, true) | (true, false) => ProtectionDecision::Settled,
        (false, false) => ProtectionDecision::AddFinalizer,
        (true, true) => match find_attributes_class_user(meta.name.as_deref().unwrap_or_default(), claims, volumes) {
            Some(user) => ProtectionDecision::Keep(user),
            None => ProtectionDecision::RemoveFinalizer,
        },
    }
}

/// Returns the name of a claim or a volume that refers to the class.
fn find_attributes_class_user<C, V>(class: &str, claims: &[C], volumes: &[V]) -> Option<String>
where
    C: Borrow<PersistentVolumeClaim>,
    V: Borrow<PersistentVolume>,
{
    let claim_uses = |claim: &PersistentVolumeClaim| {
        let status = claim.status.as_ref();
        let requested = claim.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref());
        let current = status.and_then(|s| s.current_volume_attributes_class_name.as_deref());
        let target = status
            .and_then(|s| s.modify_volume_status.as_ref())
            .and_then(|s| s.target_volume_attributes_class_name.as_deref());
        [requested, current, target].contains(&Some(class))
    };
    let volume_uses = |volume: &PersistentVolume| {
        volume.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref()) == Some(class)
    };
    let claim = claims.iter().map(|c| c.borrow()).find(|c| claim_uses(c)).map(|c| &c.metadata);
    let user = claim.or_else(|| volumes.iter().map(|v| v.borrow()).find(|v| volume_uses(v)).map(|v| &v.metadata))?;
    user.name.clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

    #[test]
    fn a_claim_is_released_only_if_no_pod_on_a_node_uses_it() {
        let deleting = |protected: bool| {
            let mut c = build::claim("ns", "c", None, "1Gi");
            c.metadata.deletion_timestamp = Some(build::time(9));
            c.metadata.finalizers = protected.then(|| vec![finalizer::PVC_PROTECTION.to_owned()]);
            c
        };
        let mut protected = build::claim("ns", "c", None, "1Gi");
        protected.metadata.finalizers = Some(vec![finalizer::PVC_PROTECTION.to_owned()]);
        let bare = build::claim("ns", "c", None, "1Gi");
        let running = build::pod("ns", "p", "n1", &["c"]);
        let finished = {
            let mut p = running.clone();
            p.status.as_mut().unwrap().phase = Some("Succeeded".to_owned());
            p
        };
        let of_pod = |controller: Option<bool>| {
            let mut c = deleting(true);
            c.metadata.name = Some("p-data".to_owned());
            let uid = "uid-p".to_owned();
            c.metadata.owner_references = Some(vec![OwnerReference { uid, controller, ..OwnerReference::default() }]);
            c
        };
        let own = |grace: Option<i64>| {
            let mut p = build::pod("ns", "p", "n1", &[]);
            build::ephemeral_volume(&mut p, "data");
            p.metadata.deletion_timestamp = grace.map(|_| build::time(9));
            p.metadata.deletion_grace_period_seconds = grace;
            p
        };
        let forced = {
            let mut p = running.clone();
            p.metadata.deletion_timestamp = Some(build::time(9));
            p.metadata.deletion_grace_period_seconds = Some(0);
            p
        };
        let keep = || ProtectionDecision::Keep("p".to_owned());
        for (case, c, pods, want) in [
            ("owned by a running pod", of_pod(Some(true)), vec![own(None)], keep()),
            ("owned by a pod that is terminating", of_pod(Some(true)), vec![own(Some(30))], keep()),
            (
                "owned by a pod that has terminated",
                of_pod(Some(true)),
                vec![own(Some(0))],
                ProtectionDecision::RemoveFinalizer,
            ),
            (
                "named like the pod's own claim, but not owned by the pod",
                of_pod(None),
                vec![own(None)],
                ProtectionDecision::RemoveFinalizer,
            ),
            ("used and not owned by a pod that has terminated", deleting(true), vec![forced], keep()),
            ("not being deleted", protected, vec![], ProtectionDecision::Settled),
            ("unprotected", bare, vec![], ProtectionDecision::AddFinalizer),
            ("deleted and unused", deleting(true), vec![], ProtectionDecision::RemoveFinalizer),
            ("used", deleting(true), vec![running], keep()),
            ("a finished pod may still have it mounted", deleting(true), vec![finished], keep()),
            (
                "an unscheduled pod has nothing mounted",
                deleting(true),
                vec![build::pod("ns", "p", "", &["c"])],
                ProtectionDecision::RemoveFinalizer,
            ),
            (
                "a pod in another namespace uses a claim of that name",
                deleting(true),
                vec![build::pod("other", "p", "n1", &["c"])],
                ProtectionDecision::RemoveFinalizer,
            ),
            ("without the finalizer", deleting(false), vec![], ProtectionDecision::Settled),
        ] {
            assert_eq!(claim(&c, &pods), want, "{case}");
        }
    }

    #[test]
    fn a_bound_claim_reports_whether_pods_use_it() {
        let (bound, _) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
        let reported = |in_use| condition::with_unused_condition(bound.clone(), in_use, build::time(1));
        let mut deleting = bound.clone();
        deleting.metadata.deletion_timestamp = Some(build::time(9));
        let waiting = || build::pod("ns", "p", "", &["c"]);
        let finished = || {
            let mut p = build::pod("ns", "p", "n1", &["c"]);
            p.status.as_mut().unwrap().phase = Some("Failed".to_owned());
            p
        };
        for (case, claim, pods, want) in [
            ("no pod uses it", bound.clone(), vec![], Some(false)),
            ("a pod without a node uses it", bound.clone(), vec![waiting()], Some(true)),
            ("a terminated pod does not use it", bound.clone(), vec![finished()], Some(false)),
            ("reported already", reported(true), vec![waiting()], None),
            ("reported as used, now unused", reported(true), vec![finished()], Some(false)),
            ("reported as unused, now used", reported(false), vec![waiting(), finished()], Some(true)),
            ("not bound", build::claim("ns", "c", None, "1Gi"), vec![waiting()], None),
            ("being deleted", deleting, vec![], None),
        ] {
            assert_eq!(usage_update(&claim, &pods), want, "{case}");
        }
        let since = |claim: &PersistentVolumeClaim| {
            claim.status.as_ref().unwrap().conditions.as_ref().unwrap()[0].last_transition_time.clone()
        };
        let again = condition::with_unused_condition(reported(true), true, build::time(7));
        assert_eq!(since(&again), Some(build::time(1)), "an unchanged status keeps its transition time");
        assert_eq!(since(&condition::with_unused_condition(again, false, build::time(7))), Some(build::time(7)));
    }

    #[test]
    fn an_attributes_class_is_released_only_if_unused() {
        let mut gold = VolumeAttributesClass::default();
        gold.metadata.name = Some("gold".to_owned());
        gold.metadata.finalizers = Some(vec![finalizer::VAC_PROTECTION.to_owned()]);
        let live = gold.clone();
        gold.metadata.deletion_timestamp = Some(build::time(9));
        let idle = build::claim("ns", "c", None, "1Gi");
        let mut requesting = idle.clone();
        requesting.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
        let mut modifying = idle.clone();
        let status = modifying.status.get_or_insert_default();
        status.modify_volume_status.get_or_insert_default().target_volume_attributes_class_name =
            Some("gold".to_owned());
        let bare = {
            let mut class = live.clone();
            class.metadata.finalizers = None;
            class
        };
        let gone = {
            let mut class = gold.clone();
            class.metadata.finalizers = None;
            class
        };
        let mut having = idle.clone();
        having.status.get_or_insert_default().current_volume_attributes_class_name = Some("gold".to_owned());
        let mut volume = build::volume("v", "", "1Gi");
        let plain = volume.clone();
        volume.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
        for (case, class, claims, volumes, want) in [
            ("not being deleted", &live, vec![], vec![], ProtectionDecision::Settled),
            ("unprotected", &bare, vec![], vec![], ProtectionDecision::AddFinalizer),
            ("without the finalizer", &gone, vec![], vec![], ProtectionDecision::Settled),
            (
                "a claim is being modified to it",
                &gold,
                vec![modifying],
                vec![],
                ProtectionDecision::Keep("c".to_owned()),
            ),
            ("unused", &gold, vec![idle.clone()], vec![plain.clone()], ProtectionDecision::RemoveFinalizer),
            ("a claim requests it", &gold, vec![idle, requesting], vec![], ProtectionDecision::Keep("c".to_owned())),
            ("a claim has it", &gold, vec![having], vec![], ProtectionDecision::Keep("c".to_owned())),
            ("a volume has it", &gold, vec![], vec![plain, volume], ProtectionDecision::Keep("v".to_owned())),
        ] {
            assert_eq!(attributes_class(class, &claims, &volumes), want, "{case}");
        }
    }

    #[test]
    fn a_volume_is_released_only_if_it_is_not_bound() {
        let with = |deleting: bool, protected: bool, phase: &str| {
            let mut v = build::volume("v", "", "1Gi");
            v.metadata.deletion_timestamp = deleting.then(|| build::time(9));
            v.metadata.finalizers = protected.then(|| vec![finalizer::PV_PROTECTION.to_owned()]);
            v.status.as_mut().unwrap().phase = Some(phase.to_owned());
            v
        };
        for (case, v, want) in [
            ("bound", with(true, true, "Bound"), ProtectionDecision::Keep(String::new())),
            ("released", with(true, true, "Released"), ProtectionDecision::RemoveFinalizer),
            ("protected", with(false, true, "Bound"), ProtectionDecision::Settled),
            ("unprotected", with(false, false, "Available"), ProtectionDecision::AddFinalizer),
            ("without the finalizer", with(true, false, "Released"), ProtectionDecision::Settled),
        ] {
            assert_eq!(volume(&v), want, "{case}");
        }
    }
}
