//! Zero values that are not stored. Most optional fields of the built-in kinds have `omitempty` in Go: a client that sends
//! `hostNetwork: false` reads an object without this field, and has not changed the object. The table lists the optional
//! fields for which a zero value differs from a missing one.

use serde_json::Value;

use super::{Scalar, TypeDef, TypeRef};

/// By type: the optional fields whose zero values are stored (pointers and fields without `omitempty` in Go).
const SIGNIFICANT_ZEROS: &[(&str, &[&str])] = &[
    ("apiextensions.v1.CustomResourceDefinitionVersion", &["deprecationWarning"]),
    ("apiextensions.v1.CustomResourceSubresourceScale", &["labelSelectorPath"]),
    (
        "apiextensions.v1.JSONSchemaProps",
        &[
            "maxItems",
            "maxLength",
            "maxProperties",
            "maximum",
            "minItems",
            "minLength",
            "minProperties",
            "minimum",
            "multipleOf",
            "x-kubernetes-list-type",
            "x-kubernetes-map-type",
            "x-kubernetes-preserve-unknown-fields",
        ],
    ),
    ("apiextensions.v1.ServiceReference", &["path", "port"]),
    ("apiextensions.v1.ValidationRule", &["optionalOldSelf", "reason"]),
    ("apiextensions.v1.WebhookClientConfig", &["url"]),
    ("apps.v1.DaemonSetSpec", &["revisionHistoryLimit"]),
    ("apps.v1.DaemonSetStatus", &["collisionCount"]),
    ("apps.v1.DeploymentSpec", &["progressDeadlineSeconds", "replicas", "revisionHistoryLimit"]),
    ("apps.v1.DeploymentStatus", &["collisionCount", "terminatingReplicas"]),
    ("apps.v1.ReplicaSetSpec", &["replicas"]),
    ("apps.v1.ReplicaSetStatus", &["terminatingReplicas"]),
    ("apps.v1.RollingUpdateStatefulSetStrategy", &["partition"]),
    ("apps.v1.StatefulSetSpec", &["replicas", "revisionHistoryLimit"]),
    ("apps.v1.StatefulSetStatus", &["collisionCount"]),
    (
        "batch.v1.JobSpec",
        &[
            "activeDeadlineSeconds",
            "backoffLimit",
            "backoffLimitPerIndex",
            "completionMode",
            "completions",
            "managedBy",
            "manualSelector",
            "maxFailedIndexes",
            "parallelism",
            "podReplacementPolicy",
            "suspend",
            "ttlSecondsAfterFinished",
        ],
    ),
    ("batch.v1.JobStatus", &["failedIndexes", "ready", "terminating"]),
    ("batch.v1.PodFailurePolicyOnExitCodesRequirement", &["containerName"]),
    ("batch.v1.SuccessPolicyRule", &["succeededCount", "succeededIndexes"]),
    (
        "coordination.v1.LeaseSpec",
        &["holderIdentity", "leaseDurationSeconds", "leaseTransitions", "preferredHolder", "strategy"],
    ),
    ("core.v1.AppArmorProfile", &["localhostProfile"]),
    ("core.v1.AzureDiskVolumeSource", &["cachingMode", "fsType", "kind", "readOnly"]),
    ("core.v1.AzureFilePersistentVolumeSource", &["secretNamespace"]),
    ("core.v1.CSIVolumeSource", &["fsType", "readOnly"]),
    ("core.v1.ClusterTrustBundleProjection", &["name", "optional", "signerName", "user"]),
    ("core.v1.ConfigMap", &["immutable"]),
    ("core.v1.ConfigMapEnvSource", &["optional"]),
    ("core.v1.ConfigMapKeySelector", &["optional"]),
    ("core.v1.ConfigMapProjection", &["optional"]),
    ("core.v1.ConfigMapVolumeSource", &["defaultMode", "defaultUser", "optional"]),
    ("core.v1.Container", &["restartPolicy"]),
    ("core.v1.ContainerImage", &["names"]),
    ("core.v1.ContainerStatus", &["started", "stopSignal"]),
    ("core.v1.DownwardAPIVolumeFile", &["mode", "user"]),
    ("core.v1.DownwardAPIVolumeSource", &["defaultMode", "defaultUser"]),
    ("core.v1.EmptyDirVolumeSource", &["mode"]),
    ("core.v1.EphemeralContainer", &["restartPolicy"]),
    ("core.v1.EvictionResponder", &["priority"]),
    ("core.v1.FCVolumeSource", &["lun"]),
    ("core.v1.FileKeySelector", &["optional"]),
    ("core.v1.GRPCAction", &["mode", "service"]),
    ("core.v1.GlusterfsPersistentVolumeSource", &["endpointsNamespace"]),
    ("core.v1.HTTPGetAction", &["protocol"]),
    ("core.v1.HostPathVolumeSource", &["type"]),
    ("core.v1.ISCSIPersistentVolumeSource", &["initiatorName"]),
    ("core.v1.ISCSIVolumeSource", &["initiatorName"]),
    ("core.v1.KeyToPath", &["mode", "user"]),
    ("core.v1.Lifecycle", &["stopSignal"]),
    ("core.v1.LocalVolumeSource", &["fsType"]),
    ("core.v1.NodeFeatures", &["supplementalGroupsPolicy"]),
    ("core.v1.NodeRuntimeHandlerFeatures", &["recursiveReadOnlyMounts", "userNamespaces"]),
    ("core.v1.NodeSwapStatus", &["capacity"]),
    ("core.v1.PersistentVolumeClaimSpec", &["storageClassName", "volumeAttributesClassName", "volumeMode"]),
    ("core.v1.PersistentVolumeClaimStatus", &["currentVolumeAttributesClassName"]),
    ("core.v1.PersistentVolumeSpec", &["volumeAttributesClassName", "volumeMode"]),
    ("core.v1.PodCertificateProjection", &["maxExpirationSeconds", "user"]),
    ("core.v1.PodDNSConfigOption", &["value"]),
    ("core.v1.PodResourceClaim", &["resourceClaimName", "resourceClaimTemplateName"]),
    ("core.v1.PodResourceClaimStatus", &["resourceClaimName"]),
    ("core.v1.PodSchedulingGroup", &["podGroupName"]),
    (
        "core.v1.PodSecurityContext",
        &[
            "fsGroup",
            "fsGroupChangePolicy",
            "runAsGroup",
            "runAsNonRoot",
            "runAsUser",
            "seLinuxChangePolicy",
            "supplementalGroupsPolicy",
        ],
    ),
    (
        "core.v1.PodSpec",
        &[
            "activeDeadlineSeconds",
            "automountServiceAccountToken",
            "enableServiceLinks",
            "hostUsers",
            "hostnameOverride",
            "preemptionPolicy",
            "priority",
            "runtimeClassName",
            "setHostnameAsFQDN",
            "shareProcessNamespace",
            "terminationGracePeriodSeconds",
        ],
    ),
    ("core.v1.Probe", &["terminationGracePeriodSeconds"]),
    ("core.v1.ProjectedVolumeSource", &["defaultMode", "defaultUser", "sources"]),
    ("core.v1.ResourceHealth", &["message"]),
    ("core.v1.SeccompProfile", &["localhostProfile"]),
    ("core.v1.Secret", &["immutable"]),
    ("core.v1.SecretEnvSource", &["optional"]),
    ("core.v1.SecretKeySelector", &["optional"]),
    ("core.v1.SecretProjection", &["optional"]),
    ("core.v1.SecretVolumeSource", &["defaultMode", "defaultUser", "optional"]),
    (
        "core.v1.SecurityContext",
        &[
            "allowPrivilegeEscalation",
            "privileged",
            "procMount",
            "readOnlyRootFilesystem",
            "runAsGroup",
            "runAsNonRoot",
            "runAsUser",
        ],
    ),
    ("core.v1.ServiceAccount", &["automountServiceAccountToken"]),
    ("core.v1.ServiceAccountTokenProjection", &["expirationSeconds", "user"]),
    ("core.v1.Toleration", &["tolerationSeconds"]),
    ("core.v1.TopologySpreadConstraint", &["minDomains", "nodeAffinityPolicy", "nodeTaintsPolicy"]),
    ("core.v1.TypedLocalObjectReference", &["apiGroup"]),
    ("core.v1.TypedObjectReference", &["apiGroup", "namespace"]),
    ("core.v1.VolumeMount", &["mountPropagation", "recursiveReadOnly"]),
    ("core.v1.VolumeMountStatus", &["recursiveReadOnly"]),
    (
        "core.v1.WindowsSecurityContextOptions",
        &["gmsaCredentialSpec", "gmsaCredentialSpecName", "hostProcess", "runAsUserName"],
    ),
    ("meta.v1.ObjectMeta", &["deletionGracePeriodSeconds"]),
    ("meta.v1.OwnerReference", &["blockOwnerDeletion", "controller"]),
    ("rbac.v1.ClusterRole", &["rules"]),
    ("rbac.v1.PolicyRule", &["verbs"]),
    ("rbac.v1.Role", &["rules"]),
    (
        "storage.v1.CSIDriverSpec",
        &[
            "attachRequired",
            "fsGroupPolicy",
            "nodeAllocatableUpdatePeriodSeconds",
            "podInfoOnMount",
            "preventPodSchedulingIfMissing",
            "requiresRepublish",
            "seLinuxMount",
            "serviceAccountTokenInSecrets",
            "storageCapacity",
        ],
    ),
    ("storage.v1.CSINodeDriver", &["topologyKeys"]),
    ("storage.v1.StorageClass", &["allowVolumeExpansion", "volumeBindingMode"]),
    ("storage.v1.TokenRequest", &["expirationSeconds"]),
    ("storage.v1.VolumeAttachmentSource", &["persistentVolumeName"]),
    ("storage.v1.VolumeError", &["errorCode"]),
    ("storage.v1.VolumeNodeResources", &["count"]),
];

