//! Which volume suits a claim. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_api::access;
use cleat_api::claim::{self, is_reserved_for};
use cleat_api::key::Meta as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// May a free volume be taken, or only one that was set aside for the claim?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Any,
    ReservedOnly,
}

/// The volume reserved for the claim if there is one; else, among the free ones that satisfy it, the one with the
/// fewest access modes too many, then the smallest, then the first by name.
pub(super) fn best<'a>(
    claim: &PersistentVolumeClaim,
    candidates: &'a [Arc<PersistentVolume>],
    choice: Choice,
) -> Option<&'a Arc<PersistentVolume>> {
    let reserved =
        candidates.iter().filter(|v| is_reserved_for(v, claim) && is_usable(v, claim)).min_by_key(|v| name(v));
    if reserved.is_some() || choice == Choice::ReservedOnly {
        return reserved;
    }
    let free = candidates.iter().filter(|v| suits(v, claim));
    free.min_by_key(|v| (modes(v).len(), claim::capacity(v), name(v)))
}

/// A free volume that satisfies the claim.
pub(super) fn suits(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim::claim_ref(volume).is_none()
        && claim::volume_phase(volume) == "Available"
        && claim::volume_class(volume) == claim::claim_class(claim).unwrap_or_default()
        && is_usable(volume, claim)
        && offers_modes(volume, claim)
        && selected(volume, claim)
}

fn is_usable(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    !volume.metadata.is_deleting()
        && holds_enough(volume, claim)
        && claim::volume_mode(volume) == claim::claim_mode(claim)
        && attributes_class(volume) == wanted_attributes_class(claim)
}

/// Why a volume that a claim names cannot be bound to it; `None` if it can.
pub(super) fn misfit(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let text = if volume.metadata.is_deleting() {
        return Some(format!("the volume is marked for deletion {name:?}"));
    } else if !holds_enough(volume, claim) {
        "requested PV is too small"
    } else if claim::volume_class(volume) != claim::claim_class(claim).unwrap_or_default() {
        "storageClassName does not match"
    } else if attributes_class(volume) != wanted_attributes_class(claim) {
        "volumeAttributesClassName does not match"
    } else if claim::volume_mode(volume) != claim::claim_mode(claim) {
        "incompatible volumeMode"
    } else if !offers_modes(volume, claim) {
        "incompatible accessMode"
    } else {
        return None;
    };
    Some(text.to_owned())
}

fn name(volume: &PersistentVolume) -> Option<&String> {
    volume.metadata.name.as_ref()
}

fn holds_enough(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    match (claim::capacity(volume), claim::requested(claim)) {
        (Some(capacity), Some(requested)) => capacity >= requested,
        (_, None) => true,
        (None, Some(_)) => false,
    }
}

fn attributes_class(volume: &PersistentVolume) -> &str {
    volume.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref()).unwrap_or_default()
}

fn wanted_attributes_class(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|s| s.volume_attributes_class_name.as_deref()).unwrap_or_default()
}

pub(super) fn modes(volume: &PersistentVolume) -> BTreeSet<&str> {
    let all = volume.spec.iter().flat_map(|s| s.access_modes.iter().flatten());
    all.map(String::as_str).filter(|m| access::ORDER.contains(m)).collect()
}

fn offers_modes(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let offered = modes(volume);
    let mut wanted = claim.spec.iter().flat_map(|s| s.access_modes.iter().flatten());
    wanted.all(|mode| offered.contains(mode.as_str()))
}

fn selected(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let Some(selector) = claim.spec.as_ref().and_then(|s| s.selector.as_ref()) else { return true };
    matches_labels(selector, volume)
}

