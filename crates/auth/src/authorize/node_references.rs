//! Which Secrets, ConfigMaps, claims and service accounts the pods of each node refer to: a node may read these
//! objects.

use std::collections::{HashMap, HashSet};

use cleat_store::Entry;
use k8s_openapi::api::core::v1::{Container, Pod, Volume};

use super::store_cache::CachedView;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ReferencedKind {
    Secret,
    ConfigMap,
    Claim,
    ServiceAccount,
}

/// Kind and name of objects in one namespace.
type References = HashSet<(ReferencedKind, String)>;

struct PodReferences {
    namespace: String,
    references: References,
}

#[derive(Default)]
pub(super) struct NodeReferences {
    /// By node, then by the pod's storage key.
    pods_by_node: HashMap<String, HashMap<String, PodReferences>>,
    /// By the pod's storage key.
    node_by_pod: HashMap<String, String>,
}

impl NodeReferences {
    /// Does a pod on the node refer to this object?
    pub(super) fn contains(&self, node: &str, kind: ReferencedKind, namespace: &str, name: &str) -> bool {
        let reference = (kind, name.to_owned());
        self.pods_on(node).any(|pod| pod.namespace == namespace && pod.references.contains(&reference))
    }

    /// Namespace and name of the claims that pods on the node use.
    pub(super) fn claims(&self, node: &str) -> Vec<(String, String)> {
        let claims = self.pods_on(node).flat_map(|pod| {
            let claims = pod.references.iter().filter(|(kind, _)| *kind == ReferencedKind::Claim);
            claims.map(|(_, name)| (pod.namespace.clone(), name.clone()))
        });
        claims.collect()
    }

    fn pods_on(&self, node: &str) -> impl Iterator<Item = &PodReferences> {
        self.pods_by_node.get(node).into_iter().flat_map(|pods| pods.values())
    }
}

impl CachedView for NodeReferences {
    const PREFIXES: &'static [&'static str] = &["/registry/pods/"];

    fn apply(&mut self, key: &str, object: Option<&Entry>) {
        if let Some(node) = self.node_by_pod.remove(key)
            && let Some(pods) = self.pods_by_node.get_mut(&node)
        {
            pods.remove(key);
            if pods.is_empty() {
                self.pods_by_node.remove(&node);
            }
        }
        let Some(pod) = object.and_then(|entry| serde_json::from_slice::<Pod>(&entry.value).ok()) else { return };
        let Some(node) = pod.spec.as_ref().and_then(|s| s.node_name.clone()).filter(|n| !n.is_empty()) else { return };
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let references = PodReferences { namespace, references: pod_references(&pod) };
        self.node_by_pod.insert(key.into(), node.clone());
        self.pods_by_node.entry(node).or_default().insert(key.into(), references);
    }
}

fn pod_references(pod: &Pod) -> References {
    let mut references = References::new();
    let Some(spec) = &pod.spec else { return references };
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    references.extend(spec.service_account_name.iter().map(|n| (ReferencedKind::ServiceAccount, n.clone())));
    references.extend(spec.image_pull_secrets.iter().flatten().map(|s| (ReferencedKind::Secret, s.name.clone())));
    for volume in spec.volumes.iter().flatten() {
        add_volume_references(pod_name, volume, &mut references);
    }
    for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
        add_container_references(container, &mut references);
    }
    references
}

fn add_volume_references(pod: &str, volume: &Volume, references: &mut References) {
    let mut add = |kind: ReferencedKind, name: Option<&String>| references.extend(name.map(|n| (kind, n.clone())));
    add(ReferencedKind::Secret, volume.secret.as_ref().and_then(|s| s.secret_name.as_ref()));
    add(ReferencedKind::ConfigMap, volume.config_map.as_ref().map(|c| &c.name));
    add(ReferencedKind::Claim, volume.persistent_volume_claim.as_ref().map(|c| &c.claim_name));
    if volume.ephemeral.is_some() {
        add(ReferencedKind::Claim, Some(&format!("{pod}-{}", volume.name)));
    }
    let publish_secret = volume.csi.as_ref().and_then(|c| c.node_publish_secret_ref.as_ref());
    add(ReferencedKind::Secret, publish_secret.map(|s| &s.name));
    for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
        add(ReferencedKind::Secret, source.secret.as_ref().map(|s| &s.name));
        add(ReferencedKind::ConfigMap, source.config_map.as_ref().map(|c| &c.name));
    }
}

fn add_container_references(container: &Container, references: &mut References) {
    for source in container.env_from.iter().flatten() {
        references.extend(source.secret_ref.iter().map(|s| (ReferencedKind::Secret, s.name.clone())));
        references.extend(source.config_map_ref.iter().map(|c| (ReferencedKind::ConfigMap, c.name.clone())));
    }
    for source in container.env.iter().flatten().filter_map(|e| e.value_from.as_ref()) {
        references.extend(source.secret_key_ref.iter().map(|s| (ReferencedKind::Secret, s.name.clone())));
        references.extend(source.config_map_key_ref.iter().map(|c| (ReferencedKind::ConfigMap, c.name.clone())));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_has_the_references_of_its_pods() {
        let mut references = NodeReferences::default();
        let pod = json!({ "metadata": { "name": "p", "namespace": "d" }, "spec": {
            "nodeName": "n", "serviceAccountName": "sa",
            "containers": [{ "name": "c", "envFrom": [{ "configMapRef": { "name": "env" } }] }],
            "volumes": [
                { "name": "a", "secret": { "secretName": "s" } },
                { "name": "b", "persistentVolumeClaim": { "claimName": "c" } },
                { "name": "e", "ephemeral": {} },
                { "name": "f", "projected": { "sources": [{ "configMap": { "name": "m" } }] } },
            ],
        } });
        let key = "/registry/pods/d/p";
        let entry = Entry { key: key.into(), value: pod.to_string().into(), created: 1, modified: 1 };
        references.apply(key, Some(&entry));
        for (kind, name, want) in [
            (ReferencedKind::Secret, "s", true),
            (ReferencedKind::Secret, "other", false),
            (ReferencedKind::Claim, "c", true),
            (ReferencedKind::Claim, "p-e", true),
            (ReferencedKind::ConfigMap, "m", true),
            (ReferencedKind::ConfigMap, "env", true),
            (ReferencedKind::ServiceAccount, "sa", true),
        ] {
            assert_eq!(references.contains("n", kind, "d", name), want, "{kind:?} {name}");
            assert!(!references.contains("m", kind, "d", name), "another node");
            assert!(!references.contains("n", kind, "x", name), "another namespace");
        }
        references.apply(key, None);
        assert!(!references.contains("n", ReferencedKind::Secret, "d", "s"), "the pod was deleted");
    }
}
