//! May an object that someone asked to delete go? Pure.

use std::borrow::Borrow;

use cleat_api::claim::{claim_phase, volume_phase};
use cleat_api::key::Meta as _;
use cleat_api::well_known::finalizer;
use cleat_api::{condition, pod};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Settled,
    /// Created before protection was there, or stripped by hand.
    Protect,
    /// In use, by this pod.
    Keep(String),
    /// Nobody in sight uses it; for a claim, the pods are still to be read live.
    LetGo,
}

impl Decision {
    /// Is there anything to do?
    pub fn is_work(&self) -> bool {
        match self {
            Self::Protect | Self::LetGo => true,
            Self::Settled | Self::Keep(_) => false,
        }
    }
}

pub fn claim<P: Borrow<Pod>>(claim: &PersistentVolumeClaim, pods: &[P]) -> Decision {
    match (claim.metadata.is_deleting(), claim.metadata.has_finalizer(finalizer::PVC_PROTECTION)) {
        (false, true) | (true, false) => Decision::Settled,
        (false, false) => Decision::Protect,
        (true, true) => match user(claim, pods) {
            Some(name) => Decision::Keep(name),
            None => Decision::LetGo,
        },
    }
}

/// A pod on a node that refers to the claim. Its phase does not matter: until the pod is gone, its volume may be
/// mounted. A pod without a node has nothing mounted.
pub fn user<P: Borrow<Pod>>(claim: &PersistentVolumeClaim, pods: &[P]) -> Option<String> {
    let uses = |pod: &&P| {
        let pod: &Pod = (*pod).borrow();
        // Its own claim goes with the pod, which waits for it where owners are deleted last: one of them must begin.
        let left_behind = is_shut_down(pod) && pod::owns_claim(pod, claim);
        pod::node_name(pod).is_some() && pod::uses_claim(pod, claim) && !left_behind
    };
    let user: &Pod = pods.iter().find(uses)?.borrow();
    user.metadata.name.clone()
}

/// The node has ended the pod, or somebody has forced its deletion.
fn is_shut_down(pod: &Pod) -> bool {
    pod.metadata.is_deleting() && pod.metadata.deletion_grace_period_seconds == Some(0)
}

/// Whether pods use a bound claim, if its status does not say so. Here a pod counts from its creation to its end.
pub fn usage<P: Borrow<Pod>>(claim: &PersistentVolumeClaim, pods: &[P]) -> Option<bool> {
    if claim_phase(claim) != "Bound" || claim.metadata.is_deleting() {
        return None;
    }
    let in_use = pods.iter().map(Borrow::borrow).any(|pod| !pod::is_terminated(pod) && pod::uses_claim(pod, claim));
    (condition::claim_in_use(claim) != Some(in_use)).then_some(in_use)
}

pub fn volume(volume: &PersistentVolume) -> Decision {
    match (volume.metadata.is_deleting(), volume.metadata.has_finalizer(finalizer::PV_PROTECTION)) {
        (false, true) | (true, false) => Decision::Settled,
        (false, false) => Decision::Protect,
        (true, true) if volume_phase(volume) == "Bound" => {
            let claim = volume.spec.as_ref().and_then(|s| s.claim_ref.as_ref()).and_then(|r| r.name.clone());
            Decision::Keep(claim.unwrap_or_default())
        }
        (true, true) => Decision::LetGo,
    }
}

/// A class of attributes stays while a claim wants it, has it or is getting it, or a volume has it.
pub fn attributes<C, V>(class: &VolumeAttributesClass, claims: &[C], volumes: &[V]) -> Decision
where
    C: Borrow<PersistentVolumeClaim>,
    V: Borrow<PersistentVolume>,
{
    let meta = &class.metadata;
    match (meta.is_deleting(), meta.has_finalizer(finalizer::VAC_PROTECTION)) {
        (false, true) | (true, false) => Decision::Settled,
        (false, false) => Decision::Protect,
        (true, true) => match attributes_user(meta.name.as_deref().unwrap_or_default(), claims, volumes) {
            Some(user) => Decision::Keep(user),
            None => Decision::LetGo,
        },
    }
}

