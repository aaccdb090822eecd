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
use cleat_api::Handed;
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
    pub(crate) body: Bytes,
    /// From a component of this process: an object in place of a body, or the type of the answer.
    pub(crate) handed: Option<Handed>,
    /// What the object that was handed over says.
    pub(crate) said: OnceLock<Bytes>,
    /// Ends streams when the connection's server stops.
    pub(crate) closing: CancellationToken,
}

impl Call {
    /// What the body says, or the object in its place.
    pub(crate) fn text(&self) -> &Bytes {
        match &self.handed {
            Some(handed) if self.body.is_empty() => {
                self.said.get_or_init(|| handed.text().map(Bytes::from).unwrap_or_default())
            }
            _ => &self.body,
        }
    }

    /// The object in place of a body, if there is one that the kind knows. Whoever asks again reads what it `says`.
    pub(crate) fn adopted<T>(&self, kind: &dyn Kind, says: impl FnOnce(Box<dyn Object>) -> (T, Bytes)) -> Option<T> {
        let object = kind.adopt(self.handed.as_ref().filter(|_| self.body.is_empty())?)?;
        let (made, text) = says(object);
        self.said.get_or_init(|| text);
        Some(made)
    }
}
