//! Strategy of Secret (v1). Error texts never contain values.

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

use super::config_map::{MAX_DATA_BYTES, check_data_key};
use super::field_checks::check_immutable;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct SecretStrategy;

impl Strategy for SecretStrategy {
    type Object = Secret;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "Secret", "secrets").deletes_with_status()
    }

    fn set_defaults(secret: &mut Secret) {
        secret.type_.get_or_insert_with(|| "Opaque".into());
        for (key, text) in secret.string_data.take().unwrap_or_default() {
            secret.data.get_or_insert_default().insert(key, ByteString(text.into_bytes()));
        }
        secret.data.take_if(|d| d.is_empty());
    }

    fn validate(secret: &Secret) -> Vec<FieldError> {
        let mut errors = Vec::new();
        for key in secret.data.iter().flatten().map(|(key, _)| key) {
            check_data_key("data", key, &mut errors);
        }
        if secret.data.iter().flatten().map(|(_, v)| v.0.len()).sum::<usize>() > MAX_DATA_BYTES {
            errors.push(FieldError::too_long("data", MAX_DATA_BYTES));
        }
        check_type(secret, &mut errors);
        errors
    }

    fn validate_update(new: &Secret, old: &Secret) -> Vec<FieldError> {
        let mut errors = Vec::new();
        check_immutable("type", &new.type_, &old.type_, &mut errors);
        if old.immutable == Some(true) {
            let why = "field is immutable when `immutable` is set";
            if new.immutable != Some(true) {
                errors.push(FieldError::forbidden("immutable", why));
            }
            if new.data != old.data {
                errors.push(FieldError::forbidden("data", why));
            }
        }
        errors
    }

    fn selectable_fields() -> &'static [&'static str] {
        &["type"]
    }

    fn selectable_value(secret: &Secret, _name: &str) -> String {
        secret.type_.clone().unwrap_or_default()
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Type", "What the secret is for."),
            Column::text("Data", "How many keys the secret has."),
            AGE,
        ];
        COLUMNS
    }

    fn cells(secret: &Secret, now: Timestamp) -> Vec<Value> {
        vec![
            column::name(&secret.metadata),
            secret.type_.clone().unwrap_or_default().into(),
            secret.data.as_ref().map_or(0, |d| d.len()).into(),
            column::age(&secret.metadata, now),
        ]
    }
}

const SERVICE_ACCOUNT_NAME_ANNOTATION: &str = "kubernetes.io/service-account.name";
const REDACTED: &str = "<secret contents redacted>";

/// The keys and annotations that the built-in secret types require.
fn check_type(secret: &Secret, errors: &mut Vec<FieldError>) {
    let found = |key: &str| secret.data.as_ref().and_then(|d| d.get(key));
    let require = |key: &str, errors: &mut Vec<FieldError>| match found(key) {
        None => errors.push(FieldError::required(format!("data[{key}]"), "")),
        Some(value) if key.starts_with(".docker") && serde_json::from_slice::<Value>(&value.0).is_err() => {
            errors.push(FieldError::invalid(format!("data[{key}]"), REDACTED, "must be JSON"));
        }
        Some(_) => {}
    };
    match secret.type_.as_deref().unwrap_or_default() {
        "kubernetes.io/service-account-token" => {
            let named = secret.metadata.annotations.as_ref().and_then(|a| a.get(SERVICE_ACCOUNT_NAME_ANNOTATION));
            if named.is_none_or(String::is_empty) {
                errors
                    .push(FieldError::required(format!("metadata.annotations[{SERVICE_ACCOUNT_NAME_ANNOTATION}]"), ""));
            }
        }
        "kubernetes.io/dockercfg" => require(".dockercfg", errors),
        "kubernetes.io/dockerconfigjson" => require(".dockerconfigjson", errors),
        // One of the two keys is enough.
        "kubernetes.io/basic-auth" if found("username").is_none() && found("password").is_none() => {
            require("username", errors);
            require("password", errors);
        }
        "kubernetes.io/ssh-auth" if found("ssh-privatekey").is_none_or(|v| v.0.is_empty()) => {
            errors.push(FieldError::required("data[ssh-privatekey]", ""));
        }
        "kubernetes.io/tls" => {
            require("tls.crt", errors);
            require("tls.key", errors);
        }
        _ => {}
    }
}
