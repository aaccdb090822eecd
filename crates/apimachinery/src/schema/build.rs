//! Builds a [`Schema`] from OpenAPI definitions.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::builtin::{DEFINITION_REF_PREFIX, OpenApiDefinitions};
use super::{FieldDef, ListMapKey, ListType, PatchStrategy, Scalar, Schema, TypeDef, TypeId};
use super::{merge_rules, zero_values};

/// Where a definition comes from. It decides what an object without properties may contain.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SchemaSource {
    /// A built-in type: such an object may contain anything, and is atomic.
    Builtin,
    /// A CustomResourceDefinition: undeclared fields are not allowed.
    Custom,
}

impl Schema {
    /// The schema of a built-in kind.
    pub fn of<T: JsonSchema>() -> Self {
        let mut definitions = OpenApiDefinitions::new();
        let name = definitions.add::<T>();
        let root = json!({ "$ref": format!("{DEFINITION_REF_PREFIX}{name}") });
        Builder::new(definitions.finish(), SchemaSource::Builtin).build(&root)
    }

    /// The schema of a custom resource, from the `openAPIV3Schema` of one of its versions.
    pub fn from_open_api(declared: &Value) -> Self {
        let mut definitions = OpenApiDefinitions::new();
        let meta = definitions.add::<ObjectMeta>();
        let mut root = declared.clone();
        if root.get("type").is_none() {
            root["type"] = "object".into();
        }
        let properties = root["properties"].take();
        let mut properties = if let Value::Object(found) = properties { found } else { Map::new() };
        add_object_fields(&mut properties, &meta);
        root["properties"] = properties.into();
        Builder::new(definitions.finish(), SchemaSource::Custom).build(&root)
    }
}

/// Adds `apiVersion`, `kind` and `metadata`, which every object has.
fn add_object_fields(properties: &mut Map<String, Value>, meta: &str) {
    properties.insert("apiVersion".into(), json!({ "type": "string" }));
    properties.insert("kind".into(), json!({ "type": "string" }));
    properties.insert("metadata".into(), json!({ "$ref": format!("{DEFINITION_REF_PREFIX}{meta}"), "default": {} }));
}

struct Builder {
    definitions: Map<String, Value>,
    source: SchemaSource,
    types: Vec<TypeDef>,
    named: HashMap<String, TypeId>,
}

impl Builder {
    fn new(definitions: Map<String, Value>, source: SchemaSource) -> Self {
        Self { definitions, source, types: Vec::new(), named: HashMap::new() }
    }

    fn build(mut self, root: &Value) -> Schema {
        self.add(root);
        self.types.shrink_to_fit();
        Schema { types: self.types }
    }

    fn add(&mut self, schema: &Value) -> TypeId {
        let Some(name) = reference(schema) else {
            let id = self.reserve();
            return self.fill(id, "", schema, self.source);
        };
        let Some(mut definition) = self.definitions.get(name).cloned() else {
            let id = self.reserve();
            return self.fill(id, name, &json!({}), SchemaSource::Builtin);
        };
        // A field can override the map type of the type that it refers to. The result is a type of its own.
        if let Some(map_type) = schema.get("x-kubernetes-map-type") {
            definition["x-kubernetes-map-type"] = map_type.clone();
            let id = self.reserve();
            return self.fill(id, name, &definition, SchemaSource::Builtin);
        }
        if let Some(id) = self.named.get(name) {
            return *id;
        }
        let id = self.reserve();
        self.named.insert(name.to_owned(), id);
        if name.ends_with(".meta.v1.MicroTime") {
            self.types[id as usize] = TypeDef::Scalar(Scalar::MicroTime);
            return id;
        }
        self.fill(id, name, &definition, SchemaSource::Builtin)
    }

    /// Allocates an index before the type is built: a recursive type needs its own index, and the root must be the first.
    fn reserve(&mut self) -> TypeId {
        self.types.push(TypeDef::Untyped { atomic: false });
        (self.types.len() - 1) as TypeId
    }

    fn fill(&mut self, id: TypeId, name: &str, schema: &Value, source: SchemaSource) -> TypeId {
        let outer_source = std::mem::replace(&mut self.source, source);
        let built = self.build_type(name, schema);
        self.source = outer_source;
        self.types[id as usize] = built;
        id
    }