fn matches_labels(selector: &LabelSelector, volume: &PersistentVolume) -> bool {
    let label = |key: &str| volume.metadata.labels.as_ref().and_then(|l| l.get(key));
    let exact = selector.match_labels.iter().flatten().all(|(key, value)| label(key) == Some(value));
    let expressions = selector.match_expressions.iter().flatten().all(|term| {
        let value = label(&term.key);
        let listed = |v: &String| term.values.iter().flatten().any(|w| w == v);
        match term.operator.as_str() {
            "In" => value.is_some_and(listed),
            "NotIn" => !value.is_some_and(listed),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            _ => false,
        }
    });
    exact && expressions
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::build;

    fn modes_of(mut volume: PersistentVolume, modes: &[&str]) -> Arc<PersistentVolume> {
        volume.spec.as_mut().unwrap().access_modes = Some(modes.iter().map(ToString::to_string).collect());
        Arc::new(volume)
    }

    #[test]
    fn picks_the_tightest_volume() {
        let once = &["ReadWriteOnce"][..];
        let claim = build::claim("ns", "c", Some("fast"), "2Gi");
        let vol = |name: &str, class: &str, size: &str| modes_of(build::volume(name, class, size), once);
        let many =
            |name: &str, size: &str| modes_of(build::volume(name, "fast", size), &["ReadWriteOnce", "ReadWriteMany"]);
        let taken = {
            let mut v = build::volume("taken", "fast", "2Gi");
            v.spec.as_mut().unwrap().claim_ref = Some(build::reference(&build::claim("ns", "other", None, "1Gi")));
            Arc::new(v)
        };
        let pending = {
            let mut v = build::volume("pending", "fast", "2Gi");
            v.status.as_mut().unwrap().phase = Some("Pending".to_owned());
            Arc::new(v)
        };
        let deleting = {
            let mut v = build::volume("deleting", "fast", "2Gi");
            v.metadata.deletion_timestamp = Some(build::time(5));
            Arc::new(v)
        };
        for (case, candidates, want) in [
            ("the smallest that is large enough", vec![vol("a", "fast", "9Gi"), vol("b", "fast", "3Gi")], Some("b")),
            ("too small never", vec![vol("a", "fast", "1Gi")], None),
            ("another class never", vec![vol("a", "slow", "2Gi")], None),
            ("fewer modes beat smaller size", vec![many("a", "2Gi"), vol("b", "fast", "9Gi")], Some("b")),
            ("somebody else's never", vec![taken], None),
            ("not yet available", vec![pending], None),
            ("one being deleted never", vec![deleting], None),
            ("equal ones go by name", vec![vol("b", "fast", "2Gi"), vol("a", "fast", "2Gi")], Some("a")),
        ] {
            let found = best(&claim, &candidates, Choice::Any).and_then(|v| v.metadata.name.as_deref());
            assert_eq!(found, want, "{case}");
        }
    }

    #[test]
    fn a_reserved_volume_wins_whatever_its_class_and_phase() {
        let claim = build::claim("ns", "c", Some("fast"), "2Gi");
        let mut reserved = build::volume("zzz", "other", "50Gi");
        reserved.spec.as_mut().unwrap().claim_ref = Some(build::reference(&claim));
        reserved.status.as_mut().unwrap().phase = Some("Pending".to_owned());
        let candidates = [Arc::new(build::volume("a", "fast", "2Gi")), Arc::new(reserved)];
        for choice in [Choice::Any, Choice::ReservedOnly] {
            let found = best(&claim, &candidates, choice).unwrap();
            assert_eq!(found.metadata.name.as_deref(), Some("zzz"));
        }
        assert!(best(&claim, &candidates[..1], Choice::ReservedOnly).is_none());
    }

    #[test]
    fn a_selector_must_match_the_volumes_labels() {
        let mut claim = build::claim("ns", "c", Some("fast"), "1Gi");
        let selector = serde_json::json!({
            "matchLabels": {"tier": "gold"}, "matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]
        });
        claim.spec.as_mut().unwrap().selector = Some(serde_json::from_value(selector).unwrap());
        let mut volume = build::volume("v", "fast", "1Gi");
        volume.metadata.labels = Some([("tier".to_owned(), "gold".to_owned())].into());
        assert!(best(&claim, &[Arc::new(volume.clone())], Choice::Any).is_none());
        volume.metadata.labels.as_mut().unwrap().insert("zone".to_owned(), "a".to_owned());
        assert!(best(&claim, &[Arc::new(volume)], Choice::Any).is_some());
    }
}
