//! Checks that the schema of a definition is structural: the type of every value is declared exactly once, outside of
//! `allOf`, `anyOf`, `oneOf` and `not`. Only then do pruning and defaulting have one result.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use serde_json::{Map, Value};

use crate::custom::{CelProgram, StructuralSchema};
use cleat_apimachinery::field_error::FieldError;

const SCHEMA_TYPES: [&str; 6] = ["array", "boolean", "integer", "number", "object", "string"];

/// The position of a schema within the schema of the definition.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SchemaPosition {
    Root,
    Field,
    Item,
    /// Under `allOf`, `anyOf`, `oneOf` or `not`: only value validations are allowed, no types or defaults.
    ValueValidation,
}

/// Appends the errors of the schema at `path` and of all schemas in it.
pub(super) fn check_structural(path: &str, schema: &JSONSchemaProps, errors: &mut Vec<FieldError>) {
    walk(path, schema, SchemaPosition::Root, errors);
}

fn is_true(flag: Option<bool>) -> bool {
    flag == Some(true)
}

fn walk(path: &str, schema: &JSONSchemaProps, position: SchemaPosition, errors: &mut Vec<FieldError>) {
    check_features(path, schema, errors);
    match position {
        SchemaPosition::ValueValidation => check_value_validation(path, schema, errors),
        SchemaPosition::Root | SchemaPosition::Field | SchemaPosition::Item => {
            check_type(path, schema, position, errors)
        }
    }
    check_extensions(path, schema, errors);
    check_pattern_and_default(path, schema, errors);
    check_rules(path, schema, errors);
    if position == SchemaPosition::Root {
        check_metadata(path, schema, errors);
    }
    let (field, item) = match position {
        SchemaPosition::ValueValidation => (SchemaPosition::ValueValidation, SchemaPosition::ValueValidation),
        _ => (SchemaPosition::Field, SchemaPosition::Item),
    };
    for (name, inner) in schema.properties.iter().flatten() {
        let implicit = position == SchemaPosition::Root && name == "metadata";
        if !implicit {
            walk(&format!("{path}.properties[{name}]"), inner, field, errors);
        }
    }
    if let Some(JSONSchemaPropsOrBool::Schema(inner)) = &schema.additional_properties {
        walk(&format!("{path}.additionalProperties"), inner, field, errors);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(inner)) = &schema.items {
        walk(&format!("{path}.items"), inner, item, errors);
    }
    for (name, list) in [("allOf", &schema.all_of), ("anyOf", &schema.any_of), ("oneOf", &schema.one_of)] {
        for (i, inner) in list.iter().flatten().enumerate() {
            // Exception: with x-kubernetes-int-or-string, the two alternatives may state the types.
            if !(is_true(schema.x_kubernetes_int_or_string) && is_bare_type(inner)) {
                walk(&format!("{path}.{name}[{i}]"), inner, SchemaPosition::ValueValidation, errors);
            }
        }
    }
    if let Some(inner) = &schema.not {
        walk(&format!("{path}.not"), inner, SchemaPosition::ValueValidation, errors);
    }
}

fn check_rules(path: &str, schema: &JSONSchemaProps, errors: &mut Vec<FieldError>) {
    const SUPPORTED_REASONS: [&str; 4] =
        ["FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired"];
    for (i, rule) in schema.x_kubernetes_validations.iter().flatten().enumerate() {
        let at = format!("{path}.x-kubernetes-validations[{i}]");
        if rule.rule.trim().is_empty() {
            errors.push(FieldError::required(format!("{at}.rule"), "rule is not specified"));
        } else if let Err(why) = CelProgram::compile(&rule.rule) {
            let why = format!("compilation failed: {why}");
            errors.push(FieldError::invalid(format!("{at}.rule"), &rule.rule, why));
        }
        if let Some(expression) = &rule.message_expression
            && let Err(why) = CelProgram::compile(expression)
        {
            let why = format!("messageExpression compilation failed: {why}");
            errors.push(FieldError::invalid(format!("{at}.messageExpression"), expression, why));
        }
        if let Some(reason) = rule.reason.as_deref().filter(|r| !SUPPORTED_REASONS.contains(r)) {
            errors.push(FieldError::not_supported(format!("{at}.reason"), reason, &SUPPORTED_REASONS));
        }
    }
}

