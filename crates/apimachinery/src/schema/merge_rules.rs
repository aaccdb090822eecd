//! How lists and maps of the built-in kinds are merged; the Rust types do not contain this. The tables list the exceptions:
//! any other list is atomic and is replaced by patches, any other object is merged field by field.

use serde_json::{Value, json};

/// How a field is merged, if it is an exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MergeRule {
    /// A list of type map with these keys. A strategic merge patch merges by the first key.
    ListMap(&'static [&'static str]),
    /// As `ListMap`, with the patch strategy retainKeys in addition.
    ListMapRetainKeys(&'static [&'static str]),
    /// A list of type map with these keys that a strategic merge patch replaces.
    ListMapReplaced(&'static [&'static str]),
    /// An atomic list that a strategic merge patch merges by this field.
    AtomicMergedBy(&'static str),
    /// A list of type set that a strategic merge patch merges.
    SetMerged,
    /// A list of type set that a strategic merge patch replaces.
    Set,
    /// An atomic object.
    AtomicMap,
    /// An object that is merged field by field although its type is atomic.
    GranularMap,
    /// An object with the patch strategy retainKeys.
    RetainKeys,
}

impl MergeRule {
    /// The OpenAPI extensions of the field.
    pub(super) fn extensions(self) -> Value {
        let keyed = |keys: &[&str]| json!({ "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys });
        let mut extensions = match self {
            Self::ListMap(keys) | Self::ListMapRetainKeys(keys) | Self::ListMapReplaced(keys) => keyed(keys),
            Self::AtomicMergedBy(_) => json!({ "x-kubernetes-list-type": "atomic" }),
            Self::SetMerged | Self::Set => json!({ "x-kubernetes-list-type": "set" }),
            Self::AtomicMap => json!({ "x-kubernetes-map-type": "atomic" }),
            Self::GranularMap => json!({ "x-kubernetes-map-type": "granular" }),
            Self::RetainKeys => json!({}),
        };
        let (strategy, key) = match self {
            Self::ListMap(keys) => ("merge", keys.first().copied()),
            Self::ListMapRetainKeys(keys) => ("merge,retainKeys", keys.first().copied()),
            Self::AtomicMergedBy(key) => ("merge", Some(key)),
            Self::SetMerged => ("merge", None),
            Self::RetainKeys => ("retainKeys", None),
            Self::ListMapReplaced(_) | Self::Set | Self::AtomicMap | Self::GranularMap => return extensions,
        };
        extensions["x-kubernetes-patch-strategy"] = strategy.into();
        if let Some(key) = key {
            extensions["x-kubernetes-patch-merge-key"] = key.into();
        }
        extensions
    }
}

use MergeRule::*;

/// By type and field. The type names are those of [`short_type_name`].
const MERGE_RULES: &[(&str, &str, MergeRule)] = &[
    ("apps.v1.DaemonSetStatus", "conditions", ListMap(&["type"])),
    ("apps.v1.DeploymentSpec", "strategy", RetainKeys),
    ("apps.v1.DeploymentStatus", "conditions", ListMap(&["type"])),
    ("apps.v1.ReplicaSetStatus", "conditions", ListMap(&["type"])),
    ("apps.v1.StatefulSetStatus", "conditions", ListMap(&["type"])),
    ("batch.v1.JobSchedulingConfiguration", "resourceClaims", ListMap(&["name"])),
    ("batch.v1.JobStatus", "conditions", AtomicMergedBy("type")),
    ("batch.v1.PodFailurePolicyOnExitCodesRequirement", "values", Set),
    ("batch.v1.UncountedTerminatedPods", "failed", Set),
    ("batch.v1.UncountedTerminatedPods", "succeeded", Set),
    ("core.v1.Container", "env", ListMap(&["name"])),
    ("core.v1.Container", "ports", ListMap(&["containerPort", "protocol"])),
    ("core.v1.Container", "volumeDevices", ListMap(&["devicePath"])),
    ("core.v1.Container", "volumeMounts", ListMap(&["mountPath"])),
    ("core.v1.ContainerRestartRuleOnExitCodes", "values", Set),
    ("core.v1.ContainerStatus", "allocatedResourcesStatus", ListMap(&["name"])),
    ("core.v1.ContainerStatus", "volumeMounts", ListMap(&["mountPath"])),
    ("core.v1.EphemeralContainer", "env", ListMap(&["name"])),
    ("core.v1.EphemeralContainer", "ports", ListMap(&["containerPort", "protocol"])),
    ("core.v1.EphemeralContainer", "volumeDevices", ListMap(&["devicePath"])),
    ("core.v1.EphemeralContainer", "volumeMounts", ListMap(&["mountPath"])),
    ("core.v1.NamespaceStatus", "conditions", ListMap(&["type"])),
    ("core.v1.NodeAllocatableResourceClaimStatus", "containers", Set),
    ("core.v1.NodeAllocatableResourceClaimStatus", "mapping", ListMapReplaced(&["name"])),
    ("core.v1.NodeAllocatableResourceClaimStatus", "overhead", ListMapReplaced(&["name"])),
    ("core.v1.NodePodPreemptionPolicy", "disableResizePreemption", Set),
    ("core.v1.NodeSpec", "podCIDRs", SetMerged),
    ("core.v1.NodeStatus", "addresses", ListMap(&["type"])),
    ("core.v1.NodeStatus", "conditions", ListMap(&["type"])),
    ("core.v1.PersistentVolumeClaimStatus", "conditions", ListMap(&["type"])),
    ("core.v1.PersistentVolumeSpec", "claimRef", GranularMap),
    ("core.v1.PodSpec", "containers", ListMap(&["name"])),
    ("core.v1.PodSpec", "ephemeralContainers", ListMap(&["name"])),
    ("core.v1.PodSpec", "evictionResponders", ListMap(&["name"])),
    ("core.v1.PodSpec", "hostAliases", ListMap(&["ip"])),
    ("core.v1.PodSpec", "imagePullSecrets", ListMap(&["name"])),
    ("core.v1.PodSpec", "initContainers", ListMap(&["name"])),
    ("core.v1.PodSpec", "nodeSelector", AtomicMap),
    ("core.v1.PodSpec", "resourceClaims", ListMapRetainKeys(&["name"])),
    ("core.v1.PodSpec", "schedulingGates", ListMap(&["name"])),
    ("core.v1.PodSpec", "topologySpreadConstraints", ListMap(&["topologyKey", "whenUnsatisfiable"])),
    ("core.v1.PodSpec", "volumes", ListMapRetainKeys(&["name"])),
    ("core.v1.PodStatus", "conditions", ListMap(&["type"])),
    ("core.v1.PodStatus", "hostIPs", AtomicMergedBy("ip")),
    ("core.v1.PodStatus", "nodeAllocatableResourceClaimStatuses", ListMapReplaced(&["resourceClaimName"])),
    ("core.v1.PodStatus", "podIPs", ListMap(&["ip"])),
    ("core.v1.PodStatus", "resourceClaimStatuses", ListMapRetainKeys(&["name"])),
    ("core.v1.PodStatus", "volumeHealth", ListMapReplaced(&["name"])),
    ("core.v1.PodVolumeHealth", "healthConditions", ListMapReplaced(&["status"])),
    ("core.v1.ResourceRequirements", "claims", ListMapReplaced(&["name"])),
    ("core.v1.ResourceStatus", "resources", ListMapReplaced(&["resourceID"])),
    ("core.v1.ServiceAccount", "secrets", ListMap(&["name"])),
    ("core.v1.ServiceSpec", "ports", ListMap(&["port", "protocol"])),
    ("core.v1.ServiceSpec", "selector", AtomicMap),
    ("core.v1.ServiceStatus", "conditions", ListMap(&["type"])),
    ("core.v1.VolumeHealthStatus", "healthConditions", ListMapReplaced(&["status"])),
    ("core.v1.VolumeMount", "bindMountOptions", Set),
    ("storage.v1.CSIDriverSpec", "volumeLifecycleModes", Set),
    ("storage.v1.CSINodeSpec", "drivers", ListMap(&["name"])),
    ("storage.v1.CSINodeStatus", "storageHealth", ListMap(&["name"])),
    ("apiextensions.v1.CustomResourceDefinitionStatus", "conditions", ListMapReplaced(&["type"])),
    ("apiextensions.v1.JSONSchemaProps", "x-kubernetes-validations", ListMap(&["rule"])),
    ("meta.v1.ObjectMeta", "finalizers", SetMerged),
    ("meta.v1.ObjectMeta", "ownerReferences", ListMap(&["uid"])),
];

/// Structs that are atomic in every field.
const ATOMIC_STRUCTS: &[&str] = &[
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

/// Fields that the Go type holds by value, in addition to `metadata`, `spec` and `status` of every kind.
const EMBEDDED_STRUCTS: &[(&str, &str)] = &[
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

/// The defaults of list map keys.
const KEY_DEFAULTS: &[(&str, &str, &str)] =
    &[("core.v1.ContainerPort", "protocol", "TCP"), ("core.v1.ServicePort", "protocol", "TCP")];

/// A type's name without its package prefix: `core.v1.Pod`.
pub(super) fn short_type_name(type_name: &str) -> &str {
    let mut dots = type_name.rmatch_indices('.');
    dots.nth(2).map_or(type_name, |(dot, _)| &type_name[dot + 1..])
}

pub(super) fn merge_rule(type_name: &str, field: &str) -> Option<MergeRule> {
    MERGE_RULES.iter().find(|(t, f, _)| *t == type_name && *f == field).map(|(_, _, rule)| *rule)
}

pub(super) fn is_atomic(type_name: &str) -> bool {
    ATOMIC_STRUCTS.contains(&type_name)
}

pub(super) fn is_embedded(type_name: &str, field: &str) -> bool {
    EMBEDDED_STRUCTS.contains(&(type_name, field))
}

pub(super) fn key_default(type_name: &str, field: &str) -> Option<&'static str> {
    KEY_DEFAULTS.iter().find(|(t, f, _)| *t == type_name && *f == field).map(|(_, _, value)| *value)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::DeepMerge;
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use super::super::{ListType, Scalar, Schema, TypeDef, TypeRef};
    use super::*;

    /// Two values of a type that differ in every scalar, so that no key of a list is the same in both.
    fn values(ty: TypeRef<'_>, depth: usize) -> Option<[Value; 2]> {
        Some(match ty.def {
            TypeDef::Scalar(Scalar::String | Scalar::MicroTime) => {
                [json!("2001-01-01T00:00:00.000000Z"), json!("2002-01-01T00:00:00.000000Z")]
            }
            TypeDef::Scalar(Scalar::Integer | Scalar::Number | Scalar::IntOrString) => [json!(1), json!(2)],
            TypeDef::Scalar(Scalar::Boolean) => [json!(true), json!(false)],
            TypeDef::Struct { fields, .. } if depth > 0 => {
                let mut two = [json!({}), json!({})];
                for field in fields {
                    let member = ty.resolve(field.type_id);
                    if matches!(member.def, TypeDef::Scalar(_))
                        && let Some([a, b]) = values(member, depth - 1)
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

    /// Merges two objects that differ in one list, and checks that the list grows exactly if the table says so.
    fn check<T: DeepMerge + Serialize + DeserializeOwned>(
        ty: TypeRef<'_>,
        path: &mut Vec<String>,
        wrap: &dyn Fn(Value) -> Value,
        checked: &mut Vec<String>,
    ) {
        if path.len() > 7 {
            return;
        }
        let TypeDef::Struct { fields, .. } = ty.def else { return };
        for field in fields {
            let name = field.name.to_string();
            let wrapped = |value: Value| wrap(json!({ &name: value }));
            let member = ty.resolve(field.type_id);
            path.push(name.clone());
            let pointer = format!("/{}", path.join("/"));
            match member.def {
                TypeDef::List { .. } => {
                    if let Some([a, b]) = values(member.element(), 1) {
                        let typed = |v: &Value| serde_json::from_value::<T>(wrapped(json!([v])));
                        if let (Ok(mut one), Ok(two)) = (typed(&a), typed(&b)) {
                            one.merge_from(two);
                            let merged = serde_json::to_value(&one).unwrap();
                            let grown = merged.pointer(&pointer).unwrap().as_array().unwrap().len() == 2;
                            // Some lists are atomic, but have a patch strategy; `DeepMerge` follows the latter.
                            let patched = field.patch_strategy != super::super::PatchStrategy::Plain;
                            let expected = *member.list_type() != ListType::Atomic || patched;
                            let exception = pointer.ends_with("/volumeClaimTemplates");
                            assert!(exception || grown == expected, "{pointer}: {:?}", member.list_type());
                            checked.push(pointer);
                        }
                    }
                    // The elements of an atomic list are not merged.
                    if *member.list_type() != ListType::Atomic {
                        path.push("0".into());
                        check::<T>(member.element(), path, &|v| wrapped(json!([v])), checked);
                        path.pop();
                    }
                }
                TypeDef::Struct { .. } => check::<T>(member, path, &wrapped, checked),
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
