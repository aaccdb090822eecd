//! The compiled schema of a definition, and what it does to values before validation: pruning and defaulting. Validation is
//! in `schema_validation` and `rule_validation`.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use regex::Regex;
use serde_json::{Map, Value};

use super::rule::CompiledRule;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SchemaType {
    Object,
    Array,
    String,
    Integer,
    Number,
    Boolean,
}

impl SchemaType {
    pub(super) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "object" => Self::Object,
            "array" => Self::Array,
            "string" => Self::String,
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
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }

    /// A number without a fraction, such as `3.0`, is an integer, too.
    pub(super) fn matches(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Object, Value::Object(_))
            | (Self::Array, Value::Array(_))
            | (Self::String, Value::String(_))
            | (Self::Number, Value::Number(_))
            | (Self::Boolean, Value::Bool(_)) => true,
            (Self::Integer, Value::Number(n)) => {
                n.is_i64() || n.is_u64() || n.as_f64().is_some_and(|f| f.fract() == 0.0)
            }
            _ => false,
        }
    }
}

/// `additionalProperties`: what fields that are not in `properties` may hold.
#[derive(Debug, Default)]
pub(super) enum AdditionalProperties {
    #[default]
    None,
    Any,
    Schema(Box<StructuralSchema>),
}

/// `x-kubernetes-list-type`: what identifies an element of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ListType {
    #[default]
    Atomic,
    Set,
    Map(Vec<String>),
}

/// A limit, and whether it is exclusive; `None` if there is no limit.
pub(super) type NumericLimit = Option<(f64, bool)>;

/// A schema, compiled for use at every write. Fields have the meaning of the JSON Schema keywords of the same name.
#[derive(Debug, Default)]
pub(crate) struct StructuralSchema {
    pub(super) value_type: Option<SchemaType>,
    pub(super) format: Option<String>,
    pub(super) nullable: bool,
    pub(super) int_or_string: bool,
    pub(super) preserve_unknown_fields: bool,
    pub(super) embedded_resource: bool,
    pub(super) properties: BTreeMap<String, StructuralSchema>,
    pub(super) additional_properties: AdditionalProperties,
    pub(super) items: Option<Box<StructuralSchema>>,
    pub(super) default: Option<Value>,
    pub(super) required: Vec<String>,
    pub(super) enum_values: Vec<Value>,
    pub(super) pattern: Option<Regex>,
    pub(super) minimum: NumericLimit,
    pub(super) maximum: NumericLimit,
    pub(super) multiple_of: Option<f64>,
    /// `minLength` and `maxLength` of a string, in characters.
    pub(super) length: (Option<i64>, Option<i64>),
    /// `minItems` and `maxItems` of a list.
    pub(super) item_count: (Option<i64>, Option<i64>),
    /// `minProperties` and `maxProperties` of an object.
    pub(super) property_count: (Option<i64>, Option<i64>),
    pub(super) list_type: ListType,
    pub(super) all_of: Vec<StructuralSchema>,
    pub(super) any_of: Vec<StructuralSchema>,
    pub(super) one_of: Vec<StructuralSchema>,
    pub(super) not: Option<Box<StructuralSchema>>,
    pub(super) rules: Vec<CompiledRule>,
}

impl StructuralSchema {
    /// Compiles the schema. Parts that validation of the definition refuses are ignored.
    pub(crate) fn compile(schema: &JSONSchemaProps) -> Self {
        let compile_all = |list: &Option<Vec<JSONSchemaProps>>| list.iter().flatten().map(Self::compile).collect();
        let is = |flag: Option<bool>| flag == Some(true);
        let bound = |limit: Option<f64>, exclusive| limit.map(|l| (l, is(exclusive)));
        Self {
            value_type: schema.type_.as_deref().and_then(SchemaType::parse),
            format: schema.format.clone(),
            nullable: is(schema.nullable),
            int_or_string: is(schema.x_kubernetes_int_or_string),
            preserve_unknown_fields: is(schema.x_kubernetes_preserve_unknown_fields),
            embedded_resource: is(schema.x_kubernetes_embedded_resource),
            properties: schema.properties.iter().flatten().map(|(k, v)| (k.clone(), Self::compile(v))).collect(),
            additional_properties: match &schema.additional_properties {
                None | Some(JSONSchemaPropsOrBool::Bool(false)) => AdditionalProperties::None,
                Some(JSONSchemaPropsOrBool::Bool(true)) => AdditionalProperties::Any,
                Some(JSONSchemaPropsOrBool::Schema(each)) => {
                    AdditionalProperties::Schema(Box::new(Self::compile(each)))
                }
            },
            items: match &schema.items {
                Some(JSONSchemaPropsOrArray::Schema(each)) => Some(Box::new(Self::compile(each))),
                _ => None,
            },
            default: schema.default.as_ref().map(|json| json.0.clone()),
            required: schema.required.clone().unwrap_or_default(),
            enum_values: schema.enum_.iter().flatten().map(|json| json.0.clone()).collect(),
            pattern: schema.pattern.as_deref().and_then(|p| Regex::new(p).ok()),
            minimum: bound(schema.minimum, schema.exclusive_minimum),
            maximum: bound(schema.maximum, schema.exclusive_maximum),
            multiple_of: schema.multiple_of,
            length: (schema.min_length, schema.max_length),
            item_count: (schema.min_items, schema.max_items),
            property_count: (schema.min_properties, schema.max_properties),
            list_type: match schema.x_kubernetes_list_type.as_deref() {
                Some("set") => ListType::Set,
                Some("map") => ListType::Map(schema.x_kubernetes_list_map_keys.clone().unwrap_or_default()),
                _ => ListType::Atomic,
            },
            all_of: compile_all(&schema.all_of),
            any_of: compile_all(&schema.any_of),
            one_of: compile_all(&schema.one_of),
            not: schema.not.as_deref().map(|not| Box::new(Self::compile(not))),
            rules: schema.x_kubernetes_validations.iter().flatten().filter_map(CompiledRule::compile).collect(),
        }
    }

