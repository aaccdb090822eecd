//! Validation of pods and pod templates, and of what an update of a pod may change.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Toleration, Volume};
use serde_json::Value;

use super::container::{BlockCapability, check_container};
use super::volume_source::check_volume_source;
use crate::strategy::field_checks::check_dns_label;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::names;

const IMMUTABLE_SPEC: &str = "pod updates may not change fields other than `spec.containers[*].image`,\
    `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing \
    tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

/// Validates the pod spec at the path `root`. `pod` is the name of the pod; `None` for a template.
pub(super) fn validate_spec(root: &str, pod: Option<&str>, spec: &PodSpec) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let volumes = check_volumes(root, pod, spec.volumes.as_deref().unwrap_or_default(), &mut errors);
    if spec.containers.is_empty() {
        errors.push(FieldError::required(format!("{root}.containers"), ""));
    }
    let mut container_names = BTreeSet::new();
    let init = spec.init_containers.as_deref().unwrap_or_default();
    for (list, containers) in [("containers", spec.containers.as_slice()), ("initContainers", init)] {
        for (i, container) in containers.iter().enumerate() {
            let path = format!("{root}.{list}[{i}]");
            if !container.name.is_empty() && !container_names.insert(container.name.as_str()) {
                errors.push(FieldError::duplicate(format!("{path}.name"), &container.name));
            }
            check_container(&path, container, &volumes, &mut errors);
        }
    }
    if let Some(seconds) = spec.active_deadline_seconds.filter(|s| !(1..=i64::from(i32::MAX)).contains(s)) {
        let why = "must be between 1 and 2147483647, inclusive";
        errors.push(FieldError::invalid(format!("{root}.activeDeadlineSeconds"), seconds, why));
    }
    let policies = ["Always", "OnFailure", "Never"];
    if let Some(policy) = spec.restart_policy.as_deref().filter(|p| !policies.contains(p)) {
        errors.push(FieldError::not_supported_in_order(format!("{root}.restartPolicy"), policy, &policies));
    }
    if let Some(node) = spec.node_name.as_deref().filter(|n| !n.is_empty())
        && let Err(why) = names::validate_subdomain(node)
    {
        errors.push(FieldError::invalid(format!("{root}.nodeName"), node, why));
    }
    if let Some(account) = spec.service_account_name.as_deref().filter(|a| !a.is_empty())
        && let Err(why) = names::validate_subdomain(account)
    {
        errors.push(FieldError::invalid(format!("{root}.serviceAccountName"), account, why));
    }
    for (i, toleration) in spec.tolerations.iter().flatten().enumerate() {
        check_toleration(&format!("{root}.tolerations[{i}]"), toleration, &mut errors);
    }
    errors
}

fn check_toleration(path: &str, toleration: &Toleration, errors: &mut Vec<FieldError>) {
    let given = |text: &Option<String>| text.clone().unwrap_or_default();
    let (key, operator, value) = (given(&toleration.key), given(&toleration.operator), given(&toleration.value));
    if !key.is_empty()
        && let Err(why) = names::validate_qualified_name(&key)
    {
        errors.push(FieldError::invalid(format!("{path}.key"), &key, why));
    }
    if key.is_empty() && operator != "Exists" {
        let why = "operator must be Exists when `key` is empty, which means \"match all values and all keys\"";
        errors.push(FieldError::invalid(format!("{path}.operator"), &operator, why));
    }
    let effect = given(&toleration.effect);
    if toleration.toleration_seconds.is_some() && effect != "NoExecute" {
        let why = "effect must be 'NoExecute' when `tolerationSeconds` is set";
        errors.push(FieldError::invalid(format!("{path}.effect"), &effect, why));
    }
    match operator.as_str() {
        "" | "Equal" => {
            if let Err(why) = names::validate_label_value(&value) {
                errors.push(FieldError::invalid(format!("{path}.operator"), &value, why));
            }
        }
        "Exists" if value.is_empty() => {}
        "Exists" => {
            let why = "value must be empty when `operator` is 'Exists'";
            errors.push(FieldError::invalid(format!("{path}.operator"), &value, why));
        }
        other => {
            errors.push(FieldError::not_supported_in_order(format!("{path}.operator"), other, &["Equal", "Exists"]));
        }
    }
    let effects = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
    if !effect.is_empty() && !effects.contains(&effect.as_str()) {
        errors.push(FieldError::not_supported_in_order(format!("{path}.effect"), &effect, &effects));
    }
}

fn check_volumes<'a>(
    root: &str,
    pod: Option<&str>,
    volumes: &'a [Volume],
    errors: &mut Vec<FieldError>,
) -> BlockCapability<'a> {
    let mut capabilities = BlockCapability::new();
    let ephemeral_claims: BTreeSet<String> =
        volumes.iter().filter(|v| v.ephemeral.is_some()).filter_map(|v| Some(format!("{}-{}", pod?, v.name))).collect();
    for (i, volume) in volumes.iter().enumerate() {
        let path = format!("{root}.volumes[{i}]");
        check_dns_label(&format!("{path}.name"), &volume.name, errors);
        let can_be_block = volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some();
        if capabilities.insert(volume.name.as_str(), can_be_block).is_some() {
            errors.push(FieldError::duplicate(format!("{path}.name"), &volume.name));
        }
        // Every field of a volume except its name is a source.
        let sources = match serde_json::to_value(volume) {
            Ok(Value::Object(fields)) => fields.keys().filter(|k| *k != "name").cloned().collect(),
            _ => Vec::new(),
        };
        for extra in sources.iter().skip(1) {
            errors.push(FieldError::forbidden(format!("{path}.{extra}"), "may not specify more than 1 volume type"));
        }
        check_volume_source(&path, volume, errors);
        if let Some(claim) =
            volume.persistent_volume_claim.as_ref().filter(|c| ephemeral_claims.contains(&c.claim_name))
        {
            let path = format!("{path}.persistentVolumeClaim.claimName");
            let why = "must not reference a PVC that gets created for an ephemeral volume";
            errors.push(FieldError::invalid(path, &claim.claim_name, why));
        }
    }
    capabilities
}

