//! The seam between the generic API machinery and one kind. [`Strategy`] is what a kind's file implements, on its own
//! type. [`Kind`] is the same interface without the type; the machinery uses only this one. [`StrategyKind`] makes a
//! [`Kind`] of a [`Strategy`].

mod object;
mod strategy;
mod strategy_kind;

use std::sync::Arc;

use cleat_api::transport::TypedBody;
use jiff::Timestamp;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::cache::KindCaches;
use crate::column::TableColumn;
use crate::descriptor::Descriptor;
use crate::field_error::FieldError;
use crate::kind_store::Conversion;
use crate::names::NameRule;
use crate::schema::Schema;
use crate::schema::builtin::OpenApiDefinitions;

pub use object::{ApiType, Object, typed, typed_mut};
pub use strategy::Strategy;
pub use strategy_kind::StrategyKind;

/// What an object is decoded from.
pub enum DecodeSource<'a> {
    /// A body that a client sent, or a stored object. Errors name the line and column.
    Bytes(&'a [u8]),
    /// JSON that the server generated. Errors do not name a line and column, because no client has this JSON.
    Generated(&'a str),
    Value(Value),
}

/// One kind of the API. Methods that [`Strategy`] has, too, have the same contract there. An object may only be passed to
/// the kind that decoded it.
pub trait Kind: Send + Sync {
    fn descriptor(&self) -> &Descriptor;
    fn name_rule(&self) -> NameRule;
    /// Decodes an object. Unknown fields are dropped and of a duplicate field the last value counts;
    /// [`strict_decoding`](crate::strict_decoding) reports both.
    fn decode(&self, source: DecodeSource<'_>) -> Result<Box<dyn Object>, serde_json::Error>;
    /// Takes the object out of the body of an in-process request. `None` if the body holds another type.
    fn take_typed(&self, _body: &TypedBody) -> Option<Box<dyn Object>> {
        None
    }
    fn set_defaults(&self, object: &mut dyn Object);
    fn prepare_create(&self, object: &mut dyn Object, now: Timestamp);
    fn prepare_update(&self, new: &mut dyn Object, old: &dyn Object);
    fn prepare_status(&self, new: &mut dyn Object, old: &dyn Object, now: Timestamp);
    fn validate(&self, object: &dyn Object) -> Vec<FieldError>;
    fn validate_create(&self, object: &dyn Object) -> Vec<FieldError>;
    fn validate_update(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError>;
    fn validate_status(&self, new: &dyn Object, old: &dyn Object) -> Vec<FieldError>;
    fn is_deletion_blocked(&self, object: &dyn Object) -> bool;
    fn selectable_fields(&self) -> Vec<&str>;
    fn selectable_value(&self, object: &dyn Object, name: &str) -> String;
    fn columns(&self) -> Vec<TableColumn<'_>>;
    fn cells(&self, object: &dyn Object, now: Timestamp) -> Vec<Value>;
    fn row_conditions(&self, object: &dyn Object) -> Option<Value>;

    /// The conversion between the stored and the served form. `None` if both are the same.
    fn conversion(&self) -> Option<Arc<dyn Conversion>> {
        None
    }

    /// The warning for clients that use this kind, if it is deprecated.
    fn deprecation(&self) -> Option<&str> {
        None
    }

    /// The message that refuses the creation of objects. `None` if objects can be created.
    fn create_disabled_reason(&self) -> Option<&'static str> {
        None
    }

    /// A token that is cancelled when the server replaces or removes this kind. Watches of the kind then end.
    fn retired(&self) -> Option<&CancellationToken> {
        None
    }

    /// Cancels the token of [`Kind::retired`].
    fn retire(&self) {
        if let Some(retired) = self.retired() {
            retired.cancel();
        }
    }

    /// The types of the kind's fields, and how lists and maps are merged.
    fn schema(&self) -> &Schema {
        Schema::unknown()
    }

    fn caches(&self) -> &KindCaches;

    /// Returns true if the kind accepts strategic merge patches. Custom resources do not: their definitions have no patch
    /// strategies.
    fn supports_strategic_merge(&self) -> bool {
        false
    }

    /// Adds the OpenAPI definition of the kind and returns the definition's name. `None` if the kind has no definition.
    fn add_openapi_definition(&self, _definitions: &mut OpenApiDefinitions) -> Option<String> {
        None
    }
}
