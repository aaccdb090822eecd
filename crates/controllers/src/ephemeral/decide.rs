//! Which claims a pod's ephemeral volumes still need. Pure.

use std::sync::Arc;

use cleat_api::key::{Key, Meta as _};
use cleat_api::pod;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Create {
        volume: String,
        claim: Box<PersistentVolumeClaim>,
    },
    /// A claim of that name is not this pod's.
    Refuse {
        volume: String,
        claim: Key,
    },
}

pub fn decide(pod: &Pod, find: impl Fn(&Key) -> Option<Arc<PersistentVolumeClaim>>) -> Vec<Decision> {
    if pod.metadata.is_deleting() {
        return Vec::new();
    }
    let wanted = pod::claim_volumes(pod).into_iter().filter(|v| v.ephemeral);
    wanted
        .filter_map(|v| match find(&v.claim) {
            Some(claim) if pod::owns_claim(pod, &claim) => None,
            Some(_) => Some(Decision::Refuse { volume: v.volume, claim: v.claim }),
            None => {
                let claim = Box::new(build(pod, &v.volume, &v.claim)?);
                Some(Decision::Create { volume: v.volume, claim })
            }
        })
        .collect()
}

fn build(pod: &Pod, volume: &str, claim: &Key) -> Option<PersistentVolumeClaim> {
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

    fn pod() -> Pod {
        let mut pod = build::pod("ns", "p", "", &[]);
        build::ephemeral_volume(&mut pod, "data");
        let spec = build::claim("ns", "x", Some("fast"), "1Gi").spec.unwrap();
        let template = PersistentVolumeClaimTemplate { metadata: None, spec };
        let volume = pod.spec.as_mut().unwrap().volumes.as_mut().unwrap().last_mut().unwrap();
        volume.ephemeral.as_mut().unwrap().volume_claim_template = Some(template);
        pod
    }

    #[test]
    fn a_pod_gets_its_own_claim_and_nobody_elses() {
        let deleting = {
            let mut p = pod();
            p.metadata.deletion_timestamp = Some(build::time(1));
            p
        };
        let Decision::Create { claim: made, volume } = decide(&pod(), |_| None).remove(0) else { panic!("not made") };
        assert_eq!(volume, "data");
        assert_eq!(Key::of(&made.metadata), Key::namespaced("ns", "p-data"));
        assert_eq!(made.spec.as_ref().unwrap().storage_class_name.as_deref(), Some("fast"));
        let foreign = build::claim("ns", "p-data", None, "1Gi");
        let mut tolerated = made.as_ref().clone();
        tolerated.metadata.owner_references.as_mut().unwrap()[0].controller = None;
        let mut of_predecessor = made.as_ref().clone();
        of_predecessor.metadata.owner_references.as_mut().unwrap()[0].uid = "uid-before".to_owned();
        let refused = Decision::Refuse { volume: "data".to_owned(), claim: Key::namespaced("ns", "p-data") };
        let plain = build::pod("ns", "p", "", &["c"]);
        let bare = {
            let mut p = build::pod("ns", "p", "", &[]);
            build::ephemeral_volume(&mut p, "data");
            p
        };
        for (case, pod, there, want) in [
            ("a claim of somebody's is not made", plain, None, vec![]),
            ("nothing to make it from", bare, None, vec![]),
            ("its claim is there", pod(), Some(made.as_ref().clone()), vec![]),
            ("a claim of that name is somebody else's", pod(), Some(foreign), vec![refused.clone()]),
            ("the pod owns the claim, but not as its controller", pod(), Some(tolerated), vec![refused.clone()]),
            ("an earlier pod of that name had it", pod(), Some(of_predecessor), vec![refused]),
            ("a pod that goes gets nothing new", deleting, None, vec![]),
        ] {
            assert_eq!(decide(&pod, |_| there.clone().map(Arc::new)), want, "{case}");
        }
    }
}
