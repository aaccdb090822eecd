//! Rules about what a caller may write into objects it may write: nobody grants rights they do not hold, and a node
//! writes only about itself and the pods placed on it.
//!
//! Every function takes the [`Actor`] of the write. Writes of the server itself are not checked.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::actor::Actor;
use crate::authenticate::Caller;
use crate::authorize::rules::{everything, missing, shown};
use crate::authorize::{Attributes, Authorizer, What, role_key};
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::{Kind, Object, typed};
use cleat_apimachinery::managed_fields::decode;
use cleat_apimachinery::part::ObjectPart;
use cleat_registry::strategy::rbac::GROUP;
use cleat_store::Store;

const MIRROR: &str = "kubernetes.io/config.mirror";
/// Labels in the reserved domains that a node may set on itself all the same.
const NODE_LABELS: [&str; 12] = [
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

/// A PUT or PATCH that turns out to create needs the right to create as well.
async fn check_creation(
    authorizer: &Authorizer,
    caller: &Caller,
    verb: &str,
    d: &Descriptor,
    object: &dyn Object,
) -> Result<(), ApiError> {
    if !matches!(verb, "update" | "patch") {
        return Ok(());
    }
    let meta = object.meta();
    let what = What::Resource {
        group: &d.group,
        plural: &d.plural,
        subresource: "",
        namespace: meta.namespace.as_deref(),
        name: meta.name.as_deref().unwrap_or_default(),
    };
    authorizer.require(caller, &Attributes::new("create", what)).await
}

/// May the actor create this object?
pub async fn create(
    authorizer: &Authorizer,
    actor: &Actor,
    kind: &dyn Kind,
    object: &dyn Object,
) -> Result<(), ApiError> {
    let Actor::Client { caller, verb } = actor else { return Ok(()) };
    let d = kind.descriptor();
    check_creation(authorizer, caller, verb, d, object).await?;
    if d.group == GROUP {
        return grant(authorizer, caller, d, object, None).await;
    }
    match caller.node() {
        Some(node) => node_creates(d, node, object),
        None => Ok(()),
    }
}

/// May the actor replace `old` by `new`?
pub async fn update(
    authorizer: &Authorizer,
    actor: &Actor,
    at: &ObjectAddress<'_>,
    part: ObjectPart,
    new: &dyn Object,
    old: &dyn Object,
) -> Result<(), ApiError> {
    let Some(caller) = actor.caller() else { return Ok(()) };
    let d = at.descriptor();
    if d.group == GROUP && part == ObjectPart::Main {
        return grant(authorizer, caller, d, new, Some(old)).await;
    }
    match caller.node() {
        Some(node) => node_updates(d, node, part, new, old),
        None => Ok(()),
    }
}

/// May the actor delete this object?
pub async fn delete(store: &dyn Store, actor: &Actor, at: ObjectAddress<'_>) -> Result<(), ApiError> {
    let Some(caller) = actor.caller() else { return Ok(()) };
    let (Some(node), "pods", "") = (caller.node(), at.descriptor().plural.as_str(), at.descriptor().group.as_str())
    else {
        return Ok(());
    };
    let Some(entry) = store.get(&at.key()).await? else { return Ok(()) };
    let pod = decode(at.kind, &entry)?;
    if placed_on(typed(&*pod), node) {
        return Ok(());
    }
    let why = format!("node {node:?} can only delete pods with spec.nodeName set to itself");
    Err(ApiError::forbidden(at.descriptor(), at.name, why))
}

/// Nobody grants what they do not hold, unless they may `escalate` or `bind`.
async fn grant(
    authorizer: &Authorizer,
    caller: &Caller,
    d: &Descriptor,
    new: &dyn Object,
    old: Option<&dyn Object>,
) -> Result<(), ApiError> {
    let name = new.meta().name.as_deref().unwrap_or_default();
    let namespace = new.meta().namespace.as_deref();
    let of = |rules: &Option<Vec<PolicyRule>>| rules.clone().unwrap_or_default();
    let (verb, plural, about, given) = match d.plural.as_str() {
        "roles" => {
            let (new, old) = (typed::<Role>(new), old.map(typed::<Role>));
            if old.is_some_and(|old| old.rules == new.rules) {
                return Ok(());
            }
            ("escalate", "roles", name.to_owned(), of(&new.rules))
        }
        "clusterroles" => {
            let (new, old) = (typed::<ClusterRole>(new), old.map(typed::<ClusterRole>));
            if old.is_some_and(|old| old.rules == new.rules && old.aggregation_rule == new.aggregation_rule) {
                return Ok(());
            }
            // What an aggregated role will collect cannot be known.
            let given = if new.aggregation_rule.is_some() { everything() } else { of(&new.rules) };
            ("escalate", "clusterroles", name.to_owned(), given)
        }
        "rolebindings" => {
            let (new, old) = (typed::<RoleBinding>(new), old.map(typed::<RoleBinding>));
            if old.is_some_and(|old| old.subjects == new.subjects && old.role_ref == new.role_ref) {
                return Ok(());
            }
            bound(authorizer, &new.role_ref, namespace).await
        }
        _ => {
            let (new, old) = (typed::<ClusterRoleBinding>(new), old.map(typed::<ClusterRoleBinding>));
            if old.is_some_and(|old| old.subjects == new.subjects && old.role_ref == new.role_ref) {
                return Ok(());
            }
            bound(authorizer, &new.role_ref, None).await
        }
    };
    let what = What::Resource { group: GROUP, plural, subresource: "", namespace, name: &about };
    if authorizer.decide(caller, &Attributes::new(verb, what)).await.is_allowed() {
        return Ok(());
    }
    let held = authorizer.rules(caller, namespace).await;
    let excess = missing(&held, &given);
    if excess.is_empty() {
        return Ok(());
    }
    let excess: Vec<String> = excess.iter().map(shown).collect();
    let why = format!(
        "user {:?} (groups={:?}) is attempting to grant RBAC permissions not currently held:\n{}",
        caller.name,
        caller.groups,
        excess.join("\n")
    );
    Err(ApiError::forbidden(d, name, why))
}

/// What a binding gives: the rules of its role. Those of a role that is not there yet cannot be known.
async fn bound(
    authorizer: &Authorizer,
    role: &RoleRef,
    namespace: Option<&str>,
) -> (&'static str, &'static str, String, Vec<PolicyRule>) {
    let plural = if role.kind == "Role" { "roles" } else { "clusterroles" };
    let given = authorizer.role(&role_key(role, namespace)).await.unwrap_or_else(everything);
    ("bind", plural, role.name.clone(), given)
}

fn placed_on(pod: &Pod, node: &str) -> bool {
    pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node)
}

