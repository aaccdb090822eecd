//! May an object that someone asked to delete go? Pure.

use std::borrow::Borrow;

use cleat_api::claim::volume_phase;
use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::finalizer;
use cleat_api::pod;
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
    fn attributes_go_only_when_nobody_has_or_wants_them() {
        let mut gold = VolumeAttributesClass::default();
        gold.metadata.name = Some("gold".to_owned());
        gold.metadata.finalizers = Some(vec![finalizer::VAC_PROTECTION.to_owned()]);
        let living = gold.clone();
        gold.metadata.deletion_timestamp = Some(build::time(9));
        let idle = build::claim("ns", "c", None, "1Gi");
        let mut wanting = idle.clone();
        wanting.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
        let mut having = idle.clone();
        having.status.get_or_insert_default().current_volume_attributes_class_name = Some("gold".to_owned());
        let mut volume = build::volume("v", "", "1Gi");
        let plain = volume.clone();
        volume.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
        for (case, class, claims, volumes, want) in [
            ("nobody asked to delete it", &living, vec![], vec![], Decision::Settled),
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
