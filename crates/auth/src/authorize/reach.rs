//! What each node's pods refer to: the objects a node has to read.

use std::collections::{HashMap, HashSet};

use cleat_store::Entry;
use k8s_openapi::api::core::v1::{Container, Pod, Volume};

use super::feed::Picture;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Refers {
    Secret,
    ConfigMap,
    Claim,
    Account,
}

type Names = HashSet<(Refers, String)>;

#[derive(Default)]
pub(super) struct Reach {
    /// By node, then by the pod's storage key.
    nodes: HashMap<String, HashMap<String, (String, Names)>>,
    placed: HashMap<String, String>,
}

impl Reach {
    pub(super) fn has(&self, node: &str, refers: Refers, namespace: &str, name: &str) -> bool {
        let wanted = (refers, name.to_owned());
        let mut pods = self.nodes.get(node).into_iter().flat_map(|pods| pods.values());
        pods.any(|(home, names)| home == namespace && names.contains(&wanted))
    }

    /// Namespace and name of the claims that pods on the node use.
    pub(super) fn claims(&self, node: &str) -> Vec<(String, String)> {
        let pods = self.nodes.get(node).into_iter().flat_map(|pods| pods.values());
        let claims = pods.flat_map(|(home, names)| {
            names.iter().filter(|(r, _)| *r == Refers::Claim).map(|(_, name)| (home.clone(), name.clone()))
        });
        claims.collect()
    }
}

impl Picture for Reach {
    const PREFIXES: &'static [&'static str] = &["/registry/pods/"];

    fn apply(&mut self, key: &str, object: Option<&Entry>) {
        if let Some(node) = self.placed.remove(key)
            && let Some(pods) = self.nodes.get_mut(&node)
        {
            pods.remove(key);
            if pods.is_empty() {
                self.nodes.remove(&node);
            }
        }
        let Some(pod) = object.and_then(|entry| serde_json::from_slice::<Pod>(&entry.value).ok()) else { return };
        let Some(node) = pod.spec.as_ref().and_then(|s| s.node_name.clone()).filter(|n| !n.is_empty()) else { return };
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        self.placed.insert(key.into(), node.clone());
        self.nodes.entry(node).or_default().insert(key.into(), (namespace, references(&pod)));
    }
}

fn references(pod: &Pod) -> Names {
    let mut names = Names::new();
    let Some(spec) = &pod.spec else { return names };
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    names.extend(spec.service_account_name.iter().map(|n| (Refers::Account, n.clone())));
    names.extend(spec.image_pull_secrets.iter().flatten().map(|s| (Refers::Secret, s.name.clone())));
    for volume in spec.volumes.iter().flatten() {
        of_volume(pod_name, volume, &mut names);
    }
    for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
        of_container(container, &mut names);
    }
    names
}

fn of_volume(pod: &str, volume: &Volume, names: &mut Names) {
    let mut add = |refers: Refers, name: Option<&String>| names.extend(name.map(|n| (refers, n.clone())));
    add(Refers::Secret, volume.secret.as_ref().and_then(|s| s.secret_name.as_ref()));
    add(Refers::ConfigMap, volume.config_map.as_ref().map(|c| &c.name));
    add(Refers::Claim, volume.persistent_volume_claim.as_ref().map(|c| &c.claim_name));
    if volume.ephemeral.is_some() {
        add(Refers::Claim, Some(&format!("{pod}-{}", volume.name)));
    }
    let publish = volume.csi.as_ref().and_then(|c| c.node_publish_secret_ref.as_ref());
    add(Refers::Secret, publish.map(|s| &s.name));
    for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
        add(Refers::Secret, source.secret.as_ref().map(|s| &s.name));
        add(Refers::ConfigMap, source.config_map.as_ref().map(|c| &c.name));
    }
}

fn of_container(container: &Container, names: &mut Names) {
    for source in container.env_from.iter().flatten() {
        names.extend(source.secret_ref.iter().map(|s| (Refers::Secret, s.name.clone())));
        names.extend(source.config_map_ref.iter().map(|c| (Refers::ConfigMap, c.name.clone())));
    }
    for source in container.env.iter().flatten().filter_map(|e| e.value_from.as_ref()) {
        names.extend(source.secret_key_ref.iter().map(|s| (Refers::Secret, s.name.clone())));
        names.extend(source.config_map_key_ref.iter().map(|c| (Refers::ConfigMap, c.name.clone())));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_reaches_what_its_pods_name() {
        let mut reach = Reach::default();
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
        reach.apply(key, Some(&entry));
        for (refers, name, want) in [
            (Refers::Secret, "s", true),
            (Refers::Secret, "other", false),
            (Refers::Claim, "c", true),
            (Refers::Claim, "p-e", true),
            (Refers::ConfigMap, "m", true),
            (Refers::ConfigMap, "env", true),
            (Refers::Account, "sa", true),
        ] {
            assert_eq!(reach.has("n", refers, "d", name), want, "{refers:?} {name}");
            assert!(!reach.has("m", refers, "d", name), "another node");
            assert!(!reach.has("n", refers, "x", name), "another namespace");
        }
        reach.apply(key, None);
        assert!(!reach.has("n", Refers::Secret, "d", "s"), "the pod is gone");
    }
}
