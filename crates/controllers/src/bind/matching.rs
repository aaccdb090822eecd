//! Which volume suits a claim. Pure.

use std::sync::Arc;

use cleat_api::claim::{self, is_reserved_for};
use cleat_api::key::Meta as _;
use cleat_api::matching;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

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
    let usable = |v: &&Arc<PersistentVolume>| {
        is_half_bound(v, claim) || (matching::is_usable(v, claim) && matching::supports_access_modes(v, claim))
    };
    let reserved = candidates.iter().filter(|v| is_reserved_for(v, claim)).filter(usable).min_by_key(|v| name(v));
    if reserved.is_some() || choice == Choice::ReservedOnly {
        return reserved;
    }
    let free = candidates.iter().filter(|v| suits(v, claim));
    free.min_by_key(|v| (matching::access_modes(v).len(), claim::capacity(v), name(v)))
}

/// A bind of this volume was interrupted, and from its phase on the volume is protected. It is finished even if somebody
/// has asked to delete the volume since: nobody could give it back otherwise.
fn is_half_bound(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let uid = claim::claim_ref(volume).and_then(|r| r.uid.as_deref());
    claim::volume_phase(volume) == "Bound" && uid == Some(claim.metadata.uid())
}

/// A free volume that satisfies the claim.
pub(super) fn suits(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    matching::is_usable(volume, claim) && matching::is_available_for(volume, claim)
}

/// Why a volume that a claim names cannot be bound to it; `None` if it can.
pub(super) fn misfit(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let text = if volume.metadata.is_deleting() {
        return Some(format!("the volume is marked for deletion {name:?}"));
    } else if !matching::has_capacity_for(volume, claim) {
        "requested PV is too small"
    } else if claim::volume_class(volume) != claim::claim_class(claim).unwrap_or_default() {
        "storageClassName does not match"
    } else if matching::volume_attributes_class(volume) != matching::claim_attributes_class(claim) {
        "volumeAttributesClassName does not match"
    } else if claim::volume_mode(volume) != claim::claim_volume_mode(claim) {
        "incompatible volumeMode"
    } else if !matching::supports_access_modes(volume, claim) {
        "incompatible accessMode"
    } else {
        return None;
    };
    Some(text.to_owned())
}

fn name(volume: &PersistentVolume) -> Option<&String> {
    volume.metadata.name.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

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
        let mut shared = claim;
        shared.spec.as_mut().unwrap().access_modes = Some(vec!["ReadWriteMany".to_owned()]);
        assert!(best(&shared, &candidates, Choice::ReservedOnly).is_none(), "its access modes count");
    }

    #[test]
    fn a_bind_that_was_begun_is_finished_even_on_a_volume_that_goes() {
        let claim = build::claim("ns", "c", Some("fast"), "2Gi");
        let going = |phase: &str| {
            let mut v = build::volume("v", "fast", "2Gi");
            v.spec.as_mut().unwrap().claim_ref = Some(build::reference(&claim));
            v.status.as_mut().unwrap().phase = Some(phase.to_owned());
            v.metadata.deletion_timestamp = Some(build::time(5));
            [Arc::new(v)]
        };
        assert!(best(&claim, &going("Bound"), Choice::ReservedOnly).is_some());
        assert!(best(&claim, &going("Available"), Choice::ReservedOnly).is_none(), "it vanishes at any moment");
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
