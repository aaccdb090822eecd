//! Validation of one container of a pod.

use std::collections::BTreeMap;

use cleat_api::Quantity;
use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, ObjectFieldSelector, VolumeMount};

use crate::strategy::field_checks::check_dns_label;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::names;

/// The pod's volumes by name, and whether each can be a block device.
pub(super) type BlockCapability<'a> = BTreeMap<&'a str, bool>;

/// Fields of the pod that `fieldRef` may name.
const DOWNWARD_API_FIELDS: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

pub(super) fn check_container(
    path: &str,
    container: &Container,
    volumes: &BlockCapability<'_>,
    errors: &mut Vec<FieldError>,
) {
    check_dns_label(&format!("{path}.name"), &container.name, errors);
    if container.image.as_deref().is_none_or(str::is_empty) {
        errors.push(FieldError::required(format!("{path}.image"), ""));
    }
    check_ports(path, container, errors);
    for (i, variable) in container.env.iter().flatten().enumerate() {
        check_variable(&format!("{path}.env[{i}]"), variable, errors);
    }
    check_mounts(path, container, volumes, errors);
    let policies = ["Always", "IfNotPresent", "Never"];
    if let Some(policy) = container.image_pull_policy.as_deref().filter(|p| !policies.contains(p)) {
        errors.push(FieldError::not_supported(format!("{path}.imagePullPolicy"), policy, &policies));
    }
    check_resources(&format!("{path}.resources"), container, errors);
}

fn check_ports(path: &str, container: &Container, errors: &mut Vec<FieldError>) {
    for (i, port) in container.ports.iter().flatten().enumerate() {
        let path = format!("{path}.ports[{i}]");
        let why = "must be between 1 and 65535, inclusive";
        match port.container_port {
            0 => errors.push(FieldError::required(format!("{path}.containerPort"), "")),
            1..=65535 => {}
            other => errors.push(FieldError::invalid(format!("{path}.containerPort"), other, why)),
        }
        if let Some(host) = port.host_port.filter(|p| *p != 0 && !(1..=65535).contains(p)) {
            errors.push(FieldError::invalid(format!("{path}.hostPort"), host, why));
        }
        let protocols = ["SCTP", "TCP", "UDP"];
        if let Some(protocol) = port.protocol.as_deref().filter(|p| !protocols.contains(p)) {
            errors.push(FieldError::not_supported(format!("{path}.protocol"), protocol, &protocols));
        }
    }
}

fn check_variable(path: &str, variable: &EnvVar, errors: &mut Vec<FieldError>) {
    if variable.name.is_empty() {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    } else if !variable.name.bytes().all(|b| (0x20..0x7f).contains(&b) && b != b'=') {
        let why = "a valid environment variable name must consist only of printable ASCII characters other than '='";
        errors.push(FieldError::invalid(format!("{path}.name"), &variable.name, why));
    }
    let Some(source) = &variable.value_from else { return };
    let path = format!("{path}.valueFrom");
    let count = count_sources(source);
    if count == 0 {
        let why = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or \
                   `fileKeyRef`";
        errors.push(FieldError::invalid(&path, "", why));
    } else if variable.value.as_deref().is_some_and(|v| !v.is_empty()) {
        errors.push(FieldError::invalid(&path, "", "may not be specified when `value` is not empty"));
    } else if count > 1 {
        errors.push(FieldError::invalid(&path, "", "may not have more than one field specified at a time"));
    }
    if let Some(field) = &source.field_ref {
        check_field_ref(&format!("{path}.fieldRef"), field, errors);
    }
    for (name, key) in [
        ("configMapKeyRef", source.config_map_key_ref.as_ref().map(|r| &r.key)),
        ("secretKeyRef", source.secret_key_ref.as_ref().map(|r| &r.key)),
    ] {
        if key.is_some_and(String::is_empty) {
            errors.push(FieldError::required(format!("{path}.{name}.key"), ""));
        }
    }
}

fn count_sources(source: &EnvVarSource) -> usize {
    [
        source.field_ref.is_some(),
        source.resource_field_ref.is_some(),
        source.config_map_key_ref.is_some(),
        source.secret_key_ref.is_some(),
        source.file_key_ref.is_some(),
    ]
    .into_iter()
    .filter(|set| *set)
    .count()
}