    fn build_type(&mut self, name: &str, schema: &Value) -> TypeDef {
        if is_true(schema, "x-kubernetes-int-or-string") {
            return TypeDef::Scalar(Scalar::IntOrString);
        }
        match schema["type"].as_str() {
            Some("string") => TypeDef::Scalar(Scalar::String),
            Some("integer") => TypeDef::Scalar(Scalar::Integer),
            Some("number") => TypeDef::Scalar(Scalar::Number),
            Some("boolean") => TypeDef::Scalar(Scalar::Boolean),
            Some("array") => {
                let element = self.add(&schema["items"]);
                TypeDef::List { element, list_type: self.list_type(schema, element) }
            }
            Some("object") => self.object(name, schema),
            _ => TypeDef::Untyped { atomic: false },
        }
    }

    fn object(&mut self, type_name: &str, schema: &Value) -> TypeDef {
        let atomic = schema["x-kubernetes-map-type"] == "atomic";
        let mut declared = schema["properties"].as_object().cloned().unwrap_or_default();
        if is_true(schema, "x-kubernetes-embedded-resource") {
            add_object_fields(&mut declared, "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta");
        }
        let additional = match &schema["additionalProperties"] {
            Value::Object(element) => Some(self.add(&Value::Object(element.clone()))),
            Value::Bool(true) => Some(self.add(&json!({}))),
            _ if is_true(schema, "x-kubernetes-preserve-unknown-fields") => Some(self.add(&json!({}))),
            _ => None,
        };
        match additional {
            Some(element) if declared.is_empty() => return TypeDef::Map { element, atomic },
            None if declared.is_empty() && self.source == SchemaSource::Builtin => {
                return TypeDef::Untyped { atomic: true };
            }
            _ => {}
        }
        let mut fields: Vec<FieldDef> = Vec::with_capacity(declared.len());
        for (name, property) in &declared {
            let embedded = reference(property).is_some() && property["default"].is_object();
            let required = schema["required"].as_array().is_some_and(|r| r.iter().any(|r| r == name));
            let omits_zero = !type_name.is_empty()
                && !required
                && !zero_values::is_zero_significant(merge_rules::short_type_name(type_name), name);
            let type_id = self.add(property);
            fields.push(FieldDef {
                name: name.as_str().into(),
                type_id,
                patch_strategy: patch_strategy(property),
                embedded,
                omits_zero,
            });
        }
        fields.sort_by(|a, b| a.name.cmp(&b.name));
        TypeDef::Struct { fields, atomic, additional }
    }

    fn list_type(&self, schema: &Value, element: TypeId) -> ListType {
        match schema["x-kubernetes-list-type"].as_str() {
            Some("set") => ListType::Set,
            Some("map") => {
                let keys = schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten();
                let mut keys: Vec<ListMapKey> = keys
                    .filter_map(Value::as_str)
                    .map(|name| ListMapKey { name: name.into(), default: self.default(&schema["items"], name) })
                    .collect();
                keys.sort_by(|a, b| a.name.cmp(&b.name));
                // Elements without fields have no keys.
                match self.types.get(element as usize) {
                    Some(TypeDef::Struct { .. } | TypeDef::Map { .. } | TypeDef::Untyped { .. })
                        if !keys.is_empty() =>
                    {
                        ListType::Map(keys)
                    }
                    _ => ListType::Atomic,
                }
            }
            _ => ListType::Atomic,
        }
    }

    fn default(&self, items: &Value, key: &str) -> Option<Value> {
        let element = reference(items).and_then(|name| self.definitions.get(name)).unwrap_or(items);
        element["properties"][key].get("default").cloned()
    }
}

fn is_true(schema: &Value, extension: &str) -> bool {
    schema[extension] == true
}

fn reference(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.strip_prefix(DEFINITION_REF_PREFIX)
}

