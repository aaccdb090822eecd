//! Validates values against the schema. Every error names its path. On an update, a value that did not change is not
//! validated again (ratcheting): a definition may have become stricter than the objects that are stored.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value};

use super::structural_schema::{AdditionalProperties, ListType, SchemaType, StructuralSchema};
use cleat_apimachinery::field_error::FieldError;

impl StructuralSchema {
    /// Appends the errors of the value at `path`. `old` is the value at this path before the update.
    pub(crate) fn validate(&self, value: &Value, old: Option<&Value>, path: &str, errors: &mut Vec<FieldError>) {
        if old == Some(value) || (value.is_null() && self.nullable) {
            return;
        }
        if !self.check_type(value, path, errors) {
            return;
        }
        self.check_scalar(value, path, errors);
        match value {
            Value::Object(fields) => self.check_fields(fields, old.and_then(Value::as_object), path, errors),
            Value::Array(items) => self.check_items(items, old.and_then(Value::as_array), path, errors),
            _ => {}
        }
        self.check_combined(value, path, errors);
    }

    fn is_valid(&self, value: &Value) -> bool {
        let mut errors = Vec::new();
        self.validate(value, None, "", &mut errors);
        errors.is_empty()
    }

    /// Returns false, after reporting it, if the value has another type than the schema's.
    fn check_type(&self, value: &Value, path: &str, errors: &mut Vec<FieldError>) -> bool {
        let actual = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(n) if n.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let expected = if self.int_or_string {
            (!matches!(value, Value::String(_)) && !SchemaType::Integer.matches(value)).then_some("integer,string")
        } else {
            self.value_type.filter(|expected| !expected.matches(value)).map(SchemaType::name)
        };
        if let Some(expected) = expected {
            let why = format!("{} in body must be of type {expected}: \"{actual}\"", path);
            errors.push(FieldError::type_invalid(display_path(path), actual, why));
        }
        expected.is_none()
    }

    fn check_scalar(&self, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
        let mut reject =
            |why: String| errors.push(FieldError::invalid(display_path(path), value, format!("{path} in body {why}")));
        if let Some(number) = value.as_f64() {
            match self.minimum {
                Some((limit, true)) if number <= limit => reject(format!("should be greater than {limit}")),
                Some((limit, false)) if number < limit => {
                    reject(format!("should be greater than or equal to {limit}"));
                }
                _ => {}
            }
            match self.maximum {
                Some((limit, true)) if number >= limit => reject(format!("should be less than {limit}")),
                Some((limit, false)) if number > limit => reject(format!("should be less than or equal to {limit}")),
                _ => {}
            }
            if let Some(factor) = self.multiple_of.filter(|f| *f != 0.0 && (number / f).fract() != 0.0) {
                reject(format!("should be a multiple of {factor}"));
            }
        }
        if let Some(text) = value.as_str() {
            let length = i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
            if let Some(min) = self.length.0.filter(|l| length < *l) {
                reject(format!("should be at least {min} chars long"));
            }
            if let Some(pattern) = self.pattern.as_ref().filter(|p| !p.is_match(text)) {
                reject(format!("should match '{pattern}'"));
            }
            if let Some(format) = self.format.as_deref().filter(|f| !matches_format(f, text)) {
                reject(format!("must be of type {format}: \"{text}\""));
            }
            if let Some(max) = self.length.1.filter(|l| length > *l) {
                errors.push(FieldError::too_long(display_path(path), usize::try_from(max).unwrap_or(0)));
            }
        }
        if !self.enum_values.is_empty() && !self.enum_values.contains(value) {
            let values: Vec<String> =
                self.enum_values.iter().map(|c| c.as_str().map_or_else(|| c.to_string(), Into::into)).collect();
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            errors.push(FieldError::not_supported_in_order(display_path(path), value, &values));
        }
    }