fn check_field_ref(path: &str, field: &ObjectFieldSelector, errors: &mut Vec<FieldError>) {
    let field_path = field.field_path.as_str();
    let is_entry_of =
        |map: &str| field_path.strip_prefix(map).is_some_and(|rest| rest.starts_with("['") && rest.ends_with("']"));
    let path = format!("{path}.fieldPath");
    match field_path {
        "" => errors.push(FieldError::required(path, "")),
        known
            if DOWNWARD_API_FIELDS.contains(&known)
                || is_entry_of("metadata.labels")
                || is_entry_of("metadata.annotations") => {}
        map @ ("metadata.labels" | "metadata.annotations") => {
            errors.push(FieldError::not_supported(path, map, &DOWNWARD_API_FIELDS));
        }
        other => {
            let why = format!("error converting fieldPath: field label not supported: {other}");
            errors.push(FieldError::invalid(path, other, why));
        }
    }
}

fn check_mounts(path: &str, container: &Container, volumes: &BlockCapability<'_>, errors: &mut Vec<FieldError>) {
    let mut mount_paths = std::collections::BTreeSet::new();
    let privileged = container.security_context.as_ref().and_then(|c| c.privileged) == Some(true);
    for (i, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let path = format!("{path}.volumeMounts[{i}]");
        if mount.name.is_empty() {
            errors.push(FieldError::required(format!("{path}.name"), ""));
        } else if !volumes.contains_key(mount.name.as_str()) {
            errors.push(FieldError::not_found(format!("{path}.name"), &mount.name));
        }
        if mount.mount_path.is_empty() {
            errors.push(FieldError::required(format!("{path}.mountPath"), ""));
        } else if !mount_paths.insert(&mount.mount_path) {
            errors.push(FieldError::invalid(format!("{path}.mountPath"), &mount.mount_path, "must be unique"));
        }
        check_sub_path(&path, mount, errors);
    }
    for mount in container.volume_mounts.iter().flatten() {
        let path = format!("{path}.volumeMounts.mountPropagation");
        match mount.mount_propagation.as_deref() {
            None | Some("None" | "HostToContainer") => {}
            Some("Bidirectional") if privileged => {}
            Some("Bidirectional") => {
                let why = "Bidirectional mount propagation is available only to privileged containers";
                errors.push(FieldError::forbidden(path, why));
            }
            Some(other) => {
                let modes = ["Bidirectional", "HostToContainer", "None"];
                errors.push(FieldError::not_supported(path, other, &modes));
            }
        }
    }
    for (i, device) in container.volume_devices.iter().flatten().enumerate() {
        let path = format!("{path}.volumeDevices[{i}]");
        match volumes.get(device.name.as_str()) {
            None => errors.push(FieldError::not_found(format!("{path}.name"), &device.name)),
            Some(false) => {
                let why = "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                errors.push(FieldError::invalid(format!("{path}.name"), &device.name, why));
            }
            Some(true) => {}
        }
        if device.device_path.is_empty() {
            errors.push(FieldError::required(format!("{path}.devicePath"), ""));
        } else if !mount_paths.insert(&device.device_path) {
            errors.push(FieldError::invalid(format!("{path}.devicePath"), &device.device_path, "must be unique"));
        }
    }
}

fn check_sub_path(path: &str, mount: &VolumeMount, errors: &mut Vec<FieldError>) {
    let non_empty = |text: &Option<String>| text.clone().filter(|t| !t.is_empty());
    if let (Some(_), Some(expression)) = (non_empty(&mount.sub_path), non_empty(&mount.sub_path_expr)) {
        let why = "subPathExpr and subPath are mutually exclusive";
        errors.push(FieldError::invalid(format!("{path}.subPathExpr"), expression, why));
    }
    for (name, text) in [("subPath", &mount.sub_path), ("subPathExpr", &mount.sub_path_expr)] {
        let Some(text) = non_empty(text) else { continue };
        if text.starts_with('/') {
            errors.push(FieldError::invalid(format!("{path}.{name}"), &text, "must be a relative path"));
        }
        if text.split('/').any(|part| part == "..") {
            errors.push(FieldError::invalid(format!("{path}.{name}"), &text, "must not contain '..'"));
        }
    }
}

