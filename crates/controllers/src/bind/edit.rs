//! Builds the objects that the binder writes. Pure: `act` writes them.

use cleat_api::claim::claim_phase;
use cleat_api::key::Meta as _;
use cleat_api::names;
use cleat_api::well_known::{annotation, finalizer};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::{Resource as _, ResourceExt as _};

use super::decide::{ChosenBy, ClaimRefRemoval, MigrationAnnotation};

/// Sets the volume's `claimRef` to the claim.
pub fn with_claim_ref(
    mut volume: PersistentVolume,
    claim: &PersistentVolumeClaim,
    chosen_by: ChosenBy,
) -> PersistentVolume {
    let reference = ObjectReference { resource_version: claim.resource_version(), ..claim.object_ref(&()) };
    volume.spec.get_or_insert_default().claim_ref = Some(reference);
    if chosen_by == ChosenBy::Controller {
        let yes = annotation::YES.to_owned();
        volume.annotations_mut().insert(annotation::BOUND_BY_CONTROLLER.to_owned(), yes);
    }
    volume
}

/// Sets the volume's phase. Removes the transition time, so that the server sets it to the time of the write.
pub fn with_phase(mut volume: PersistentVolume, phase: &str, message: Option<&str>) -> PersistentVolume {
    let status = volume.status.get_or_insert_default();
    status.phase = Some(phase.to_owned());
    status.message = message.map(ToOwned::to_owned);
    status.last_phase_transition_time = None;
    volume
}

/// Removes the volume's `claimRef`, or the part of it that the controller added.
pub fn without_claim_ref(mut volume: PersistentVolume, removal: ClaimRefRemoval) -> PersistentVolume {
    let spec = volume.spec.get_or_insert_default();
    match removal {
        ClaimRefRemoval::Whole => {
            spec.claim_ref = None;
            volume.annotations_mut().remove(annotation::BOUND_BY_CONTROLLER);
        }
        ClaimRefRemoval::UidOnly => {
            if let Some(reference) = &mut spec.claim_ref {
                reference.uid = None;
                reference.resource_version = None;
            }
        }
    }
    volume
}

/// Sets the claim's `volumeName` and marks the bind as completed.
pub fn with_volume_name(mut claim: PersistentVolumeClaim, volume: &str, chosen_by: ChosenBy) -> PersistentVolumeClaim {
    claim.spec.get_or_insert_default().volume_name = Some(volume.to_owned());
    let yes = annotation::YES.to_owned();
    if chosen_by == ChosenBy::Controller {
        claim.annotations_mut().insert(annotation::BOUND_BY_CONTROLLER.to_owned(), yes.clone());
    }
    claim.annotations_mut().insert(annotation::BIND_COMPLETED.to_owned(), yes);
    // The PersistentVolume that was provisioned for this claim exists, so provisioning has ended. If the claim is bound
    // to another volume, a CreateVolume call may still be running: the provisioner removes the finalizer when it has
    // ended.
    let is_provisioned = names::is_provisioned_volume(volume, claim.metadata.uid());
    if is_provisioned && claim.metadata.has_finalizer(finalizer::PROVISIONING) {
        claim.metadata.finalizers = Some(claim.metadata.finalizers_without(finalizer::PROVISIONING));
    }
    claim
}

/// Sets the claim's status to Bound, with the access modes and the capacity of its volume. The capacity of a claim that
/// is Bound already is not changed: the resizer owns it.
pub fn with_bound_status(mut claim: PersistentVolumeClaim, volume: &PersistentVolume) -> PersistentVolumeClaim {
    let old_phase = claim_phase(&claim).to_owned();
    let spec = volume.spec.as_ref();
    let status = claim.status.get_or_insert_default();
    status.phase = Some("Bound".to_owned());
    status.access_modes = spec.and_then(|s| s.access_modes.clone());
    if old_phase != "Bound" {
        status.capacity = spec.and_then(|s| s.capacity.clone());
        if let Some(size) = volume.metadata.annotation(annotation::PRE_RESIZE_CAPACITY) {
            status.capacity.get_or_insert_default().insert("storage".to_owned(), Quantity(size.to_owned()));
        }
    }
    // For a claim that was Lost, the controller that modifies volumes owns this field.
    if old_phase == "Pending" {
        status.current_volume_attributes_class_name = spec.and_then(|s| s.volume_attributes_class_name.clone());
    }
    claim
}

