//! The HTTP protocol of the API: paths, query parameters, bodies, content negotiation and replies. The modules
//! `handler` and `endpoint` carry requests out.

pub(crate) mod accept;
pub(crate) mod body;
pub(crate) mod protobuf;
pub(crate) mod query;
pub(crate) mod reply;
pub(crate) mod route;
mod warnings;

use std::sync::OnceLock;

use bytes::Bytes;
use cleat_api::transport::RequestBody;
use cleat_apimachinery::kind::{Kind, Object};
use cleat_auth::actor::Actor;
use http::Method;
use query::Query;
use tokio_util::sync::CancellationToken;

/// A request to a resource whose caller is authenticated and authorized.
pub(crate) struct ResourceRequest {
    pub(crate) method: Method,
    pub(crate) query: Query,
    pub(crate) accept: Option<String>,
    pub(crate) content_type: Option<String>,
    /// The header `User-Agent`, or the caller's name if there is none.
    pub(crate) user_agent: String,
    /// The user that the request acts as.
    pub(crate) actor: Actor,
    pub(crate) body: RequestBody,
    /// The JSON of a body that came as an object. Encoded on first use.
    pub(crate) encoded_object: OnceLock<Bytes>,
    /// Cancelled when the connection's server stops; ends watches.
    pub(crate) closing: CancellationToken,
}

impl ResourceRequest {
    /// The body as JSON. A body that came as an object is encoded once.
    pub(crate) fn encoded_body(&self) -> &Bytes {
        match &self.body {
            RequestBody::Encoded(bytes, _) => bytes,
            RequestBody::Object(body) => {
                self.encoded_object.get_or_init(|| body.encode().map(Bytes::from).unwrap_or_default())
            }
        }
    }

    /// Takes the object of a body that came as an object of the kind's type. `encode` gets the object and returns its
    /// JSON, which [`ResourceRequest::encoded_body`] returns from then on. None for other bodies, and if the object was
    /// taken before.
    pub(crate) fn take_object<T>(
        &self,
        kind: &dyn Kind,
        encode: impl FnOnce(Box<dyn Object>) -> (T, Bytes),
    ) -> Option<T> {
        let RequestBody::Object(body) = &self.body else { return None };
        let (result, json) = encode(kind.take_typed(body)?);
        self.encoded_object.get_or_init(|| json);
        Some(result)
    }
}
