//! What the types of the built-in kinds do not say: how lists and maps are joined. One row per exception: a list not
//! named here is atomic and replaced whole, an object is joined field by field.

use serde_json::{Value, json};

/// The exceptional treatment of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Join {
    /// A list told apart by these fields and patched by the first of them.
    Keys(&'static [&'static str]),
    /// The same, and a patch's elements keep only what it lists.
    KeysRetaining(&'static [&'static str]),
    /// Told apart by these fields for ownership, but a patch replaces the list.
    KeysReplaced(&'static [&'static str]),
    /// One value for ownership, but a patch joins by this field.
    AtomicPatched(&'static str),
    /// Each value once, and a patch adds to it.
    SetPatched,
    /// Each value once, but a patch replaces the list.
    Set,
    /// An object that is one value.
    Atomic,
    /// An object joined field by field although its type is one value.
    Granular,
    /// A patch's object keeps only what it lists.
    Retaining,
}

impl Join {
    /// The same in the words of OpenAPI, to be added to the field.
    pub(super) fn extensions(self) -> Value {
        let keyed = |keys: &[&str]| json!({ "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys });
        let mut found = match self {
            Self::Keys(keys) | Self::KeysRetaining(keys) | Self::KeysReplaced(keys) => keyed(keys),
            Self::AtomicPatched(_) => json!({ "x-kubernetes-list-type": "atomic" }),
            Self::SetPatched | Self::Set => json!({ "x-kubernetes-list-type": "set" }),
            Self::Atomic => json!({ "x-kubernetes-map-type": "atomic" }),
            Self::Granular => json!({ "x-kubernetes-map-type": "granular" }),
            Self::Retaining => json!({}),
        };
        let (strategy, key) = match self {
            Self::Keys(keys) => ("merge", keys.first().copied()),
            Self::KeysRetaining(keys) => ("merge,retainKeys", keys.first().copied()),
            Self::AtomicPatched(key) => ("merge", Some(key)),
            Self::SetPatched => ("merge", None),
            Self::Retaining => ("retainKeys", None),
            Self::KeysReplaced(_) | Self::Set | Self::Atomic | Self::Granular => return found,
        };
        found["x-kubernetes-patch-strategy"] = strategy.into();
        if let Some(key) = key {
            found["x-kubernetes-patch-merge-key"] = key.into();
        }
        found
    }
}

use Join::*;

/// By type, without the part all types of Kubernetes share, and by field.
const JOINS: &[(&str, &str, Join)] = &[
    ("apps.v1.DaemonSetStatus", "conditions", Keys(&["type"])),
    ("apps.v1.DeploymentSpec", "strategy", Retaining),
    ("apps.v1.DeploymentStatus", "conditions", Keys(&["type"])),
    ("apps.v1.ReplicaSetStatus", "conditions", Keys(&["type"])),
    ("apps.v1.StatefulSetStatus", "conditions", Keys(&["type"])),
    ("batch.v1.JobSchedulingConfiguration", "resourceClaims", Keys(&["name"])),
    ("batch.v1.JobStatus", "conditions", AtomicPatched("type")),
    ("batch.v1.PodFailurePolicyOnExitCodesRequirement", "values", Set),
    ("batch.v1.UncountedTerminatedPods", "failed", Set),
    ("batch.v1.UncountedTerminatedPods", "succeeded", Set),
    ("core.v1.Container", "env", Keys(&["name"])),
    ("core.v1.Container", "ports", Keys(&["containerPort", "protocol"])),
    ("core.v1.Container", "volumeDevices", Keys(&["devicePath"])),
    ("core.v1.Container", "volumeMounts", Keys(&["mountPath"])),
    ("core.v1.ContainerRestartRuleOnExitCodes", "values", Set),
    ("core.v1.ContainerStatus", "allocatedResourcesStatus", Keys(&["name"])),
    ("core.v1.ContainerStatus", "volumeMounts", Keys(&["mountPath"])),
    ("core.v1.EphemeralContainer", "env", Keys(&["name"])),
    ("core.v1.EphemeralContainer", "ports", Keys(&["containerPort", "protocol"])),
    ("core.v1.EphemeralContainer", "volumeDevices", Keys(&["devicePath"])),
    ("core.v1.EphemeralContainer", "volumeMounts", Keys(&["mountPath"])),
    ("core.v1.NamespaceStatus", "conditions", Keys(&["type"])),
    ("core.v1.NodeAllocatableResourceClaimStatus", "containers", Set),
    ("core.v1.NodeAllocatableResourceClaimStatus", "mapping", KeysReplaced(&["name"])),
    ("core.v1.NodeAllocatableResourceClaimStatus", "overhead", KeysReplaced(&["name"])),
    ("core.v1.NodePodPreemptionPolicy", "disableResizePreemption", Set),
    ("core.v1.NodeSpec", "podCIDRs", SetPatched),
    ("core.v1.NodeStatus", "addresses", Keys(&["type"])),
    ("core.v1.NodeStatus", "conditions", Keys(&["type"])),
    ("core.v1.PersistentVolumeClaimStatus", "conditions", Keys(&["type"])),
    ("core.v1.PersistentVolumeSpec", "claimRef", Granular),
    ("core.v1.PodSpec", "containers", Keys(&["name"])),
    ("core.v1.PodSpec", "ephemeralContainers", Keys(&["name"])),
    ("core.v1.PodSpec", "evictionResponders", Keys(&["name"])),
    ("core.v1.PodSpec", "hostAliases", Keys(&["ip"])),
    ("core.v1.PodSpec", "imagePullSecrets", Keys(&["name"])),
    ("core.v1.PodSpec", "initContainers", Keys(&["name"])),
    ("core.v1.PodSpec", "nodeSelector", Atomic),
    ("core.v1.PodSpec", "resourceClaims", KeysRetaining(&["name"])),
    ("core.v1.PodSpec", "schedulingGates", Keys(&["name"])),
    ("core.v1.PodSpec", "topologySpreadConstraints", Keys(&["topologyKey", "whenUnsatisfiable"])),
    ("core.v1.PodSpec", "volumes", KeysRetaining(&["name"])),
    ("core.v1.PodStatus", "conditions", Keys(&["type"])),
    ("core.v1.PodStatus", "hostIPs", AtomicPatched("ip")),
    ("core.v1.PodStatus", "nodeAllocatableResourceClaimStatuses", KeysReplaced(&["resourceClaimName"])),
    ("core.v1.PodStatus", "podIPs", Keys(&["ip"])),
    ("core.v1.PodStatus", "resourceClaimStatuses", KeysRetaining(&["name"])),
    ("core.v1.PodStatus", "volumeHealth", KeysReplaced(&["name"])),
    ("core.v1.PodVolumeHealth", "healthConditions", KeysReplaced(&["status"])),
    ("core.v1.ResourceRequirements", "claims", KeysReplaced(&["name"])),
    ("core.v1.ResourceStatus", "resources", KeysReplaced(&["resourceID"])),
    ("core.v1.ServiceAccount", "secrets", Keys(&["name"])),
    ("core.v1.ServiceSpec", "ports", Keys(&["port", "protocol"])),
    ("core.v1.ServiceSpec", "selector", Atomic),
    ("core.v1.ServiceStatus", "conditions", Keys(&["type"])),
    ("core.v1.VolumeHealthStatus", "healthConditions", KeysReplaced(&["status"])),
    ("core.v1.VolumeMount", "bindMountOptions", Set),
    ("storage.v1.CSIDriverSpec", "volumeLifecycleModes", Set),
    ("storage.v1.CSINodeSpec", "drivers", Keys(&["name"])),
    ("storage.v1.CSINodeStatus", "storageHealth", Keys(&["name"])),
    ("apiextensions.v1.CustomResourceDefinitionStatus", "conditions", KeysReplaced(&["type"])),
    ("apiextensions.v1.JSONSchemaProps", "x-kubernetes-validations", Keys(&["rule"])),
    ("meta.v1.ObjectMeta", "finalizers", SetPatched),
    ("meta.v1.ObjectMeta", "ownerReferences", Keys(&["uid"])),
];

/// Structs that are one value wherever they stand.
const ATOMIC: &[&str] = &[
    "core.v1.ConfigMapKeySelector",
    "core.v1.FileKeySelector",
    "core.v1.LocalObjectReference",
    "core.v1.NodeSelector",
    "core.v1.NodeSelectorTerm",
    "core.v1.ObjectFieldSelector",
    "core.v1.ObjectReference",
    "core.v1.ResourceFieldSelector",
    "core.v1.SecretKeySelector",
    "core.v1.SecretReference",
    "core.v1.TopologySelectorTerm",
    "core.v1.TypedLocalObjectReference",
    "meta.v1.LabelSelector",
    "meta.v1.OwnerReference",
    "rbac.v1.RoleRef",
    "rbac.v1.Subject",
];

/// Structs held by value besides every kind's `metadata`, `spec` and `status`.
const EMBEDDED: &[(&str, &str)] = &[
    ("apps.v1.DaemonSetSpec", "template"),
    ("apps.v1.DaemonSetSpec", "updateStrategy"),
    ("apps.v1.DeploymentSpec", "strategy"),
    ("apps.v1.DeploymentSpec", "template"),
    ("apps.v1.ReplicaSetSpec", "template"),
    ("apps.v1.StatefulSetSpec", "template"),
    ("apps.v1.StatefulSetSpec", "updateStrategy"),
    ("batch.v1.JobSpec", "template"),
    ("core.v1.Container", "resources"),
    ("core.v1.ContainerStatus", "lastState"),
    ("core.v1.ContainerStatus", "state"),
    ("core.v1.EphemeralContainer", "resources"),
    ("core.v1.Event", "source"),
    ("core.v1.NodeDaemonEndpoints", "kubeletEndpoint"),
    ("core.v1.NodeStatus", "daemonEndpoints"),
    ("core.v1.NodeStatus", "nodeInfo"),
    ("core.v1.PersistentVolumeClaimSpec", "resources"),
    ("core.v1.PersistentVolumeClaimTemplate", "metadata"),
    ("core.v1.PersistentVolumeClaimTemplate", "spec"),
    ("core.v1.PodTemplateSpec", "metadata"),
    ("core.v1.PodTemplateSpec", "spec"),
    ("core.v1.ServiceStatus", "loadBalancer"),
    ("storage.v1.VolumeAttachmentSpec", "source"),
    ("apiextensions.v1.CustomResourceDefinitionSpec", "names"),
    ("apiextensions.v1.CustomResourceDefinitionStatus", "acceptedNames"),
];

/// Values that keys of a list have when they are left out.
const DEFAULTS: &[(&str, &str, &str)] =
    &[("core.v1.ContainerPort", "protocol", "TCP"), ("core.v1.ServicePort", "protocol", "TCP")];

/// A type's name without its package prefix: `core.v1.Pod`.
pub(super) fn short(type_name: &str) -> &str {
    let mut dots = type_name.rmatch_indices('.');
    dots.nth(2).map_or(type_name, |(at, _)| &type_name[at + 1..])
}

pub(super) fn join(type_name: &str, field: &str) -> Option<Join> {
    JOINS.iter().find(|(t, f, _)| *t == type_name && *f == field).map(|(_, _, join)| *join)
}

pub(super) fn is_atomic(type_name: &str) -> bool {
    ATOMIC.contains(&type_name)
}

pub(super) fn is_embedded(type_name: &str, field: &str) -> bool {
    EMBEDDED.contains(&(type_name, field))
}

pub(super) fn default(type_name: &str, field: &str) -> Option<&'static str> {
    DEFAULTS.iter().find(|(t, f, _)| *t == type_name && *f == field).map(|(_, _, value)| *value)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::DeepMerge;
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use super::super::{At, Relation, Scalar, Schema, Type};
    use super::*;

    /// Two values of a type that share nothing a list could tell them apart by.
    fn values(at: At<'_>, depth: usize) -> Option<[Value; 2]> {
        Some(match at.of {
            Type::Scalar(Scalar::Text | Scalar::MicroTime) => {
                [json!("2001-01-01T00:00:00.000000Z"), json!("2002-01-01T00:00:00.000000Z")]
            }
            Type::Scalar(Scalar::Integer | Scalar::Number | Scalar::IntOrText) => [json!(1), json!(2)],
            Type::Scalar(Scalar::Flag) => [json!(true), json!(false)],
            Type::Struct { fields, .. } if depth > 0 => {
                let mut two = [json!({}), json!({})];
                for field in fields {
                    let of = at.id(field.of);
                    if matches!(of.of, Type::Scalar(_))
                        && let Some([a, b]) = values(of, depth - 1)
                    {
                        two[0][&*field.name] = a;
                        two[1][&*field.name] = b;
                    }
                }
                two
            }
            _ => return None,
        })
    }

    /// Merges two objects that differ in one list; does the list grow, as the table says?
    fn check<T: DeepMerge + Serialize + DeserializeOwned>(
        at: At<'_>,
        path: &mut Vec<String>,
        wrap: &dyn Fn(Value) -> Value,
        checked: &mut Vec<String>,
    ) {
        if path.len() > 7 {
            return;
        }
        let Type::Struct { fields, .. } = at.of else { return };
        for field in fields {
            let name = field.name.to_string();
            let wrapped = |value: Value| wrap(json!({ &name: value }));
            let of = at.id(field.of);
            path.push(name.clone());
            let pointer = format!("/{}", path.join("/"));
            match of.of {
                Type::List { .. } => {
                    if let Some([a, b]) = values(of.element(), 1) {
                        let typed = |v: &Value| serde_json::from_value::<T>(wrapped(json!([v])));
                        if let (Ok(mut one), Ok(two)) = (typed(&a), typed(&b)) {
                            one.merge_from(two);
                            let merged = serde_json::to_value(&one).unwrap();
                            let grown = merged.pointer(&pointer).unwrap().as_array().unwrap().len() == 2;
                            // The real lists are atomic; these types patch or merge them all the same.
                            let patched = field.patch != super::super::PatchRule::Plain;
                            let expected = *of.relation() != Relation::Atomic || patched;
                            let exception = pointer.ends_with("/volumeClaimTemplates");
                            assert!(exception || grown == expected, "{pointer}: {:?}", of.relation());
                            checked.push(pointer);
                        }
                    }
                    // Inside a list that is replaced whole nothing is merged.
                    if *of.relation() != Relation::Atomic {
                        path.push("0".into());
                        check::<T>(of.element(), path, &|v| wrapped(json!([v])), checked);
                        path.pop();
                    }
                }
                Type::Struct { .. } => check::<T>(of, path, &wrapped, checked),
                _ => {}
            }
            path.pop();
        }
    }

    #[test]
    fn the_table_agrees_with_how_the_types_merge_themselves() {
        use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
        use k8s_openapi::api::batch::v1::Job;
        use k8s_openapi::api::core::v1::{
            Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ServiceAccount,
        };
        use k8s_openapi::api::rbac::v1::{ClusterRole, RoleBinding};
        use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, StorageClass, VolumeAttachment};
        let mut checked = Vec::new();
        macro_rules! check_all {
            ($($kind:ty),*) => {$(
                check::<$kind>(Schema::of::<$kind>().root(), &mut Vec::new(), &|v| v, &mut checked);
            )*};
        }
        check_all!(
            Pod,
            Node,
            Namespace,
            PersistentVolume,
            PersistentVolumeClaim,
            ServiceAccount,
            CSIDriver,
            CSINode,
            StorageClass,
            VolumeAttachment,
            Deployment,
            DaemonSet,
            ReplicaSet,
            StatefulSet,
            Job,
            ClusterRole,
            RoleBinding
        );
        assert!(checked.len() > 300, "{}", checked.len());
    }
}
