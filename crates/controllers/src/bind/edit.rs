//! The objects as a bind, a release or a loss leaves them. Pure: what is written, apart from the writing.

use cleat_api::claim::claim_phase;
use cleat_api::key::Meta as _;
use cleat_api::well_known::{annotation, finalizer};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::{Resource as _, ResourceExt as _};

use super::decide::{Handover, Point, Reserve, Unbind};

/// The volume, meant for this claim and no other.
pub fn reserved(mut volume: PersistentVolume, claim: &PersistentVolumeClaim, reserve: Reserve) -> PersistentVolume {
    let reference = ObjectReference { resource_version: claim.resource_version(), ..claim.object_ref(&()) };
    volume.spec.get_or_insert_default().claim_ref = Some(reference);
    if reserve == Reserve::AsController {
        let yes = annotation::YES.to_owned();
        volume.annotations_mut().insert(annotation::BOUND_BY_CONTROLLER.to_owned(), yes);
    }
    volume
}

/// The volume in another phase. The server stamps the moment of a change that carries no time of its own.
pub fn in_phase(mut volume: PersistentVolume, phase: &str, message: Option<&str>) -> PersistentVolume {
    let status = volume.status.get_or_insert_default();
    status.phase = Some(phase.to_owned());
    status.message = message.map(ToOwned::to_owned);
    status.last_phase_transition_time = None;
    volume
}

/// The volume without its reservation, or with no more of it than a user had written.
pub fn freed(mut volume: PersistentVolume, unbind: Unbind) -> PersistentVolume {
    let spec = volume.spec.get_or_insert_default();
    match unbind {
        Unbind::Clear => {
            spec.claim_ref = None;
            volume.annotations_mut().remove(annotation::BOUND_BY_CONTROLLER);
        }
        Unbind::KeepName => {
            if let Some(reference) = &mut spec.claim_ref {
                reference.uid = None;
                reference.resource_version = None;
            }
        }
    }
    volume
}

/// The claim, pointing at its volume for good.
pub fn pointed(mut claim: PersistentVolumeClaim, volume: &str, point: Point) -> PersistentVolumeClaim {
    claim.spec.get_or_insert_default().volume_name = Some(volume.to_owned());
    let yes = annotation::YES.to_owned();
    if point == Point::AsController {
        claim.annotations_mut().insert(annotation::BOUND_BY_CONTROLLER.to_owned(), yes.clone());
    }
    claim.annotations_mut().insert(annotation::BIND_COMPLETED.to_owned(), yes);
    // The volume made for it is recorded: nothing is in the making any more. With another volume, it may be.
    let made_for_it = !claim.metadata.uid().is_empty() && volume.ends_with(claim.metadata.uid());
    if made_for_it && claim.metadata.has_finalizer(finalizer::PROVISIONING) {
        claim.metadata.finalizers = Some(claim.metadata.finalizers_without(finalizer::PROVISIONING));
    }
    claim
}

/// The claim's status, telling of its volume. What a claim that is bound already says about its size is the business
/// of those who resize it.
pub fn bound(mut claim: PersistentVolumeClaim, volume: &PersistentVolume) -> PersistentVolumeClaim {
    let before = claim_phase(&claim).to_owned();
    let spec = volume.spec.as_ref();
    let status = claim.status.get_or_insert_default();
    status.phase = Some("Bound".to_owned());
    status.access_modes = spec.and_then(|s| s.access_modes.clone());
    if before != "Bound" {
        status.capacity = spec.and_then(|s| s.capacity.clone());
        if let Some(size) = volume.metadata.annotation(annotation::PRE_RESIZE_CAPACITY) {
            status.capacity.get_or_insert_default().insert("storage".to_owned(), Quantity(size.to_owned()));
        }
    }
    // One that was lost and found again is for those who modify volumes to tell about.
    if before == "Pending" {
        status.current_volume_attributes_class_name = spec.and_then(|s| s.volume_attributes_class_name.clone());
    }
    claim
}

/// The object, saying which driver took over from its plugin, and not held by the plugin any more.
pub fn handed_over<K: kube::Resource>(mut object: K, to: Handover) -> K {
    let meta = object.meta_mut();
    let annotations = meta.annotations.get_or_insert_default();
    match to {
        Handover::To(driver) => annotations.insert(annotation::MIGRATED_TO.to_owned(), driver.to_owned()),
        Handover::Nobody => annotations.remove(annotation::MIGRATED_TO),
    };
    if meta.has_finalizer(finalizer::IN_TREE_PV_CONTROLLER) && matches!(to, Handover::To(_)) {
        meta.finalizers = Some(meta.finalizers_without(finalizer::IN_TREE_PV_CONTROLLER));
    }
    object
}

