//! PATCH: which algorithm the content type asks for, and its application to a stored object.

mod merge_keys;
mod strategic;

use bytes::BytesMut;
use serde_json::Value;

use crate::descriptor::Descriptor;
use crate::error::ApiError;
use crate::render::{self, Stored};

const ACCEPTED: &str =
    "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json";
/// Nothing tells how lists of a kind that somebody defined are to be merged.
pub(crate) const ACCEPTED_CUSTOM: &str = "application/json-patch+json, application/merge-patch+json";
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
        self.merge(&descriptor.kind, &mut value)?;
        Ok(value)
    }

    /// Applies the patch to an object of the kind.
    pub(crate) fn merge(&self, kind: &str, value: &mut Value) -> Result<(), ApiError> {
        match self {
            Self::Json(patch) => json_patch::patch(value, patch).map_err(|_| ApiError::PatchRejected)?,
            Self::Merge(patch) => json_patch::merge(value, patch),
            Self::Strategic(patch) => strategic::merge(kind, value, patch)?,
        }
        Ok(())
    }
}