    fn check_fields(
        &self,
        fields: &Map<String, Value>,
        old: Option<&Map<String, Value>>,
        path: &str,
        errors: &mut Vec<FieldError>,
    ) {
        for missing in self.required.iter().filter(|key| !fields.contains_key(*key)) {
            errors.push(FieldError::required(join_path(path, missing), ""));
        }
        let size = i64::try_from(fields.len()).unwrap_or(i64::MAX);
        if let Some(min) = self.property_count.0.filter(|l| size < *l) {
            let why = format!("{} in body should have at least {min} properties", path);
            errors.push(FieldError::invalid(display_path(path), size, why));
        }
        if let Some(max) = self.property_count.1.filter(|l| size > *l) {
            errors.push(FieldError::too_many(display_path(path), size, max));
        }
        for (key, value) in fields {
            let schema = match (self.properties.get(key), &self.additional_properties) {
                (Some(schema), _) => schema,
                (None, AdditionalProperties::Schema(schema)) => schema,
                (None, _) => continue,
            };
            schema.validate(value, old.and_then(|o| o.get(key)), &join_path(path, key), errors);
        }
    }

    fn check_items(&self, items: &[Value], old: Option<&Vec<Value>>, path: &str, errors: &mut Vec<FieldError>) {
        let count = i64::try_from(items.len()).unwrap_or(i64::MAX);
        if let Some(min) = self.item_count.0.filter(|l| count < *l) {
            let why = format!("{} in body should have at least {min} items", path);
            errors.push(FieldError::invalid(display_path(path), count, why));
        }
        if let Some(max) = self.item_count.1.filter(|l| count > *l) {
            errors.push(FieldError::too_many(display_path(path), count, max));
        }
        let mut identities = BTreeSet::new();
        for (i, item) in items.iter().enumerate() {
            let at = format!("{path}[{i}]");
            let identity = match &self.list_type {
                ListType::Atomic => None,
                ListType::Set => Some(item.clone()),
                ListType::Map(keys) => Some(element_key(item, keys)),
            };
            if let Some(identity) = &identity
                && !identities.insert(identity.to_string())
            {
                errors.push(FieldError::duplicate(&at, identity));
            }
            // Only the elements of a map list have an identity by which to find the old element.
            let old_item = match &self.list_type {
                ListType::Map(keys) => old.and_then(|o| o.iter().find(|e| Some(element_key(e, keys)) == identity)),
                _ => None,
            };
            if let Some(schema) = &self.items {
                schema.validate(item, old_item, &at, errors);
            }
        }
    }

    /// `allOf`, `anyOf`, `oneOf` and `not`.
    fn check_combined(&self, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
        for schema in &self.all_of {
            schema.validate(value, None, path, errors);
        }
        let quoted = format!("\"{}\"", path);
        let mut reject =
            |why: String| errors.push(FieldError::invalid(display_path(path), value, format!("{quoted} {why}")));
        if !self.any_of.is_empty() && !self.any_of.iter().any(|s| s.is_valid(value)) {
            reject("must validate at least one schema (anyOf)".into());
        }
        match self.one_of.iter().filter(|s| s.is_valid(value)).count() {
            _ if self.one_of.is_empty() => {}
            1 => {}
            0 => reject("must validate one and only one schema (oneOf). Found none valid".into()),
            many => reject(format!("must validate one and only one schema (oneOf). Found {many} valid alternatives")),
        }
        if self.not.as_ref().is_some_and(|s| s.is_valid(value)) {
            reject("must not validate the schema (not)".into());
        }
    }
}

/// The key of an element of a map list: the values of `keys`. Elements with equal keys are the same element.
pub(super) fn element_key(item: &Value, keys: &[String]) -> Value {
    keys.iter().map(|key| (key.clone(), item.get(key).cloned().unwrap_or_default())).collect::<Map<_, _>>().into()
}

pub(super) fn join_path(path: &str, key: &str) -> String {
    if path.is_empty() { key.into() } else { format!("{path}.{key}") }
}

/// The path as error messages show it: `<nil>` for the root.
pub(super) fn display_path(path: &str) -> &str {
    if path.is_empty() { "<nil>" } else { path }
}

