//! OpenAPI v2: one document for all kinds. kubectl validates the items of a List with it.

use serde_json::{Map, Value, json};

use super::paths::{self, Dialect};
use cleat_apimachinery::schema::builtin::{DEFINITION_REF_PREFIX, OpenApiDefinitions};
use cleat_registry::catalog::ServedKinds;

const REFERENCE: &str = "#/definitions/";

pub(super) fn document(kinds: &ServedKinds) -> Value {
    let mut all = OpenApiDefinitions::new();
    let mut all_paths = Map::new();
    let mut defined_kinds: Vec<(String, Value)> = Vec::new();
    for kind in kinds.iter() {
        let d = kind.descriptor();
        let name = kind.add_openapi_definition(&mut all);
        let schema = name.as_ref().map(|name| format!("{REFERENCE}{name}"));
        paths::add_paths(&**kind, schema.as_deref(), Dialect::V2, &mut all_paths);
        defined_kinds.extend(name.map(|n| (n, json!({ "group": d.group, "version": d.version, "kind": d.kind }))));
    }
    let mut definitions = all.finish();
    for schema in definitions.values_mut() {
        to_v2_schema(schema);
    }
    for (name, kind) in defined_kinds {
        if let Some(schema) = definitions.get_mut(&name) {
            schema["x-kubernetes-group-version-kind"] = json!([kind]);
        }
    }
    json!({
        "swagger": "2.0",
        "info": { "title": "Kubernetes", "version": "v1" },
        "paths": all_paths,
        "definitions": definitions,
    })
}

/// Converts a definition to OpenAPI v2, which has no values of several types and another reference prefix.
fn to_v2_schema(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if fields.remove("x-kubernetes-int-or-string").is_some() && !fields.contains_key("type") {
                let is_quantity =
                    fields.get("description").and_then(Value::as_str).is_some_and(|d| d.starts_with("Quantity is "));
                fields.insert("type".into(), "string".into());
                if !is_quantity {
                    fields.insert("format".into(), "int-or-string".into());
                }
            }
            for unsupported in ["oneOf", "anyOf", "not", "nullable", "x-kubernetes-validations"] {
                fields.remove(unsupported);
            }
            if let Some(Value::String(reference)) = fields.get_mut("$ref") {
                *reference = reference.replacen(DEFINITION_REF_PREFIX, REFERENCE, 1);
            }
            fields.values_mut().for_each(to_v2_schema);
        }
        Value::Array(list) => list.iter_mut().for_each(to_v2_schema),
        _ => {}
    }
}
