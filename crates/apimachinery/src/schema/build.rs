//! From an OpenAPI description to a [`Schema`].

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::builtin::{Definitions, PREFIX};
use super::{Field, Key, PatchRule, Relation, Scalar, Schema, Type, TypeId};
use super::{facts, zero};

/// Whose description it is: what an object without properties may hold differs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Author {
    /// The Go types: such an object is opaque data.
    Builtin,
    /// A custom resource definition: nothing but what it declares survives.
    Custom,
}

impl Schema {
    pub fn of<T: JsonSchema>() -> Self {
        let mut definitions = Definitions::new();
        let name = definitions.add::<T>();
        let root = json!({ "$ref": format!("{PREFIX}{name}") });
        Builder::new(definitions.finish(), Author::Builtin).build(&root)
    }

    /// The schema of a custom resource, from the `openAPIV3Schema` of one of its versions.
    pub fn from_open_api(declared: &Value) -> Self {
        let mut definitions = Definitions::new();
        let meta = definitions.add::<ObjectMeta>();
        let mut root = declared.clone();
        if root.get("type").is_none() {
            root["type"] = "object".into();
        }
        let properties = root["properties"].take();
        let mut properties = if let Value::Object(found) = properties { found } else { Map::new() };
        implicit(&mut properties, &meta);
        root["properties"] = properties.into();
        Builder::new(definitions.finish(), Author::Custom).build(&root)
    }
}

/// What every object has, whatever its definition declares.
fn implicit(properties: &mut Map<String, Value>, meta: &str) {
    properties.insert("apiVersion".into(), json!({ "type": "string" }));
    properties.insert("kind".into(), json!({ "type": "string" }));
    properties.insert("metadata".into(), json!({ "$ref": format!("{PREFIX}{meta}"), "default": {} }));
}

struct Builder {
    definitions: Map<String, Value>,
    author: Author,
    types: Vec<Type>,
    named: HashMap<String, TypeId>,
}

impl Builder {
    fn new(definitions: Map<String, Value>, author: Author) -> Self {
        Self { definitions, author, types: Vec::new(), named: HashMap::new() }
    }

    fn build(mut self, root: &Value) -> Schema {
        self.add(root);
        self.types.shrink_to_fit();
        Schema { types: self.types }
    }

    fn add(&mut self, schema: &Value) -> TypeId {
        let Some(name) = reference(schema) else {
            let id = self.reserve();
            return self.fill(id, "", schema, self.author);
        };
        let Some(mut definition) = self.definitions.get(name).cloned() else {
            let id = self.reserve();
            return self.fill(id, name, &json!({}), Author::Builtin);
        };
        // A field may treat the type it refers to differently from the rest.
        if let Some(map_type) = schema.get("x-kubernetes-map-type") {
            definition["x-kubernetes-map-type"] = map_type.clone();
            let id = self.reserve();
            return self.fill(id, name, &definition, Author::Builtin);
        }
        if let Some(id) = self.named.get(name) {
            return *id;
        }
        let id = self.reserve();
        self.named.insert(name.to_owned(), id);
        if name.ends_with(".meta.v1.MicroTime") {
            self.types[id as usize] = Type::Scalar(Scalar::MicroTime);
            return id;
        }
        self.fill(id, name, &definition, Author::Builtin)
    }

    /// Takes the position first, so that a type can refer to itself and the root comes first.
    fn reserve(&mut self) -> TypeId {
        self.types.push(Type::Untyped { atomic: false });
        (self.types.len() - 1) as TypeId
    }

    fn fill(&mut self, id: TypeId, name: &str, schema: &Value, author: Author) -> TypeId {
        let author_before = std::mem::replace(&mut self.author, author);
        let made = self.made(name, schema);
        self.author = author_before;
        self.types[id as usize] = made;
        id
    }

    fn made(&mut self, name: &str, schema: &Value) -> Type {
        if is_true(schema, "x-kubernetes-int-or-string") {
            return Type::Scalar(Scalar::IntOrText);
        }
        match schema["type"].as_str() {
            Some("string") => Type::Scalar(Scalar::Text),
            Some("integer") => Type::Scalar(Scalar::Integer),
            Some("number") => Type::Scalar(Scalar::Number),
            Some("boolean") => Type::Scalar(Scalar::Flag),
            Some("array") => {
                let element = self.add(&schema["items"]);
                Type::List { element, relation: self.relation(schema, element) }
            }
            Some("object") => self.object(name, schema),
            _ => Type::Untyped { atomic: false },
        }
    }