/// Sets or removes the annotation `migrated-to`. If it is set, the in-tree plugin's finalizer is removed.
pub fn with_migration<K: kube::Resource>(mut object: K, migration: MigrationAnnotation) -> K {
    let meta = object.meta_mut();
    let annotations = meta.annotations.get_or_insert_default();
    match migration {
        MigrationAnnotation::Set(driver) => annotations.insert(annotation::MIGRATED_TO.to_owned(), driver.to_owned()),
        MigrationAnnotation::Remove => annotations.remove(annotation::MIGRATED_TO),
    };
    if meta.has_finalizer(finalizer::IN_TREE_PV_CONTROLLER) && matches!(migration, MigrationAnnotation::Set(_)) {
        meta.finalizers = Some(meta.finalizers_without(finalizer::IN_TREE_PV_CONTROLLER));
    }
    object
}

pub fn with_lost_status(mut claim: PersistentVolumeClaim) -> PersistentVolumeClaim {
    let status = claim.status.get_or_insert_default();
    status.phase = Some("Lost".to_owned());
    status.access_modes = None;
    status.capacity = None;
    status.current_volume_attributes_class_name = None;
    claim
}

pub fn with_pending_status(mut claim: PersistentVolumeClaim) -> PersistentVolumeClaim {
    claim.status.get_or_insert_default().phase = Some("Pending".to_owned());
    claim
}

pub fn with_class(mut claim: PersistentVolumeClaim, class: String) -> PersistentVolumeClaim {
    claim.spec.get_or_insert_default().storage_class_name = Some(class);
    claim
}

/// Requests a volume from the provisioner. With `hold`, also adds the finalizer that the provisioner would add next.
pub fn with_provisioner(mut claim: PersistentVolumeClaim, provisioner: &str, hold: bool) -> PersistentVolumeClaim {
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
    fn a_resize_in_progress_is_not_overwritten() {
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
        assert_eq!(size(&with_bound_status(claim.clone(), &volume)), "1Gi", "already Bound");
        assert_eq!(size(&with_bound_status(with_lost_status(claim.clone()), &volume)), "9Gi", "was Lost");
        build::annotate(&mut volume.metadata, annotation::PRE_RESIZE_CAPACITY, "2Gi");
        assert_eq!(
            size(&with_bound_status(with_pending_status(claim), &volume)),
            "2Gi",
            "the file system is not resized yet"
        );
    }

    #[test]
    fn only_the_volume_provisioned_for_a_claim_ends_provisioning() {
        let claim = with_provisioner(build::claim("ns", "c", None, "1Gi"), build::DRIVER, true);
        let is_held = |volume: &str| {
            with_volume_name(claim.clone(), volume, ChosenBy::Controller)
                .metadata
                .has_finalizer(finalizer::PROVISIONING)
        };
        assert!(!is_held("pvc-uid-c"));
        assert!(is_held("another"));
    }

    #[test]
    fn the_attributes_class_is_set_by_the_first_bind_only() {
        let claim = build::claim("ns", "c", None, "1Gi");
        let mut volume = build::volume("v", "", "1Gi");
        volume.spec.as_mut().unwrap().volume_attributes_class_name = Some("gold".to_owned());
        let current_class =
            |claim| with_bound_status(claim, &volume).status.unwrap().current_volume_attributes_class_name;
        assert_eq!(current_class(claim.clone()).as_deref(), Some("gold"));
        assert_eq!(current_class(with_lost_status(claim)), None, "was Lost");
    }

    #[test]
    fn migration_sets_the_driver_and_removes_the_plugins_finalizer() {
        let mut volume = build::volume("v", "", "1Gi");
        volume.metadata.finalizers =
            Some(vec![finalizer::IN_TREE_PV_CONTROLLER.to_owned(), finalizer::PV_PROTECTION.to_owned()]);
        let migrated = with_migration(volume, MigrationAnnotation::Set("ebs.csi.aws.com"));
        assert_eq!(migrated.metadata.annotation(annotation::MIGRATED_TO), Some("ebs.csi.aws.com"));
        assert_eq!(migrated.metadata.finalizers, Some(vec![finalizer::PV_PROTECTION.to_owned()]));
        assert_eq!(
            with_migration(migrated, MigrationAnnotation::Remove).metadata.annotation(annotation::MIGRATED_TO),
            None
        );
    }

    #[test]
    fn a_users_claim_ref_keeps_its_name() {
        let claim = build::claim("ns", "c", None, "1Gi");
        let ours = with_claim_ref(build::volume("v", "", "1Gi"), &claim, ChosenBy::Controller);
        let users = with_claim_ref(build::volume("v", "", "1Gi"), &claim, ChosenBy::User);
        let reference = |v: PersistentVolume| v.spec.unwrap().claim_ref;
        assert_eq!(reference(without_claim_ref(ours, ClaimRefRemoval::Whole)), None);
        let left = reference(without_claim_ref(users, ClaimRefRemoval::UidOnly)).unwrap();
        assert_eq!((left.name.as_deref(), left.uid), (Some("c"), None));
    }
}
