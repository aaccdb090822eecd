//! A pod's claims, its node, and whether it has terminated.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

use crate::key::{Key, Meta};

/// A volume of a pod that is backed by a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimVolume {
    /// The name inside the pod's `spec.volumes`.
    pub volume: String,
    pub claim: Key,
    pub read_only: bool,
    /// A generic ephemeral volume: the claim is created for this pod and must be owned by it.
    pub ephemeral: bool,
}

pub fn claim_volumes(pod: &Pod) -> Vec<ClaimVolume> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    volumes
        .filter_map(|v| {
            let (claim, read_only, ephemeral) = match (&v.persistent_volume_claim, &v.ephemeral) {
                (Some(source), _) => (source.claim_name.clone(), source.read_only.unwrap_or(false), false),
                (None, Some(_)) => {
                    (format!("{}-{}", pod.metadata.name.as_deref().unwrap_or_default(), v.name), false, true)
                }
                (None, None) => return None,
            };
            let claim = Key::namespaced(namespace.clone(), claim);
            Some(ClaimVolume { volume: v.name.clone(), claim, read_only, ephemeral })
        })
        .collect()
}

/// Returns true if a volume of the pod refers to the claim. The claim of an ephemeral volume must be owned by the pod.
pub fn uses_claim(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let key = Key::of(&claim.metadata);
    claim_volumes(pod).into_iter().any(|v| v.claim == key && (!v.ephemeral || owns_claim(pod, claim)))
}

/// Returns true if the pod is the claim's controller, as it is for the claims of its ephemeral volumes.
pub fn owns_claim(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let mut owners = claim.metadata.owner_references.iter().flatten();
    owners.any(|o| o.controller == Some(true) && o.uid == pod.metadata.uid())
}

pub fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|n| !n.is_empty())
}

/// Returns true if no container of the pod runs or will run again: the pod has finished, or it is being deleted and no
/// container is running.
pub fn is_terminated(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    if matches!(status.and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed")) {
        return true;
    }
    let mut containers = status.into_iter().flat_map(|s| {
        let all = [&s.container_statuses, &s.init_container_statuses, &s.ephemeral_container_statuses];
        all.into_iter().flatten().flatten()
    });
    pod.metadata.is_deleting() && !containers.any(|c| c.state.as_ref().is_some_and(|s| s.running.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    #[test]
    fn a_deleting_pod_is_terminated_only_when_nothing_runs() {
        let mut pod = build::pod("default", "p", "n1", &["c"]);
        assert!(!is_terminated(&pod));
        pod.metadata.deletion_timestamp = Some(build::time(1));
        assert!(is_terminated(&pod));
        build::running(&mut pod, "main");
        assert!(!is_terminated(&pod));
    }

    #[test]
    fn claims_and_ephemeral_claims_are_both_listed() {
        let mut pod = build::pod("ns", "p", "n1", &["c"]);
        build::ephemeral_volume(&mut pod, "scratch");
        let names: Vec<_> = claim_volumes(&pod).into_iter().map(|v| (v.claim.to_string(), v.ephemeral)).collect();
        assert_eq!(names, [("ns/c".to_owned(), false), ("ns/p-scratch".to_owned(), true)]);
    }
}
