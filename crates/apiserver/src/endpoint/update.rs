//! PUT and PATCH.

use http::StatusCode;

use super::write::{Origin, Part, modify};
use super::{At, decode, read};
use crate::api::Api;
use crate::error::ApiError;
use crate::http::Call;
use crate::http::reply::Reply;
use crate::kind::Object;
use crate::patch::{self, Format};
use crate::render::Stored;

pub(crate) async fn put(api: &Api, call: &Call, at: At<'_>, part: Part) -> Result<Reply, ApiError> {
    let effect = call.query.effect("UpdateOptions")?;
    let validation = call.query.field_validation("UpdateOptions")?;
    let (object, warnings) = decode::body(call, at.kind, validation)?;
    let stored =
        modify(api, at, part, Origin::Put, effect, &mut |_: &dyn Object, _: &Stored| Ok(object.copy())).await?;
    Ok(read::one(call, at.kind, StatusCode::OK, &stored)?.with_warnings(warnings))
}

pub(crate) async fn patch(api: &Api, call: &Call, at: At<'_>, part: Part) -> Result<Reply, ApiError> {
    let effect = call.query.effect("PatchOptions")?;
    let validation = call.query.field_validation("PatchOptions")?;
    let format = Format::of(call.content_type.as_deref())?;
    if format == Format::Strategic && at.descriptor().custom {
        return Err(ApiError::UnsupportedMediaType(patch::ACCEPTED_CUSTOM));
    }
    let patch = patch::Patch::parse(format, &call.body)?;
    let mut warnings = Vec::new();
    let mut change = |_: &dyn Object, stored: &Stored| {
        let value = patch.apply(at.descriptor(), stored)?;
        let (object, found) = decode::patched(at, value, validation)?;
        warnings = found;
        Ok(object)
    };
    let stored = modify(api, at, part, Origin::Patch, effect, &mut change).await?;
    Ok(read::one(call, at.kind, StatusCode::OK, &stored)?.with_warnings(warnings))
}
