//! OpenAPI v3: one document per group and version.

use serde_json::{Map, Value, json};

use super::paths::{self, Dialect};
use cleat_apimachinery::schema::builtin::{DEFINITION_REF_PREFIX, OpenApiDefinitions};
use cleat_registry::catalog::ServedKinds;

pub(super) fn document(kinds: &ServedKinds, group: &str, version: &str) -> Value {
    let mut definitions = OpenApiDefinitions::new();
    let mut all_paths = Map::new();
    let mut defined_kinds = Vec::new();
    for kind in kinds.in_group_version(group, version) {
        let name = kind.add_openapi_definition(&mut definitions);
        let schema = name.as_ref().map(|name| format!("{DEFINITION_REF_PREFIX}{name}"));
        paths::add_paths(&**kind, schema.as_deref(), Dialect::V3, &mut all_paths);
        defined_kinds.extend(name.map(|name| (name, kind)));
    }
    let mut schemas = definitions.finish();
    for schema in schemas.values_mut() {
        to_v3_schema(schema);
    }
    for (name, kind) in defined_kinds {
        let d = kind.descriptor();
        if let Some(schema) = schemas.get_mut(&name) {
            schema["x-kubernetes-group-version-kind"] =
                json!([{ "group": d.group, "version": d.version, "kind": d.kind }]);
        }
    }
    json!({
        "openapi": "3.0.0",
        "info": { "title": "Kubernetes", "version": "v1" },
        "paths": all_paths,
        "components": { "schemas": schemas },
    })
}

/// Converts a definition to OpenAPI v3: no other field beside `$ref`, and `oneOf` for values of several types.
fn to_v3_schema(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if fields.remove("x-kubernetes-int-or-string").is_some() && !fields.contains_key("type") {
                let number = if fields.get("description").is_some_and(is_quantity) { "number" } else { "integer" };
                if number == "integer" {
                    fields.insert("format".into(), "int-or-string".into());
                }
                fields.insert("oneOf".into(), json!([{ "type": number }, { "type": "string" }]));
            }
            if fields.len() > 1
                && let Some(reference) = fields.remove("$ref")
            {
                fields.insert("allOf".into(), json!([{ "$ref": reference }]));
            }
            fields.values_mut().for_each(to_v3_schema);
        }
        Value::Array(list) => list.iter_mut().for_each(to_v3_schema),
        _ => {}
    }
}

fn is_quantity(description: &Value) -> bool {
    description.as_str().is_some_and(|d| d.starts_with("Quantity is "))
}
