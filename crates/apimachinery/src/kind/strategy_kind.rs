//! A [`Kind`] that is implemented by a [`Strategy`].

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use cleat_api::transport::TypedBody;
use jiff::Timestamp;
use serde_json::Value;

use super::object::{Object, typed, typed_mut};
use super::strategy::Strategy;
use super::{DecodeSource, Kind};
use crate::cache::KindCaches;
use crate::column::TableColumn;
use crate::descriptor::Descriptor;
use crate::field_error::FieldError;
use crate::kind_store::Conversion;
use crate::names::NameRule;
use crate::schema::Schema;
use crate::schema::builtin::OpenApiDefinitions;

/// A kind with the behaviour of the strategy `S`.
pub struct StrategyKind<S> {
    descriptor: Descriptor,
    conversion: Option<Arc<dyn Conversion>>,
    /// Built at the first use.
    schema: OnceLock<Schema>,
    caches: KindCaches,
    strategy: PhantomData<fn() -> S>,
}

impl<S: Strategy> StrategyKind<S> {
    pub fn new() -> Self {
        Self {
            descriptor: S::descriptor(),
            conversion: S::conversion(),
            schema: OnceLock::new(),
            caches: KindCaches::default(),
            strategy: PhantomData,
        }
    }
}

impl<S: Strategy> Default for StrategyKind<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Strategy> Kind for StrategyKind<S> {
    fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    fn name_rule(&self) -> NameRule {
        S::name_rule()
    }

    /// All sources use `serde_json::from_str`: a second deserializer would be compiled again for every API type.
    fn decode(&self, source: DecodeSource<'_>) -> Result<Box<dyn Object>, serde_json::Error> {
        let decoded = |text: &str| serde_json::from_str::<S::Object>(text);
        Ok(Box::new(match source {
            // One UTF-8 check of the whole body is faster than one for each string.
            DecodeSource::Bytes(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => decoded(text)?,
                Err(error) => return Err(invalid_utf8(bytes, error)),
            },
            DecodeSource::Generated(text) => decoded(text).map_err(without_position)?,
            DecodeSource::Value(value) => decoded(&value.to_string()).map_err(without_position)?,
        }))
    }

    fn take_typed(&self, body: &TypedBody) -> Option<Box<dyn Object>> {
        body.take::<S::Object>().map(|object| object as Box<dyn Object>)
    }

    fn set_defaults(&self, object: &mut dyn Object) {
        S::set_defaults(typed_mut(object));
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

    fn validate_create(&self, object: &dyn Object) -> Vec<FieldError> {
        S::validate_create(typed(object))
    }

    fn validate_update(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError> {
        S::validate_update(typed(new), typed(old))
    }

    fn validate_status(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError> {
        S::validate_status(typed(new), typed(old))
    }

    fn is_deletion_blocked(&self, object: &dyn Object) -> bool {
        S::is_deletion_blocked(typed(object))
    }

    fn selectable_fields(&self) -> Vec<&str> {
        S::selectable_fields().to_vec()
    }

    fn selectable_value(&self, object: &dyn Object, name: &str) -> String {
        S::selectable_value(typed(object), name)
    }

    fn columns(&self) -> Vec<TableColumn<'_>> {
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

    fn caches(&self) -> &KindCaches {
        &self.caches
    }

    fn supports_strategic_merge(&self) -> bool {
        true
    }

    fn add_openapi_definition(&self, definitions: &mut OpenApiDefinitions) -> Option<String> {
        Some(definitions.add::<S::Object>())
    }
}

/// The error for a body that is not in UTF-8: the error of the JSON decoder, which names the position.
fn invalid_utf8(bytes: &[u8], error: std::str::Utf8Error) -> serde_json::Error {
    let decoded = serde_json::from_slice::<Value>(bytes);
    decoded.err().unwrap_or_else(|| serde::de::Error::custom(error))
}

/// The error without its line and column.
fn without_position(error: serde_json::Error) -> serde_json::Error {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    serde::de::Error::custom(text.strip_suffix(&position).unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    #[test]
    fn the_error_for_invalid_utf8_names_its_position() {
        let kind = crate::test_kinds::all().into_iter().find(|kind| kind.descriptor().plural == "configmaps").unwrap();
        let body = b"{\"metadata\":{\"name\":\"a\xff\"}}";
        let got = kind.decode(DecodeSource::Bytes(body)).map(drop).unwrap_err().to_string();
        assert_eq!(got, serde_json::from_slice::<ConfigMap>(body).unwrap_err().to_string());
    }
}
