//! The behaviour of one served version of a definition: what `Strategy` is for a built-in kind.

use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::custom_object::{self, CustomObject};
use super::json_path::JsonPath;
use super::structural_schema::StructuralSchema;
use cleat_apimachinery::cache::KindCaches;
use cleat_apimachinery::column::{self, TableColumn};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::{DecodeSource, Kind, Object, typed, typed_mut};
use cleat_apimachinery::kind_store::Conversion;
use cleat_apimachinery::names::NameRule;
use cleat_apimachinery::schema::builtin::{DEFINITION_REF_PREFIX, OpenApiDefinitions};

const STATUS_FIELD: &str = "status";

/// One of the definition's `additionalPrinterColumns`.
pub(super) struct CustomColumn {
    pub(super) name: String,
    pub(super) value_type: String,
    pub(super) format: String,
    pub(super) description: String,
    pub(super) priority: i32,
    pub(super) path: JsonPath,
}

/// One served version of a definition.
pub(super) struct CustomKind {
    pub(super) descriptor: Descriptor,
    pub(super) conversion: Arc<VersionConversion>,
    pub(super) columns: Vec<CustomColumn>,
    /// `selectableFields`: the name in field selectors and the path.
    pub(super) selectable_fields: Vec<(String, JsonPath)>,
    /// The schema as OpenAPI publishes it: that of the definition.
    pub(super) open_api_schema: Value,
    /// The same schema, for merging: patches and server-side apply.
    pub(super) merge_schema: cleat_apimachinery::schema::Schema,
    pub(super) caches: KindCaches,
    /// The deprecation warning, if the version is deprecated.
    pub(super) deprecation: Option<String>,
    /// The definition is being deleted: no object can be created.
    pub(super) is_terminating: bool,
    /// Cancelled when the kind is removed or replaced.
    pub(super) retired: CancellationToken,
}

/// Converts between the stored version of an object and the served one.
pub(super) struct VersionConversion {
    pub(super) api_version: String,
    pub(super) kind: String,
    /// The first bytes of every object that is stored in this version.
    pub(super) json_prefix: String,
    pub(super) schema: StructuralSchema,
    /// The schema has defaults, so that stored objects may lack fields.
    pub(super) has_defaults: bool,
    pub(super) has_rules: bool,
    /// `apiVersion` of the stored objects.
    pub(super) storage_api_version: String,
}

impl Conversion for VersionConversion {
    fn to_served(&self, stored: &Bytes) -> Bytes {
        if !self.has_defaults && stored.starts_with(self.json_prefix.as_bytes()) {
            return stored.clone();
        }
        let Ok(mut object) = custom_object::parse_json(stored).and_then(CustomObject::from_json) else {
            return stored.clone();
        };
        object.api_version.clone_from(&self.api_version);
        object.kind.clone_from(&self.kind);
        self.schema.prune_fields(&mut object.fields, "", &mut Vec::new());
        self.schema.apply_defaults_to_fields(&mut object.fields);
        object.encode().into()
    }

    fn to_stored(&self, served: Bytes) -> Bytes {
        if self.api_version == self.storage_api_version {
            return served;
        }
        let Ok(mut object) = custom_object::parse_json(&served).and_then(CustomObject::from_json) else {
            return served;
        };
        object.api_version.clone_from(&self.storage_api_version);
        object.encode().into()
    }
}

impl CustomKind {
    fn has_status(&self) -> bool {
        self.descriptor.has_status
    }

    /// Validates the object against the schema and, if it is well-formed, against the rules.
    fn validate_object(&self, new: &CustomObject, old: Option<&CustomObject>) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let schema = &self.conversion.schema;
        if old.is_none_or(|old| old.fields != new.fields) {
            schema.validate(&new.fields.clone().into(), old.map(|o| o.fields.clone().into()).as_ref(), "", &mut errors);
        }
        // Rules may assume that the object is well-formed.
        if errors.is_empty() && self.conversion.has_rules {
            errors = schema.rule_violations(&new.to_rule_input(), old.map(CustomObject::to_rule_input).as_ref());
        }
        errors
    }
}

impl Kind for CustomKind {
    fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    fn name_rule(&self) -> NameRule {
        NameRule::Subdomain
    }

    fn decode(&self, source: DecodeSource<'_>) -> Result<Box<dyn Object>, serde_json::Error> {
        let value = match source {
            DecodeSource::Bytes(bytes) => custom_object::parse_json(bytes)?,
            DecodeSource::Generated(text) => custom_object::parse_json(text.as_bytes())?,
            DecodeSource::Value(value) => value,
        };
        let mut object = CustomObject::from_json(value)?;
        object.api_version.clone_from(&self.conversion.api_version);
        object.kind.clone_from(&self.conversion.kind);
        self.conversion.schema.prune_fields(&mut object.fields, "", &mut Vec::new());
        Ok(Box::new(object))
    }

    fn set_defaults(&self, object: &mut dyn Object) {
        let object: &mut CustomObject = typed_mut(object);
        self.conversion.schema.apply_defaults_to_fields(&mut object.fields);
    }

    fn prepare_create(&self, object: &mut dyn Object, _now: Timestamp) {
        let object: &mut CustomObject = typed_mut(object);
        object.meta.generation = Some(1);
        if self.has_status() {
            object.fields.remove(STATUS_FIELD);
        }
    }

