//! Secret.

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

use super::config_map::{DATA_LIMIT, check_key};
use super::immutable;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct Secrets;

impl Strategy for Secrets {
    type Object = Secret;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "Secret", "secrets").deletes_with_status()
    }

    fn default(secret: &mut Secret) {
        secret.type_.get_or_insert_with(|| "Opaque".into());
        for (key, text) in secret.string_data.take().unwrap_or_default() {
            secret.data.get_or_insert_default().insert(key, ByteString(text.into_bytes()));
        }
        secret.data.take_if(|d| d.is_empty());
    }

    fn validate(secret: &Secret) -> Vec<FieldError> {
        let mut errors = Vec::new();
        for key in secret.data.iter().flatten().map(|(key, _)| key) {
            check_key("data", key, &mut errors);
        }
        if secret.data.iter().flatten().map(|(_, v)| v.0.len()).sum::<usize>() > DATA_LIMIT {
            errors.push(FieldError::too_long("data", DATA_LIMIT));
        }
        check_type(secret, &mut errors);
        errors
    }

    fn validate_update(new: &Secret, old: &Secret) -> Vec<FieldError> {
        let mut errors = Vec::new();
        immutable("type", &new.type_, &old.type_, &mut errors);
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

    fn fields() -> &'static [&'static str] {
        &["type"]
    }

    fn field(secret: &Secret, _name: &str) -> String {
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

const ACCOUNT: &str = "kubernetes.io/service-account.name";
const REDACTED: &str = "<secret contents redacted>";

/// What a secret of a known type must hold.
fn check_type(secret: &Secret, errors: &mut Vec<FieldError>) {
    let found = |key: &str| secret.data.as_ref().and_then(|d| d.get(key));
    let need = |key: &str, errors: &mut Vec<FieldError>| match found(key) {
        None => errors.push(FieldError::required(format!("data[{key}]"), "")),
        Some(value) if key.starts_with(".docker") && serde_json::from_slice::<Value>(&value.0).is_err() => {
            errors.push(FieldError::invalid(format!("data[{key}]"), REDACTED, "must be JSON"));
        }
        Some(_) => {}
    };
    match secret.type_.as_deref().unwrap_or_default() {
        "kubernetes.io/service-account-token" => {
            let named = secret.metadata.annotations.as_ref().and_then(|a| a.get(ACCOUNT));
            if named.is_none_or(String::is_empty) {
                errors.push(FieldError::required(format!("metadata.annotations[{ACCOUNT}]"), ""));
            }
        }
        "kubernetes.io/dockercfg" => need(".dockercfg", errors),
        "kubernetes.io/dockerconfigjson" => need(".dockerconfigjson", errors),
        // Either of the two is enough.
        "kubernetes.io/basic-auth" if found("username").is_none() && found("password").is_none() => {
            need("username", errors);
            need("password", errors);
        }
        "kubernetes.io/ssh-auth" if found("ssh-privatekey").is_none_or(|v| v.0.is_empty()) => {
            errors.push(FieldError::required("data[ssh-privatekey]", ""));
        }
        "kubernetes.io/tls" => {
            need("tls.crt", errors);
            need("tls.key", errors);
        }
        _ => {}
    }
}
