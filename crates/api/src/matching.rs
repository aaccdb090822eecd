//! What a claim asks of a volume, one question at a time. The binder and the scheduler ask the same ones.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};

use crate::access;
use crate::claim;
use crate::key::Meta as _;
use crate::selector;

/// What must hold even for a volume that was set aside for the claim.
pub fn is_usable(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    !volume.metadata.is_deleting()
        && holds_enough(volume, claim)
        && claim::volume_mode(volume) == claim::claim_mode(claim)
        && attributes_class(volume) == wanted_attributes_class(claim)
}

/// What must hold besides for a volume that nobody has.
pub fn is_suitable(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim::claim_ref(volume).is_none()
        && claim::volume_phase(volume) == "Available"
        && claim::volume_class(volume) == claim::claim_class(claim).unwrap_or_default()
        && offers_modes(volume, claim)
        && is_selected(volume, claim)
}

pub fn holds_enough(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    match (claim::capacity(volume), claim::requested(claim)) {
        (Some(capacity), Some(requested)) => capacity >= requested,
        (_, None) => true,
        (None, Some(_)) => false,
    }
}

pub fn attributes_class(volume: &PersistentVolume) -> &str {
    volume.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref()).unwrap_or_default()
}

pub fn wanted_attributes_class(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref()).unwrap_or_default()
}

pub fn modes(volume: &PersistentVolume) -> BTreeSet<&str> {
    let all = volume.spec.iter().flat_map(|s| s.access_modes.iter().flatten());
    all.map(String::as_str).filter(|m| access::ORDER.contains(m)).collect()
}

pub fn offers_modes(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let offered = modes(volume);
    let mut wanted = claim.spec.iter().flat_map(|s| s.access_modes.iter().flatten());
    wanted.all(|mode| offered.contains(mode.as_str()))
}

pub fn is_selected(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let selector = claim.spec.as_ref().and_then(|s| s.selector.as_ref());
    selector.is_none_or(|selector| selector::labels_match(selector, volume.metadata.labels.as_ref()))
}

/// The volume can be had on this node.
pub fn reaches(volume: &PersistentVolume, node: &Node) -> bool {
    let affinity = volume.spec.as_ref().and_then(|s| s.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required.as_ref());
    required.is_none_or(|selector| selector::node_matches(selector, node))
}
