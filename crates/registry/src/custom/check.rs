//! Does a value meet its schema? Every place where it does not is named. On an update, what did not change is not
//! asked again: a definition may have become stricter than the objects it finds.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value};

use super::schema::{Additional, List, Schema, Type};
use cleat_apimachinery::field::FieldError;

impl Schema {
    /// What is wrong with the value at `path`. `old` is what stood there before.
    pub fn check(&self, value: &Value, old: Option<&Value>, path: &str, errors: &mut Vec<FieldError>) {
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

    fn is_met(&self, value: &Value) -> bool {
        let mut errors = Vec::new();
        self.check(value, None, "", &mut errors);
        errors.is_empty()
    }

    fn check_type(&self, value: &Value, path: &str, errors: &mut Vec<FieldError>) -> bool {
        let found = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(n) if n.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let wanted = if self.int_or_string {
            (!matches!(value, Value::String(_)) && !Type::Integer.fits(value)).then_some("integer,string")
        } else {
            self.kind.filter(|kind| !kind.fits(value)).map(Type::name)
        };
        if let Some(wanted) = wanted {
            let why = format!("{} in body must be of type {wanted}: \"{found}\"", path);
            errors.push(FieldError::type_invalid(place(path), found, why));
        }
        wanted.is_none()
    }

    fn check_scalar(&self, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
        let at = path;
        let mut refuse =
            |why: String| errors.push(FieldError::invalid(place(path), value, format!("{at} in body {why}")));
        if let Some(number) = value.as_f64() {
            match self.minimum {
                Some((limit, true)) if number <= limit => refuse(format!("should be greater than {limit}")),
                Some((limit, false)) if number < limit => {
                    refuse(format!("should be greater than or equal to {limit}"));
                }
                _ => {}
            }
            match self.maximum {
                Some((limit, true)) if number >= limit => refuse(format!("should be less than {limit}")),
                Some((limit, false)) if number > limit => refuse(format!("should be less than or equal to {limit}")),
                _ => {}
            }
            if let Some(of) = self.multiple_of.filter(|of| *of != 0.0 && (number / of).fract() != 0.0) {
                refuse(format!("should be a multiple of {of}"));
            }
        }
        if let Some(text) = value.as_str() {
            let length = i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
            if let Some(least) = self.length.0.filter(|l| length < *l) {
                refuse(format!("should be at least {least} chars long"));
            }
            if let Some(pattern) = self.pattern.as_ref().filter(|p| !p.is_match(text)) {
                refuse(format!("should match '{pattern}'"));
            }
            if let Some(format) = self.format.as_deref().filter(|f| !fits_format(f, text)) {
                refuse(format!("must be of type {format}: \"{text}\""));
            }
            if let Some(most) = self.length.1.filter(|l| length > *l) {
                errors.push(FieldError::too_long(place(path), usize::try_from(most).unwrap_or(0)));
            }
        }
        if !self.choices.is_empty() && !self.choices.contains(value) {
            let choices: Vec<String> =
                self.choices.iter().map(|c| c.as_str().map_or_else(|| c.to_string(), Into::into)).collect();
            let choices: Vec<&str> = choices.iter().map(String::as_str).collect();
            errors.push(FieldError::not_supported_value(place(path), value, &choices));
        }
    }

    /// The fields of an object; its own schema, not that of what is around it.
    pub fn check_fields(
        &self,
        fields: &Map<String, Value>,
        old: Option<&Map<String, Value>>,
        path: &str,
        errors: &mut Vec<FieldError>,
    ) {
        for missing in self.required.iter().filter(|key| !fields.contains_key(*key)) {
            errors.push(FieldError::required(inside(path, missing), ""));
        }
        let size = i64::try_from(fields.len()).unwrap_or(i64::MAX);
        if let Some(least) = self.size.0.filter(|l| size < *l) {
            let why = format!("{} in body should have at least {least} properties", path);
            errors.push(FieldError::invalid(place(path), size, why));
        }
        if let Some(most) = self.size.1.filter(|l| size > *l) {
            errors.push(FieldError::too_many(place(path), size, most));
        }
        for (key, value) in fields {
            let schema = match (self.properties.get(key), &self.additional) {
                (Some(schema), _) => schema,
                (None, Additional::Each(schema)) => schema,
                (None, _) => continue,
            };
            schema.check(value, old.and_then(|o| o.get(key)), &inside(path, key), errors);
        }
    }

    fn check_items(&self, items: &[Value], old: Option<&Vec<Value>>, path: &str, errors: &mut Vec<FieldError>) {
        let count = i64::try_from(items.len()).unwrap_or(i64::MAX);
        if let Some(least) = self.count.0.filter(|l| count < *l) {
            let why = format!("{} in body should have at least {least} items", path);
            errors.push(FieldError::invalid(place(path), count, why));
        }
        if let Some(most) = self.count.1.filter(|l| count > *l) {
            errors.push(FieldError::too_many(place(path), count, most));
        }
        let mut seen = BTreeSet::new();
        for (i, item) in items.iter().enumerate() {
            let at = format!("{path}[{i}]");
            let identity = match &self.list {
                List::Atomic => None,
                List::Set => Some(item.clone()),
                List::Map(keys) => Some(self.identity(item, keys)),
            };
            if let Some(identity) = &identity
                && !seen.insert(identity.to_string())
            {
                errors.push(FieldError::duplicate(&at, identity));
            }
            // Elements are the same as before only where something tells them apart.
            let before = match &self.list {
                List::Map(keys) => old.and_then(|o| o.iter().find(|e| Some(self.identity(e, keys)) == identity)),
                _ => None,
            };
            if let Some(schema) = &self.items {
                schema.check(item, before, &at, errors);
            }
        }
    }

    pub(super) fn identity(&self, item: &Value, keys: &[String]) -> Value {
        keys.iter().map(|key| (key.clone(), item.get(key).cloned().unwrap_or_default())).collect::<Map<_, _>>().into()
    }

    fn check_combined(&self, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
        for schema in &self.all_of {
            schema.check(value, None, path, errors);
        }
        let quoted = format!("\"{}\"", path);
        let mut refuse = |why: String| errors.push(FieldError::invalid(place(path), value, format!("{quoted} {why}")));
        if !self.any_of.is_empty() && !self.any_of.iter().any(|s| s.is_met(value)) {
            refuse("must validate at least one schema (anyOf)".into());
        }
        match self.one_of.iter().filter(|s| s.is_met(value)).count() {
            _ if self.one_of.is_empty() => {}
            1 => {}
            0 => refuse("must validate one and only one schema (oneOf). Found none valid".into()),
            many => refuse(format!("must validate one and only one schema (oneOf). Found {many} valid alternatives")),
        }
        if self.not.as_ref().is_some_and(|s| s.is_met(value)) {
            refuse("must not validate the schema (not)".into());
        }
    }
}

pub(super) fn inside(path: &str, key: &str) -> String {
    if path.is_empty() { key.into() } else { format!("{path}.{key}") }
}

/// The root has no path of its own.
pub(super) fn place(path: &str) -> &str {
    if path.is_empty() { "<nil>" } else { path }
}

/// Formats that are not known are not checked.
fn fits_format(format: &str, text: &str) -> bool {
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

    fn schema() -> Schema {
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
        Schema::compile(&serde_json::from_value(schema).unwrap())
    }

    #[test]
    fn every_mistake_is_named_where_it_is() {
        for (case, change, want) in [
            ("fine", json!({}), None),
            ("required", json!({ "size": null }), Some("size")),
            ("too large", json!({ "size": 11 }), Some("size")),
            ("another type", json!({ "size": "3" }), Some("size")),
            ("a whole number in other words", json!({ "size": 3.0 }), None),
            ("no choice", json!({ "mode": "c" }), Some("mode")),
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
            ("no time", json!({ "when": "soon" }), Some("when")),
            ("one of two", json!({ "either": { "a": 1 } }), None),
            ("both of two", json!({ "either": { "a": 1, "b": 1 } }), Some("either")),
            ("the one not allowed", json!({ "either": { "a": 1, "c": 1 } }), Some("either")),
        ] {
            let mut value = json!({ "size": 3 });
            json_patch::merge(&mut value, &change);
            if case == "null where it may be" {
                value["nullable"] = Value::Null;
            }
            let mut errors = Vec::new();
            schema().check(&value, None, "", &mut errors);
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{case}: {errors:?}");
        }
    }

    #[test]
    fn what_did_not_change_is_not_asked_again() {
        let old = json!({ "size": 50, "name": "ok", "map": [{ "key": "a", "n": 9 }] });
        for (case, new, want) in [
            ("the invalid part stays", json!({ "size": 50, "name": "new", "map": [{ "key": "a", "n": 9 }] }), None),
            ("the invalid part changes", json!({ "size": 51, "name": "ok" }), Some("size")),
            ("an element moves", json!({ "size": 50, "map": [{ "key": "b", "n": 1 }, { "key": "a", "n": 9 }] }), None),
            ("an element changes", json!({ "size": 50, "map": [{ "key": "a", "n": 8 }] }), Some("map[0].n")),
        ] {
            let mut errors = Vec::new();
            schema().check(&new, Some(&old), "", &mut errors);
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{case}: {errors:?}");
        }
    }
}
