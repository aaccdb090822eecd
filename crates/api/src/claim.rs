//! What claims, volumes and classes say about each other.

use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, VolumeResourceRequirements,
};
use k8s_openapi::api::storage::v1::StorageClass;

use crate::key::{Key, Meta};
use crate::keys::annotation;
use crate::quantity::Quantity;

pub const FILESYSTEM: &str = "Filesystem";
pub const BLOCK: &str = "Block";
pub const WAIT_FOR_FIRST_CONSUMER: &str = "WaitForFirstConsumer";

/// The class a claim names: the legacy annotation wins, then the field. `None` is "no word about it",
/// `Some("")` is "no class at all".
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

pub fn requested(claim: &PersistentVolumeClaim) -> Option<Quantity> {
    storage(claim.spec.as_ref()?.resources.as_ref()?)
}

fn storage(resources: &VolumeResourceRequirements) -> Option<Quantity> {
    resources.requests.as_ref()?.get("storage")?.0.parse().ok()
}

pub fn capacity(volume: &PersistentVolume) -> Option<Quantity> {
    volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?.0.parse().ok()
}

pub fn claim_mode(claim: &PersistentVolumeClaim) -> &str {
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

/// The volume a claim points at; `None` while it points at none.
pub fn volume_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref()?.volume_name.as_deref().filter(|n| !n.is_empty())
}

/// The claim's volume is to be filled from something.
pub fn has_source(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.as_ref().is_some_and(|s| s.data_source.is_some() || s.data_source_ref.is_some())
}

pub fn claim_ref(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref()?.claim_ref.as_ref()
}

pub fn claim_ref_key(reference: &ObjectReference) -> Key {
    Key::namespaced(reference.namespace.clone().unwrap_or_default(), reference.name.clone().unwrap_or_default())
}

/// The volume is meant for this claim: same name and namespace, and the uid either agrees or was left open.
pub fn is_reserved_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim_ref(volume).is_some_and(|r| {
        claim_ref_key(r) == Key::of(&claim.metadata)
            && r.uid.as_deref().is_none_or(|uid| uid.is_empty() || uid == claim.metadata.uid())
    })
}

/// Both sides agree, uid included: what attach and mount rely on.
pub fn is_bound_pair(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim_phase(claim) == "Bound"
        && volume_name(claim) == volume.metadata.name.as_deref()
        && claim_ref(volume).and_then(|r| r.uid.as_deref()).is_some_and(|uid| uid == claim.metadata.uid())
}

pub fn waits_for_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some(WAIT_FOR_FIRST_CONSUMER)
}

/// Among the classes marked default the newest wins, then the smallest name.
pub fn default_class<'a>(classes: impl IntoIterator<Item = &'a StorageClass>) -> Option<&'a StorageClass> {
    let marked = |c: &&StorageClass| {
        [annotation::DEFAULT_CLASS, annotation::DEFAULT_CLASS_BETA]
            .iter()
            .any(|key| c.metadata.annotation(key) == Some("true"))
    };
    classes.into_iter().filter(marked).min_by(|a, b| {
        let newest_first = b.metadata.creation_timestamp.cmp(&a.metadata.creation_timestamp);
        newest_first.then_with(|| a.metadata.name.cmp(&b.metadata.name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    #[test]
    fn the_newest_of_the_default_classes_is_the_default() {
        let class = |name: &str, marks: &[(&str, &str)], age: i64| {
            let mut class = build::class(name, build::DRIVER);
            marks.iter().for_each(|(key, value)| build::annotate(&mut class.metadata, key, value));
            class.metadata.creation_timestamp = Some(build::time(age));
            class
        };
        let (now, before) = (annotation::DEFAULT_CLASS, annotation::DEFAULT_CLASS_BETA);
        for (case, classes, want) in [
            ("none is marked", vec![class("a", &[], 1), class("b", &[(now, "false")], 2)], None),
            ("marked in the older way", vec![class("a", &[(before, "true")], 1)], Some("a")),
            ("the newest wins", vec![class("a", &[(now, "true")], 1), class("b", &[(now, "true")], 2)], Some("b")),
            ("then the name", vec![class("b", &[(now, "true")], 1), class("a", &[(before, "true")], 1)], Some("a")),
            ("any other word is no mark", vec![class("a", &[(now, "yes")], 1)], None),
        ] {
            assert_eq!(default_class(&classes).and_then(|c| c.metadata.name.as_deref()), want, "{case}");
        }
    }
}
