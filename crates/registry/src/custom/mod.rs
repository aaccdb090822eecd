//! Kinds that somebody defined. [`Custom`] is one served version of a definition; it goes through the same machinery as
//! the kinds built in. The API server's `definitions`
//! controller keeps the served kinds in step with the stored definitions.

mod cel;
mod check;
pub mod names;
mod object;
pub mod path;
mod rules;
mod schema;
mod version;

pub use cel::Program;
pub use schema::Schema;
pub use version::kinds;

use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use cleat_apimachinery::cache::KindCaches;
use cleat_apimachinery::column::{self, ColumnOf};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::{Kind, Object, Source, typed, typed_mut};
use cleat_apimachinery::names::NameRule;
use cleat_apimachinery::schema::builtin::{Definitions, PREFIX};
use cleat_apimachinery::view::Conversion;
use object::CustomObject;
use path::Path;

/// The finalizer of a definition while its custom resources are being deleted.
pub const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";
const STATUS: &str = "status";

/// A column that the definition asks for.
struct CustomColumn {
    name: String,
    kind: String,
    format: String,
    description: String,
    priority: i32,
    path: Path,
}

/// One served version of a definition.
pub struct Custom {
    descriptor: Descriptor,
    shape: Arc<Shape>,
    columns: Vec<CustomColumn>,
    selectable: Vec<(String, Path)>,
    /// As the definition declares it.
    published: Value,
    /// The same, for those who join two versions of an object.
    joins: cleat_apimachinery::schema::Schema,
    caches: KindCaches,
    deprecation: Option<String>,
    /// The definition is going away: nothing new is made.
    terminating: bool,
    retired: CancellationToken,
}

/// What turns stored bytes into this version, and back.
struct Shape {
    api_version: String,
    kind: String,
    /// What the stored bytes of this very version begin with.
    head: String,
    schema: Schema,
    fills: bool,
    has_rules: bool,
    storage_version: String,
}

impl Conversion for Shape {
    fn show(&self, stored: &Bytes) -> Bytes {
        if !self.fills && stored.starts_with(self.head.as_bytes()) {
            return stored.clone();
        }
        let Ok(mut object) = object::read(stored).and_then(CustomObject::parse) else { return stored.clone() };
        object.api_version.clone_from(&self.api_version);
        object.kind.clone_from(&self.kind);
        self.schema.prune_fields(&mut object.body, "", &mut Vec::new());
        self.schema.fill_fields(&mut object.body);
        object.encode().into()
    }

    fn keep(&self, shown: Bytes) -> Bytes {
        if self.api_version == self.storage_version {
            return shown;
        }
        let Ok(mut object) = object::read(&shown).and_then(CustomObject::parse) else { return shown };
        object.api_version.clone_from(&self.storage_version);
        object.encode().into()
    }
}

impl Custom {
    fn has_status(&self) -> bool {
        self.descriptor.has_status
    }

    fn check(&self, new: &CustomObject, old: Option<&CustomObject>) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let schema = &self.shape.schema;
        if old.is_none_or(|old| old.body != new.body) {
            schema.check(&new.body.clone().into(), old.map(|o| o.body.clone().into()).as_ref(), "", &mut errors);
        }
        // Rules are about what is well-formed.
        if errors.is_empty() && self.shape.has_rules {
            errors = schema.broken_rules(&new.ruled(), old.map(CustomObject::ruled).as_ref());
        }
        errors
    }
}

impl Kind for Custom {
    fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    fn name_rule(&self) -> NameRule {
        NameRule::Subdomain
    }

    fn decode(&self, source: Source<'_>) -> Result<Box<dyn Object>, serde_json::Error> {
        let value = match source {
            Source::Bytes(bytes) => object::read(bytes)?,
            Source::Made(text) => object::read(text.as_bytes())?,
            Source::Value(value) => value,
        };
        let mut object = CustomObject::parse(value)?;
        object.api_version.clone_from(&self.shape.api_version);
        object.kind.clone_from(&self.shape.kind);
        self.shape.schema.prune_fields(&mut object.body, "", &mut Vec::new());
        Ok(Box::new(object))
    }

    fn default(&self, object: &mut dyn Object) {
        let object: &mut CustomObject = typed_mut(object);
        self.shape.schema.fill_fields(&mut object.body);
    }

    fn prepare_create(&self, object: &mut dyn Object, _now: Timestamp) {
        let object: &mut CustomObject = typed_mut(object);
        object.meta.generation = Some(1);
        if self.has_status() {
            object.body.remove(STATUS);
        }
    }

