//! PATCH: which algorithm the content type asks for, and its application to a stored object.

mod json;
mod merge_keys;
mod strategic;

use bytes::BytesMut;
use serde_json::Value;

use crate::descriptor::Descriptor;
use crate::error::ApiError;
use crate::render::{self, Stored};

const ACCEPTED: &str =
    "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json";
const OPERATIONS_LIMIT: usize = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    Merge,
    Strategic,
}

impl Format {
    pub(crate) fn of(content_type: Option<&str>) -> Result<Self, ApiError> {
        match content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/strategic-merge-patch+json" => Ok(Self::Strategic),
            _ => Err(ApiError::UnsupportedMediaType(ACCEPTED)),
        }
    }
}

pub(crate) enum Patch {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
}

impl Patch {
    pub(crate) fn parse(format: Format, body: &[u8]) -> Result<Self, ApiError> {
        let bad = |e: serde_json::Error| ApiError::BadRequest(format!("error decoding patch: {e}"));
        let object = || -> Result<Value, ApiError> {
            let value: Value = serde_json::from_slice(body).map_err(bad)?;
            match value.is_object() {
                true => Ok(value),
                false => Err(ApiError::BadRequest("error decoding patch: it is not an object".into())),
            }
        };
        Ok(match format {
            Format::Json => {
                let operations: Vec<Value> = serde_json::from_slice(body).map_err(bad)?;
                // Well-formed but meaningless is refused like an operation that does not apply.
                let patch: json_patch::Patch =
                    serde_json::from_value(operations.into()).map_err(|_| ApiError::PatchRejected)?;
                if patch.0.len() > OPERATIONS_LIMIT {
                    return Err(ApiError::TooLarge { limit: OPERATIONS_LIMIT });
                }
                Self::Json(patch)
            }
            Format::Merge => Self::Merge(object()?),
            Format::Strategic => Self::Strategic(object()?),
        })
    }

    /// The patched object, with the resourceVersion it was read at unless the patch carries its own.
    pub(crate) fn apply(&self, descriptor: &Descriptor, stored: &Stored) -> Result<Value, ApiError> {
        let mut bytes = BytesMut::new();
        render::object(&mut bytes, descriptor, stored);
        let mut value: Value = serde_json::from_slice(&bytes)
            .map_err(|e| ApiError::Internal(format!("a stored object cannot be read: {e}")))?;
        match self {
            Self::Json(patch) => json::apply(&mut value, patch)?,
            Self::Merge(patch) => json_patch::merge(&mut value, patch),
            Self::Strategic(patch) => strategic::merge(&descriptor.kind, &mut value, patch)?,
        }
        Ok(value)
    }
}
