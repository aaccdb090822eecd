//! What a node may write: its own Node, CSINode and Lease, mirror pods, the status of pods assigned to it, and the
//! progress of a resize in the status of claims. The node authorizer has already allowed the request itself.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::{Object, typed};
use cleat_apimachinery::part::ObjectPart;

/// On a pod that mirrors a static pod of its node.
const MIRROR_POD_ANNOTATION: &str = "kubernetes.io/config.mirror";
/// The labels in reserved domains that a node may set on itself.
const ALLOWED_NODE_LABELS: [&str; 12] = [
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "kubernetes.io/instance-type",
];

pub(super) fn is_assigned_to(pod: &Pod, node: &str) -> bool {
    pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node)
}

/// Nodes, CSINodes and leases must have the name of the node that writes them. Other kinds are not checked here.
fn check_own_name(d: &Descriptor, node: &str, meta: &ObjectMeta) -> Result<(), ApiError> {
    let name = meta.name.as_deref().unwrap_or_default();
    let why = match (d.group.as_str(), d.plural.as_str()) {
        ("", "nodes") => format!("node {node:?} is not allowed to modify node {name:?}"),
        ("storage.k8s.io", "csinodes") => "can only access CSINode with the same name as the requesting node".into(),
        ("coordination.k8s.io", "leases") => "can only access leases with the same name as the requesting node".into(),
        _ => return Ok(()),
    };
    if name == node { Ok(()) } else { Err(ApiError::forbidden(d, name, why)) }
}

pub(super) fn check_node_create(d: &Descriptor, node: &str, object: &dyn Object) -> Result<(), ApiError> {
    check_own_name(d, node, object.meta())?;
    let name = object.meta().name.as_deref().unwrap_or_default();
    let refuse = |why: String| Err(ApiError::forbidden(d, name, why));
    match (d.group.as_str(), d.plural.as_str()) {
        ("", "nodes") => check_node_labels(d, node, object.meta(), None),
        ("", "pods") => {
            let pod: &Pod = typed(object);
            if !object.meta().annotations.as_ref().is_some_and(|a| a.contains_key(MIRROR_POD_ANNOTATION)) {
                return refuse(format!(
                    "pod does not have {MIRROR_POD_ANNOTATION:?} annotation, node {node:?} can only create mirror pods"
                ));
            }
            if !is_assigned_to(pod, node) {
                return refuse(format!("node {node:?} can only create pods with spec.nodeName set to itself"));
            }
            let is_owned = object.meta().owner_references.iter().flatten().all(|o| o.kind == "Node" && o.name == node);
            if !is_owned {
                return refuse(format!("node {node:?} can only create pods with an owner reference set to itself"));
            }
            let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
            let references_api = volumes.into_iter().any(|v| {
                v.secret.is_some()
                    || v.config_map.is_some()
                    || v.persistent_volume_claim.is_some()
                    || v.projected.is_some()
            });
            if references_api {
                return refuse(format!("node {node:?} can not create pods that reference API objects"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

pub(super) fn check_node_update(
    d: &Descriptor,
    node: &str,
    part: ObjectPart,
    new: &dyn Object,
    old: &dyn Object,
) -> Result<(), ApiError> {
    check_own_name(d, node, old.meta())?;
    let name = old.meta().name.as_deref().unwrap_or_default();
    let refuse = |why: String| Err(ApiError::forbidden(d, name, why));
    match (d.group.as_str(), d.plural.as_str()) {
        ("", "nodes") => {
            let taints = |object: &dyn Object| typed::<Node>(object).spec.as_ref().and_then(|s| s.taints.clone());
            if part == ObjectPart::Main && taints(new).unwrap_or_default() != taints(old).unwrap_or_default() {
                return refuse(format!("node {node:?} is not allowed to modify taints"));
            }
            if new.meta().owner_references != old.meta().owner_references {
                return refuse(format!("node {node:?} is not allowed to modify ownerReferences"));
            }
            check_node_labels(d, node, new.meta(), Some(old.meta()))
        }
        ("", "pods") if part == ObjectPart::Status => {
            if !is_assigned_to(typed(old), node) {
                let why = "can only update pod status for pods with spec.nodeName set to itself";
                return refuse(format!("node {node:?} {why}"));
            }
            if new.meta().labels != old.meta().labels {
                return refuse(format!("node {node:?} cannot update labels through pod status"));
            }
            Ok(())
        }
        ("", "persistentvolumeclaims") if part == ObjectPart::Status => {
            // The status without the fields that a node may write.
            let other_fields = |object: &dyn Object| {
                let mut status = typed::<PersistentVolumeClaim>(object).status.clone().unwrap_or_default();
                status.capacity = None;
                status.conditions = None;
                status.allocated_resources = None;
                status.allocated_resource_statuses = None;
                status
            };
            if other_fields(new) != other_fields(old) {
                return refuse(format!("node {node:?} may only change capacity and resize progress of a claim"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A node may not change its own labels in reserved domains: administrators use them to select nodes for pods.
fn check_node_labels(d: &Descriptor, node: &str, new: &ObjectMeta, old: Option<&ObjectMeta>) -> Result<(), ApiError> {
    let value = |meta: Option<&ObjectMeta>, key: &str| meta.and_then(|m| m.labels.as_ref()?.get(key).cloned());
    let keys: BTreeSet<&String> =
        [Some(new), old].into_iter().flatten().flat_map(|m| m.labels.iter().flatten()).map(|(key, _)| key).collect();
    let changed = keys.into_iter().filter(|key| value(Some(new), key) != value(old, key));
    let refused: Vec<&str> = changed.filter(|key| is_reserved(key)).map(String::as_str).collect();
    if refused.is_empty() {
        return Ok(());
    }
    let verb = if old.is_some() { "modify" } else { "set the following" };
    let why = format!("node {node:?} is not allowed to {verb} labels: {}", refused.join(", "));
    Err(ApiError::forbidden(d, new.name.as_deref().unwrap_or_default(), why))
}

/// Is this a label that a node may not set on itself?
fn is_reserved(label: &str) -> bool {
    let Some((domain, _)) = label.split_once('/') else { return false };
    let is_within = |parent: &str| domain == parent || domain.strip_suffix(parent).is_some_and(|d| d.ends_with('.'));
    let in_reserved = is_within("kubernetes.io") || is_within("k8s.io");
    let in_node_domain = is_within("kubelet.kubernetes.io") || is_within("node.kubernetes.io");
    in_reserved && !in_node_domain && !ALLOWED_NODE_LABELS.contains(&label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_in_reserved_domains_are_reserved_with_exceptions() {
        for (label, want) in [
            ("plain", false),
            ("example.com/a", false),
            ("topology.block.cleat.dev/node", false),
            ("notkubernetes.io/a", false),
            ("kubernetes.io/hostname", false),
            ("node.kubernetes.io/anything", false),
            ("a.kubelet.kubernetes.io/anything", false),
            ("node-restriction.kubernetes.io/a", true),
            ("node-role.kubernetes.io/control-plane", true),
            ("x.k8s.io/a", true),
            ("topology.kubernetes.io/zone", false),
        ] {
            assert_eq!(is_reserved(label), want, "{label}");
        }
    }
}
