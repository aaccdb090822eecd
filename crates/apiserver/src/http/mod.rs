//! The protocol of the API: paths, query parameters, bodies, content negotiation and replies. What a request does is
//! decided elsewhere ([`handler`](crate::handler), [`endpoint`](crate::endpoint)).

pub(crate) mod accept;
pub(crate) mod body;
pub(crate) mod protobuf;
mod protobuf_security;
mod protobuf_sidecars;
pub(crate) mod query;
pub(crate) mod reply;
pub(crate) mod route;
mod warning;

use std::sync::OnceLock;

use bytes::Bytes;
use cleat_api::transport::RequestBody;
use cleat_apimachinery::kind::{Kind, Object};
use cleat_auth::actor::Actor;
use http::Method;
use query::Query;
use tokio_util::sync::CancellationToken;

/// A request to a resource, taken apart.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) query: Query,
    pub(crate) accept: Option<String>,
    pub(crate) content_type: Option<String>,
    /// Who the client says it is.
    pub(crate) agent: String,
    /// On whose behalf the request is carried out.
    pub(crate) actor: Actor,
    pub(crate) body: RequestBody,
    /// The encoded form of an object that came instead of an encoded body. Set when it is first needed.
    pub(crate) encoded_object: OnceLock<Bytes>,
    /// Ends streams when the connection's server stops.
    pub(crate) closing: CancellationToken,
}

impl Call {
    /// The encoded body. An object that came instead of one is encoded once.
    pub(crate) fn text(&self) -> &Bytes {
        match &self.body {
            RequestBody::Encoded(bytes, _) => bytes,
            RequestBody::Object(body) => {
                self.encoded_object.get_or_init(|| body.encode().map(Bytes::from).unwrap_or_default())
            }
        }
    }

    /// Takes the object of a body that was not encoded, if it is of the kind's type. `encode` uses it and returns its encoded
    /// form, which [`Call::text`] returns from then on.
    pub(crate) fn adopted<T>(&self, kind: &dyn Kind, encode: impl FnOnce(Box<dyn Object>) -> (T, Bytes)) -> Option<T> {
        let RequestBody::Object(body) = &self.body else { return None };
        let (made, text) = encode(kind.adopt(body)?);
        self.encoded_object.get_or_init(|| text);
        Some(made)
    }
}