pub fn lost(mut claim: PersistentVolumeClaim) -> PersistentVolumeClaim {
    let status = claim.status.get_or_insert_default();
    status.phase = Some("Lost".to_owned());
    status.access_modes = None;
    status.capacity = None;
    status.current_volume_attributes_class_name = None;
    claim
}

pub fn pending(mut claim: PersistentVolumeClaim) -> PersistentVolumeClaim {
    claim.status.get_or_insert_default().phase = Some("Pending".to_owned());
    claim
}

pub fn classed(mut claim: PersistentVolumeClaim, class: String) -> PersistentVolumeClaim {
    claim.spec.get_or_insert_default().storage_class_name = Some(class);
    claim
}

/// The claim, handed to its provisioner, and held for it if it would do so next.
pub fn asked(mut claim: PersistentVolumeClaim, provisioner: &str, hold: bool) -> PersistentVolumeClaim {
    for key in [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA] {
        claim.annotations_mut().insert(key.to_owned(), provisioner.to_owned());
    }
    if hold {
        claim.metadata.finalizers = Some(claim.metadata.finalizers_with(finalizer::PROVISIONING));
    }
    claim
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    #[test]
    fn a_resize_under_way_is_not_overwritten() {
        let (claim, mut volume) = build::bound(build::claim("ns", "c", None, "1Gi"), build::volume("v", "", "1Gi"));
        volume
            .spec
            .as_mut()
            .unwrap()
            .capacity
            .as_mut()
            .unwrap()
            .insert("storage".to_owned(), Quantity("9Gi".to_owned()));
        let size = |claim: &PersistentVolumeClaim| {
            claim.status.as_ref().unwrap().capacity.as_ref().unwrap()["storage"].0.clone()
        };
        assert_eq!(size(&bound(claim.clone(), &volume)), "1Gi", "bound already");
        assert_eq!(size(&bound(lost(claim.clone()), &volume)), "9Gi", "bound again");
        build::annotate(&mut volume.metadata, annotation::PRE_RESIZE_CAPACITY, "2Gi");
        assert_eq!(size(&bound(pending(claim), &volume)), "2Gi", "the file system is not resized yet");
    }

    #[test]
    fn only_the_volume_made_for_a_claim_ends_the_making_of_it() {
        let claim = asked(build::claim("ns", "c", None, "1Gi"), build::DRIVER, true);
        let held = |volume: &str| {
            pointed(claim.clone(), volume, Point::AsController).metadata.has_finalizer(finalizer::PROVISIONING)
        };
        assert!(!held("pvc-uid-c"));
        assert!(held("another"));
    }

    #[test]
    fn the_attributes_of_a_volume_are_told_with_the_first_bind_only() {
        let claim = build::claim("ns", "c", None, "1Gi");
        let mut volume = build::volume("v", "", "1Gi");
        volume.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
        let told = |claim| bound(claim, &volume).status.unwrap().current_volume_attributes_class_name;
        assert_eq!(told(claim.clone()).as_deref(), Some("gold"));
        assert_eq!(told(lost(claim)), None, "found again");
    }

    #[test]
    fn who_took_over_is_written_and_the_plugin_lets_go() {
        let mut volume = build::volume("v", "", "1Gi");
        volume.metadata.finalizers = Some(vec![finalizer::IN_TREE_PV_CONTROLLER.to_owned(), finalizer::PV_PROTECTION.to_owned()]);
        let moved = handed_over(volume, Handover::To("ebs.csi.aws.com"));
        assert_eq!(moved.metadata.annotation(annotation::MIGRATED_TO), Some("ebs.csi.aws.com"));
        assert_eq!(moved.metadata.finalizers, Some(vec![finalizer::PV_PROTECTION.to_owned()]));
        assert_eq!(handed_over(moved, Handover::Nobody).metadata.annotation(annotation::MIGRATED_TO), None);
    }

    #[test]
    fn only_our_own_reservation_is_taken_back_altogether() {
        let claim = build::claim("ns", "c", None, "1Gi");
        let ours = reserved(build::volume("v", "", "1Gi"), &claim, Reserve::AsController);
        let users = reserved(build::volume("v", "", "1Gi"), &claim, Reserve::ForUser);
        let reference = |v: PersistentVolume| v.spec.unwrap().claim_ref;
        assert_eq!(reference(freed(ours, Unbind::Clear)), None);
        let kept = reference(freed(users, Unbind::KeepName)).unwrap();
        assert_eq!((kept.name.as_deref(), kept.uid), (Some("c"), None));
    }
}
