//! The seam between the generic API machinery and one kind: [`Strategy`] is what a kind's file implements, on its own
//! type; [`Kind`] is the same without the type, which is all the machinery sees.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use cleat_api::TypedBody;
use jiff::Timestamp;
use k8s_openapi::Metadata;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::descriptor::Descriptor;
use crate::field::FieldError;
use crate::managed::Precedents;
use crate::meta::NameRule;
use crate::raw::Compact;
use crate::schema::Schema;
use crate::schema::builtin::Definitions;
use crate::strict::Outlines;
use crate::table::{Column, ColumnOf};
use crate::view::Conversion;

/// The behaviour of one kind where it differs from the common rules. Every method is pure.
pub(crate) trait Strategy: Send + Sync + 'static {
    type Object: Typed;

    fn descriptor() -> Descriptor;

    fn name_rule() -> NameRule {
        NameRule::Subdomain
    }

    /// Fills what the client left out. Idempotent.
    fn default(_object: &mut Self::Object) {}

    /// Removes what a client may not choose at creation.
    fn prepare_create(_object: &mut Self::Object, _now: Timestamp) {}

    /// Restores what the main resource may not change.
    fn prepare_update(_new: &mut Self::Object, _old: &Self::Object) {}

    /// Restores what the status subresource may not change.
    fn prepare_status(_new: &mut Self::Object, _old: &Self::Object, _now: Timestamp) {}

    fn validate(_object: &Self::Object) -> Vec<FieldError> {
        Vec::new()
    }

    /// What only a new object has to meet.
    fn validate_new(_object: &Self::Object) -> Vec<FieldError> {
        Vec::new()
    }

    fn validate_update(_new: &Self::Object, _old: &Self::Object) -> Vec<FieldError> {
        Vec::new()
    }

    fn validate_status(_new: &Self::Object, _old: &Self::Object) -> Vec<FieldError> {
        Vec::new()
    }

    /// May the object go although nothing in its metadata holds it?
    fn is_held(_object: &Self::Object) -> bool {
        false
    }

    /// Selectable fields beyond `metadata.name` and `metadata.namespace`.
    fn fields() -> &'static [&'static str] {
        &[]
    }

    /// The value of one of `fields`; empty if it has none.
    fn field(_object: &Self::Object, _name: &str) -> String {
        String::new()
    }

    fn columns() -> &'static [Column];

    fn cells(object: &Self::Object, now: Timestamp) -> Vec<Value>;

    /// For a kind that shares its storage with another.
    fn conversion() -> Option<Arc<dyn Conversion>> {
        None
    }

    /// The row's `conditions`, for the kinds that have them.
    fn row_conditions(_object: &Self::Object) -> Option<Value> {
        None
    }
}

/// What the type of a kind has to be able to do.
pub(crate) trait Typed:
    Metadata<Ty = ObjectMeta> + JsonSchema + Serialize + DeserializeOwned + Clone + PartialEq + Send + Sync + 'static
{
}

impl<T> Typed for T where
    T: Metadata<Ty = ObjectMeta>
        + JsonSchema
        + Serialize
        + DeserializeOwned
        + Clone
        + PartialEq
        + Send
        + Sync
        + 'static
{
}

/// An object of some kind. Only the kind that decoded it looks inside.
pub(crate) trait Object: Any + Send + Sync {
    fn meta(&self) -> &ObjectMeta;
    fn meta_mut(&mut self) -> &mut ObjectMeta;
    fn copy(&self) -> Box<dyn Object>;
    /// The canonical bytes. They hold whatever resourceVersion the metadata holds; clear it before storing.
    fn encode(&self) -> Vec<u8>;
}

impl<T: Typed> Object for T {
    fn meta(&self) -> &ObjectMeta {
        self.metadata()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.metadata_mut()
    }

    fn copy(&self) -> Box<dyn Object> {
        Box::new(self.clone())
    }

    fn encode(&self) -> Vec<u8> {
        // Most objects fit without growing.
        let mut out = Vec::with_capacity(2048);
        // Maps in the types are ordered and have string keys, so encoding is deterministic and cannot fail.
        self.serialize(&mut serde_json::Serializer::with_formatter(&mut out, WholeNumbers)).expect("API types encode");
        metadata_first(&mut out).expect("API types have metadata, and are encoded plainly");
        out
    }
}

/// Writes a number without a fraction as clients write it: `10`, not `10.0`.
struct WholeNumbers;

impl serde_json::ser::Formatter for WholeNumbers {
    fn write_f64<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, value: f64) -> std::io::Result<()> {
        if value.fract() == 0.0 && value.abs() < 1e15 {
            return write!(writer, "{value:.0}");
        }
        serde_json::ser::CompactFormatter.write_f64(writer, value)
    }
}

