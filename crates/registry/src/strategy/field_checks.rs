//! Field checks that several kinds share. Each appends to `errors` what is wrong at `path`, with the error texts of
//! Kubernetes. Nothing here belongs to one kind only.

use std::collections::BTreeMap;

use cleat_api::{Quantity, access};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::quantity::ResourceList;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::names;

const MAX_PARAMETERS: usize = 512;
const MAX_PARAMETERS_BYTES: usize = 256 << 10;

/// The `storage` entry of a resource list is required and must be positive.
pub(super) fn check_storage_quantity(resources: Option<&ResourceList>, path: &str, errors: &mut Vec<FieldError>) {
    let Some(raw) = resources.and_then(|r| r.get("storage")) else {
        errors.push(FieldError::required(path, ""));
        return;
    };
    match raw.0.parse::<Quantity>() {
        Ok(quantity) if quantity.is_positive() => {}
        Ok(_) => errors.push(FieldError::invalid(path, &raw.0, "must be greater than zero")),
        Err(error) => errors.push(FieldError::invalid(path, &raw.0, error.to_string())),
    }
}

pub(super) fn check_access_modes(modes: Option<&Vec<String>>, path: &str, errors: &mut Vec<FieldError>) {
    let modes = modes.map(Vec::as_slice).unwrap_or_default();
    if modes.is_empty() {
        errors.push(FieldError::required(path, "at least 1 access mode is required"));
    }
    for mode in modes.iter().filter(|m| !access::ALL_MODES.contains(&m.as_str())) {
        errors.push(FieldError::not_supported(path, mode, &access::ALL_MODES));
    }
    if modes.len() > 1 && modes.iter().any(|m| m == access::READ_WRITE_ONCE_POD) {
        let why = "may not use ReadWriteOncePod with other access modes";
        errors.push(FieldError::forbidden(path, why));
    }
}

/// `parameters` of a StorageClass or VolumeAttributesClass: their number, their keys and their total size.
pub(super) fn check_class_parameters(parameters: Option<&BTreeMap<String, String>>, errors: &mut Vec<FieldError>) {
    let Some(parameters) = parameters else { return };
    if parameters.len() > MAX_PARAMETERS {
        errors.push(FieldError::too_long("parameters", MAX_PARAMETERS));
    }
    if parameters.keys().any(String::is_empty) {
        errors.push(FieldError::invalid("parameters", "", "field can not be empty."));
    }
    if parameters.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>() > MAX_PARAMETERS_BYTES {
        errors.push(FieldError::too_long("parameters", MAX_PARAMETERS_BYTES));
    }
}

/// A value, if there is one, must be one of `allowed`.
pub(super) fn check_supported(path: &str, value: Option<&String>, allowed: &[&str], errors: &mut Vec<FieldError>) {
    if let Some(value) = value.filter(|v| !allowed.contains(&v.as_str())) {
        errors.push(FieldError::not_supported(path, value, allowed));
    }
}

/// The name of a container or volume: required, and a DNS label.
pub(super) fn check_dns_label(path: &str, name: &str, errors: &mut Vec<FieldError>) {
    if name.is_empty() {
        errors.push(FieldError::required(path, ""));
    } else if let Err(why) = names::validate_label(name) {
        errors.push(FieldError::invalid(path, name, why));
    }
}

pub(super) fn check_non_negative(path: &str, count: Option<i64>, errors: &mut Vec<FieldError>) {
    if let Some(count) = count.filter(|c| *c < 0) {
        errors.push(FieldError::invalid(path, count, "must be greater than or equal to 0"));
    }
}

pub(super) fn check_label_selector(path: &str, selector: &LabelSelector, errors: &mut Vec<FieldError>) {
    for (key, value) in selector.match_labels.iter().flatten() {
        for (part, checked) in [(key, names::validate_qualified_name(key)), (value, names::validate_label_value(value))]
        {
            if let Err(why) = checked {
                errors.push(FieldError::invalid(format!("{path}.matchLabels"), part, why));
            }
        }
    }
    for (i, expression) in selector.match_expressions.iter().flatten().enumerate() {
        let path = format!("{path}.matchExpressions[{i}]");
        let has_values = expression.values.as_ref().is_some_and(|v| !v.is_empty());
        match (expression.operator.as_str(), has_values) {
            ("In" | "NotIn", false) => {
                let why = "must be specified when `operator` is 'In' or 'NotIn'";
                errors.push(FieldError::required(format!("{path}.values"), why));
            }
            ("Exists" | "DoesNotExist", true) => {
                let why = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                errors.push(FieldError::forbidden(format!("{path}.values"), why));
            }
            ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => {}
            (other, _) => {
                let why = "not a valid selector operator";
                errors.push(FieldError::invalid(format!("{path}.operator"), other, why));
            }
        }
        if let Err(why) = names::validate_qualified_name(&expression.key) {
            errors.push(FieldError::invalid(format!("{path}.key"), &expression.key, why));
        }
    }
}

/// An update must not change the field.
pub(super) fn check_immutable<T: PartialEq + serde::Serialize>(
    path: &str,
    new: &T,
    old: &T,
    errors: &mut Vec<FieldError>,
) {
    if new != old {
        errors.push(FieldError::invalid(path, new, "field is immutable"));
    }
}

/// Options of a FlexVolume must not use the keys under which Kubernetes itself passes options to the driver.
pub(super) fn check_flex_options(path: &str, options: Option<&BTreeMap<String, String>>, errors: &mut Vec<FieldError>) {
    for key in options.into_iter().flat_map(BTreeMap::keys) {
        let namespace = format!(".{}", key.split('/').next().unwrap_or_default().to_lowercase());
        if [".kubernetes.io", ".k8s.io"].iter().any(|reserved| namespace.ends_with(reserved)) {
            let why = "kubernetes.io and k8s.io namespaces are reserved";
            errors.push(FieldError::invalid(format!("{path}[{key}]"), key, why));
        }
    }
}
