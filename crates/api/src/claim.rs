//! Fields of claims, volumes and storage classes, and how they refer to each other.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use crate::key::{Key, Meta};
use crate::quantity::Quantity;
use crate::well_known::annotation;

pub const FILESYSTEM: &str = "Filesystem";
pub const BLOCK: &str = "Block";
pub const WAIT_FOR_FIRST_CONSUMER: &str = "WaitForFirstConsumer";

/// The class that the claim names: the beta annotation if present, or else the field. `None` means that the claim names none
/// and may get the default; `Some("")` means that it must have no class.
pub fn claim_class(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim
        .metadata
        .annotation(annotation::STORAGE_CLASS_BETA)
        .or_else(|| claim.spec.as_ref()?.storage_class_name.as_deref())
}

pub fn volume_class(volume: &PersistentVolume) -> &str {
    volume
        .metadata
        .annotation(annotation::STORAGE_CLASS_BETA)
        .or_else(|| volume.spec.as_ref()?.storage_class_name.as_deref())
        .unwrap_or_default()
}

pub fn requested_storage(claim: &PersistentVolumeClaim) -> Option<Quantity> {
    claim.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?.get("storage")?.0.parse().ok()
}

pub fn capacity(volume: &PersistentVolume) -> Option<Quantity> {
    volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?.0.parse().ok()
}

pub fn claim_volume_mode(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|s| s.volume_mode.as_deref()).unwrap_or(FILESYSTEM)
}

pub fn volume_mode(volume: &PersistentVolume) -> &str {
    volume.spec.as_ref().and_then(|s| s.volume_mode.as_deref()).unwrap_or(FILESYSTEM)
}

pub fn claim_phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or_default()
}

pub fn volume_phase(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or_default()
}

/// The claim's `spec.volumeName`; `None` while it is empty.
pub fn volume_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref()?.volume_name.as_deref().filter(|n| !n.is_empty())
}

/// Returns true if the volume is to be created from a snapshot, another claim or another source.
pub fn has_data_source(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.as_ref().is_some_and(|s| s.data_source.is_some() || s.data_source_ref.is_some())
}

pub fn claim_ref(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref()?.claim_ref.as_ref()
}

pub fn claim_ref_key(reference: &ObjectReference) -> Key {
    Key::namespaced(reference.namespace.clone().unwrap_or_default(), reference.name.clone().unwrap_or_default())
}

/// Returns true if the volume's claimRef names this claim: same namespace and name, and either the same uid or none.
pub fn is_reserved_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim_ref(volume).is_some_and(|r| {
        claim_ref_key(r) == Key::of(&claim.metadata)
            && r.uid.as_deref().is_none_or(|uid| uid.is_empty() || uid == claim.metadata.uid())
    })
}

/// Returns true if the claim is Bound to this volume and the volume's claimRef has its uid. Attaching and mounting rely on
/// this.
pub fn is_bound_pair(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim_phase(claim) == "Bound"
        && volume_name(claim) == volume.metadata.name.as_deref()
        && claim_ref(volume).and_then(|r| r.uid.as_deref()).is_some_and(|uid| uid == claim.metadata.uid())
}

pub fn waits_for_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some(WAIT_FOR_FIRST_CONSUMER)
}

/// The default class: of the classes annotated as default, the newest, and of equally old ones the first by name.
pub fn default_class<'a>(classes: impl IntoIterator<Item = &'a StorageClass>) -> Option<&'a StorageClass> {
    let is_marked = |c: &&StorageClass| {
        [annotation::DEFAULT_CLASS, annotation::DEFAULT_CLASS_BETA]
            .iter()
            .any(|key| c.metadata.annotation(key) == Some("true"))
    };
    classes.into_iter().filter(is_marked).min_by(|a, b| {
        let newest_first = b.metadata.creation_timestamp.cmp(&a.metadata.creation_timestamp);
        newest_first.then_with(|| a.metadata.name.cmp(&b.metadata.name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    #[test]
    fn of_several_default_classes_the_newest_is_used() {
        let class = |name: &str, marks: &[(&str, &str)], age: i64| {
            let mut class = build::class(name, build::DRIVER);
            marks.iter().for_each(|(key, value)| build::annotate(&mut class.metadata, key, value));
            class.metadata.creation_timestamp = Some(build::time(age));
            class
        };
        let (current, beta) = (annotation::DEFAULT_CLASS, annotation::DEFAULT_CLASS_BETA);
        for (case, classes, want) in [
            ("none is marked", vec![class("a", &[], 1), class("b", &[(current, "false")], 2)], None),
            ("marked by the beta annotation", vec![class("a", &[(beta, "true")], 1)], Some("a")),
            (
                "the newest wins",
                vec![class("a", &[(current, "true")], 1), class("b", &[(current, "true")], 2)],
                Some("b"),
            ),
            ("then the name", vec![class("b", &[(current, "true")], 1), class("a", &[(beta, "true")], 1)], Some("a")),
            ("only the value true is a mark", vec![class("a", &[(current, "yes")], 1)], None),
        ] {
            assert_eq!(default_class(&classes).and_then(|c| c.metadata.name.as_deref()), want, "{case}");
        }
    }
}
