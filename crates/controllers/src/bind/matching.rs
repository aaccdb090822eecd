//! Chooses a volume for a claim. Pure.

use std::sync::Arc;

use cleat_api::claim::{self, is_reserved_for};
use cleat_api::key::Meta as _;
use cleat_api::matching;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

/// Which candidates may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CandidateFilter {
    /// Available volumes, and volumes reserved for the claim.
    Any,
    /// Only volumes whose `claimRef` names the claim.
    ReservedOnly,
}

/// Returns the volume reserved for the claim if there is one. Otherwise returns, among the available volumes that
/// satisfy the claim, the one with the fewest access modes, then the smallest, then the first by name.
pub(super) fn find_best<'a>(
    claim: &PersistentVolumeClaim,
    candidates: &'a [Arc<PersistentVolume>],
    filter: CandidateFilter,
) -> Option<&'a Arc<PersistentVolume>> {
    let usable = |v: &&Arc<PersistentVolume>| {
        is_half_bound(v, claim) || (matching::is_usable(v, claim) && matching::supports_access_modes(v, claim))
    };
    let reserved = candidates.iter().filter(|v| is_reserved_for(v, claim)).filter(usable).min_by_key(|v| name(v));
    if reserved.is_some() || filter == CandidateFilter::ReservedOnly {
        return reserved;
    }
    let available = candidates.iter().filter(|v| satisfies(v, claim));
    available.min_by_key(|v| (matching::access_modes(v).len(), claim::capacity(v), name(v)))
}

/// Returns true if a bind of this volume to the claim was interrupted after the volume became Bound. Such a bind is
/// finished even if the volume is being deleted: a Bound volume is protected, so without a bind it would stay in this
/// state forever.
fn is_half_bound(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let uid = claim::claim_ref(volume).and_then(|r| r.uid.as_deref());
    claim::volume_phase(volume) == "Bound" && uid == Some(claim.metadata.uid())
}

/// Returns true if the volume is available and satisfies the claim.
pub(super) fn satisfies(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    matching::is_usable(volume, claim) && matching::is_available_for(volume, claim)
}

/// Returns the reason why a volume that the claim names cannot be bound to it; `None` if it can be bound.
pub(super) fn mismatch(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let reason = if volume.metadata.is_deleting() {
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
    Some(reason.to_owned())
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
    fn the_volume_with_fewest_modes_then_smallest_capacity_is_chosen() {
        let once = &["ReadWriteOnce"][..];
        let claim = build::claim("ns", "c", Some("fast"), "2Gi");
        let vol = |name: &str, class: &str, size: &str| modes_of(build::volume(name, class, size), once);
        let many =
            |name: &str, size: &str| modes_of(build::volume(name, "fast", size), &["ReadWriteOnce", "ReadWriteMany"]);
        let of_other = {
            let mut v = build::volume("of-other", "fast", "2Gi");
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
            ("a volume that is too small never", vec![vol("a", "fast", "1Gi")], None),
            ("a volume of another class never", vec![vol("a", "slow", "2Gi")], None),
            ("fewer modes beat smaller size", vec![many("a", "2Gi"), vol("b", "fast", "9Gi")], Some("b")),
            ("a volume of another claim never", vec![of_other], None),
            ("not yet available", vec![pending], None),
            ("a volume that is being deleted never", vec![deleting], None),
            ("equal volumes are ordered by name", vec![vol("b", "fast", "2Gi"), vol("a", "fast", "2Gi")], Some("a")),
        ] {
            let found = find_best(&claim, &candidates, CandidateFilter::Any).and_then(|v| v.metadata.name.as_deref());
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
        for filter in [CandidateFilter::Any, CandidateFilter::ReservedOnly] {
            let found = find_best(&claim, &candidates, filter).unwrap();
            assert_eq!(found.metadata.name.as_deref(), Some("zzz"));
        }
        assert!(find_best(&claim, &candidates[..1], CandidateFilter::ReservedOnly).is_none());
        let mut shared = claim;
        shared.spec.as_mut().unwrap().access_modes = Some(vec!["ReadWriteMany".to_owned()]);
        assert!(
            find_best(&shared, &candidates, CandidateFilter::ReservedOnly).is_none(),
            "a reserved volume must offer the access modes"
        );
    }

    #[test]
    fn an_interrupted_bind_is_finished_even_if_the_volume_is_being_deleted() {
        let claim = build::claim("ns", "c", Some("fast"), "2Gi");
        let deleting = |phase: &str| {
            let mut v = build::volume("v", "fast", "2Gi");
            v.spec.as_mut().unwrap().claim_ref = Some(build::reference(&claim));
            v.status.as_mut().unwrap().phase = Some(phase.to_owned());
            v.metadata.deletion_timestamp = Some(build::time(5));
            [Arc::new(v)]
        };
        assert!(find_best(&claim, &deleting("Bound"), CandidateFilter::ReservedOnly).is_some());
        assert!(
            find_best(&claim, &deleting("Available"), CandidateFilter::ReservedOnly).is_none(),
            "it may be deleted at any moment"
        );
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
        assert!(find_best(&claim, &[Arc::new(volume.clone())], CandidateFilter::Any).is_none());
        volume.metadata.labels.as_mut().unwrap().insert("zone".to_owned(), "a".to_owned());
        assert!(find_best(&claim, &[Arc::new(volume)], CandidateFilter::Any).is_some());
    }
}
