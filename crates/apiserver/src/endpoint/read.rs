//! GET of one object, and the rendering of one object in the form the client negotiated.

use bytes::BytesMut;
use http::StatusCode;
use serde_json::json;

use super::At;
use super::write::Written;
use crate::api::Api;
use crate::error::ApiError;
use crate::http::Call;
use crate::http::accept::{Form, Shape, negotiate};
use crate::http::reply::Reply;
use crate::kind::Kind;
use crate::render::{self, Stored};
use crate::{meta, table};

pub(crate) async fn get(api: &Api, call: &Call, at: At<'_>) -> Result<Reply, ApiError> {
    if let Some(asked) = call.query.list_options()?.version {
        let current = api.store.revision().await?;
        if asked > current {
            return Err(ApiError::VersionTooLarge { asked, current });
        }
    }
    let entry = api.of(at.kind).get(&at.key()).await?.ok_or_else(|| at.not_found())?;
    one(call, at.kind, StatusCode::OK, &Stored::from(&entry))
}

/// What a write has made; whoever is in this process and knows its type gets it as it is.
pub(crate) fn written(call: &Call, kind: &dyn Kind, code: StatusCode, written: Written) -> Result<Reply, ApiError> {
    let Written { stored, object } = written;
    if let Some(handed) = &call.handed
        && matches!(negotiate(call.accept.as_deref(), Shape::Item)?, Form::Plain)
        && let Some(answer) = handed.reply(object)
    {
        return Ok(Reply::handed(code, answer));
    }
    one(call, kind, code, &stored)
}

pub(crate) fn one(call: &Call, kind: &dyn Kind, code: StatusCode, stored: &Stored) -> Result<Reply, ApiError> {
    let mut out = BytesMut::new();
    match negotiate(call.accept.as_deref(), Shape::Item)? {
        Form::Plain => render::object(&mut out, kind.descriptor(), stored),
        Form::Partial => render::partial(&mut out, stored),
        Form::Table => {
            table::open(&mut out, kind, &json!({ "resourceVersion": stored.revision.to_string() }), true);
            table::row(&mut out, kind, stored, call.query.include_object()?, meta::now());
            table::close(&mut out);
        }
    }
    Ok(Reply::buffer(code, out))
}
