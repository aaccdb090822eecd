//! PUT and PATCH of an existing object. Server-side apply is in `apply`.

use cleat_api::transport::AcceptedReply;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::CurrentObject;
use cleat_apimachinery::part::ObjectPart;
use http::StatusCode;

use super::decode::DecodedBody;
use super::write::{UpdateSource, is_removable, modify};
use super::{apply, decode, read};
use crate::http::ResourceRequest;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::field_ownership::Operation;
use cleat_apimachinery::managed_fields::{ManagedObject, OwnershipTracker};
use cleat_apimachinery::patch::{self, PatchFormat};

pub(crate) async fn put(
    state: &ServerState,
    request: &ResourceRequest,
    at: ObjectAddress<'_>,
    part: ObjectPart,
) -> Result<Reply, ApiError> {
    let mode = request.query.write_mode("UpdateOptions")?;
    let validation = request.query.field_validation("UpdateOptions")?;
    let manager = request.query.field_manager("UpdateOptions", &request.user_agent)?;
    let tracker = OwnershipTracker::new(at.kind, part, Operation::Update, &manager);
    let mut decoded = decode::decode_body(request, at.kind, validation)?;
    let warnings = std::mem::take(&mut decoded.warnings);
    let mut decoded = Some(decoded);
    let mut change = |current: &CurrentObject<'_>| {
        let DecodedBody { mut object, encoded, .. } = match decoded.take() {
            Some(decoded) => decoded,
            // The previous attempt conflicted with another write and has consumed the object: decode the body again.
            None => decode::decode_body(request, at.kind, validation)?,
        };
        let owners = tracker.owners_after_update(&current.split, &mut *object, encoded.as_deref());
        Ok(ManagedObject { object, owners })
    };
    let written = modify(state, &request.actor, at, part, UpdateSource::Put, mode, &mut change).await?;
    Ok(read::render_written(request, at.kind, StatusCode::OK, written)?.with_warnings(warnings))
}

pub(crate) async fn patch(
    state: &ServerState,
    request: &ResourceRequest,
    at: ObjectAddress<'_>,
    part: ObjectPart,
) -> Result<Reply, ApiError> {
    let mode = request.query.write_mode("PatchOptions")?;
    let validation = request.query.field_validation("PatchOptions")?;
    let manager = request.query.field_manager("PatchOptions", &request.user_agent)?;
    let format = PatchFormat::of(request.content_type.as_deref(), at.kind)?;
    if format == PatchFormat::Apply {
        return apply::apply(state, request, at, part).await;
    }
    if request.query.force().is_some() {
        let error = FieldError::forbidden("force", "may not be specified for non-apply patch");
        return Err(ApiError::invalid_option("PatchOptions", error));
    }
    let tracker = OwnershipTracker::new(at.kind, part, Operation::Update, &manager);
    let patch = patch::Patch::parse(format, request.encoded_body())?;
    let duplicates = decode::duplicate_fields(request.encoded_body(), validation);
    let finalizers_only = patch.as_finalizer_patch().filter(|_| duplicates.is_empty());
    let mut warnings = Vec::new();
    let mut change = |current: &CurrentObject<'_>| {
        if let Some(finalizers) = &finalizers_only {
            let mut object = finalizers.apply(current);
            // If this write removes the object, its managedFields are never stored. They are computed only for a reply
            // that shows them; a typed reply does not.
            let is_removed = object.meta().deletion_timestamp.is_some() && is_removable(at.kind, &*object);
            let owners = match is_removed && request.body.accepted_reply() != AcceptedReply::Encoded {
                true => current.split.owners.clone(),
                false => tracker.owners_after_update(&current.split, &mut *object, None),
            };
            return Ok(ManagedObject { object, owners });
        }
        let patched = patch.apply(at.kind, current)?;
        let (mut object, strict_warnings) =
            decode::decode_patched(at, patched, request.encoded_body(), duplicates.clone(), validation)?;
        warnings = strict_warnings;
        let owners = tracker.owners_after_update(&current.split, &mut *object, None);
        Ok(ManagedObject { object, owners })
    };
    let written = modify(state, &request.actor, at, part, UpdateSource::Patch, mode, &mut change).await?;
    Ok(read::render_written(request, at.kind, StatusCode::OK, written)?.with_warnings(warnings))
}
