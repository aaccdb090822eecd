//! Sends requests and decodes replies.
//!
//! kube's own calls decode `managedFields`, which are often larger than the rest of the object, and copy each body. All reads and
//! writes of this crate use these functions instead.

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use cleat_api::transport::{AcceptedReply, ReplyBody, RequestBody, Transport, TypedBody};
use kube::Error;
use kube::core::Status;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::decode::without_managed_fields;

/// Sends a request and decodes the object in the reply.
pub(crate) async fn fetch<T: DeserializeOwned>(
    client: &dyn Transport,
    request: http::Request<Vec<u8>>,
) -> kube::Result<T> {
    let json = fetch_bytes(client, request).await?;
    serde_json::from_slice(&without_managed_fields(&json)).map_err(Error::SerdeError)
}

/// Sends a request and returns the body of the reply.
pub(crate) async fn fetch_bytes(client: &dyn Transport, request: http::Request<Vec<u8>>) -> kube::Result<Bytes> {
    match call(client, request.map(RequestBody::encoded)).await?.into_body() {
        ReplyBody::Encoded(bytes) => Ok(bytes),
        ReplyBody::Object(_) => Ok(Bytes::new()),
    }
}

/// Sends a request and discards the body of a successful reply.
pub(crate) async fn send(client: &dyn Transport, request: http::Request<Vec<u8>>) -> kube::Result<()> {
    fetch_bytes(client, request).await.map(drop)
}

/// Sends a write and returns the object in the reply. A server in this process receives `object` itself instead of its JSON and
/// may reply with an object too.
pub(crate) async fn exchange<T: ExchangedObject>(
    client: &dyn Transport,
    request: http::Request<Vec<u8>>,
    object: Option<&T>,
) -> kube::Result<Arc<T>> {
    let response = call(client, with_typed_body(client, request, object)).await?;
    match response.body().object() {
        Some(object) => Ok(object),
        None => {
            let object = serde_json::from_slice(&without_managed_fields(response.body().encoded()));
            object.map(Arc::new).map_err(Error::SerdeError)
        }
    }
}

/// Like [`exchange`], for requests whose reply may be a Status instead of an object: `None` then.
pub(crate) async fn exchange_unless_status<T: ExchangedObject>(
    client: &dyn Transport,
    request: http::Request<Vec<u8>>,
) -> kube::Result<Option<Arc<T>>> {
    #[derive(Deserialize)]
    struct KindOnly<'a> {
        #[serde(borrow)]
        kind: Option<Cow<'a, str>>,
    }
    let response = call(client, with_typed_body::<T>(client, request, None)).await?;
    if let Some(object) = response.body().object() {
        return Ok(Some(object));
    }
    let reply: KindOnly<'_> = serde_json::from_slice(response.body().encoded()).map_err(Error::SerdeError)?;
    match reply.kind.as_deref() {
        Some("Status") => Ok(None),
        _ => serde_json::from_slice(&without_managed_fields(response.body().encoded()))
            .map(|object| Some(Arc::new(object)))
            .map_err(Error::SerdeError),
    }
}

/// Like [`exchange`], but discards the reply. A server in this process then does not encode it.
pub(crate) async fn submit<T: ExchangedObject>(
    client: &dyn Transport,
    request: http::Request<Vec<u8>>,
    object: &T,
) -> kube::Result<()> {
    call(client, with_typed_body(client, request, Some(object))).await.map(drop)
}

/// An object that can be sent in a request and received in a reply.
pub(crate) trait ExchangedObject: DeserializeOwned + Serialize + Clone + Any + Send + Sync {}

impl<T: DeserializeOwned + Serialize + Clone + Any + Send + Sync> ExchangedObject for T {}

async fn call(client: &dyn Transport, request: http::Request<RequestBody>) -> kube::Result<http::Response<ReplyBody>> {
    let response = client.call(request).await.map_err(|error| Error::Service(error.0))?;
    let code = response.status();
    if is_failure(code) { Err(failure(code, response.body().encoded())) } else { Ok(response) }
}

/// The request with the object itself as its body if the server accepts objects, and with its encoded body otherwise.
fn with_typed_body<T: ExchangedObject>(
    client: &dyn Transport,
    request: http::Request<Vec<u8>>,
    object: Option<&T>,
) -> http::Request<RequestBody> {
    request.map(|encoded| match object {
        _ if !client.accepts_objects() => RequestBody::encoded(encoded),
        Some(object) => RequestBody::Object(TypedBody::new(Box::new(object.clone()))),
        None => RequestBody::Encoded(encoded.into(), AcceptedReply::object::<T>()),
    })
}

pub(crate) fn is_failure(code: http::StatusCode) -> bool {
    code.is_client_error() || code.is_server_error()
}

/// The error for a failed response. A body that is not a Status becomes the message of one.
pub(crate) fn failure(code: http::StatusCode, body: &[u8]) -> Error {
    let status = serde_json::from_slice::<Status>(body).unwrap_or_else(|_| {
        let message = String::from_utf8_lossy(body);
        Status::failure(message.trim(), "Failed to parse error data").with_code(code.as_u16())
    });
    Error::Api(status.boxed())
}
