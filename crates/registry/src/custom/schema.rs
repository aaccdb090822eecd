//! A definition's schema, compiled: what objects may hold, what they get by default, and what is dropped.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use regex::Regex;
use serde_json::{Map, Value};

use super::rules::Rule;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Object,
    Array,
    Text,
    Integer,
    Number,
    Boolean,
}

impl Type {
    pub(super) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "object" => Self::Object,
            "array" => Self::Array,
            "string" => Self::Text,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            _ => return None,
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::Text => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }

    pub(super) fn fits(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Object, Value::Object(_))
            | (Self::Array, Value::Array(_))
            | (Self::Text, Value::String(_))
            | (Self::Number, Value::Number(_))
            | (Self::Boolean, Value::Bool(_)) => true,
            (Self::Integer, Value::Number(n)) => {
                n.is_i64() || n.is_u64() || n.as_f64().is_some_and(|f| f.fract() == 0.0)
            }
            _ => false,
        }
    }
}

/// Fields that are not listed.
#[derive(Debug, Default)]
pub(super) enum Additional {
    #[default]
    No,
    Any,
    Each(Box<Schema>),
}

/// How the elements of a list are told apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum List {
    #[default]
    Atomic,
    Set,
    Map(Vec<String>),
}

/// A bound, and whether it is itself out of bounds.
pub(super) type Bound = Option<(f64, bool)>;

#[derive(Debug, Default)]
pub struct Schema {
    pub(super) kind: Option<Type>,
    pub(super) format: Option<String>,
    pub(super) nullable: bool,
    pub(super) int_or_string: bool,
    pub(super) preserve: bool,
    pub(super) embedded: bool,
    pub(super) properties: BTreeMap<String, Schema>,
    pub(super) additional: Additional,
    pub(super) items: Option<Box<Schema>>,
    pub(super) default: Option<Value>,
    pub(super) required: Vec<String>,
    pub(super) choices: Vec<Value>,
    pub(super) pattern: Option<Regex>,
    pub(super) minimum: Bound,
    pub(super) maximum: Bound,
    pub(super) multiple_of: Option<f64>,
    pub(super) length: (Option<i64>, Option<i64>),
    pub(super) count: (Option<i64>, Option<i64>),
    pub(super) size: (Option<i64>, Option<i64>),
    pub(super) list: List,
    pub(super) all_of: Vec<Schema>,
    pub(super) any_of: Vec<Schema>,
    pub(super) one_of: Vec<Schema>,
    pub(super) not: Option<Box<Schema>>,
    pub(super) rules: Vec<Rule>,
}

impl Schema {
    pub fn compile(from: &JSONSchemaProps) -> Self {
        let each = |list: &Option<Vec<JSONSchemaProps>>| list.iter().flatten().map(Self::compile).collect();
        let is = |flag: Option<bool>| flag == Some(true);
        let bound = |limit: Option<f64>, exclusive| limit.map(|l| (l, is(exclusive)));
        Self {
            kind: from.type_.as_deref().and_then(Type::parse),
            format: from.format.clone(),
            nullable: is(from.nullable),
            int_or_string: is(from.x_kubernetes_int_or_string),
            preserve: is(from.x_kubernetes_preserve_unknown_fields),
            embedded: is(from.x_kubernetes_embedded_resource),
            properties: from.properties.iter().flatten().map(|(k, v)| (k.clone(), Self::compile(v))).collect(),
            additional: match &from.additional_properties {
                None | Some(JSONSchemaPropsOrBool::Bool(false)) => Additional::No,
                Some(JSONSchemaPropsOrBool::Bool(true)) => Additional::Any,
                Some(JSONSchemaPropsOrBool::Schema(each)) => Additional::Each(Box::new(Self::compile(each))),
            },
            items: match &from.items {
                Some(JSONSchemaPropsOrArray::Schema(each)) => Some(Box::new(Self::compile(each))),
                _ => None,
            },
            default: from.default.as_ref().map(|json| json.0.clone()),
            required: from.required.clone().unwrap_or_default(),
            choices: from.enum_.iter().flatten().map(|json| json.0.clone()).collect(),
            pattern: from.pattern.as_deref().and_then(|p| Regex::new(p).ok()),
            minimum: bound(from.minimum, from.exclusive_minimum),
            maximum: bound(from.maximum, from.exclusive_maximum),
            multiple_of: from.multiple_of,
            length: (from.min_length, from.max_length),
            count: (from.min_items, from.max_items),
            size: (from.min_properties, from.max_properties),
            list: match from.x_kubernetes_list_type.as_deref() {
                Some("set") => List::Set,
                Some("map") => List::Map(from.x_kubernetes_list_map_keys.clone().unwrap_or_default()),
                _ => List::Atomic,
            },
            all_of: each(&from.all_of),
            any_of: each(&from.any_of),
            one_of: each(&from.one_of),
            not: from.not.as_deref().map(|not| Box::new(Self::compile(not))),
            rules: from.x_kubernetes_validations.iter().flatten().filter_map(Rule::compile).collect(),
        }
    }

    pub fn has_defaults(&self) -> bool {
        let additional = matches!(&self.additional, Additional::Each(each) if each.has_defaults());
        self.default.is_some()
            || additional
            || self.properties.values().any(Self::has_defaults)
            || self.items.as_ref().is_some_and(|items| items.has_defaults())
    }

