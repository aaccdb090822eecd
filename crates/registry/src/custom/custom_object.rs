//! A decoded custom resource: typed metadata, and every other field as JSON. It lives for one request only; the store and
//! the caches hold encoded bytes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::Error as _;
use serde_json::{Map, Value};

use cleat_apimachinery::kind::Object;

#[derive(Clone, Debug, Default)]
pub(super) struct CustomObject {
    pub(super) api_version: String,
    pub(super) kind: String,
    pub(super) meta: ObjectMeta,
    /// Everything but `apiVersion`, `kind` and `metadata`.
    pub(super) fields: Map<String, Value>,
}

impl CustomObject {
    /// Fails if the value is not an object or if `apiVersion`, `kind` or `metadata` have wrong types.
    pub(super) fn from_json(value: Value) -> Result<Self, serde_json::Error> {
        let Value::Object(mut fields) = value else {
            return Err(serde_json::Error::custom("an object is expected"));
        };
        let mut take_string = |field: &str| match fields.remove(field) {
            Some(Value::String(text)) => Ok(text),
            None | Some(Value::Null) => Ok(String::new()),
            Some(_) => Err(serde_json::Error::custom(format!("{field} must be a string"))),
        };
        let (api_version, kind) = (take_string("apiVersion")?, take_string("kind")?);
        let meta = match fields.remove("metadata") {
            None | Some(Value::Null) => ObjectMeta::default(),
            Some(metadata) => serde_json::from_value(metadata)?,
        };
        Ok(Self { api_version, kind, meta, fields })
    }

    /// The object with its metadata, without `apiVersion` and `kind`: the input of JSON paths.
    pub(super) fn to_json(&self) -> Value {
        let mut json = self.fields.clone();
        json.insert("metadata".into(), serde_json::to_value(&self.meta).unwrap_or_default());
        Value::Object(json)
    }

    /// The object as `self` of validation rules: metadata has only `name` and `generateName`.
    pub(super) fn to_rule_input(&self) -> Value {
        let mut json = self.fields.clone();
        let mut meta = Map::new();
        meta.extend(self.meta.name.clone().map(|name| ("name".to_owned(), name.into())));
        meta.extend(self.meta.generate_name.clone().map(|name| ("generateName".to_owned(), name.into())));
        json.insert("metadata".into(), meta.into());
        json.insert("apiVersion".into(), self.api_version.clone().into());
        json.insert("kind".into(), self.kind.clone().into());
        Value::Object(json)
    }

    pub(super) fn encoded(&self) -> Vec<u8> {
        // `render` in apimachinery requires that these three fields come first, in this order.
        let quote = |text: &str| Value::from(text).to_string();
        let meta = serde_json::to_string(&self.meta).expect("metadata encodes");
        let mut out =
            format!(r#"{{"apiVersion":{},"kind":{},"metadata":{meta}"#, quote(&self.api_version), quote(&self.kind));
        for (key, value) in &self.fields {
            out.push(',');
            out.push_str(&quote(key));
            out.push(':');
            out.push_str(&value.to_string());
        }
        out.push('}');
        out.into_bytes()
    }
}

impl Object for CustomObject {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }

    fn copy(&self) -> Box<dyn Object> {
        Box::new(self.clone())
    }

    fn encode(&self) -> Vec<u8> {
        self.encoded()
    }
}

/// Parses exactly one JSON value: trailing bytes are an error. Of a repeated key, the last value counts.
pub(super) fn parse_json(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = Value::deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}
