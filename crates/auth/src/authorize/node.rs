//! What a node may do beyond what roles grant: its own Node, CSINode and Lease, the pods placed on it, and the objects
//! those pods refer to. What it may write into them is judged in `guard`.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, SecretReference};
use k8s_openapi::api::storage::v1::VolumeAttachment;

use super::feed::Feed;
use super::reach::{Reach, Refers};
use super::{Attributes, What};
use cleat_apimachinery::selector;
use cleat_registry::reader::ObjectReader;

pub(super) const LEASES: &str = "kube-node-lease";

pub(super) async fn may(objects: &ObjectReader, reach: &Feed<Reach>, node: &str, asked: &Attributes<'_>) -> bool {
    let What::Resource { group, plural, subresource, namespace, name } = asked.what else { return false };
    let verb = asked.verb;
    let reads = matches!(verb, "get" | "list" | "watch");
    let writes = matches!(verb, "update" | "patch");
    let own = name == node;
    let home = namespace.unwrap_or_default();
    match (group, plural, subresource) {
        ("", "nodes", "") => verb == "create" || ((reads || writes) && own),
        ("", "nodes", "status") => (verb == "get" || writes) && own,
        ("storage.k8s.io", "csinodes", "") => verb == "create" || ((reads || writes || verb == "delete") && own),
        ("coordination.k8s.io", "leases", "") => {
            home == LEASES && (verb == "create" || ((verb == "get" || writes || verb == "delete") && own))
        }
        ("" | "events.k8s.io", "events", "") => matches!(verb, "create" | "update" | "patch"),
        ("storage.k8s.io", "csidrivers", "") => reads,
        ("", "pods", "") => match verb {
            // Whose the pod is, is judged where it is written.
            "create" | "delete" => true,
            "get" => {
                let pod = objects.get::<Pod>(group, plural, namespace, name).await;
                pod.is_none_or(|pod| pod.spec.and_then(|s| s.node_name).as_deref() == Some(node))
            }
            "list" | "watch" => selects(asked.fields, node),
            _ => false,
        },
        ("", "pods", "status") => writes,
        ("", "pods", "eviction") | ("", "serviceaccounts", "token") => verb == "create",
        ("authentication.k8s.io", "tokenreviews", "") => verb == "create",
        ("authorization.k8s.io", "subjectaccessreviews" | "localsubjectaccessreviews", "") => verb == "create",
        ("storage.k8s.io", "volumeattachments", "") => {
            let read = objects.get::<VolumeAttachment>(group, plural, None, name);
            reads && read.await.is_some_and(|found| found.spec.node_name == node)
        }
        ("", "persistentvolumeclaims", "") => reads && has(objects, reach, node, Refers::Claim, home, name).await,
        ("", "persistentvolumeclaims", "status") => {
            (verb == "get" || writes) && has(objects, reach, node, Refers::Claim, home, name).await
        }
        ("", "persistentvolumes", "") => reads && reaches_volume(objects, reach, node, name).await,
        ("", "configmaps", "") => reads && has(objects, reach, node, Refers::ConfigMap, home, name).await,
        ("", "serviceaccounts", "") => verb == "get" && has(objects, reach, node, Refers::Account, home, name).await,
        ("", "secrets", "") => {
            reads
                && (has(objects, reach, node, Refers::Secret, home, name).await
                    || volume_needs_secret(objects, reach, node, home, name).await)
        }
        _ => false,
    }
}

/// Does the field selector restrict a list of pods to the node's own?
fn selects(fields: &str, node: &str) -> bool {
    selector::required(fields, "spec.nodeName").is_some_and(|value| value == node)
}

async fn has(
    objects: &ObjectReader,
    reach: &Feed<Reach>,
    node: &str,
    refers: Refers,
    namespace: &str,
    name: &str,
) -> bool {
    reach.follow(objects.store()).await;
    !name.is_empty() && reach.read(|reach| reach.has(node, refers, namespace, name))
}

async fn reaches_volume(objects: &ObjectReader, reach: &Feed<Reach>, node: &str, name: &str) -> bool {
    let volume = objects.get::<PersistentVolume>("", "persistentvolumes", None, name).await;
    let Some(claim) = volume.and_then(|v| v.spec?.claim_ref) else { return false };
    let (namespace, name) = (claim.namespace.unwrap_or_default(), claim.name.unwrap_or_default());
    has(objects, reach, node, Refers::Claim, &namespace, &name).await
}

async fn volume_needs_secret(
    objects: &ObjectReader,
    reach: &Feed<Reach>,
    node: &str,
    namespace: &str,
    name: &str,
) -> bool {
    let is_it = |reference: Option<SecretReference>| {
        reference.is_some_and(|r| r.name.as_deref() == Some(name) && r.namespace.as_deref() == Some(namespace))
    };
    for (home, claim) in reach.read(|reach| reach.claims(node)) {
        let found = objects.get::<PersistentVolumeClaim>("", "persistentvolumeclaims", Some(&home), &claim).await;
        let Some(volume) = found.and_then(|c| c.spec?.volume_name) else { continue };
        let volume = objects.get::<PersistentVolume>("", "persistentvolumes", None, &volume).await;
        let Some(csi) = volume.and_then(|v| v.spec?.csi) else { continue };
        if [csi.node_stage_secret_ref, csi.node_publish_secret_ref, csi.node_expand_secret_ref].into_iter().any(is_it) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_selector_for_the_node_itself_counts() {
        for (fields, want) in [
            ("spec.nodeName=n", true),
            ("spec.nodeName==n", true),
            ("status.phase!=Failed,spec.nodeName=n", true),
            ("spec.nodeName=m", false),
            ("spec.nodeName!=n", false),
            ("", false),
        ] {
            assert_eq!(selects(fields, "n"), want, "{fields}");
        }
    }
}