fn is_bare_type(schema: &JSONSchemaProps) -> bool {
    let bare = JSONSchemaProps { type_: schema.type_.clone(), ..Default::default() };
    matches!(schema.type_.as_deref(), Some("integer" | "string")) && *schema == bare
        || schema.any_of.iter().flatten().all(is_bare_type) && schema.any_of.is_some()
}

/// Features of JSON Schema that definitions must not use.
fn check_features(path: &str, schema: &JSONSchemaProps, errors: &mut Vec<FieldError>) {
    if is_true(schema.unique_items) {
        let why = "uniqueItems cannot be set to true since the runtime complexity becomes quadratic";
        errors.push(FieldError::forbidden(format!("{path}.uniqueItems"), why));
    }
    if schema.ref_path.is_some() {
        errors.push(FieldError::forbidden(format!("{path}.$ref"), "$ref is not supported"));
    }
    for (name, set) in [
        ("definitions", schema.definitions.as_ref().is_some_and(|d| !d.is_empty())),
        ("dependencies", schema.dependencies.as_ref().is_some_and(|d| !d.is_empty())),
        ("patternProperties", schema.pattern_properties.as_ref().is_some_and(|p| !p.is_empty())),
        ("additionalItems", schema.additional_items.is_some()),
        ("id", schema.id.is_some()),
    ] {
        if set {
            errors.push(FieldError::forbidden(format!("{path}.{name}"), format!("{name} is not supported")));
        }
    }
    let allows_additional = !matches!(schema.additional_properties, None | Some(JSONSchemaPropsOrBool::Bool(false)));
    if schema.properties.as_ref().is_some_and(|p| !p.is_empty()) && allows_additional {
        let why = "additionalProperties and properties are mutual exclusive";
        errors.push(FieldError::forbidden(format!("{path}.additionalProperties"), why));
    }
    if let Some(JSONSchemaPropsOrArray::Schemas(_)) = &schema.items {
        let why = "items must be a schema object and not an array";
        errors.push(FieldError::forbidden(format!("{path}.items"), why));
    }
}

fn check_type(path: &str, schema: &JSONSchemaProps, position: SchemaPosition, errors: &mut Vec<FieldError>) {
    let at = format!("{path}.type");
    let untyped = is_true(schema.x_kubernetes_int_or_string) || is_true(schema.x_kubernetes_preserve_unknown_fields);
    match (schema.type_.as_deref().unwrap_or_default(), position) {
        ("", SchemaPosition::Root) => errors.push(FieldError::required(at, "must not be empty at the root")),
        ("", _) if untyped => {}
        ("", SchemaPosition::Item) => {
            errors.push(FieldError::required(at, "must not be empty for specified array items"))
        }
        ("", _) => errors.push(FieldError::required(at, "must not be empty for specified object fields")),
        (known, _) if !SCHEMA_TYPES.contains(&known) => {
            errors.push(FieldError::not_supported(at, known, &SCHEMA_TYPES))
        }
        ("object", _) => {}
        (other, SchemaPosition::Root) => errors.push(FieldError::invalid(at, other, "must be object at the root")),
        ("array", _) if schema.items.is_none() => {
            errors.push(FieldError::required(format!("{path}.items"), "must be specified"));
        }
        _ => {}
    }
}

fn check_value_validation(path: &str, schema: &JSONSchemaProps, errors: &mut Vec<FieldError>) {
    for (name, set, empty) in [
        ("type", schema.type_.is_some(), "empty"),
        ("default", schema.default.is_some(), "undefined"),
        ("description", schema.description.is_some(), "empty"),
        ("title", schema.title.is_some(), "empty"),
        ("nullable", is_true(schema.nullable), "false"),
        ("additionalProperties", schema.additional_properties.is_some(), "undefined"),
        ("x-kubernetes-preserve-unknown-fields", is_true(schema.x_kubernetes_preserve_unknown_fields), "false"),
        ("x-kubernetes-embedded-resource", is_true(schema.x_kubernetes_embedded_resource), "false"),
        ("x-kubernetes-int-or-string", is_true(schema.x_kubernetes_int_or_string), "false"),
        ("x-kubernetes-list-type", schema.x_kubernetes_list_type.is_some(), "undefined"),
        ("x-kubernetes-list-map-keys", schema.x_kubernetes_list_map_keys.is_some(), "empty"),
    ] {
        if set {
            errors.push(FieldError::forbidden(format!("{path}.{name}"), format!("must be {empty} to be structural")));
        }
    }
}

