//! Strategy of ConfigMap (v1), and the limits of data that Secret shares.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::Value;

use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct ConfigMapStrategy;

/// Limit of all values together.
pub(super) const MAX_DATA_BYTES: usize = 1 << 20;

/// A key in the data of a ConfigMap or Secret.
pub(super) fn check_data_key(path: &str, key: &str, errors: &mut Vec<FieldError>) {
    let is_file_name = !key.is_empty() && key.len() <= 253 && key != "." && !key.starts_with("..");
    if !is_file_name || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
        let why = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or \
                   'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";
        errors.push(FieldError::invalid(format!("{path}[{key}]"), key, why));
    }
}

impl Strategy for ConfigMapStrategy {
    type Object = ConfigMap;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "ConfigMap", "configmaps").short_names(&["cm"]).deletes_with_status()
    }

    fn set_defaults(map: &mut ConfigMap) {
        map.data.take_if(|d| d.is_empty());
        map.binary_data.take_if(|d| d.is_empty());
    }

    fn validate(map: &ConfigMap) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let mut size = 0;
        for (key, value) in map.data.iter().flatten() {
            check_data_key("data", key, &mut errors);
            size += value.len();
            if map.binary_data.as_ref().is_some_and(|b| b.contains_key(key)) {
                errors.push(FieldError::invalid(format!("data[{key}]"), key, "duplicate of key present in binaryData"));
            }
        }
        for (key, value) in map.binary_data.iter().flatten() {
            check_data_key("binaryData", key, &mut errors);
            size += value.0.len();
        }
        if size > MAX_DATA_BYTES {
            errors.push(FieldError::too_long("", MAX_DATA_BYTES));
        }
        errors
    }

    fn validate_update(new: &ConfigMap, old: &ConfigMap) -> Vec<FieldError> {
        let mut errors = Vec::new();
        if old.immutable == Some(true) {
            let why = "field is immutable when `immutable` is set";
            if new.immutable != Some(true) {
                errors.push(FieldError::forbidden("immutable", why));
            }
            if new.data != old.data {
                errors.push(FieldError::forbidden("data", why));
            }
            if new.binary_data != old.binary_data {
                errors.push(FieldError::forbidden("binaryData", why));
            }
        }
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[NAME, Column::text("Data", "How many keys the map has."), AGE];
        COLUMNS
    }

    fn cells(map: &ConfigMap, now: Timestamp) -> Vec<Value> {
        let keys = map.data.as_ref().map_or(0, |d| d.len()) + map.binary_data.as_ref().map_or(0, |d| d.len());
        vec![column::name(&map.metadata), keys.into(), column::age(&map.metadata, now)]
    }
}