pub(super) fn is_zero_significant(type_name: &str, field: &str) -> bool {
    SIGNIFICANT_ZEROS.iter().any(|(t, fields)| *t == type_name && fields.contains(&field))
}

impl TypeRef<'_> {
    /// Removes from a value of this type the zero values that are not stored.
    pub fn remove_zero_values(&self, value: &mut Value) {
        match value {
            Value::Object(members) => {
                members.retain(|name, inner| match self.declared(name) {
                    Some(field) if field.omits_zero => !self.resolve(field.type_id).is_zero(inner),
                    _ => true,
                });
                for (name, inner) in members {
                    if let Some(ty) = self.member(name) {
                        ty.remove_zero_values(inner);
                    }
                }
            }
            Value::Array(elements) => elements.iter_mut().for_each(|inner| self.element().remove_zero_values(inner)),
            _ => {}
        }
    }

    fn is_zero(&self, value: &Value) -> bool {
        match (self.def, value) {
            (TypeDef::Scalar(Scalar::String), Value::String(text)) => text.is_empty(),
            (TypeDef::Scalar(Scalar::Integer | Scalar::Number), Value::Number(number)) => number.as_f64() == Some(0.0),
            (TypeDef::Scalar(Scalar::Boolean), Value::Bool(flag)) => !flag,
            (TypeDef::List { .. }, Value::Array(elements)) => elements.is_empty(),
            (TypeDef::Map { .. }, Value::Object(members)) => members.is_empty(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::apps::v1::Deployment;
    use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
    use k8s_openapi::api::rbac::v1::Role;
    use schemars::JsonSchema;
    use serde_json::json;

    use super::super::Schema;
    use super::*;

    fn without_zeros<T: JsonSchema>(mut value: Value) -> Value {
        Schema::of::<T>().root().remove_zero_values(&mut value);
        value
    }

    #[test]
    fn zero_values_are_removed_unless_the_table_lists_them() {
        let pod = json!({
            "metadata": { "name": "p", "labels": {}, "annotations": { "empty": "" } },
            "spec": {
                "hostNetwork": false, "nodeName": "", "tolerations": [], "nodeSelector": {}, "priority": 0,
                "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0, "containers": [],
                "volumes": [{ "name": "v", "emptyDir": {} }, { "name": "w", "hostPath": { "path": "/", "type": "" } }],
                "securityContext": { "runAsUser": 0 },
            },
        });
        let want = json!({
            "metadata": { "name": "p", "annotations": { "empty": "" } },
            "spec": {
                "priority": 0, "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0, "containers": [],
                "volumes": [{ "name": "v", "emptyDir": {} }, { "name": "w", "hostPath": { "path": "/", "type": "" } }],
                "securityContext": { "runAsUser": 0 },
            },
        });
        assert_eq!(without_zeros::<Pod>(pod), want);
        let class = json!({ "spec": { "storageClassName": "" } });
        assert_eq!(without_zeros::<PersistentVolume>(class.clone()), json!({ "spec": {} }));
        assert_eq!(without_zeros::<PersistentVolumeClaim>(class.clone()), class, "a claim without class asks for none");
        let replicas = json!({ "spec": { "replicas": 0, "minReadySeconds": 0 } });
        assert_eq!(without_zeros::<Deployment>(replicas), json!({ "spec": { "replicas": 0 } }));
        assert_eq!(without_zeros::<Role>(json!({ "rules": [] })), json!({ "rules": [] }));
    }

    #[test]
    fn the_table_lists_existing_fields_only() {
        use super::super::builtin::OpenApiDefinitions;
        let mut definitions = OpenApiDefinitions::new();
        for kind in crate::test_kinds::all() {
            kind.add_openapi_definition(&mut definitions);
        }
        let all = definitions.finish();
        for (type_name, fields) in SIGNIFICANT_ZEROS {
            let found = all.iter().find(|(name, _)| super::super::merge_rules::short_type_name(name) == *type_name);
            let (_, definition) = found.unwrap_or_else(|| panic!("no type {type_name}"));
            for field in *fields {
                assert!(definition["properties"].get(*field).is_some(), "{type_name} has no {field}");
            }
        }
    }
}