    /// Drops what the schema does not know; tells where each was.
    pub fn prune(&self, value: &mut Value, path: &str, dropped: &mut Vec<String>) {
        match value {
            Value::Object(fields) => self.prune_fields(fields, path, dropped),
            Value::Array(items) => {
                if let Some(schema) = &self.items {
                    for (i, item) in items.iter_mut().enumerate() {
                        schema.prune(item, &format!("{path}[{i}]"), dropped);
                    }
                }
            }
            _ => {}
        }
    }

    pub fn prune_fields(&self, fields: &mut Map<String, Value>, path: &str, dropped: &mut Vec<String>) {
        let place = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        let implicit = |key: &str| self.embedded && ["apiVersion", "kind", "metadata"].contains(&key);
        fields.retain(|key, value| {
            if let Some(schema) = self.properties.get(key) {
                schema.prune(value, &place(key), dropped);
                return true;
            }
            match &self.additional {
                Additional::Each(schema) => {
                    schema.prune(value, &place(key), dropped);
                    true
                }
                Additional::Any => true,
                Additional::No if self.preserve || implicit(key) => true,
                Additional::No => {
                    dropped.push(place(key));
                    false
                }
            }
        });
    }

    /// Fills what was left out. A null where none may be counts as left out.
    pub fn fill(&self, value: &mut Value) {
        match value {
            Value::Object(fields) => self.fill_fields(fields),
            Value::Array(items) => {
                if let Some(schema) = &self.items {
                    items.iter_mut().for_each(|item| schema.fill(item));
                }
            }
            _ => {}
        }
    }

    pub fn fill_fields(&self, fields: &mut Map<String, Value>) {
        for (key, schema) in &self.properties {
            if fields.get(key).is_some_and(Value::is_null) && !schema.nullable {
                fields.remove(key);
            }
            if let Some(default) = schema.default.as_ref().filter(|_| !fields.contains_key(key)) {
                fields.insert(key.clone(), default.clone());
            }
            if let Some(value) = fields.get_mut(key) {
                schema.fill(value);
            }
        }
        if let Additional::Each(schema) = &self.additional {
            for (_, value) in fields.iter_mut().filter(|(key, _)| !self.properties.contains_key(*key)) {
                if value.is_null()
                    && !schema.nullable
                    && let Some(default) = &schema.default
                {
                    *value = default.clone();
                }
                schema.fill(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema(json: Value) -> Schema {
        Schema::compile(&serde_json::from_value(json).unwrap())
    }

    #[test]
    fn unknown_fields_are_dropped_unless_they_are_to_be_kept() {
        let schema = schema(json!({ "type": "object", "properties": {
            "known": { "type": "string" },
            "free": { "type": "object", "x-kubernetes-preserve-unknown-fields": true,
                      "properties": { "strict": { "type": "object" } } },
            "map": { "type": "object", "additionalProperties": { "type": "object", "properties": { "a": { "type": "string" } } } },
            "list": { "type": "array", "items": { "type": "object", "properties": { "a": { "type": "string" } } } },
            "embedded": { "type": "object", "x-kubernetes-embedded-resource": true,
                          "properties": { "spec": { "type": "object" } } },
        } }));
        let mut value = json!({
            "known": "x", "unknown": 1, "free": { "any": { "thing": 1 }, "strict": { "gone": 1 } },
            "map": { "k": { "a": "x", "b": 1 } }, "list": [{ "a": "x" }, { "c": 1 }],
            "embedded": { "apiVersion": "v1", "kind": "K", "metadata": { "name": "n" }, "extra": 1 },
        });
        let mut dropped = Vec::new();
        schema.prune(&mut value, "", &mut dropped);
        dropped.sort();
        assert_eq!(dropped, ["embedded.extra", "free.strict.gone", "list[1].c", "map.k.b", "unknown"]);
        assert_eq!(value["free"]["any"]["thing"], 1);
        assert_eq!(value["embedded"]["metadata"]["name"], "n");
    }

    #[test]
    fn what_was_left_out_is_filled_in() {
        let schema = schema(json!({ "type": "object", "properties": {
            "mode": { "type": "string", "default": "a" },
            "nullable": { "type": "string", "nullable": true, "default": "b" },
            "nested": { "type": "object", "default": {}, "properties": { "n": { "type": "integer", "default": 7 } } },
            "items": { "type": "array", "items": { "type": "object", "properties": { "v": { "type": "string", "default": "dv" } } } },
            "plain": { "type": "string" },
        } }));
        assert!(schema.has_defaults());
        for (case, given, want) in [
            ("nothing given", json!({}), json!({ "mode": "a", "nullable": "b", "nested": { "n": 7 } })),
            (
                "nulls",
                json!({ "mode": null, "nullable": null, "plain": null }),
                json!({ "mode": "a", "nullable": null, "nested": { "n": 7 } }),
            ),
            (
                "lists",
                json!({ "mode": "x", "nullable": "y", "nested": { "n": 1 }, "items": [{}, { "v": "w" }] }),
                json!({ "mode": "x", "nullable": "y", "nested": { "n": 1 }, "items": [{ "v": "dv" }, { "v": "w" }] }),
            ),
        ] {
            let mut value = given;
            schema.fill(&mut value);
            assert_eq!(value, want, "{case}");
        }
    }
}
