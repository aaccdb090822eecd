//! GET of one object, and the reply that shows one object in the negotiated representation.

use bytes::BytesMut;
use cleat_api::transport::AcceptedReply;
use cleat_apimachinery::address::ObjectAddress;
use http::StatusCode;
use serde_json::json;

use super::write::WrittenObject;
use crate::http::ResourceRequest;
use crate::http::accept::{ReplyKind, Representation, negotiate};
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::Kind;
use cleat_apimachinery::meta;
use cleat_apimachinery::render::{self, StoredObject};
use cleat_apimachinery::table;

pub(crate) async fn get(
    state: &ServerState,
    request: &ResourceRequest,
    at: ObjectAddress<'_>,
) -> Result<Reply, ApiError> {
    if let Some(requested) = request.query.list_options()?.resource_version {
        let current = state.store.revision().await?;
        if requested > current {
            return Err(ApiError::VersionTooLarge { requested, current });
        }
    }
    let entry = state.store_of(at.kind).get(&at.key()).await?.ok_or_else(|| at.not_found())?;
    render_object(request, at.kind, StatusCode::OK, &StoredObject::from(&entry))
}

/// The reply to a write. A caller in the same process that accepts the object's type gets the object without encoding.
pub(crate) fn render_written(
    request: &ResourceRequest,
    kind: &dyn Kind,
    code: StatusCode,
    written: WrittenObject,
) -> Result<Reply, ApiError> {
    let WrittenObject { stored, object } = written;
    if request.body.accepted_reply() != AcceptedReply::Encoded
        && matches!(negotiate(request.accept.as_deref(), ReplyKind::Item)?, Representation::Full)
        && let Some(reply) = request.body.accepted_reply().reply(object)
    {
        return Ok(Reply::object(code, reply));
    }
    render_object(request, kind, code, &stored)
}

pub(crate) fn render_object(
    request: &ResourceRequest,
    kind: &dyn Kind,
    code: StatusCode,
    stored: &StoredObject,
) -> Result<Reply, ApiError> {
    let mut out = BytesMut::new();
    match negotiate(request.accept.as_deref(), ReplyKind::Item)? {
        Representation::Full => render::write_object(&mut out, kind.descriptor(), stored),
        Representation::Metadata => render::write_partial_metadata(&mut out, stored),
        Representation::Table => {
            table::open(&mut out, kind, &json!({ "resourceVersion": stored.revision.to_string() }), true);
            table::write_row(&mut out, kind, stored, request.query.include_object()?, meta::now());
            table::close(&mut out);
        }
    }
    Ok(Reply::buffer(code, out))
}