fn check_extensions(path: &str, schema: &JSONSchemaProps, errors: &mut Vec<FieldError>) {
    if schema.x_kubernetes_preserve_unknown_fields == Some(false) {
        let why = "must be true or undefined";
        errors.push(FieldError::invalid(format!("{path}.x-kubernetes-preserve-unknown-fields"), false, why));
    }
    if is_true(schema.x_kubernetes_embedded_resource) {
        if schema.type_.as_deref() != Some("object") {
            let why = "must be object if x-kubernetes-embedded-resource is true";
            errors.push(FieldError::invalid(format!("{path}.type"), &schema.type_, why));
        }
        let has_properties = schema.properties.as_ref().is_some_and(|p| !p.is_empty());
        if !has_properties && !is_true(schema.x_kubernetes_preserve_unknown_fields) {
            let why = "must not be empty if x-kubernetes-embedded-resource is true without \
                       x-kubernetes-preserve-unknown-fields";
            errors.push(FieldError::required(format!("{path}.properties"), why));
        }
    }
    check_list(path, schema, errors);
}

fn check_list(path: &str, schema: &JSONSchemaProps, errors: &mut Vec<FieldError>) {
    let Some(list) = schema.x_kubernetes_list_type.as_deref() else {
        if schema.x_kubernetes_list_map_keys.is_some() {
            let why = "must be map if x-kubernetes-list-map-keys is non-empty";
            errors.push(FieldError::required(format!("{path}.x-kubernetes-list-type"), why));
        }
        return;
    };
    if schema.type_.as_deref() != Some("array") {
        let why = "must be array if x-kubernetes-list-type is specified";
        errors.push(FieldError::invalid(format!("{path}.type"), &schema.type_, why));
    }
    let list_types = ["atomic", "map", "set"];
    if !list_types.contains(&list) {
        errors.push(FieldError::not_supported(format!("{path}.x-kubernetes-list-type"), list, &list_types));
    }
    let keys = schema.x_kubernetes_list_map_keys.clone().unwrap_or_default();
    let at = format!("{path}.x-kubernetes-list-map-keys");
    match (list, keys.is_empty()) {
        ("map", true) => {
            errors.push(FieldError::required(&at, "must not be empty if x-kubernetes-list-type is map"));
        }
        ("map", false) => {}
        (_, false) => {
            let why = "must be map if x-kubernetes-list-map-keys is non-empty";
            errors.push(FieldError::invalid(format!("{path}.x-kubernetes-list-type"), list, why));
        }
        (_, true) => {}
    }
    let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items else { return };
    for (i, key) in keys.iter().enumerate() {
        let Some(field) = items.properties.as_ref().and_then(|p| p.get(key)) else {
            errors.push(FieldError::invalid(format!("{at}[{i}]"), key, "entries must all be names of item properties"));
            continue;
        };
        let required = items.required.iter().flatten().any(|r| r == key);
        if !required && field.default.is_none() {
            let why = "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required \
                       property";
            errors.push(FieldError::required(format!("{path}.items.properties[{key}].default"), why));
        }
    }
}

fn check_pattern_and_default(path: &str, schema: &JSONSchemaProps, errors: &mut Vec<FieldError>) {
    if let Some(pattern) = &schema.pattern
        && let Err(error) = regex::Regex::new(pattern)
    {
        let why = format!("must be a valid regular expression, but isn't: {error}");
        errors.push(FieldError::invalid(format!("{path}.pattern"), pattern, why));
    }
    if let Some(default) = &schema.default {
        let at = format!("{path}.default");
        let compiled = StructuralSchema::compile(schema);
        let (mut value, mut pruned) = (default.0.clone(), Vec::new());
        compiled.prune(&mut value, "", &mut pruned);
        if !pruned.is_empty() {
            errors.push(FieldError::invalid(&at, &default.0, "must not have unknown fields"));
        }
        // Nested defaults apply to a default, too, before it is validated.
        compiled.apply_defaults(&mut value);
        compiled.validate(&value, None, &at, errors);
    }
}

