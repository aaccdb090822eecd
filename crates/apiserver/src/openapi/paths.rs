//! The paths and operations of a kind. OpenAPI v2 and v3 differ only in how they describe bodies and parameters.

use serde_json::{Map, Value, json};

use super::document_path;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::kind::Kind;

/// The OpenAPI version of a document.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    V2,
    V3,
}

const PATCH_MEDIA_TYPES: [&str; 4] = [
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
];

/// Adds all paths of a kind. `schema` is the reference to the kind's definition, if there is one.
pub(super) fn add_paths(kind: &dyn Kind, schema: Option<&str>, dialect: Dialect, out: &mut Map<String, Value>) {
    let d = kind.descriptor();
    let base = format!("/{}", document_path(&d.group, &d.version));
    let operations = Operations { kind, schema, dialect };
    let collection = match d.namespaced {
        true => {
            out.insert(format!("{base}/{}", d.plural), operations.path_item(&[("get", "list")], &[]));
            format!("{base}/namespaces/{{namespace}}/{}", d.plural)
        }
        false => format!("{base}/{}", d.plural),
    };
    let collection_parameters: &[&str] = if d.namespaced { &["namespace"] } else { &[] };
    let object_parameters: Vec<&str> = collection_parameters.iter().copied().chain(["name"]).collect();
    let has = |verb: &str| d.verbs().contains(&verb);
    let on_collection = [("get", "list"), ("post", "create"), ("delete", "deletecollection")];
    let on_collection: Vec<_> = on_collection.into_iter().filter(|(_, verb)| has(verb)).collect();
    let on_object = [("get", "get"), ("put", "update"), ("patch", "patch"), ("delete", "delete")];
    let on_object: Vec<_> = on_object.into_iter().filter(|(_, verb)| has(verb)).collect();
    if d.has_status {
        let status = [("get", "get"), ("put", "update"), ("patch", "patch")];
        out.insert(format!("{collection}/{{name}}/status"), operations.path_item(&status, &object_parameters));
    }
    out.insert(format!("{collection}/{{name}}"), operations.path_item(&on_object, &object_parameters));
    out.insert(collection, operations.path_item(&on_collection, collection_parameters));
}

struct Operations<'a> {
    kind: &'a dyn Kind,
    schema: Option<&'a str>,
    dialect: Dialect,
}

impl Operations<'_> {
    fn path_item(&self, methods: &[(&str, &str)], path_parameters: &[&str]) -> Value {
        let mut path: Map<String, Value> =
            methods.iter().map(|(method, verb)| ((*method).to_owned(), self.operation(verb))).collect();
        let parameters = path_parameters.iter().map(|name| self.parameter(name, "path", "string")).collect::<Vec<_>>();
        if !parameters.is_empty() {
            path.insert("parameters".into(), parameters.into());
        }
        path.into()
    }

    fn operation(&self, verb: &str) -> Value {
        let d: &Descriptor = self.kind.descriptor();
        let action = match verb {
            "create" => "post",
            "update" => "put",
            other => other,
        };
        let mut operation = json!({
            "operationId": format!("{verb}{}{}", capitalize(&d.version), d.kind),
            "responses": { "200": self.response() },
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": { "group": d.group, "version": d.version, "kind": d.kind },
        });
        let strings: &[&str] = match verb {
            "create" | "update" => &["dryRun", "fieldManager", "fieldValidation", "pretty"],
            "patch" => &["dryRun", "fieldManager", "fieldValidation", "pretty"],
            "delete" | "deletecollection" => &["dryRun", "propagationPolicy", "pretty"],
            "list" => &["labelSelector", "fieldSelector", "continue", "resourceVersion", "resourceVersionMatch"],
            _ => &["pretty"],
        };
        let mut parameters: Vec<Value> = strings.iter().map(|name| self.parameter(name, "query", "string")).collect();
        if verb == "patch" {
            parameters.push(self.parameter("force", "query", "boolean"));
        }
        if verb == "list" {
            parameters.extend(["limit", "timeoutSeconds"].map(|name| self.parameter(name, "query", "integer")));
            parameters.extend(
                ["watch", "allowWatchBookmarks", "sendInitialEvents"].map(|n| self.parameter(n, "query", "boolean")),
            );
        }
        if ["create", "update", "patch"].contains(&verb) {
            self.body(verb, &mut operation, &mut parameters);
        }
        operation["parameters"] = parameters.into();
        operation
    }

    fn body(&self, verb: &str, operation: &mut Value, parameters: &mut Vec<Value>) {
        let media: Vec<&str> = match verb {
            "patch" => {
                let strategic = self.kind.supports_strategic_merge();
                PATCH_MEDIA_TYPES.into_iter().filter(|b| strategic || !b.contains("strategic")).collect()
            }
            _ => vec!["application/json"],
        };
        let schema = match (verb, self.schema) {
            ("patch", _) | (_, None) => json!({ "type": "object" }),
            (_, Some(name)) => json!({ "$ref": name }),
        };
        match self.dialect {
            Dialect::V3 => {
                let content: Map<String, Value> =
                    media.iter().map(|m| ((*m).to_owned(), json!({ "schema": schema }))).collect();
                operation["requestBody"] = json!({ "content": content, "required": true });
            }
            Dialect::V2 => {
                operation["consumes"] = media.into();
                parameters.push(json!({ "in": "body", "name": "body", "required": true, "schema": schema }));
            }
        }
    }

    fn response(&self) -> Value {
        match (self.dialect, self.schema) {
            (Dialect::V3, Some(name)) => {
                json!({ "description": "OK", "content": { "application/json": { "schema": { "$ref": name } } } })
            }
            (Dialect::V2, Some(name)) => json!({ "description": "OK", "schema": { "$ref": name } }),
            (_, None) => json!({ "description": "OK" }),
        }
    }

    fn parameter(&self, name: &str, location: &str, value_type: &str) -> Value {
        let mut parameter = match self.dialect {
            Dialect::V2 => json!({ "name": name, "in": location, "type": value_type, "uniqueItems": true }),
            Dialect::V3 => {
                json!({ "name": name, "in": location, "schema": { "type": value_type, "uniqueItems": true } })
            }
        };
        if location == "path" {
            parameter["required"] = true.into();
        }
        parameter
    }
}

fn capitalize(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}
