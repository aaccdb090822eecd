//! Decides which claims must be created for a pod's ephemeral volumes. Pure.

use std::sync::Arc;

use cleat_api::key::{Key, Meta as _};
use cleat_api::pod;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

/// A pod and its ephemeral volumes.
#[derive(Clone, Debug)]
pub struct EphemeralPodSnapshot {
    pub pod: Arc<Pod>,
    pub volumes: Vec<EphemeralVolume>,
}

#[derive(Clone, Debug)]
pub struct EphemeralVolume {
    pub name: String,
    /// The claim that the volume uses.
    pub claim: Key,
    /// The claim of that name, if there is one. The pod may not be its owner.
    pub existing: Option<Arc<PersistentVolumeClaim>>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum EphemeralClaimDecision {
    Create {
        volume: String,
        claim: Box<PersistentVolumeClaim>,
    },
    /// The pod does not own the existing claim of that name.
    Refuse {
        volume: String,
        claim: Key,
    },
}

/// Returns a decision for each volume that has no claim of its own yet.
pub fn pod(snapshot: &EphemeralPodSnapshot) -> Vec<EphemeralClaimDecision> {
    if snapshot.pod.metadata.is_deleting() {
        return Vec::new();
    }
    snapshot.volumes.iter().filter_map(|volume| decide_volume(&snapshot.pod, volume)).collect()
}

fn decide_volume(pod: &Pod, volume: &EphemeralVolume) -> Option<EphemeralClaimDecision> {
    let name = volume.name.clone();
    match &volume.existing {
        Some(claim) if pod::owns_claim(pod, claim) => None,
        Some(_) => Some(EphemeralClaimDecision::Refuse { volume: name, claim: volume.claim.clone() }),
        None => {
            let claim = Box::new(build_claim(pod, &volume.name, &volume.claim)?);
            Some(EphemeralClaimDecision::Create { volume: name, claim })
        }
    }
}

/// Builds the claim from the volume's template; `None` if the volume has no template.
fn build_claim(pod: &Pod, volume: &str, claim: &Key) -> Option<PersistentVolumeClaim> {
    let mut volumes = pod.spec.as_ref()?.volumes.iter().flatten();
    let source = volumes.find(|v| v.name == volume)?.ephemeral.as_ref()?;
    let template = source.volume_claim_template.clone()?;
    let meta = template.metadata.unwrap_or_default();
    Some(PersistentVolumeClaim {
        metadata: ObjectMeta {
            namespace: claim.namespace.clone(),
            name: Some(claim.name.clone()),
            annotations: meta.annotations,
            labels: meta.labels,
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                name: pod.metadata.name.clone().unwrap_or_default(),
                uid: pod.metadata.uid().to_owned(),
                controller: Some(true),
                block_owner_deletion: Some(true),
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(template.spec),
        status: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;
    use k8s_openapi::api::core::v1::PersistentVolumeClaimTemplate;

    fn pod_with_template() -> Pod {
        let mut pod = build::pod("ns", "p", "", &[]);
        build::ephemeral_volume(&mut pod, "data");
        let spec = build::claim("ns", "x", Some("fast"), "1Gi").spec.unwrap();
        let template = PersistentVolumeClaimTemplate { metadata: None, spec };
        let volume = pod.spec.as_mut().unwrap().volumes.as_mut().unwrap().last_mut().unwrap();
        volume.ephemeral.as_mut().unwrap().volume_claim_template = Some(template);
        pod
    }

    fn decide(object: Pod, existing: Option<PersistentVolumeClaim>) -> Vec<EphemeralClaimDecision> {
        let existing = existing.map(Arc::new);
        let volumes = pod::claim_volumes(&object).into_iter().filter(|v| v.ephemeral);
        let volumes = volumes.map(|v| EphemeralVolume { name: v.volume, claim: v.claim, existing: existing.clone() });
        let volumes = volumes.collect();
        pod(&EphemeralPodSnapshot { pod: Arc::new(object), volumes })
    }

    #[test]
    fn a_pod_gets_only_a_claim_that_it_owns() {
        let deleting = {
            let mut p = pod_with_template();
            p.metadata.deletion_timestamp = Some(build::time(1));
            p
        };
        let EphemeralClaimDecision::Create { claim: created, volume } = decide(pod_with_template(), None).remove(0)
        else {
            panic!("no claim is created")
        };
        assert_eq!(volume, "data");
        assert_eq!(Key::of(&created.metadata), Key::namespaced("ns", "p-data"));
        assert_eq!(created.spec.as_ref().unwrap().storage_class_name.as_deref(), Some("fast"));
        let foreign = build::claim("ns", "p-data", None, "1Gi");
        let mut not_controlled = created.as_ref().clone();
        not_controlled.metadata.owner_references.as_mut().unwrap()[0].controller = None;
        let mut of_predecessor = created.as_ref().clone();
        of_predecessor.metadata.owner_references.as_mut().unwrap()[0].uid = "uid-before".to_owned();
        let refused =
            EphemeralClaimDecision::Refuse { volume: "data".to_owned(), claim: Key::namespaced("ns", "p-data") };
        let plain = build::pod("ns", "p", "", &["c"]);
        let bare = {
            let mut p = build::pod("ns", "p", "", &[]);
            build::ephemeral_volume(&mut p, "data");
            p
        };
        for (case, pod, existing, want) in [
            ("a volume that names an existing claim needs no claim", plain, None, vec![]),
            ("the volume has no template", bare, None, vec![]),
            ("its claim exists", pod_with_template(), Some(created.as_ref().clone()), vec![]),
            ("the pod does not own the claim of that name", pod_with_template(), Some(foreign), vec![refused.clone()]),
            (
                "the pod owns the claim, but not as its controller",
                pod_with_template(),
                Some(not_controlled),
                vec![refused.clone()],
            ),
            ("an earlier pod of that name owns the claim", pod_with_template(), Some(of_predecessor), vec![refused]),
            ("a pod that is being deleted gets no claim", deleting, None, vec![]),
        ] {
            assert_eq!(decide(pod, existing), want, "{case}");
        }
    }
}