fn check_resources(path: &str, container: &Container, errors: &mut Vec<FieldError>) {
    let Some(resources) = &container.resources else { return };
    let parsed = |text: &str| text.parse::<Quantity>().ok();
    for (part, list) in [("limits", &resources.limits), ("requests", &resources.requests)] {
        for (name, raw) in list.iter().flatten() {
            let path = format!("{path}.{part}[{name}]");
            if let Err(why) = names::validate_qualified_name(name) {
                errors.push(FieldError::invalid(&path, name, why));
            }
            match parsed(&raw.0) {
                Some(quantity) if quantity.is_negative() => {
                    errors.push(FieldError::invalid(path, &raw.0, "must be greater than or equal to 0"));
                }
                Some(_) => {}
                None => errors.push(FieldError::invalid(path, &raw.0, "must be a quantity")),
            }
        }
    }
    for (name, request) in resources.requests.iter().flatten() {
        let Some(limit) = resources.limits.as_ref().and_then(|l| l.get(name)) else { continue };
        let can_overcommit = ["cpu", "memory", "ephemeral-storage"].contains(&name.as_str());
        let (Some(request_value), Some(limit_value)) = (parsed(&request.0), parsed(&limit.0)) else { continue };
        let path = format!("{path}.requests");
        if can_overcommit && request_value > limit_value {
            let why = format!("must be less than or equal to {name} limit of {}", limit.0);
            errors.push(FieldError::invalid(path, &request.0, why));
        } else if !can_overcommit && request_value != limit_value {
            let why = format!("must be equal to {name} limit of {}", limit.0);
            errors.push(FieldError::invalid(path, &request.0, why));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn invalid_containers_name_the_field() {
        let volumes = BlockCapability::from([("v", false), ("b", true)]);
        for (case, change, field) in [
            ("valid", json!({}), None),
            ("a variable without a name", json!({ "env": [{ "name": "" }] }), Some("c.env[0].name")),
            (
                "a value and a source",
                json!({ "env": [{ "name": "A", "value": "x", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }] }),
                Some("c.env[0].valueFrom"),
            ),
            ("an empty source", json!({ "env": [{ "name": "A", "valueFrom": {} }] }), Some("c.env[0].valueFrom")),
            (
                "an unknown field",
                json!({ "env": [{ "name": "A", "valueFrom": { "fieldRef": { "fieldPath": "bad.path" } } }] }),
                Some("c.env[0].valueFrom.fieldRef.fieldPath"),
            ),
            (
                "both sub paths",
                json!({ "volumeMounts": [{ "name": "v", "mountPath": "/x", "subPath": "a", "subPathExpr": "b" }] }),
                Some("c.volumeMounts[0].subPathExpr"),
            ),
            (
                "a sub path upwards",
                json!({ "volumeMounts": [{ "name": "v", "mountPath": "/x", "subPath": "../a" }] }),
                Some("c.volumeMounts[0].subPath"),
            ),
            (
                "propagation without privilege",
                json!({ "volumeMounts": [{ "name": "v", "mountPath": "/x", "mountPropagation": "Bidirectional" }] }),
                Some("c.volumeMounts.mountPropagation"),
            ),
            (
                "a directory as a device",
                json!({ "volumeDevices": [{ "name": "v", "devicePath": "/d" }] }),
                Some("c.volumeDevices[0].name"),
            ),
            ("a claim as a device", json!({ "volumeDevices": [{ "name": "b", "devicePath": "/d" }] }), None),
            (
                "a request above the limit",
                json!({ "resources": { "requests": { "cpu": "2" }, "limits": { "cpu": "1" } } }),
                Some("c.resources.requests"),
            ),
            ("port 0", json!({ "ports": [{ "containerPort": 0 }] }), Some("c.ports[0].containerPort")),
        ] {
            let mut container: Value = json!({ "name": "c", "image": "i" });
            json_patch::merge(&mut container, &change);
            let mut errors = Vec::new();
            check_container("c", &serde_json::from_value(container).unwrap(), &volumes, &mut errors);
            assert_eq!(errors.first().map(|e| e.field.as_str()), field, "{case}: {errors:?}");
        }
    }
}