/// Moves `metadata` to directly after `apiVersion` and `kind`: `render` relies on finding it there.
pub(crate) fn metadata_first(bytes: &mut [u8]) -> Option<()> {
    let offset = |rest: &Compact<'_>| bytes.len() - rest.0.len();
    let mut text = Compact(bytes);
    text.take(b'{')?;
    for _ in ["apiVersion", "kind"] {
        text.member()?;
        text.value()?;
    }
    let leading = offset(&text);
    let mut member = leading;
    while text.member()?? != b"metadata" {
        text.value()?;
        member = offset(&text);
    }
    text.value()?;
    let end = offset(&text);
    // What is between, each with the comma before it, changes places with it.
    bytes[leading..end].rotate_right(end - member);
    Some(())
}

/// Where an object is decoded from.
pub(crate) enum Source<'a> {
    Bytes(&'a [u8]),
    /// A text that nobody has seen.
    Made(&'a str),
    Value(Value),
}

/// What was worked out about objects of a kind and holds for others like them.
#[derive(Default)]
pub(crate) struct Learned {
    pub(crate) precedents: Precedents,
    pub(crate) outlines: Outlines,
}

pub(crate) trait Kind: Send + Sync {
    fn descriptor(&self) -> &Descriptor;
    fn name_rule(&self) -> NameRule;
    /// Fields the kind does not have are dropped; `strict` tells about them.
    fn decode(&self, source: Source<'_>) -> Result<Box<dyn Object>, serde_json::Error>;
    /// An object of the kind that came as it is.
    fn adopt(&self, _handed: &TypedBody) -> Option<Box<dyn Object>> {
        None
    }
    fn default(&self, object: &mut dyn Object);
    fn prepare_create(&self, object: &mut dyn Object, now: Timestamp);
    fn prepare_update(&self, new: &mut dyn Object, old: &dyn Object);
    fn prepare_status(&self, new: &mut dyn Object, old: &dyn Object, now: Timestamp);
    fn validate(&self, object: &dyn Object) -> Vec<FieldError>;
    fn validate_new(&self, object: &dyn Object) -> Vec<FieldError>;
    fn validate_update(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError>;
    fn validate_status(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError>;
    fn is_held(&self, object: &dyn Object) -> bool;
    fn fields(&self) -> Vec<&str>;
    fn field(&self, object: &dyn Object, name: &str) -> String;
    fn columns(&self) -> Vec<ColumnOf<'_>>;
    fn cells(&self, object: &dyn Object, now: Timestamp) -> Vec<Value>;
    fn row_conditions(&self, object: &dyn Object) -> Option<Value>;

    /// Are objects of the kind worth keeping for the next change? No two such kinds are stored in the same place.
    fn is_kept(&self) -> bool {
        false
    }

    /// How the kind differs from what is stored, if it does.
    fn conversion(&self) -> Option<Arc<dyn Conversion>> {
        None
    }

    /// What a client that uses the kind is to be warned of.
    fn deprecation(&self) -> Option<&str> {
        None
    }

    /// Why no object of the kind can be created now.
    fn closed(&self) -> Option<&'static str> {
        None
    }

    /// Cancelled when the kind is not served any more in this form; watches of it end then.
    fn retired(&self) -> Option<&CancellationToken> {
        None
    }

    fn retire(&self) {
        if let Some(retired) = self.retired() {
            retired.cancel();
        }
    }
    /// How objects of the kind are built and joined.
    fn schema(&self) -> &Schema {
        Schema::unknown()
    }
    fn learned(&self) -> &Learned;
    /// Does the kind say how to merge its lists? Custom resources do not.
    fn merges_strategically(&self) -> bool {
        false
    }
    /// Adds the kind's description for OpenAPI and returns its name there, if it has one.
    fn describe(&self, _definitions: &mut Definitions) -> Option<String> {
        None
    }
}

pub(crate) struct Erased<S> {
    descriptor: Descriptor,
    conversion: Option<Arc<dyn Conversion>>,
    /// Built when first needed.
    schema: OnceLock<Schema>,
    learned: Learned,
    strategy: PhantomData<fn() -> S>,
}

impl<S: Strategy> Erased<S> {
    pub(crate) fn new() -> Self {
        Self {
            descriptor: S::descriptor(),
            conversion: S::conversion(),
            schema: OnceLock::new(),
            learned: Learned::default(),
            strategy: PhantomData,
        }
    }
}

/// The typed object inside, for code that is about one kind only.
pub(crate) fn typed<T: 'static>(object: &dyn Object) -> &T {
    let any: &dyn Any = object;
    any.downcast_ref().expect("an object is only handed to the kind that decoded it")
}

pub(crate) fn typed_mut<T: 'static>(object: &mut dyn Object) -> &mut T {
    let any: &mut dyn Any = object;
    any.downcast_mut().expect("an object is only handed to the kind that decoded it")
}

impl<S: Strategy> Kind for Erased<S> {
    fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    fn name_rule(&self) -> NameRule {
        S::name_rule()
    }

    /// One decoder for all sources: the types are many and large, and each more would be compiled for all of them.
    fn decode(&self, source: Source<'_>) -> Result<Box<dyn Object>, serde_json::Error> {
        let decoded = |text: &str| serde_json::from_str::<S::Object>(text);
        Ok(Box::new(match source {
            // Checked as a whole, which is faster than string by string.
            Source::Bytes(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => decoded(text)?,
                Err(error) => return Err(undecodable(bytes, error)),
            },
            Source::Made(text) => decoded(text).map_err(unplaced)?,
            Source::Value(value) => decoded(&value.to_string()).map_err(unplaced)?,
        }))
    }

    fn is_kept(&self) -> bool {
        // Most events are never changed; the numbers in a definition's schema may come back from storage as others.
        let d = self.descriptor();
        self.conversion().is_none() && !matches!(d.plural.as_str(), "events" | "customresourcedefinitions")
    }

    fn adopt(&self, handed: &TypedBody) -> Option<Box<dyn Object>> {
        handed.take::<S::Object>().map(|object| object as Box<dyn Object>)
    }

    fn default(&self, object: &mut dyn Object) {
        S::default(typed_mut(object));
    }

    fn prepare_create(&self, object: &mut dyn Object, now: Timestamp) {
        S::prepare_create(typed_mut(object), now);
    }

    fn prepare_update(&self, new: &mut dyn Object, old: &dyn Object) {
        S::prepare_update(typed_mut(new), typed(old));
    }

    fn prepare_status(&self, new: &mut dyn Object, old: &dyn Object, now: Timestamp) {
        S::prepare_status(typed_mut(new), typed(old), now);
    }

    fn validate(&self, object: &dyn Object) -> Vec<FieldError> {
        S::validate(typed(object))
    }

    fn validate_new(&self, object: &dyn Object) -> Vec<FieldError> {
        S::validate_new(typed(object))
    }

    fn validate_update(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError> {
        S::validate_update(typed(new), typed(old))
    }

    fn validate_status(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError> {
        S::validate_status(typed(new), typed(old))
    }

    fn is_held(&self, object: &dyn Object) -> bool {
        S::is_held(typed(object))
    }

    fn fields(&self) -> Vec<&str> {
        S::fields().to_vec()
    }

    fn field(&self, object: &dyn Object, name: &str) -> String {
        S::field(typed(object), name)
    }

    fn columns(&self) -> Vec<ColumnOf<'_>> {
        S::columns().to_vec()
    }

    fn cells(&self, object: &dyn Object, now: Timestamp) -> Vec<Value> {
        S::cells(typed(object), now)
    }

    fn row_conditions(&self, object: &dyn Object) -> Option<Value> {
        S::row_conditions(typed(object))
    }

    fn conversion(&self) -> Option<Arc<dyn Conversion>> {
        self.conversion.clone()
    }

    fn schema(&self) -> &Schema {
        self.schema.get_or_init(Schema::of::<S::Object>)
    }

    fn learned(&self) -> &Learned {
        &self.learned
    }

    fn merges_strategically(&self) -> bool {
        true
    }

    fn describe(&self, definitions: &mut Definitions) -> Option<String> {
        Some(definitions.add::<S::Object>())
    }
}

/// What is said of a body that is not in UTF-8.
fn undecodable(bytes: &[u8], error: std::str::Utf8Error) -> serde_json::Error {
    let read = serde_json::from_slice::<Value>(bytes);
    read.err().unwrap_or_else(|| serde::de::Error::custom(error))
}

/// The error without its place in a text that nobody has seen.
fn unplaced(error: serde_json::Error) -> serde_json::Error {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    serde::de::Error::custom(text.strip_suffix(&place).unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod};
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_begins_with_what_it_is() {
        fn encoded<T: Typed>(value: Value) -> String {
            String::from_utf8(serde_json::from_value::<T>(value).unwrap().encode()).unwrap()
        }
        let meta = json!({ "name": "metadata", "labels": { "metadata": "\"metadata\":{" } });
        let shown = r#""metadata":{"labels":{"metadata":"\"metadata\":{"},"name":"metadata"}"#;
        let map = json!({ "metadata": meta, "data": { "metadata": "x" }, "immutable": true });
        let want =
            format!(r#"{{"apiVersion":"v1","kind":"ConfigMap",{shown},"data":{{"metadata":"x"}},"immutable":true}}"#);
        assert_eq!(encoded::<ConfigMap>(map), want);
        let event = json!({ "metadata": meta, "action": "a", "involvedObject": {}, "message": "m", "type": "Normal" });
        let want = format!(
            r#"{{"apiVersion":"v1","kind":"Event",{shown},"action":"a","involvedObject":{{}},"message":"m","type":"Normal"}}"#
        );
        assert_eq!(encoded::<Event>(event), want);
        let want = format!(r#"{{"apiVersion":"v1","kind":"Pod",{shown}}}"#);
        assert_eq!(encoded::<Pod>(json!({ "metadata": meta })), want);
    }

    #[test]
    fn a_body_that_is_not_in_utf8_is_refused_where_it_is_not() {
        let kind = crate::strategy::all().into_iter().find(|kind| kind.descriptor().plural == "configmaps").unwrap();
        let body = b"{\"metadata\":{\"name\":\"a\xff\"}}";
        let got = kind.decode(Source::Bytes(body)).map(drop).unwrap_err().to_string();
        assert_eq!(got, serde_json::from_slice::<ConfigMap>(body).unwrap_err().to_string());
    }
}