    fn object(&mut self, type_name: &str, schema: &Value) -> Type {
        let atomic = schema["x-kubernetes-map-type"] == "atomic";
        let mut declared = schema["properties"].as_object().cloned().unwrap_or_default();
        if is_true(schema, "x-kubernetes-embedded-resource") {
            implicit(&mut declared, "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta");
        }
        let others = match &schema["additionalProperties"] {
            Value::Object(element) => Some(self.add(&Value::Object(element.clone()))),
            Value::Bool(true) => Some(self.add(&json!({}))),
            _ if is_true(schema, "x-kubernetes-preserve-unknown-fields") => Some(self.add(&json!({}))),
            _ => None,
        };
        match others {
            Some(element) if declared.is_empty() => return Type::Map { element, atomic },
            None if declared.is_empty() && self.author == Author::Builtin => return Type::Untyped { atomic: true },
            _ => {}
        }
        let mut fields: Vec<Field> = Vec::with_capacity(declared.len());
        for (name, property) in &declared {
            let embedded = reference(property).is_some() && property["default"].is_object();
            let required = schema["required"].as_array().is_some_and(|r| r.iter().any(|r| r == name));
            let omits_zero = !type_name.is_empty() && !required && !zero::is_meant(facts::short(type_name), name);
            let of = self.add(property);
            fields.push(Field { name: name.as_str().into(), of, patch: patch_rule(property), embedded, omits_zero });
        }
        fields.sort_by(|a, b| a.name.cmp(&b.name));
        Type::Struct { fields, atomic, others }
    }

    fn relation(&self, schema: &Value, element: TypeId) -> Relation {
        match schema["x-kubernetes-list-type"].as_str() {
            Some("set") => Relation::Set,
            Some("map") => {
                let keys = schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten();
                let mut keys: Vec<Key> = keys
                    .filter_map(Value::as_str)
                    .map(|name| Key { name: name.into(), default: self.default(&schema["items"], name) })
                    .collect();
                keys.sort_by(|a, b| a.name.cmp(&b.name));
                // Elements without fields cannot be told apart.
                match self.types.get(element as usize) {
                    Some(Type::Struct { .. } | Type::Map { .. } | Type::Untyped { .. }) if !keys.is_empty() => {
                        Relation::Keys(keys)
                    }
                    _ => Relation::Atomic,
                }
            }
            _ => Relation::Atomic,
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
    schema["$ref"].as_str()?.strip_prefix(PREFIX)
}

fn patch_rule(property: &Value) -> PatchRule {
    let key = property["x-kubernetes-patch-merge-key"].as_str();
    match (property["x-kubernetes-patch-strategy"].as_str(), key) {
        (Some("merge"), Some(key)) => PatchRule::By(key.into()),
        (Some("merge"), None) => PatchRule::Set,
        (Some("merge,retainKeys"), Some(key)) => PatchRule::ByRetaining(key.into()),
        (Some("retainKeys"), _) => PatchRule::Retaining,
        _ => PatchRule::Plain,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

    use super::*;
    use crate::schema::At;

    fn walk<'a>(schema: &'a Schema, path: &str) -> At<'a> {
        path.split('.').fold(schema.root(), |at, name| match name {
            "*" => at.element(),
            name => at.member(name).unwrap_or_else(|| panic!("{path}: no {name}")),
        })
    }

    #[test]
    fn a_pod_knows_how_its_lists_are_joined() {
        let pod = Schema::of::<Pod>();
        let keys = |path: &str| match walk(&pod, path).relation() {
            Relation::Keys(keys) => keys.iter().map(|k| k.name.clone()).collect::<Vec<_>>().join(","),
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
        let Relation::Keys(ports) = walk(&pod, "spec.containers.*.ports").relation() else { panic!() };
        assert_eq!(ports[1].default, Some("TCP".into()));
        let container = walk(&pod, "spec.containers.*");
        assert!(container.declared("resources").unwrap().embedded);
        assert!(!container.declared("securityContext").unwrap().embedded);
        assert_eq!(walk(&pod, "spec").declared("volumes").unwrap().patch, PatchRule::ByRetaining("name".into()));
    }

    #[test]
    fn a_field_can_treat_its_type_differently() {
        let volume = Schema::of::<PersistentVolume>();
        assert!(!walk(&volume, "spec.claimRef").is_atomic_object(), "binding writes its parts separately");
        assert!(walk(&volume, "spec.nodeAffinity.required").is_atomic_object());
        assert_eq!(*walk(&volume, "spec.capacity").element().of, Type::Untyped { atomic: false });
        assert_eq!(*walk(&volume, "spec.capacity.storage").of, Type::Scalar(Scalar::IntOrText));
    }

    #[test]
    fn recursive_types_refer_to_themselves() {
        let definition = Schema::of::<CustomResourceDefinition>();
        let at = "spec.versions.*.schema.openAPIV3Schema.properties.a.properties.b.properties.c.type";
        assert_eq!(*walk(&definition, at).of, Type::Scalar(Scalar::Text));
        assert!(definition.types.len() < 400, "{}", definition.types.len());
    }

    #[test]
    fn a_custom_resource_is_what_its_definition_says() {
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
        assert_eq!(*walk(&schema, "spec.size").of, Type::Scalar(Scalar::IntOrText));
        assert_eq!(*walk(&schema, "spec.free.any.thing").of, Type::Untyped { atomic: false });
        assert!(walk(&schema, "spec").member("other").is_none());
        assert!(walk(&schema, "spec.empty").member("x").is_none());
        let Relation::Keys(keys) = walk(&schema, "spec.parts").relation() else { panic!() };
        assert_eq!(keys.iter().map(|k| k.name.as_str()).collect::<Vec<_>>(), ["id", "zone"]);
        assert_eq!(*walk(&schema, "metadata.finalizers").relation(), Relation::Set);
    }
}
