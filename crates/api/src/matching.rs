//! Whether a volume meets the requirements of a claim. The binder and the scheduler share these rules.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};

use crate::access;
use crate::claim;
use crate::key::Meta as _;
use crate::selector;

/// The requirements on every volume of a claim, also on one that a user bound to the claim in advance.
pub fn is_usable(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    !volume.metadata.is_deleting()
        && has_capacity_for(volume, claim)
        && claim::volume_mode(volume) == claim::claim_volume_mode(claim)
        && volume_attributes_class(volume) == claim_attributes_class(claim)
}

/// The requirements, besides [`is_usable`], on a volume that no claim has.
pub fn is_available_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim::claim_ref(volume).is_none()
        && claim::volume_phase(volume) == "Available"
        && claim::volume_class(volume) == claim::claim_class(claim).unwrap_or_default()
        && supports_access_modes(volume, claim)
        && is_selected_by(volume, claim)
}

/// A claim without a request accepts every capacity.
pub fn has_capacity_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    match (claim::capacity(volume), claim::requested_storage(claim)) {
        (Some(capacity), Some(requested)) => capacity >= requested,
        (_, None) => true,
        (None, Some(_)) => false,
    }
}

pub fn volume_attributes_class(volume: &PersistentVolume) -> &str {
    volume.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref()).unwrap_or_default()
}

pub fn claim_attributes_class(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref()).unwrap_or_default()
}

/// The access modes of the volume, without those that Kubernetes does not define.
pub fn access_modes(volume: &PersistentVolume) -> BTreeSet<&str> {
    let all = volume.spec.iter().flat_map(|s| s.access_modes.iter().flatten());
    all.map(String::as_str).filter(|m| access::ALL_MODES.contains(m)).collect()
}

/// Returns true if the volume has every access mode that the claim requests.
pub fn supports_access_modes(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let offered = access_modes(volume);
    let mut requested = claim.spec.iter().flat_map(|s| s.access_modes.iter().flatten());
    requested.all(|mode| offered.contains(mode.as_str()))
}

/// A claim without a selector accepts every volume.
pub fn is_selected_by(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let selector = claim.spec.as_ref().and_then(|s| s.selector.as_ref());
    selector.is_none_or(|selector| selector::labels_match(selector, volume.metadata.labels.as_ref()))
}

/// Returns true if the volume's node affinity admits the node.
pub fn is_accessible_from(volume: &PersistentVolume, node: &Node) -> bool {
    let affinity = volume.spec.as_ref().and_then(|s| s.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required.as_ref());
    required.is_none_or(|selector| selector::node_matches(selector, node))
}