    pub(crate) fn has_defaults(&self) -> bool {
        let additional =
            matches!(&self.additional_properties, AdditionalProperties::Schema(each) if each.has_defaults());
        self.default.is_some()
            || additional
            || self.properties.values().any(Self::has_defaults)
            || self.items.as_ref().is_some_and(|items| items.has_defaults())
    }

    /// Removes the fields that the schema does not specify. Appends the path of each to `pruned`.
    pub(crate) fn prune(&self, value: &mut Value, path: &str, pruned: &mut Vec<String>) {
        match value {
            Value::Object(fields) => self.prune_fields(fields, path, pruned),
            Value::Array(items) => {
                if let Some(schema) = &self.items {
                    for (i, item) in items.iter_mut().enumerate() {
                        schema.prune(item, &format!("{path}[{i}]"), pruned);
                    }
                }
            }
            _ => {}
        }
    }

    pub(crate) fn prune_fields(&self, fields: &mut Map<String, Value>, path: &str, pruned: &mut Vec<String>) {
        let field_path = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        let is_implicit = |key: &str| self.embedded_resource && ["apiVersion", "kind", "metadata"].contains(&key);
        fields.retain(|key, value| {
            if let Some(schema) = self.properties.get(key) {
                schema.prune(value, &field_path(key), pruned);
                return true;
            }
            match &self.additional_properties {
                AdditionalProperties::Schema(schema) => {
                    schema.prune(value, &field_path(key), pruned);
                    true
                }
                AdditionalProperties::Any => true,
                AdditionalProperties::None if self.preserve_unknown_fields || is_implicit(key) => true,
                AdditionalProperties::None => {
                    pruned.push(field_path(key));
                    false
                }
            }
        });
    }

    /// Sets missing fields to their defaults. A null in a field that is not nullable counts as missing.
    pub(crate) fn apply_defaults(&self, value: &mut Value) {
        match value {
            Value::Object(fields) => self.apply_defaults_to_fields(fields),
            Value::Array(items) => {
                if let Some(schema) = &self.items {
                    items.iter_mut().for_each(|item| schema.apply_defaults(item));
                }
            }
            _ => {}
        }
    }

    pub(crate) fn apply_defaults_to_fields(&self, fields: &mut Map<String, Value>) {
        for (key, schema) in &self.properties {
            if fields.get(key).is_some_and(Value::is_null) && !schema.nullable {
                fields.remove(key);
            }
            if let Some(default) = schema.default.as_ref().filter(|_| !fields.contains_key(key)) {
                fields.insert(key.clone(), default.clone());
            }
            if let Some(value) = fields.get_mut(key) {
                schema.apply_defaults(value);
            }
        }
        if let AdditionalProperties::Schema(schema) = &self.additional_properties {
            for (_, value) in fields.iter_mut().filter(|(key, _)| !self.properties.contains_key(*key)) {
                if value.is_null()
                    && !schema.nullable
                    && let Some(default) = &schema.default
                {
                    *value = default.clone();
                }
                schema.apply_defaults(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema(json: Value) -> StructuralSchema {
        StructuralSchema::compile(&serde_json::from_value(json).unwrap())
    }

    #[test]
    fn unknown_fields_are_pruned_unless_preserved() {
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
        let mut pruned = Vec::new();
        schema.prune(&mut value, "", &mut pruned);
        pruned.sort();
        assert_eq!(pruned, ["embedded.extra", "free.strict.gone", "list[1].c", "map.k.b", "unknown"]);
        assert_eq!(value["free"]["any"]["thing"], 1);
        assert_eq!(value["embedded"]["metadata"]["name"], "n");
    }

    #[test]
    fn missing_fields_get_defaults() {
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
            schema.apply_defaults(&mut value);
            assert_eq!(value, want, "{case}");
        }
    }
}