/// The name of a claim or a volume that refers to the class.
pub fn attributes_user<C, V>(class: &str, claims: &[C], volumes: &[V]) -> Option<String>
where
    C: Borrow<PersistentVolumeClaim>,
    V: Borrow<PersistentVolume>,
{
    let wants = |claim: &PersistentVolumeClaim| {
        let status = claim.status.as_ref();
        let wanted = claim.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref());
        let current = status.and_then(|s| s.current_volume_attributes_class_name.as_deref());
        let coming = status
            .and_then(|s| s.modify_volume_status.as_ref())
            .and_then(|s| s.target_volume_attributes_class_name.as_deref());
        [wanted, current, coming].contains(&Some(class))
    };
    let has = |volume: &PersistentVolume| {
        volume.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref()) == Some(class)
    };
    let claim = claims.iter().map(|c| c.borrow()).find(|c| wants(c)).map(|c| &c.metadata);
    let user = claim.or_else(|| volumes.iter().map(|v| v.borrow()).find(|v| has(v)).map(|v| &v.metadata))?;
    user.name.clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

    #[test]
    fn a_claim_goes_only_when_no_pod_on_a_node_uses_it() {
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
        let keep = || Decision::Keep("p".to_owned());
        for (case, c, pods, want) in [
            ("made for a pod that lives", of_pod(Some(true)), vec![own(None)], keep()),
            ("made for a pod that is ending", of_pod(Some(true)), vec![own(Some(30))], keep()),
            ("made for a pod that has ended", of_pod(Some(true)), vec![own(Some(0))], Decision::LetGo),
            ("of the name that the pod's would have", of_pod(None), vec![own(None)], Decision::LetGo),
            ("shared with a pod that has ended", deleting(true), vec![forced], keep()),
            ("not being deleted", protected, vec![], Decision::Settled),
            ("unprotected", bare, vec![], Decision::Protect),
            ("deleted and unused", deleting(true), vec![], Decision::LetGo),
            ("used", deleting(true), vec![running], keep()),
            ("a finished pod may still have it mounted", deleting(true), vec![finished], keep()),
            (
                "an unscheduled pod has nothing mounted",
                deleting(true),
                vec![build::pod("ns", "p", "", &["c"])],
                Decision::LetGo,
            ),
            (
                "a claim of that name elsewhere",
                deleting(true),
                vec![build::pod("other", "p", "n1", &["c"])],
                Decision::LetGo,
            ),
            ("let go already", deleting(false), vec![], Decision::Settled),
        ] {
            assert_eq!(claim(&c, &pods), want, "{case}");
        }
    }

    #[test]
    fn a_bound_claim_says_whether_pods_use_it() {
        let (bound, _) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
        let told = |in_use| condition::with_unused_condition(bound.clone(), in_use, build::time(1));
        let mut going = bound.clone();
        going.metadata.deletion_timestamp = Some(build::time(9));
        let waiting = || build::pod("ns", "p", "", &["c"]);
        let finished = || {
            let mut p = build::pod("ns", "p", "n1", &["c"]);
            p.status.as_mut().unwrap().phase = Some("Failed".to_owned());
            p
        };
        for (case, claim, pods, want) in [
            ("nobody uses it", bound.clone(), vec![], Some(false)),
            ("a pod that waits for its node uses it", bound.clone(), vec![waiting()], Some(true)),
            ("a pod that has ended does not", bound.clone(), vec![finished()], Some(false)),
            ("said already", told(true), vec![waiting()], None),
            ("true no longer", told(true), vec![finished()], Some(false)),
            ("true again", told(false), vec![waiting(), finished()], Some(true)),
            ("not bound", build::claim("ns", "c", None, "1Gi"), vec![waiting()], None),
            ("going", going, vec![], None),
        ] {
            assert_eq!(usage(&claim, &pods), want, "{case}");
        }
        let since = |claim: &PersistentVolumeClaim| {
            claim.status.as_ref().unwrap().conditions.as_ref().unwrap()[0].last_transition_time.clone()
        };
        let again = condition::with_unused_condition(told(true), true, build::time(7));
        assert_eq!(since(&again), Some(build::time(1)), "the same again is no change");
        assert_eq!(since(&condition::with_unused_condition(again, false, build::time(7))), Some(build::time(7)));
    }

    #[test]
    fn attributes_go_only_when_nobody_has_or_wants_them() {
        let mut gold = VolumeAttributesClass::default();
        gold.metadata.name = Some("gold".to_owned());
        gold.metadata.finalizers = Some(vec![finalizer::VAC_PROTECTION.to_owned()]);
        let living = gold.clone();
        gold.metadata.deletion_timestamp = Some(build::time(9));
        let idle = build::claim("ns", "c", None, "1Gi");
        let mut wanting = idle.clone();
        wanting.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
        let mut getting = idle.clone();
        let status = getting.status.get_or_insert_default();
        status.modify_volume_status.get_or_insert_default().target_volume_attributes_class_name =
            Some("gold".to_owned());
        let bare = {
            let mut class = living.clone();
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
            ("nobody asked to delete it", &living, vec![], vec![], Decision::Settled),
            ("unprotected", &bare, vec![], vec![], Decision::Protect),
            ("let go already", &gone, vec![], vec![], Decision::Settled),
            ("a claim is getting it", &gold, vec![getting], vec![], Decision::Keep("c".to_owned())),
            ("unused", &gold, vec![idle.clone()], vec![plain.clone()], Decision::LetGo),
            ("a claim wants it", &gold, vec![idle, wanting], vec![], Decision::Keep("c".to_owned())),
            ("a claim has it", &gold, vec![having], vec![], Decision::Keep("c".to_owned())),
            ("a volume has it", &gold, vec![], vec![plain, volume], Decision::Keep("v".to_owned())),
        ] {
            assert_eq!(attributes(class, &claims, &volumes), want, "{case}");
        }
    }

    #[test]
    fn a_volume_goes_only_when_it_is_not_bound() {
        let with = |deleting: bool, protected: bool, phase: &str| {
            let mut v = build::volume("v", "", "1Gi");
            v.metadata.deletion_timestamp = deleting.then(|| build::time(9));
            v.metadata.finalizers = protected.then(|| vec![finalizer::PV_PROTECTION.to_owned()]);
            v.status.as_mut().unwrap().phase = Some(phase.to_owned());
            v
        };
        for (case, v, want) in [
            ("bound", with(true, true, "Bound"), Decision::Keep(String::new())),
            ("released", with(true, true, "Released"), Decision::LetGo),
            ("living and protected", with(false, true, "Bound"), Decision::Settled),
            ("living and unprotected", with(false, false, "Available"), Decision::Protect),
            ("let go already", with(true, false, "Released"), Decision::Settled),
        ] {
            assert_eq!(volume(&v), want, "{case}");
        }
    }
}
