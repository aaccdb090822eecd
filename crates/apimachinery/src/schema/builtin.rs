//! The OpenAPI definitions of the built-in types. Properties and descriptions come from the Rust types, the Kubernetes
//! extensions from `merge_rules`. The definitions are large, so that they are generated for each use and not cached.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::merge_rules;

/// The beginning of a `$ref` to a definition.
pub const DEFINITION_REF_PREFIX: &str = "#/components/schemas/";

/// Collects the OpenAPI definitions of kinds. A type that several kinds use is contained once.
pub struct OpenApiDefinitions {
    generator: SchemaGenerator,
}

impl Default for OpenApiDefinitions {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenApiDefinitions {
    pub fn new() -> Self {
        let settings = SchemaSettings::draft2020_12().with(|s| {
            s.definitions_path = "/components/schemas".into();
            s.meta_schema = None;
            s.transforms.clear();
        });
        Self { generator: settings.into_generator() }
    }

    /// Adds the definition of a type and returns its name.
    pub fn add<T: JsonSchema>(&mut self) -> String {
        self.generator.subschema_for::<T>();
        T::schema_name().into_owned()
    }

    /// Adds the definition of a custom resource. It may refer to types that were added.
    pub fn insert(&mut self, name: &str, definition: Value) {
        self.generator.definitions_mut().insert(name.to_owned(), definition);
    }

    /// Returns all definitions by name.
    pub fn finish(mut self) -> Map<String, Value> {
        let mut all: Map<String, Value> = self.generator.take_definitions(false).into_iter().collect();
        for (name, definition) in &mut all {
            add_extensions(merge_rules::short_type_name(name), definition);
        }
        all
    }
}

/// Adds what the Rust type does not contain: Kubernetes extensions, defaults of list keys and embedded structs.
fn add_extensions(type_name: &str, definition: &mut Value) {
    if type_name == "apiextensions.v1.JSON" {
        // Any JSON value is allowed. With the type `object` clients would refuse other values.
        definition.as_object_mut().map(|d| d.remove("type"));
        return;
    }
    if type_name == "meta.v1.FieldsV1" || type_name == "runtime.RawExtension" {
        return;
    }
    if merge_rules::is_atomic(type_name) {
        definition["x-kubernetes-map-type"] = "atomic".into();
    }
    let is_kind = definition.pointer("/properties/metadata").is_some();
    let Some(Value::Object(properties)) = definition.get_mut("properties") else { return };
    for (name, property) in properties {
        let by_value = merge_rules::is_embedded(type_name, name)
            || (is_kind && ["metadata", "spec", "status"].contains(&name.as_str()) && property.get("$ref").is_some());
        if by_value {
            property["default"] = json!({});
        }
        if let Some(value) = merge_rules::key_default(type_name, name) {
            property["default"] = value.into();
        }
        if let Some(Value::Object(extensions)) =
            merge_rules::merge_rule(type_name, name).map(merge_rules::MergeRule::extensions)
        {
            for (key, value) in extensions {
                property[key] = value;
            }
        }
        if property["type"] == "array" && property.get("x-kubernetes-list-type").is_none() {
            property["x-kubernetes-list-type"] = "atomic".into();
        }
    }
}