fn check_metadata(path: &str, schema: &JSONSchemaProps, errors: &mut Vec<FieldError>) {
    let Some(metadata) = schema.properties.as_ref().and_then(|p| p.get("metadata")) else { return };
    let at = format!("{path}.properties[metadata]");
    if metadata.type_.as_deref().is_some_and(|t| t != "object") {
        errors.push(FieldError::invalid(format!("{at}.type"), &metadata.type_, "must be object"));
    }
    let json = serde_json::to_value(metadata).ok();
    let allowed = |key: &String| ["type", "properties", "description"].contains(&key.as_str());
    let extra = json.as_ref().and_then(Value::as_object).is_some_and(|m: &Map<_, _>| !m.keys().all(allowed));
    let is_name = |key: &String| ["name", "generateName"].contains(&key.as_str());
    if extra || !metadata.properties.iter().flatten().all(|(key, _)| is_name(key)) {
        let why = "must not specify anything other than name and generateName, but metadata is implicitly specified";
        errors.push(FieldError::forbidden(at, why));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_that_are_not_structural_name_the_path() {
        let field = |schema: Value| json!({ "type": "object", "properties": { "a": schema } });
        for (case, schema, want) in [
            ("valid", field(json!({ "type": "string" })), None),
            ("no root type", json!({}), Some("s.type")),
            ("another root type", json!({ "type": "string" }), Some("s.type")),
            ("no type", field(json!({})), Some("s.properties[a].type")),
            ("an unknown type", field(json!({ "type": "text" })), Some("s.properties[a].type")),
            ("any type", field(json!({ "x-kubernetes-preserve-unknown-fields": true })), None),
            (
                "a number or a string",
                field(
                    json!({ "x-kubernetes-int-or-string": true, "anyOf": [{ "type": "integer" }, { "type": "string" }] }),
                ),
                None,
            ),
            ("no items", field(json!({ "type": "array" })), Some("s.properties[a].items")),
            (
                "items without a type",
                field(json!({ "type": "array", "items": {} })),
                Some("s.properties[a].items.type"),
            ),
            (
                "unique items",
                field(json!({ "type": "array", "uniqueItems": true, "items": { "type": "string" } })),
                Some("s.properties[a].uniqueItems"),
            ),
            ("a reference", field(json!({ "$ref": "x", "type": "object" })), Some("s.properties[a].$ref")),
            (
                "properties twice",
                field(
                    json!({ "type": "object", "properties": { "b": { "type": "string" } }, "additionalProperties": { "type": "string" } }),
                ),
                Some("s.properties[a].additionalProperties"),
            ),
            (
                "a type in oneOf",
                field(json!({ "type": "object", "oneOf": [{ "type": "object" }] })),
                Some("s.properties[a].oneOf[0].type"),
            ),
            ("a validation in oneOf", field(json!({ "type": "object", "oneOf": [{ "required": ["x"] }] })), None),
            ("a bad pattern", field(json!({ "type": "string", "pattern": "(" })), Some("s.properties[a].pattern")),
            ("a bad default", field(json!({ "type": "string", "default": 1 })), Some("s.properties[a].default")),
            (
                "an unknown field in a default",
                field(json!({ "type": "object", "default": { "x": 1 } })),
                Some("s.properties[a].default"),
            ),
            (
                "a map without keys",
                field(json!({ "type": "array", "x-kubernetes-list-type": "map", "items": { "type": "object" } })),
                Some("s.properties[a].x-kubernetes-list-map-keys"),
            ),
            (
                "a key that may be absent",
                field(
                    json!({ "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"], "items": { "type": "object", "properties": { "k": { "type": "string" } } } }),
                ),
                Some("s.properties[a].items.properties[k].default"),
            ),
            (
                "metadata",
                json!({ "type": "object", "properties": { "metadata": { "type": "object", "properties": { "labels": { "type": "object" } } } } }),
                Some("s.properties[metadata]"),
            ),
            (
                "the name",
                json!({ "type": "object", "properties": { "metadata": { "type": "object", "properties": { "name": { "type": "string" } } } } }),
                None,
            ),
        ] {
            let schema: JSONSchemaProps = serde_json::from_value(schema).unwrap();
            let mut errors = Vec::new();
            check_structural("s", &schema, &mut errors);
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{case}: {errors:?}");
        }
    }
}
