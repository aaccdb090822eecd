//! ConfigMap.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::Value;

use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct ConfigMaps;

pub(super) const DATA_LIMIT: usize = 1 << 20;

/// Keys of the data of config maps and secrets.
pub(super) fn check_key(path: &str, key: &str, errors: &mut Vec<FieldError>) {
    let fine = !key.is_empty() && key.len() <= 253 && key != "." && !key.starts_with("..");
    if !fine || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
        let why = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or \
                   'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";
        errors.push(FieldError::invalid(format!("{path}[{key}]"), key, why));
    }
}

impl Strategy for ConfigMaps {
    type Object = ConfigMap;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "ConfigMap", "configmaps").short(&["cm"]).deletes_with_status()
    }

    fn default(map: &mut ConfigMap) {
        map.data.take_if(|d| d.is_empty());
        map.binary_data.take_if(|d| d.is_empty());
    }

    fn validate(map: &ConfigMap) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let mut size = 0;
        for (key, value) in map.data.iter().flatten() {
            check_key("data", key, &mut errors);
            size += value.len();
            if map.binary_data.as_ref().is_some_and(|b| b.contains_key(key)) {
                errors.push(FieldError::invalid(format!("data[{key}]"), key, "duplicate of key present in binaryData"));
            }
        }
        for (key, value) in map.binary_data.iter().flatten() {
            check_key("binaryData", key, &mut errors);
            size += value.0.len();
        }
        if size > DATA_LIMIT {
            errors.push(FieldError::too_long("", DATA_LIMIT));
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
