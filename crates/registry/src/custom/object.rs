//! An object of a kind that somebody defined: its metadata, and the rest as it came. It exists only while a request is
//! at work; at rest there are bytes.

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
    pub(super) body: Map<String, Value>,
}

impl CustomObject {
    /// Takes a whole object apart.
    pub(super) fn parse(value: Value) -> Result<Self, serde_json::Error> {
        let Value::Object(mut body) = value else {
            return Err(serde_json::Error::custom("an object is expected"));
        };
        let mut text = |field: &str| match body.remove(field) {
            Some(Value::String(text)) => Ok(text),
            None | Some(Value::Null) => Ok(String::new()),
            Some(_) => Err(serde_json::Error::custom(format!("{field} must be a string"))),
        };
        let (api_version, kind) = (text("apiVersion")?, text("kind")?);
        let meta = match body.remove("metadata") {
            None | Some(Value::Null) => ObjectMeta::default(),
            Some(metadata) => serde_json::from_value(metadata)?,
        };
        Ok(Self { api_version, kind, meta, body })
    }

    /// The object as one value, for paths that lead anywhere in it.
    pub(super) fn whole(&self) -> Value {
        let mut whole = self.body.clone();
        whole.insert("metadata".into(), serde_json::to_value(&self.meta).unwrap_or_default());
        Value::Object(whole)
    }

    /// The object as rules see it: of its metadata only the name.
    pub(super) fn ruled(&self) -> Value {
        let mut whole = self.body.clone();
        let mut meta = Map::new();
        meta.extend(self.meta.name.clone().map(|name| ("name".to_owned(), name.into())));
        meta.extend(self.meta.generate_name.clone().map(|name| ("generateName".to_owned(), name.into())));
        whole.insert("metadata".into(), meta.into());
        whole.insert("apiVersion".into(), self.api_version.clone().into());
        whole.insert("kind".into(), self.kind.clone().into());
        Value::Object(whole)
    }

    pub(super) fn encoded(&self) -> Vec<u8> {
        // `render` relies on these three coming first.
        let text = |text: &str| Value::from(text).to_string();
        let meta = serde_json::to_string(&self.meta).expect("metadata encodes");
        let mut out =
            format!(r#"{{"apiVersion":{},"kind":{},"metadata":{meta}"#, text(&self.api_version), text(&self.kind));
        for (key, value) in &self.body {
            out.push(',');
            out.push_str(&text(key));
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

/// The value in a body, which may not hold a key twice at one place to mean two things.
pub(super) fn read(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = Value::deserialize(&mut json)?;
    json.end()?;
    Ok(value)
}
