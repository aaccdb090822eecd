//! Patches: the format follows from the content type of the request. Server-side apply is not implemented here, but in
//! [`field_ownership`](crate::field_ownership).

mod json;
mod strategic;

use bytes::BytesMut;
use serde_json::Value;

use crate::error::ApiError;
use crate::json_scanner;
use crate::kind::{Kind, Object};
use crate::managed_fields::CurrentObject;
use crate::render;
use crate::schema::Schema;

/// The content types of patches, as the error message lists them.
const ACCEPTED: &str = "application/json-patch+json, application/merge-patch+json, \
                        application/strategic-merge-patch+json, application/apply-patch+yaml";
/// As `ACCEPTED`, for custom resources.
const ACCEPTED_FOR_CUSTOM: &str =
    "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
/// The limit for the operations of a JSON patch.
const MAX_OPERATIONS: usize = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchFormat {
    Json,
    Merge,
    Strategic,
    Apply,
}

impl PatchFormat {
    pub fn of(content_type: Option<&str>, kind: &dyn Kind) -> Result<Self, ApiError> {
        match content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/strategic-merge-patch+json" if kind.supports_strategic_merge() => Ok(Self::Strategic),
            "application/apply-patch+yaml" => Ok(Self::Apply),
            _ if !kind.supports_strategic_merge() => Err(ApiError::UnsupportedMediaType(ACCEPTED_FOR_CUSTOM)),
            _ => Err(ApiError::UnsupportedMediaType(ACCEPTED)),
        }
    }
}

pub enum Patch {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
}

impl Patch {
    pub fn parse(format: PatchFormat, body: &[u8]) -> Result<Self, ApiError> {
        let bad = |e: serde_json::Error| ApiError::BadRequest(format!("error decoding patch: {e}"));
        let object = || -> Result<Value, ApiError> {
            let value: Value =
                serde_json::from_slice(body).map_err(|_| ApiError::BadRequest("invalid JSON patch".into()))?;
            match json_type_name(&value) {
                "object" => Ok(value),
                other => Err(ApiError::BadRequest(format!(
                    "error decoding patch: json: cannot unmarshal {other} into Go value of type map[string]interface {{}}"
                ))),
            }
        };
        Ok(match format {
            PatchFormat::Json => {
                let operations: Vec<Value> = serde_json::from_slice(body).map_err(bad)?;
                // A list that contains an invalid operation has the same error as an operation that fails.
                let patch: json_patch::Patch =
                    serde_json::from_value(operations.into()).map_err(|_| ApiError::PatchRejected)?;
                if patch.0.len() > MAX_OPERATIONS {
                    return Err(ApiError::TooLarge { limit: MAX_OPERATIONS });
                }
                Self::Json(patch)
            }
            PatchFormat::Merge => Self::Merge(object()?),
            PatchFormat::Strategic => Self::Strategic(object()?),
            PatchFormat::Apply => return Err(ApiError::Internal("an apply is not a patch of what is stored".into())),
        })
    }

    /// Returns the patched object as JSON. It has the resourceVersion of the current object unless the patch sets one. It
    /// has managedFields only if the patch refers to them.
    pub fn apply(&self, kind: &dyn Kind, current: &CurrentObject<'_>) -> Result<String, ApiError> {
        let mut bytes = BytesMut::new();
        let stored = current.stored;
        if self.touches_managed_fields() {
            render::write_object(&mut bytes, kind.descriptor(), stored);
        } else {
            render::write_json(&mut bytes, kind.descriptor(), &current.split.json, stored.revision);
        }
        let undecodable = |e: serde_json::Error| ApiError::Internal(format!("a stored object cannot be read: {e}"));
        if let Self::Merge(patch) = self {
            let text = std::str::from_utf8(&bytes).map_err(|e| undecodable(serde::de::Error::custom(e)))?;
            return Ok(json_scanner::apply_merge_patch(text, patch));
        }
        let mut value: Value = serde_json::from_slice(&bytes).map_err(undecodable)?;
        self.merge(kind.schema(), &mut value)?;
        Ok(value.to_string())
    }

    /// The patch as a [`FinalizerPatch`]. `None` if it changes anything else.
    pub fn as_finalizer_patch(&self) -> Option<FinalizerPatch<'_>> {
        match self {
            Self::Merge(patch) => FinalizerPatch::of(patch),
            Self::Json(_) | Self::Strategic(_) => None,
        }
    }

    /// Returns true if the patch refers to managedFields. Only then are they inserted into the object.
    fn touches_managed_fields(&self) -> bool {
        match self {
            Self::Merge(patch) | Self::Strategic(patch) => patch.pointer("/metadata/managedFields").is_some(),
            Self::Json(patch) => {
                let pointers = patch.0.iter().flat_map(|operation| {
                    let from = match operation {
                        json_patch::PatchOperation::Move(m) => Some(m.from.as_str()),
                        json_patch::PatchOperation::Copy(c) => Some(c.from.as_str()),
                        _ => None,
                    };
                    [Some(operation.path().as_str()), from]
                });
                // The whole object and the whole metadata contain managedFields.
                let whole = ["", "/metadata"];
                pointers.flatten().any(|p| whole.contains(&p) || p.starts_with("/metadata/managedFields"))
            }
        }
    }

    /// Applies the patch to an object with this schema.
    pub fn merge(&self, schema: &Schema, value: &mut Value) -> Result<(), ApiError> {
        match self {
            Self::Json(patch) => json::apply(value, patch)?,
            Self::Merge(patch) => json_patch::merge(value, patch),
            Self::Strategic(patch) => strategic::merge(schema, value, patch)?,
        }
        Ok(())
    }
}

/// A merge patch that sets `metadata.finalizers` and optionally `metadata.resourceVersion`. Controllers send such patches
/// most often. It is applied to the decoded object, without encoding and decoding it.
pub struct FinalizerPatch<'a> {
    finalizers: Option<Vec<&'a str>>,
    version: Option<&'a str>,
}

impl<'a> FinalizerPatch<'a> {
    fn of(patch: &'a Value) -> Option<Self> {
        let metadata = patch.as_object().filter(|patch| patch.len() == 1)?.get("metadata")?.as_object()?;
        let finalizers = match metadata.get("finalizers")? {
            Value::Null => None,
            list => Some(list.as_array()?.iter().map(Value::as_str).collect::<Option<_>>()?),
        };
        let version = match metadata.get("resourceVersion") {
            None => None,
            Some(version) => Some(version.as_str()?),
        };
        (metadata.len() == 1 + usize::from(version.is_some())).then_some(Self { finalizers, version })
    }

    /// The patched object. [`Patch::apply`] gives the same object as JSON.
    pub fn apply(&self, current: &CurrentObject<'_>) -> Box<dyn Object> {
        let mut object = current.object.copy();
        let meta = object.meta_mut();
        meta.finalizers = self.finalizers.as_ref().map(|list| list.iter().map(|&name| name.to_owned()).collect());
        meta.resource_version =
            Some(self.version.map_or_else(|| current.stored.revision.to_string(), ToOwned::to_owned));
        object
    }
}

/// The JSON type of a value, as Go's decoder names it in its errors.
fn json_type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
