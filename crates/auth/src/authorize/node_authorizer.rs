//! The node authorizer: what a node may do beyond what roles grant. It may access its own Node, CSINode and Lease,
//! the pods assigned to it, and the objects those pods refer to. Which fields it may write is checked in
//! `write_authorization`.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, SecretReference};
use k8s_openapi::api::storage::v1::VolumeAttachment;

use super::node_references::{NodeReferences, ReferencedKind};
use super::store_cache::StoreCache;
use super::{Attributes, RequestTarget};
use cleat_apimachinery::selector;
use cleat_registry::reader::ObjectReader;

const NODE_LEASE_NAMESPACE: &str = "kube-node-lease";

/// Answers whether the node named `node` may do what `attributes` describes.
pub(super) struct NodeAuthorizer<'a> {
    pub(super) objects: &'a ObjectReader,
    pub(super) references: &'a StoreCache<NodeReferences>,
    pub(super) node: &'a str,
}

impl NodeAuthorizer<'_> {
    pub(super) async fn is_allowed(&self, attributes: &Attributes<'_>) -> bool {
        let RequestTarget::Resource { group, plural, subresource, namespace, name } = attributes.target else {
            return false;
        };
        let verb = attributes.verb;
        let reads = matches!(verb, "get" | "list" | "watch");
        let writes = matches!(verb, "update" | "patch");
        let is_own = name == self.node;
        let namespace_or_empty = namespace.unwrap_or_default();
        match (group, plural, subresource) {
            ("", "nodes", "") => verb == "create" || ((reads || writes) && is_own),
            ("", "nodes", "status") => (verb == "get" || writes) && is_own,
            ("storage.k8s.io", "csinodes", "") => verb == "create" || ((reads || writes || verb == "delete") && is_own),
            ("coordination.k8s.io", "leases", "") => {
                namespace_or_empty == NODE_LEASE_NAMESPACE
                    && (verb == "create" || ((verb == "get" || writes || verb == "delete") && is_own))
            }
            ("" | "events.k8s.io", "events", "") => matches!(verb, "create" | "update" | "patch"),
            ("storage.k8s.io", "csidrivers", "") => reads,
            ("", "pods", "") => match verb {
                // Write authorization checks that the pod is assigned to the node.
                "create" | "delete" => true,
                // A pod that does not exist is allowed: the client gets 404 instead of 403.
                "get" => {
                    let pod = self.objects.get::<Pod>(group, plural, namespace, name).await;
                    pod.is_none_or(|pod| pod.spec.and_then(|s| s.node_name).as_deref() == Some(self.node))
                }
                "list" | "watch" => selects_pods_of(attributes.field_selector, self.node),
                _ => false,
            },
            ("", "pods", "status") => writes,
            ("", "pods", "eviction") | ("", "serviceaccounts", "token") => verb == "create",
            ("authentication.k8s.io", "tokenreviews", "") => verb == "create",
            ("authorization.k8s.io", "subjectaccessreviews" | "localsubjectaccessreviews", "") => verb == "create",
            ("storage.k8s.io", "volumeattachments", "") => {
                let attachment = self.objects.get::<VolumeAttachment>(group, plural, None, name);
                reads && attachment.await.is_some_and(|found| found.spec.node_name == self.node)
            }
            ("", "persistentvolumeclaims", "") => {
                reads && self.is_referenced(ReferencedKind::Claim, namespace_or_empty, name).await
            }
            ("", "persistentvolumeclaims", "status") => {
                (verb == "get" || writes) && self.is_referenced(ReferencedKind::Claim, namespace_or_empty, name).await
            }
            ("", "persistentvolumes", "") => reads && self.is_volume_used(name).await,
            ("", "configmaps", "") => {
                reads && self.is_referenced(ReferencedKind::ConfigMap, namespace_or_empty, name).await
            }
            ("", "serviceaccounts", "") => {
                verb == "get" && self.is_referenced(ReferencedKind::ServiceAccount, namespace_or_empty, name).await
            }
            ("", "secrets", "") => {
                reads
                    && (self.is_referenced(ReferencedKind::Secret, namespace_or_empty, name).await
                        || self.is_secret_of_used_volume(namespace_or_empty, name).await)
            }
            _ => false,
        }
    }

    /// Does a pod on the node refer to this object?
    async fn is_referenced(&self, kind: ReferencedKind, namespace: &str, name: &str) -> bool {
        self.references.refresh(self.objects.store()).await;
        !name.is_empty() && self.references.read(|references| references.contains(self.node, kind, namespace, name))
    }

    /// Is the volume bound to a claim that a pod on the node uses?
    async fn is_volume_used(&self, name: &str) -> bool {
        let volume = self.objects.get::<PersistentVolume>("", "persistentvolumes", None, name).await;
        let Some(claim) = volume.and_then(|v| v.spec?.claim_ref) else { return false };
        let (namespace, name) = (claim.namespace.unwrap_or_default(), claim.name.unwrap_or_default());
        self.is_referenced(ReferencedKind::Claim, &namespace, &name).await
    }

    /// Does the driver need this secret on the node, for a volume that a pod there uses? Reads the claims as of the
    /// last refresh: the caller has just called `is_referenced`.
    async fn is_secret_of_used_volume(&self, namespace: &str, name: &str) -> bool {
        let is_secret = |reference: Option<SecretReference>| {
            reference.is_some_and(|r| r.name.as_deref() == Some(name) && r.namespace.as_deref() == Some(namespace))
        };
        for (claim_namespace, claim) in self.references.read(|references| references.claims(self.node)) {
            let plural = "persistentvolumeclaims";
            let claim = self.objects.get::<PersistentVolumeClaim>("", plural, Some(&claim_namespace), &claim).await;
            let Some(volume) = claim.and_then(|c| c.spec?.volume_name) else { continue };
            let volume = self.objects.get::<PersistentVolume>("", "persistentvolumes", None, &volume).await;
            let Some(csi) = volume.and_then(|v| v.spec?.csi) else { continue };
            let secrets = [csi.node_stage_secret_ref, csi.node_publish_secret_ref, csi.node_expand_secret_ref];
            if secrets.into_iter().any(is_secret) {
                return true;
            }
        }
        false
    }
}

/// Does the field selector restrict a list of pods to those assigned to the node?
fn selects_pods_of(field_selector: &str, node: &str) -> bool {
    selector::required_value(field_selector, "spec.nodeName").is_some_and(|value| value == node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_selector_for_its_own_pods_is_allowed() {
        for (field_selector, want) in [
            ("spec.nodeName=n", true),
            ("spec.nodeName==n", true),
            ("status.phase!=Failed,spec.nodeName=n", true),
            ("spec.nodeName=m", false),
            ("spec.nodeName!=n", false),
            ("", false),
        ] {
            assert_eq!(selects_pods_of(field_selector, "n"), want, "{field_selector}");
        }
    }
}