/// Unknown formats match every string.
fn matches_format(format: &str, text: &str) -> bool {
    match format {
        "date-time" | "datetime" => text.parse::<jiff::Timestamp>().is_ok(),
        "date" => text.parse::<jiff::civil::Date>().is_ok() && text.len() == 10,
        "uuid" | "uuid4" => uuid::Uuid::try_parse(text).is_ok(),
        "ipv4" => text.parse::<Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<Ipv6Addr>().is_ok(),
        "byte" => BASE64_STANDARD.decode(text).is_ok(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema() -> StructuralSchema {
        let schema = json!({ "type": "object", "required": ["size"], "properties": {
            "size": { "type": "integer", "minimum": 1, "maximum": 10 },
            "mode": { "type": "string", "enum": ["a", "b"] },
            "name": { "type": "string", "pattern": "^[a-z]+$", "maxLength": 5 },
            "list": { "type": "array", "maxItems": 2, "items": { "type": "string" } },
            "set": { "type": "array", "x-kubernetes-list-type": "set", "items": { "type": "string" } },
            "map": { "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["key"],
                     "items": { "type": "object", "properties": { "key": { "type": "string" }, "n": { "type": "integer", "maximum": 3 } } } },
            "port": { "x-kubernetes-int-or-string": true },
            "nullable": { "type": "string", "nullable": true },
            "labels": { "type": "object", "additionalProperties": { "type": "string" } },
            "when": { "type": "string", "format": "date-time" },
            "either": { "type": "object", "x-kubernetes-preserve-unknown-fields": true,
                        "oneOf": [{ "required": ["a"] }, { "required": ["b"] }], "not": { "required": ["c"] } },
        } });
        StructuralSchema::compile(&serde_json::from_value(schema).unwrap())
    }

    #[test]
    fn every_error_names_its_path() {
        for (case, change, want) in [
            ("valid", json!({}), None),
            ("required", json!({ "size": null }), Some("size")),
            ("too large", json!({ "size": 11 }), Some("size")),
            ("another type", json!({ "size": "3" }), Some("size")),
            ("a whole number with a fraction of zero", json!({ "size": 3.0 }), None),
            ("not one of the enum", json!({ "mode": "c" }), Some("mode")),
            ("no match", json!({ "name": "X" }), Some("name")),
            ("too long", json!({ "name": "abcdef" }), Some("name")),
            ("too many", json!({ "list": ["a", "b", "c"] }), Some("list")),
            ("an element", json!({ "list": [1] }), Some("list[0]")),
            ("twice in a set", json!({ "set": ["a", "a"] }), Some("set[1]")),
            ("twice in a map", json!({ "map": [{ "key": "a" }, { "key": "a" }] }), Some("map[1]")),
            ("a number", json!({ "port": 80 }), None),
            ("or a string", json!({ "port": "http" }), None),
            ("but no list", json!({ "port": [] }), Some("port")),
            ("null where it may be", json!({ "nullable": null }), None),
            ("a value of a map", json!({ "labels": { "x": 1 } }), Some("labels.x")),
            ("an invalid time", json!({ "when": "soon" }), Some("when")),
            ("one of two", json!({ "either": { "a": 1 } }), None),
            ("both of two", json!({ "either": { "a": 1, "b": 1 } }), Some("either")),
            ("one that `not` excludes", json!({ "either": { "a": 1, "c": 1 } }), Some("either")),
        ] {
            let mut value = json!({ "size": 3 });
            json_patch::merge(&mut value, &change);
            if case == "null where it may be" {
                value["nullable"] = Value::Null;
            }
            let mut errors = Vec::new();
            schema().validate(&value, None, "", &mut errors);
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{case}: {errors:?}");
        }
    }

    #[test]
    fn unchanged_values_are_not_validated_again() {
        let old = json!({ "size": 50, "name": "ok", "map": [{ "key": "a", "n": 9 }] });
        for (case, new, want) in [
            ("the invalid part stays", json!({ "size": 50, "name": "new", "map": [{ "key": "a", "n": 9 }] }), None),
            ("the invalid part changes", json!({ "size": 51, "name": "ok" }), Some("size")),
            ("an element moves", json!({ "size": 50, "map": [{ "key": "b", "n": 1 }, { "key": "a", "n": 9 }] }), None),
            ("an element changes", json!({ "size": 50, "map": [{ "key": "a", "n": 8 }] }), Some("map[0].n")),
        ] {
            let mut errors = Vec::new();
            schema().validate(&new, Some(&old), "", &mut errors);
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{case}: {errors:?}");
        }
    }
}