/// Kinds of which a node has exactly one, named like itself.
fn check_own(d: &Descriptor, node: &str, meta: &ObjectMeta) -> Result<(), ApiError> {
    let name = meta.name.as_deref().unwrap_or_default();
    let what = match (d.group.as_str(), d.plural.as_str()) {
        ("", "nodes") => format!("node {node:?} is not allowed to modify node {name:?}"),
        ("storage.k8s.io", "csinodes") => "can only access CSINode with the same name as the requesting node".into(),
        ("coordination.k8s.io", "leases") => "can only access leases with the same name as the requesting node".into(),
        _ => return Ok(()),
    };
    if name == node { Ok(()) } else { Err(ApiError::forbidden(d, name, what)) }
}

fn node_creates(d: &Descriptor, node: &str, object: &dyn Object) -> Result<(), ApiError> {
    check_own(d, node, object.meta())?;
    let name = object.meta().name.as_deref().unwrap_or_default();
    let refuse = |why: String| Err(ApiError::forbidden(d, name, why));
    match (d.group.as_str(), d.plural.as_str()) {
        ("", "nodes") => check_labels(d, node, object.meta(), None),
        ("", "pods") => {
            let pod: &Pod = typed(object);
            if !object.meta().annotations.as_ref().is_some_and(|a| a.contains_key(MIRROR)) {
                return refuse(format!(
                    "pod does not have {MIRROR:?} annotation, node {node:?} can only create mirror pods"
                ));
            }
            if !placed_on(pod, node) {
                return refuse(format!("node {node:?} can only create pods with spec.nodeName set to itself"));
            }
            let owned = object.meta().owner_references.iter().flatten().all(|o| o.kind == "Node" && o.name == node);
            if !owned {
                return refuse(format!("node {node:?} can only create pods with an owner reference set to itself"));
            }
            let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
            let reads_api = volumes.into_iter().any(|v| {
                v.secret.is_some()
                    || v.config_map.is_some()
                    || v.persistent_volume_claim.is_some()
                    || v.projected.is_some()
            });
            if reads_api {
                return refuse(format!("node {node:?} can not create pods that reference API objects"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn node_updates(
    d: &Descriptor,
    node: &str,
    part: ObjectPart,
    new: &dyn Object,
    old: &dyn Object,
) -> Result<(), ApiError> {
    check_own(d, node, old.meta())?;
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
            check_labels(d, node, new.meta(), Some(old.meta()))
        }
        ("", "pods") if part == ObjectPart::Status => {
            if !placed_on(typed(old), node) {
                let why = "can only update pod status for pods with spec.nodeName set to itself";
                return refuse(format!("node {node:?} {why}"));
            }
            if new.meta().labels != old.meta().labels {
                return refuse(format!("node {node:?} cannot update labels through pod status"));
            }
            Ok(())
        }
        ("", "persistentvolumeclaims") if part == ObjectPart::Status => {
            let rest = |object: &dyn Object| {
                let mut status = typed::<PersistentVolumeClaim>(object).status.clone().unwrap_or_default();
                status.capacity = None;
                status.conditions = None;
                status.allocated_resources = None;
                status.allocated_resource_statuses = None;
                status
            };
            if rest(new) != rest(old) {
                return refuse(format!("node {node:?} may only change capacity and resize progress of a claim"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Labels in the reserved domains are how administrators steer pods to nodes; a node does not choose them.
fn check_labels(d: &Descriptor, node: &str, new: &ObjectMeta, old: Option<&ObjectMeta>) -> Result<(), ApiError> {
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

fn is_reserved(label: &str) -> bool {
    let Some((domain, _)) = label.split_once('/') else { return false };
    let within = |zone: &str| domain == zone || domain.strip_suffix(zone).is_some_and(|d| d.ends_with('.'));
    let reserved = within("kubernetes.io") || within("k8s.io");
    let free = within("kubelet.kubernetes.io") || within("node.kubernetes.io");
    reserved && !free && !NODE_LABELS.contains(&label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_labels_are_the_administrators() {
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