    fn prepare_update(&self, new: &mut dyn Object, old: &dyn Object) {
        let (new, old): (&mut CustomObject, &CustomObject) = (typed_mut(new), typed(old));
        if self.has_status() {
            new.fields.remove(STATUS_FIELD);
            if let Some(status) = old.fields.get(STATUS_FIELD) {
                new.fields.insert(STATUS_FIELD.into(), status.clone());
            }
        }
        if new.fields != old.fields {
            new.meta.generation = Some(old.meta.generation.unwrap_or(0) + 1);
        }
    }

    fn prepare_status(&self, new: &mut dyn Object, old: &dyn Object, _now: Timestamp) {
        let (new, old): (&mut CustomObject, &CustomObject) = (typed_mut(new), typed(old));
        let status = new.fields.remove(STATUS_FIELD);
        *new = old.clone();
        new.fields.remove(STATUS_FIELD);
        new.fields.extend(status.map(|status| (STATUS_FIELD.to_owned(), status)));
    }

    /// Empty: what is valid depends on the old object, so `validate_create` and `validate_update` do all the work.
    fn validate(&self, _object: &dyn Object) -> Vec<FieldError> {
        Vec::new()
    }

    fn validate_create(&self, object: &dyn Object) -> Vec<FieldError> {
        self.validate_object(typed(object), None)
    }

    fn validate_update(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError> {
        self.validate_object(typed(new), Some(typed(old)))
    }

    fn validate_status(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError> {
        self.validate_object(typed(new), Some(typed(old)))
    }

    fn is_deletion_blocked(&self, _object: &dyn Object) -> bool {
        false
    }

    fn selectable_fields(&self) -> Vec<&str> {
        self.selectable_fields.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn selectable_value(&self, object: &dyn Object, name: &str) -> String {
        let json = typed::<CustomObject>(object).to_json();
        let path = self.selectable_fields.iter().find(|(field, _)| field == name);
        match path.and_then(|(_, path)| path.select(&json).first().copied()) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        }
    }

    fn columns(&self) -> Vec<TableColumn<'_>> {
        let additional = self.columns.iter().map(|c| TableColumn {
            name: &c.name,
            value_type: &c.value_type,
            format: &c.format,
            priority: c.priority,
            description: &c.description,
        });
        std::iter::once(column::NAME).chain(additional).collect()
    }

    fn cells(&self, object: &dyn Object, now: Timestamp) -> Vec<Value> {
        let object: &CustomObject = typed(object);
        let json = object.to_json();
        let cells = self.columns.iter().map(|column| cell(column, &json, now));
        std::iter::once(column::name(&object.meta)).chain(cells).collect()
    }

    fn row_conditions(&self, _object: &dyn Object) -> Option<Value> {
        None
    }

    fn conversion(&self) -> Option<Arc<dyn Conversion>> {
        Some(self.conversion.clone())
    }

    fn schema(&self) -> &cleat_apimachinery::schema::Schema {
        &self.merge_schema
    }

    fn caches(&self) -> &KindCaches {
        &self.caches
    }

    fn add_openapi_definition(&self, definitions: &mut OpenApiDefinitions) -> Option<String> {
        let meta = definitions.add::<ObjectMeta>();
        let mut schema = self.open_api_schema.clone();
        let properties = &mut schema["properties"];
        properties["apiVersion"] = json!({ "type": "string" });
        properties["kind"] = json!({ "type": "string" });
        properties["metadata"] = json!({ "$ref": format!("{DEFINITION_REF_PREFIX}{meta}") });
        let d = &self.descriptor;
        let reversed_group: Vec<&str> = d.group.rsplit('.').collect();
        let name = format!("{}.{}.{}", reversed_group.join("."), d.version, d.kind);
        definitions.insert(&name, schema);
        Some(name)
    }

    fn deprecation(&self) -> Option<&str> {
        self.deprecation.as_deref()
    }

    fn create_disabled_reason(&self) -> Option<&'static str> {
        self.is_terminating.then_some("create not allowed while custom resource definition is terminating")
    }

    fn retired(&self) -> Option<&CancellationToken> {
        Some(&self.retired)
    }
}

/// The cell of one column. A value of another type than the column's gives null.
fn cell(column: &CustomColumn, json: &Value, now: Timestamp) -> Value {
    let selected = column.path.select(json);
    let Some(first) = selected.first().filter(|v| !v.is_null()) else { return Value::Null };
    match column.value_type.as_str() {
        "integer" => first.as_i64().map_or(Value::Null, Value::from),
        "number" | "boolean" if first.is_string() || first.is_array() || first.is_object() => Value::Null,
        "number" => first.as_f64().map_or(Value::Null, |_| (*first).clone()),
        "boolean" => first.as_bool().map_or(Value::Null, Value::from),
        "date" => match first.as_str().and_then(|text| text.parse::<Timestamp>().ok()) {
            Some(time) => column::since(Some(&Time(time)), now).into(),
            None => "<invalid>".into(),
        },
        _ => {
            let format = |v: &&Value| v.as_str().map_or_else(|| v.to_string(), Into::into);
            selected.iter().map(format).collect::<Vec<String>>().join(" ").into()
        }
    }
}
