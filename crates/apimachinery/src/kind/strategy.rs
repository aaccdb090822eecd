//! What a kind's own file implements.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use super::object::ApiType;
use crate::column::Column;
use crate::descriptor::Descriptor;
use crate::field_error::FieldError;
use crate::kind_store::Conversion;
use crate::names::NameRule;

/// The behaviour of one kind where it differs from the common rules. Every method is pure: it depends on its arguments only.
pub trait Strategy: Send + Sync + 'static {
    type Object: ApiType;

    fn descriptor() -> Descriptor;

    fn name_rule() -> NameRule {
        NameRule::Subdomain
    }

    /// Sets fields that the client left out. Idempotent: it runs again on objects that have their defaults.
    fn set_defaults(_object: &mut Self::Object) {}

    /// Clears or sets fields that a client may not choose when it creates an object.
    fn prepare_create(_object: &mut Self::Object, _now: Timestamp) {}

    /// Restores from `old` the fields that an update of the main resource may not change.
    fn prepare_update(_new: &mut Self::Object, _old: &Self::Object) {}

    /// Restores from `old` the fields that an update of the status subresource may not change.
    fn prepare_status(_new: &mut Self::Object, _old: &Self::Object, _now: Timestamp) {}

    fn validate(_object: &Self::Object) -> Vec<FieldError> {
        Vec::new()
    }

    /// Checks that apply to new objects only, in addition to `validate`.
    fn validate_create(_object: &Self::Object) -> Vec<FieldError> {
        Vec::new()
    }

    fn validate_update(_new: &Self::Object, _old: &Self::Object) -> Vec<FieldError> {
        Vec::new()
    }

    fn validate_status(_new: &Self::Object, _old: &Self::Object) -> Vec<FieldError> {
        Vec::new()
    }

    /// Returns true if a deleted object must stay although its metadata has no finalizers: a namespace with
    /// `spec.finalizers`.
    fn is_deletion_blocked(_object: &Self::Object) -> bool {
        false
    }

    /// The fields for field selectors, in addition to `metadata.name` and `metadata.namespace`.
    fn selectable_fields() -> &'static [&'static str] {
        &[]
    }

    /// The value of one of the `selectable_fields`. Empty if the field is not set.
    fn selectable_value(_object: &Self::Object, _name: &str) -> String {
        String::new()
    }

    /// The columns of the kind's table.
    fn columns() -> &'static [Column];

    /// One value per column.
    fn cells(object: &Self::Object, now: Timestamp) -> Vec<Value>;

    /// The conversion from and to the stored form, for a kind that shares its storage with another kind.
    fn conversion() -> Option<Arc<dyn Conversion>> {
        None
    }

    /// The `conditions` of the object's table row. `None` if the kind has none.
    fn row_conditions(_object: &Self::Object) -> Option<Value> {
        None
    }
}
