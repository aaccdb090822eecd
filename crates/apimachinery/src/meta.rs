//! The rules of `metadata` for every kind: which fields the server sets, which a client may change, and their validation.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use crate::field_error::FieldError;
use crate::names::{self, NameRule};

const MAX_ANNOTATIONS_BYTES: usize = 256 << 10;
const MAX_GENERATE_NAME_BYTES: usize = 58;
const RANDOM_SUFFIX_BYTES: usize = 5;
const RANDOM_SUFFIX_ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

/// The current time in whole seconds, the precision of API times.
pub fn now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// Clears the fields that a client may not choose when it creates an object.
pub fn wipe_for_create(meta: &mut ObjectMeta) {
    meta.uid = None;
    meta.creation_timestamp = None;
    meta.deletion_timestamp = None;
    meta.deletion_grace_period_seconds = None;
    meta.generation = None;
    meta.self_link = None;
    meta.resource_version = None;
}

/// Sets the fields that the server chooses when an object is created.
pub fn stamp_created(meta: &mut ObjectMeta, now: Timestamp) {
    meta.uid = Some(uuid::Uuid::new_v4().to_string());
    meta.creation_timestamp = Some(Time(now));
}

/// Restores the fields that no update can change.
pub fn carry_over(new: &mut ObjectMeta, old: &ObjectMeta) {
    new.name = old.name.clone();
    new.generate_name = old.generate_name.clone();
    new.namespace = old.namespace.clone();
    new.uid = old.uid.clone();
    new.creation_timestamp = old.creation_timestamp.clone();
    new.deletion_timestamp = old.deletion_timestamp.clone();
    new.deletion_grace_period_seconds = old.deletion_grace_period_seconds;
    new.generation = old.generation;
    new.self_link = None;
}

/// Removes empty maps, lists and strings, which mean the same as missing ones, and duplicate owner references.
pub fn normalise(meta: &mut ObjectMeta) {
    meta.labels.take_if(|m| m.is_empty());
    meta.annotations.take_if(|m| m.is_empty());
    meta.finalizers.take_if(|l| l.is_empty());
    meta.owner_references.take_if(|l| l.is_empty());
    for field in [&mut meta.name, &mut meta.generate_name, &mut meta.namespace, &mut meta.uid] {
        field.take_if(|value| value.is_empty());
    }
    if let Some(owners) = &mut meta.owner_references {
        let mut uids = BTreeSet::new();
        owners.retain(|o| uids.insert(o.uid.clone()));
    }
}

/// Appends a random suffix to `generateName`. A base that is too long is cut.
pub fn generated_name(base: &str) -> String {
    let mut end = base.len().min(MAX_GENERATE_NAME_BYTES);
    while !base.is_char_boundary(end) {
        end -= 1;
    }
    let random = uuid::Uuid::new_v4().as_u128();
    let letters = RANDOM_SUFFIX_ALPHABET.len() as u128;
    // The low 62 bits of a version 4 UUID are random; five letters of this alphabet need 24 bits.
    let suffix = (0..RANDOM_SUFFIX_BYTES as u32)
        .map(|i| RANDOM_SUFFIX_ALPHABET[(random / letters.pow(i) % letters) as usize] as char);
    base[..end].chars().chain(suffix).collect()
}

/// Which finalizers a kind allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinalizerRule {
    /// The standard finalizers, and names with a domain such as `example.com/name`.
    Qualified,
    /// Any valid qualified name, also without a domain.
    Any,
}

/// Validates the metadata of any object.
pub fn validate(meta: &ObjectMeta, rule: NameRule, finalizers: FinalizerRule) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match meta.name.as_deref() {
        None | Some("") => errors.push(FieldError::required("metadata.name", "name or generateName is required")),
        Some(name) => {
            if let Err(why) = names::validate_name(name, rule) {
                errors.push(FieldError::invalid("metadata.name", name, why));
            }
        }
    }
    for (key, value) in meta.labels.iter().flatten() {
        if let Err(why) = names::validate_qualified_name(key) {
            errors.push(FieldError::invalid("metadata.labels", key, why));
        }
        if let Err(why) = names::validate_label_value(value) {
            errors.push(FieldError::invalid("metadata.labels", value, why));
        }
    }
    let mut size = 0;
    for (key, value) in meta.annotations.iter().flatten() {
        if let Err(why) = names::validate_qualified_name(&key.to_ascii_lowercase()) {
            errors.push(FieldError::invalid("metadata.annotations", key, why));
        }
        size += key.len() + value.len();
    }
    if size > MAX_ANNOTATIONS_BYTES {
        errors.push(FieldError::too_long("metadata.annotations", MAX_ANNOTATIONS_BYTES));
    }
    for finalizer in meta.finalizers.iter().flatten() {
        let standard = finalizers == FinalizerRule::Any
            || ["orphan", "foregroundDeletion", "kubernetes"].contains(&finalizer.as_str());
        if let Err(why) = names::validate_qualified_name(finalizer) {
            errors.push(FieldError::invalid("metadata.finalizers", finalizer, why));
        } else if !standard && !finalizer.contains('/') {
            let why = "name is neither a standard finalizer name nor is it fully qualified";
            errors.push(FieldError::invalid("metadata.finalizers", finalizer, why));
        }
    }
    let mut controllers = 0;
    for (i, owner) in meta.owner_references.iter().flatten().enumerate() {
        let path = format!("metadata.ownerReferences[{i}]");
        for (part, value) in
            [("apiVersion", &owner.api_version), ("kind", &owner.kind), ("name", &owner.name), ("uid", &owner.uid)]
        {
            if value.is_empty() {
                errors.push(FieldError::invalid(format!("{path}.{part}"), value, format!("{part} must not be empty")));
            }
        }
        if owner.api_version == "v1" && owner.kind == "Event" {
            let why = "/v1, Kind=Event is disallowed from being an owner";
            errors.push(FieldError::invalid(path, owner, why));
        }
        controllers += i32::from(owner.controller == Some(true));
    }
    if controllers > 1 {
        let why = "Only one reference can have Controller set to true";
        errors.push(FieldError::invalid("metadata.ownerReferences", &meta.owner_references, why));
    }
    errors
}

/// Validates the changes of an update: an object that is being deleted gets no new finalizers.
pub fn validate_update(new: &ObjectMeta, old: &ObjectMeta) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if old.deletion_timestamp.is_some() {
        let known: BTreeSet<_> = old.finalizers.iter().flatten().collect();
        let added: Vec<_> = new.finalizers.iter().flatten().filter(|f| !known.contains(f)).collect();
        if !added.is_empty() {
            let why = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers {added:?}"
            );
            errors.push(FieldError::forbidden("metadata.finalizers", why));
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names_keep_the_base_and_differ() {
        let one = generated_name("claim-");
        assert!(one.starts_with("claim-") && one.len() == 11, "{one}");
        assert_ne!(one, generated_name("claim-"));
        assert_eq!(generated_name(&"x".repeat(80)).len(), 63);
    }

    #[test]
    fn a_deleting_object_gets_no_new_finalizer() {
        let old = ObjectMeta { deletion_timestamp: Some(Time(now())), ..Default::default() };
        let new = ObjectMeta { finalizers: Some(vec!["a/b".into()]), ..old.clone() };
        assert_eq!(validate_update(&new, &old).len(), 1);
        assert!(validate_update(&old, &new).is_empty(), "removing one is fine");
    }
}
