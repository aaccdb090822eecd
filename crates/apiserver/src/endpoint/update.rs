//! PUT and PATCH.

use cleat_api::transport::AcceptedReply;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::Current;
use cleat_apimachinery::part::ObjectPart;
use http::StatusCode;

use super::decode::Sent;
use super::write::{Origin, is_free, modify};
use super::{apply, decode, read};
use crate::api::Api;
use crate::http::Call;
use crate::http::reply::Reply;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::field_ownership::Operation;
use cleat_apimachinery::managed_fields::{Document, Tracker};
use cleat_apimachinery::patch::{self, Format};

pub(crate) async fn put(api: &Api, call: &Call, at: ObjectAddress<'_>, part: ObjectPart) -> Result<Reply, ApiError> {
    let effect = call.query.effect("UpdateOptions")?;
    let validation = call.query.field_validation("UpdateOptions")?;
    let manager = call.query.field_manager("UpdateOptions", &call.agent)?;
    let tracker = Tracker::new(at.kind, part, Operation::Update, &manager);
    let mut sent = decode::body(call, at.kind, validation)?;
    let warnings = std::mem::take(&mut sent.warnings);
    let mut sent = Some(sent);
    let mut change = |current: &Current<'_>| {
        let Sent { mut object, text, .. } = match sent.take() {
            Some(sent) => sent,
            // Somebody else wrote in between, and the first reading is used up.
            None => decode::body(call, at.kind, validation)?,
        };
        let owners = tracker.updated(&current.divided, &mut *object, text.as_deref());
        Ok(Document { object, owners })
    };
    let written = modify(api, &call.actor, at, part, Origin::Put, effect, &mut change).await?;
    Ok(read::written(call, at.kind, StatusCode::OK, written)?.with_warnings(warnings))
}

pub(crate) async fn patch(api: &Api, call: &Call, at: ObjectAddress<'_>, part: ObjectPart) -> Result<Reply, ApiError> {
    let effect = call.query.effect("PatchOptions")?;
    let validation = call.query.field_validation("PatchOptions")?;
    let manager = call.query.field_manager("PatchOptions", &call.agent)?;
    let format = Format::of(call.content_type.as_deref(), at.kind)?;
    if format == Format::Apply {
        return apply::apply(api, call, at, part).await;
    }
    if call.query.force().is_some() {
        let error = FieldError::forbidden("force", "may not be specified for non-apply patch");
        return Err(ApiError::invalid_option("PatchOptions", error));
    }
    let tracker = Tracker::new(at.kind, part, Operation::Update, &manager);
    let patch = patch::Patch::parse(format, call.text())?;
    let repeated = decode::repeated(call.text(), validation);
    let holds = patch.holds().filter(|_| repeated.is_empty());
    let mut warnings = Vec::new();
    let mut change = |current: &Current<'_>| {
        if let Some(holds) = &holds {
            let mut object = holds.apply(current);
            // Whom an object belongs to that goes with this is nobody's business any more, unless they are told.
            let goes = object.meta().deletion_timestamp.is_some() && is_free(at.kind, &*object);
            let owners = match goes && call.body.accepted_reply() != AcceptedReply::Encoded {
                true => current.divided.owners.clone(),
                false => tracker.updated(&current.divided, &mut *object, None),
            };
            return Ok(Document { object, owners });
        }
        let patched = patch.apply(at.kind, current)?;
        let (mut object, found) = decode::patched(at, patched, call.text(), repeated.clone(), validation)?;
        warnings = found;
        let owners = tracker.updated(&current.divided, &mut *object, None);
        Ok(Document { object, owners })
    };
    let written = modify(api, &call.actor, at, part, Origin::Patch, effect, &mut change).await?;
    Ok(read::written(call, at.kind, StatusCode::OK, written)?.with_warnings(warnings))
}