fn patch_strategy(property: &Value) -> PatchStrategy {
    let key = property["x-kubernetes-patch-merge-key"].as_str();
    match (property["x-kubernetes-patch-strategy"].as_str(), key) {
        (Some("merge"), Some(key)) => PatchStrategy::MergeByKey(key.into()),
        (Some("merge"), None) => PatchStrategy::MergeSet,
        (Some("merge,retainKeys"), Some(key)) => PatchStrategy::MergeByKeyRetainKeys(key.into()),
        (Some("retainKeys"), _) => PatchStrategy::RetainKeys,
        _ => PatchStrategy::Plain,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

    use super::*;
    use crate::schema::TypeRef;

    fn walk<'a>(schema: &'a Schema, path: &str) -> TypeRef<'a> {
        path.split('.').fold(schema.root(), |ty, name| match name {
            "*" => ty.element(),
            name => ty.member(name).unwrap_or_else(|| panic!("{path}: no {name}")),
        })
    }

    #[test]
    fn the_schema_of_a_pod_has_list_and_map_types() {
        let pod = Schema::of::<Pod>();
        let keys = |path: &str| match walk(&pod, path).list_type() {
            ListType::Map(keys) => keys.iter().map(|k| k.name.clone()).collect::<Vec<_>>().join(","),
            other => format!("{other:?}"),
        };
        for (path, want) in [
            ("spec.containers", "name"),
            ("spec.containers.*.ports", "containerPort,protocol"),
            ("spec.containers.*.command", "Atomic"),
            ("spec.topologySpreadConstraints", "topologyKey,whenUnsatisfiable"),
            ("spec.tolerations", "Atomic"),
            ("status.podIPs", "ip"),
            ("status.hostIPs", "Atomic"),
            ("metadata.finalizers", "Set"),
            ("metadata.ownerReferences", "uid"),
            ("metadata.managedFields", "Atomic"),
        ] {
            assert_eq!(keys(path), want, "{path}");
        }
        assert!(walk(&pod, "spec.nodeSelector").is_atomic_object());
        assert!(!walk(&pod, "metadata.labels").is_atomic_object());
        assert!(walk(&pod, "spec.containers.*.env.*.valueFrom.secretKeyRef").is_atomic_object());
        let ListType::Map(ports) = walk(&pod, "spec.containers.*.ports").list_type() else { panic!() };
        assert_eq!(ports[1].default, Some("TCP".into()));
        let container = walk(&pod, "spec.containers.*");
        assert!(container.declared("resources").unwrap().embedded);
        assert!(!container.declared("securityContext").unwrap().embedded);
        assert_eq!(
            walk(&pod, "spec").declared("volumes").unwrap().patch_strategy,
            PatchStrategy::MergeByKeyRetainKeys("name".into())
        );
    }

    #[test]
    fn a_field_can_override_the_map_type_of_its_type() {
        let volume = Schema::of::<PersistentVolume>();
        assert!(!walk(&volume, "spec.claimRef").is_atomic_object(), "binding writes its parts separately");
        assert!(walk(&volume, "spec.nodeAffinity.required").is_atomic_object());
        assert_eq!(*walk(&volume, "spec.capacity").element().def, TypeDef::Untyped { atomic: false });
        assert_eq!(*walk(&volume, "spec.capacity.storage").def, TypeDef::Scalar(Scalar::IntOrString));
    }

    #[test]
    fn recursive_types_refer_to_themselves() {
        let definition = Schema::of::<CustomResourceDefinition>();
        let path = "spec.versions.*.schema.openAPIV3Schema.properties.a.properties.b.properties.c.type";
        assert_eq!(*walk(&definition, path).def, TypeDef::Scalar(Scalar::String));
        assert!(definition.types.len() < 400, "{}", definition.types.len());
    }

    #[test]
    fn a_custom_resource_has_the_types_of_its_definition() {
        let schema = Schema::from_open_api(&json!({
            "type": "object",
            "properties": {
                "spec": { "type": "object", "properties": {
                    "size": { "x-kubernetes-int-or-string": true },
                    "free": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
                    "empty": { "type": "object" },
                    "parts": { "type": "array", "x-kubernetes-list-type": "map",
                        "x-kubernetes-list-map-keys": ["zone", "id"],
                        "items": { "type": "object", "properties": {
                            "id": { "type": "string" }, "zone": { "type": "string", "default": "a" } } } },
                } },
            },
        }));
        assert_eq!(*walk(&schema, "spec.size").def, TypeDef::Scalar(Scalar::IntOrString));
        assert_eq!(*walk(&schema, "spec.free.any.thing").def, TypeDef::Untyped { atomic: false });
        assert!(walk(&schema, "spec").member("other").is_none());
        assert!(walk(&schema, "spec.empty").member("x").is_none());
        let ListType::Map(keys) = walk(&schema, "spec.parts").list_type() else { panic!() };
        assert_eq!(keys.iter().map(|k| k.name.as_str()).collect::<Vec<_>>(), ["id", "zone"]);
        assert_eq!(*walk(&schema, "metadata.finalizers").list_type(), ListType::Set);
    }
}