/// Validates an update of a pod: all but a few fields of the spec are immutable.
pub(super) fn validate_update(new: &Pod, old: &Pod) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let new = new.spec.clone().unwrap_or_default();
    let old = old.spec.clone().unwrap_or_default();
    if new.containers.len() != old.containers.len() {
        let why = "pod updates may not add or remove containers";
        return vec![FieldError::forbidden("spec.containers", why)];
    }
    let mut allowed = old.clone();
    copy_images(&mut allowed.containers, &new.containers);
    if let (Some(allowed), Some(new)) = (&mut allowed.init_containers, &new.init_containers) {
        copy_images(allowed, new);
    }
    match (new.active_deadline_seconds, old.active_deadline_seconds) {
        (Some(new_deadline), Some(old_deadline)) if new_deadline > old_deadline => {
            let why = "must be less than or equal to previous value";
            return vec![FieldError::invalid("spec.activeDeadlineSeconds", new_deadline, why)];
        }
        (Some(new_deadline), _) => allowed.active_deadline_seconds = Some(new_deadline),
        (None, _) => {}
    }
    let new_tolerations = new.tolerations.as_deref().unwrap_or_default();
    if old.tolerations.iter().flatten().all(|t| new_tolerations.contains(t)) {
        allowed.tolerations = new.tolerations.clone();
    }
    let gates = new.scheduling_gates.as_deref().unwrap_or_default();
    if gates.iter().all(|g| old.scheduling_gates.iter().flatten().any(|o| o == g)) {
        allowed.scheduling_gates = new.scheduling_gates.clone();
    }
    let grace = (old.termination_grace_period_seconds, new.termination_grace_period_seconds);
    if matches!(grace, (Some(old_grace), Some(1)) if old_grace < 0) {
        allowed.termination_grace_period_seconds = Some(1);
    }
    if new != allowed {
        errors.push(FieldError::forbidden("spec", IMMUTABLE_SPEC));
    }
    errors
}

fn copy_images(to: &mut [Container], from: &[Container]) {
    for (to, from) in to.iter_mut().zip(from) {
        if from.image.as_deref().is_some_and(|i| !i.is_empty()) {
            to.image = from.image.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PodSpec;
    use serde_json::json;

    use super::*;

    fn pod(change: Value) -> Pod {
        let mut spec = json!({
            "containers": [{ "name": "c", "image": "i:1", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
            "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "claim" } }],
        });
        json_patch::merge(&mut spec, &change);
        Pod { spec: Some(serde_json::from_value::<PodSpec>(spec).unwrap()), ..Default::default() }
    }

    #[test]
    fn invalid_pods_name_the_field() {
        for (case, change, field) in [
            ("no container", json!({ "containers": [] }), "spec.containers"),
            ("no image", json!({ "containers": [{ "name": "c" }] }), "spec.containers[0].image"),
            ("bad name", json!({ "containers": [{ "name": "C", "image": "i" }] }), "spec.containers[0].name"),
            ("no such volume", json!({ "volumes": [] }), "spec.containers[0].volumeMounts[0].name"),
            (
                "two sources",
                json!({ "volumes": [{ "name": "v", "emptyDir": {}, "hostPath": { "path": "/x" } }] }),
                "spec.volumes[0].hostPath",
            ),
            (
                "an unknown host path type",
                json!({ "volumes": [{ "name": "v", "hostPath": { "path": "/x", "type": "Folder" } }] }),
                "spec.volumes[0].hostPath.type",
            ),
            (
                "flex without a driver",
                json!({ "volumes": [{ "name": "v", "flexVolume": { "driver": "" } }] }),
                "spec.volumes[0].flexVolume.driver",
            ),
            (
                "a flex option with a key of Kubernetes' own",
                json!({ "volumes": [{ "name": "v", "flexVolume": { "driver": "d", "options": { "my.k8s.io/a": "" } } }] }),
                "spec.volumes[0].flexVolume.options[my.k8s.io/a]",
            ),
            (
                "a toleration without a key",
                json!({ "tolerations": [{ "value": "x" }] }),
                "spec.tolerations[0].operator",
            ),
            (
                "seconds without the effect NoExecute",
                json!({ "tolerations": [{ "key": "b", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 5 }] }),
                "spec.tolerations[0].effect",
            ),
        ] {
            let errors = validate_spec("spec", None, &pod(change).spec.unwrap());
            assert_eq!(errors.first().map(|e| e.field.as_str()), Some(field), "{case}: {errors:?}");
        }
    }

    #[test]
    fn only_some_fields_of_a_pod_may_change() {
        for (case, change, is_allowed) in [
            ("nothing", json!({}), true),
            (
                "the image",
                json!({ "containers": [{ "name": "c", "image": "i:2", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }] }),
                true,
            ),
            ("another toleration", json!({ "tolerations": [{ "key": "k", "operator": "Exists" }] }), true),
            ("the node", json!({ "nodeName": "n" }), false),
            ("the volumes", json!({ "volumes": [{ "name": "v", "emptyDir": {} }] }), false),
        ] {
            assert_eq!(validate_update(&pod(change), &pod(json!({}))).is_empty(), is_allowed, "{case}");
        }
    }
}
