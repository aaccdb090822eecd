//! What a pod must be, and what of it may change.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Volume};
use serde_json::Value;

use crate::field::FieldError;
use crate::names;

const FROZEN: &str = "pod updates may not change fields other than `spec.containers[*].image`,\
    `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing \
    tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

pub(super) fn spec(spec: &PodSpec) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let volumes = check_volumes(spec.volumes.as_deref().unwrap_or_default(), &mut errors);
    if spec.containers.is_empty() {
        errors.push(FieldError::required("spec.containers", ""));
    }
    let mut seen = BTreeSet::new();
    let init = spec.init_containers.as_deref().unwrap_or_default();
    for (list, containers) in [("containers", spec.containers.as_slice()), ("initContainers", init)] {
        for (i, container) in containers.iter().enumerate() {
            let path = format!("spec.{list}[{i}]");
            if !container.name.is_empty() && !seen.insert(container.name.as_str()) {
                errors.push(FieldError::duplicate(format!("{path}.name"), &container.name));
            }
            check_container(&path, container, &volumes, &mut errors);
        }
    }
    if let Some(seconds) = spec.active_deadline_seconds.filter(|s| !(1..=i64::from(i32::MAX)).contains(s)) {
        let why = "must be between 1 and 2147483647, inclusive";
        errors.push(FieldError::invalid("spec.activeDeadlineSeconds", seconds, why));
    }
    let policies = ["Always", "OnFailure", "Never"];
    super::super::check_choice("spec.restartPolicy", spec.restart_policy.as_ref(), &policies, &mut errors);
    if let Some(node) = spec.node_name.as_deref().filter(|n| !n.is_empty())
        && let Err(why) = names::subdomain(node)
    {
        errors.push(FieldError::invalid("spec.nodeName", node, why));
    }
    errors
}

fn check_name(path: &str, name: &str, errors: &mut Vec<FieldError>) {
    if name.is_empty() {
        errors.push(FieldError::required(path, ""));
    } else if let Err(why) = names::label(name) {
        errors.push(FieldError::invalid(path, name, why));
    }
}

fn check_container(path: &str, container: &Container, volumes: &BTreeSet<&str>, errors: &mut Vec<FieldError>) {
    check_name(&format!("{path}.name"), &container.name, errors);
    if container.image.as_deref().is_none_or(str::is_empty) {
        errors.push(FieldError::required(format!("{path}.image"), ""));
    }
    let mut paths = BTreeSet::new();
    for (i, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let path = format!("{path}.volumeMounts[{i}]");
        if mount.name.is_empty() {
            errors.push(FieldError::required(format!("{path}.name"), ""));
        } else if !volumes.contains(mount.name.as_str()) {
            errors.push(FieldError::not_found(format!("{path}.name"), &mount.name));
        }
        if mount.mount_path.is_empty() {
            errors.push(FieldError::required(format!("{path}.mountPath"), ""));
        } else if !paths.insert(&mount.mount_path) {
            errors.push(FieldError::invalid(format!("{path}.mountPath"), &mount.mount_path, "must be unique"));
        }
        if let Some(sub) = mount.sub_path.as_deref().filter(|s| s.starts_with('/')) {
            errors.push(FieldError::invalid(format!("{path}.subPath"), sub, "must be a relative path"));
        }
        if let Some(sub) = mount.sub_path.as_deref().filter(|s| s.split('/').any(|part| part == "..")) {
            errors.push(FieldError::invalid(format!("{path}.subPath"), sub, "must not contain '..'"));
        }
    }
    for (i, device) in container.volume_devices.iter().flatten().enumerate() {
        let path = format!("{path}.volumeDevices[{i}]");
        if !volumes.contains(device.name.as_str()) {
            errors.push(FieldError::not_found(format!("{path}.name"), &device.name));
        }
        if !paths.insert(&device.device_path) {
            errors.push(FieldError::invalid(format!("{path}.devicePath"), &device.device_path, "must be unique"));
        }
    }
}

fn check_volumes<'a>(volumes: &'a [Volume], errors: &mut Vec<FieldError>) -> BTreeSet<&'a str> {
    let mut seen = BTreeSet::new();
    for (i, volume) in volumes.iter().enumerate() {
        let path = format!("spec.volumes[{i}]");
        check_name(&format!("{path}.name"), &volume.name, errors);
        if !seen.insert(volume.name.as_str()) {
            errors.push(FieldError::duplicate(format!("{path}.name"), &volume.name));
        }
        // Every field of a volume but its name is a source.
        let sources = match serde_json::to_value(volume) {
            Ok(Value::Object(fields)) => fields.keys().filter(|k| *k != "name").cloned().collect(),
            _ => Vec::new(),
        };
        for extra in sources.iter().skip(1) {
            errors.push(FieldError::forbidden(format!("{path}.{extra}"), "may not specify more than 1 volume type"));
        }
        if volume.persistent_volume_claim.as_ref().is_some_and(|c| c.claim_name.is_empty()) {
            errors.push(FieldError::required(format!("{path}.persistentVolumeClaim.claimName"), ""));
        }
        if let Some(csi) = &volume.csi {
            match names::csi_driver(&csi.driver) {
                _ if csi.driver.is_empty() => errors.push(FieldError::required(format!("{path}.csi.driver"), "")),
                Ok(()) => {}
                Err(why) => errors.push(FieldError::invalid(format!("{path}.csi.driver"), &csi.driver, why)),
            }
        }
        if let Some(ephemeral) = &volume.ephemeral
            && ephemeral.volume_claim_template.is_none()
        {
            errors.push(FieldError::required(format!("{path}.ephemeral.volumeClaimTemplate"), ""));
        }
    }
    seen
}

pub(super) fn update(new: &Pod, old: &Pod) -> Vec<FieldError> {
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
        (Some(wanted), Some(before)) if wanted > before => {
            let why = "must be less than or equal to previous value";
            return vec![FieldError::invalid("spec.activeDeadlineSeconds", wanted, why)];
        }
        (Some(wanted), _) => allowed.active_deadline_seconds = Some(wanted),
        (None, _) => {}
    }
    let tolerated = new.tolerations.as_deref().unwrap_or_default();
    if old.tolerations.iter().flatten().all(|t| tolerated.contains(t)) {
        allowed.tolerations = new.tolerations.clone();
    }
    let gates = new.scheduling_gates.as_deref().unwrap_or_default();
    if gates.iter().all(|g| old.scheduling_gates.iter().flatten().any(|o| o == g)) {
        allowed.scheduling_gates = new.scheduling_gates.clone();
    }
    let grace = (old.termination_grace_period_seconds, new.termination_grace_period_seconds);
    if matches!(grace, (Some(before), Some(1)) if before < 0) {
        allowed.termination_grace_period_seconds = Some(1);
    }
    if new != allowed {
        errors.push(FieldError::forbidden("spec", FROZEN));
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
        ] {
            let errors = spec(&pod(change).spec.unwrap());
            assert_eq!(errors.first().map(|e| e.field.as_str()), Some(field), "{case}: {errors:?}");
        }
    }

    #[test]
    fn only_some_fields_of_a_pod_change() {
        for (case, change, fine) in [
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
            assert_eq!(update(&pod(change), &pod(json!({}))).is_empty(), fine, "{case}");
        }
    }
}
