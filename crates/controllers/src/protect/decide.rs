//! May an object that someone asked to delete go? Pure.

use std::borrow::Borrow;

use cleat_api::claim::volume_phase;
use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::finalizer;
use cleat_api::pod;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};

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
    let key = Key::of(&claim.metadata);
    let uses = |pod: &&P| {
        let pod: &Pod = (*pod).borrow();
        let refers = pod::claim_volumes(pod).into_iter().any(|v| v.claim == key && (!v.ephemeral || owns(pod, claim)));
        pod::node_name(pod).is_some() && refers
    };
    let user: &Pod = pods.iter().find(uses)?.borrow();
    user.metadata.name.clone()
}

fn owns(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.owner_references.iter().flatten().any(|o| o.uid == pod.metadata.uid())
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

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::build;

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
        for (case, c, pods, want) in [
            ("not being deleted", protected, vec![], Decision::Settled),
            ("unprotected", bare, vec![], Decision::Protect),
            ("deleted and unused", deleting(true), vec![], Decision::LetGo),
            ("used", deleting(true), vec![running], Decision::Keep("p".to_owned())),
            (
                "a finished pod may still have it mounted",
                deleting(true),
                vec![finished],
                Decision::Keep("p".to_owned()),
            ),
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