    fn prepare_update(&self, new: &mut dyn Object, old: &dyn Object) {
        let (new, old): (&mut CustomObject, &CustomObject) = (typed_mut(new), typed(old));
        if self.has_status() {
            new.body.remove(STATUS);
            if let Some(status) = old.body.get(STATUS) {
                new.body.insert(STATUS.into(), status.clone());
            }
        }
        if new.body != old.body {
            new.meta.generation = Some(old.meta.generation.unwrap_or(0) + 1);
        }
    }

    fn prepare_status(&self, new: &mut dyn Object, old: &dyn Object, _now: Timestamp) {
        let (new, old): (&mut CustomObject, &CustomObject) = (typed_mut(new), typed(old));
        let status = new.body.remove(STATUS);
        *new = old.clone();
        new.body.remove(STATUS);
        new.body.extend(status.map(|status| (STATUS.to_owned(), status)));
    }

    /// Everything depends on whether there was something before.
    fn validate(&self, _object: &dyn Object) -> Vec<FieldError> {
        Vec::new()
    }

    fn validate_new(&self, object: &dyn Object) -> Vec<FieldError> {
        self.check(typed(object), None)
    }

    fn validate_update(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError> {
        self.check(typed(new), Some(typed(old)))
    }

    fn validate_status(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError> {
        self.check(typed(new), Some(typed(old)))
    }

    fn is_held(&self, _object: &dyn Object) -> bool {
        false
    }

    fn fields(&self) -> Vec<&str> {
        self.selectable.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn field(&self, object: &dyn Object, name: &str) -> String {
        let whole = typed::<CustomObject>(object).whole();
        let path = self.selectable.iter().find(|(field, _)| field == name);
        match path.and_then(|(_, path)| path.find(&whole).first().copied()) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        }
    }

    fn columns(&self) -> Vec<ColumnOf<'_>> {
        let named = self.columns.iter().map(|c| ColumnOf {
            name: &c.name,
            kind: &c.kind,
            format: &c.format,
            priority: c.priority,
            description: &c.description,
        });
        std::iter::once(column::NAME).chain(named).collect()
    }

    fn cells(&self, object: &dyn Object, now: Timestamp) -> Vec<Value> {
        let object: &CustomObject = typed(object);
        let whole = object.whole();
        let cells = self.columns.iter().map(|column| cell(column, &whole, now));
        std::iter::once(column::name(&object.meta)).chain(cells).collect()
    }

    fn row_conditions(&self, _object: &dyn Object) -> Option<Value> {
        None
    }

    fn conversion(&self) -> Option<Arc<dyn Conversion>> {
        Some(self.shape.clone())
    }

    fn schema(&self) -> &cleat_apimachinery::schema::Schema {
        &self.joins
    }

    fn caches(&self) -> &KindCaches {
        &self.caches
    }

    fn describe(&self, definitions: &mut Definitions) -> Option<String> {
        let meta = definitions.add::<ObjectMeta>();
        let mut described = self.published.clone();
        let properties = &mut described["properties"];
        properties["apiVersion"] = json!({ "type": "string" });
        properties["kind"] = json!({ "type": "string" });
        properties["metadata"] = json!({ "$ref": format!("{PREFIX}{meta}") });
        let d = &self.descriptor;
        let reversed: Vec<&str> = d.group.rsplit('.').collect();
        let name = format!("{}.{}.{}", reversed.join("."), d.version, d.kind);
        definitions.put(&name, described);
        Some(name)
    }

    fn deprecation(&self) -> Option<&str> {
        self.deprecation.as_deref()
    }

    fn closed(&self) -> Option<&'static str> {
        self.terminating.then_some("create not allowed while custom resource definition is terminating")
    }

    fn retired(&self) -> Option<&CancellationToken> {
        Some(&self.retired)
    }
}

fn cell(column: &CustomColumn, whole: &Value, now: Timestamp) -> Value {
    let found = column.path.find(whole);
    let Some(first) = found.first().filter(|v| !v.is_null()) else { return Value::Null };
    match column.kind.as_str() {
        "integer" => first.as_i64().map_or(Value::Null, Value::from),
        "number" | "boolean" if first.is_string() || first.is_array() || first.is_object() => Value::Null,
        "number" => first.as_f64().map_or(Value::Null, |_| (*first).clone()),
        "boolean" => first.as_bool().map_or(Value::Null, Value::from),
        "date" => match first.as_str().and_then(|text| text.parse::<Timestamp>().ok()) {
            Some(time) => column::since(Some(&Time(time)), now).into(),
            None => "<invalid>".into(),
        },
        _ => {
            let shown = |v: &&Value| v.as_str().map_or_else(|| v.to_string(), Into::into);
            found.iter().map(shown).collect::<Vec<String>>().join(" ").into()
        }
    }
}
