//! How a component reaches an API server: one form for servers in the same process and for servers elsewhere.
//!
//! A [`Transport`] to a server in this process passes objects without encoding them: [`RequestBody::Object`] and
//! [`ReplyBody::Object`]. Over HTTP bodies are always encoded. Callers use the same functions for both.

use std::any::{Any, TypeId};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use http::{Request, Response};
use serde::Serialize;

/// A connection to one API server on behalf of one user.
pub trait Transport: Send + Sync {
    /// Sends a request and returns the whole reply, whatever its status code.
    fn call(&self, request: Request<RequestBody>) -> BoxFuture<'_, Result<Response<ReplyBody>, TransportError>>;

    /// Sends a watch request and returns its reply as it arrives. A chunk may end in the middle of an event. If the status
    /// code is not 200, the chunks are an encoded Status.
    fn watch(&self, request: Request<()>) -> BoxFuture<'_, Result<Response<WatchChunks>, TransportError>>;

    /// Whether the server takes [`RequestBody::Object`]. The caller must encode the body if it does not.
    fn accepts_objects(&self) -> bool;
}

/// The body of a watch reply.
pub type WatchChunks = BoxStream<'static, Result<Bytes, TransportError>>;

/// No reply arrived. Whether the server carried out the request is unknown.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct TransportError(#[from] pub Box<dyn std::error::Error + Send + Sync>);

pub enum RequestBody {
    /// JSON, a patch, or nothing. The reply may be an object of the accepted type.
    Encoded(Bytes, AcceptedReply),
    Object(TypedBody),
}

impl RequestBody {
    /// An encoded body whose reply is encoded, too.
    pub fn encoded(bytes: impl Into<Bytes>) -> Self {
        Self::Encoded(bytes.into(), AcceptedReply::Encoded)
    }

    /// The type in which the caller accepts the reply.
    pub fn accepted_reply(&self) -> AcceptedReply {
        match self {
            Self::Encoded(_, accepted) => *accepted,
            Self::Object(body) => body.reply,
        }
    }
}

/// What a caller accepts besides an encoded reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptedReply {
    /// Nothing else.
    Encoded,
    /// An object of this type.
    Object(TypeId),
}

impl AcceptedReply {
    pub fn object<T: Any>() -> Self {
        Self::Object(TypeId::of::<T>())
    }

    /// The object as a reply body, if the caller accepts its type.
    pub fn reply(self, object: Arc<dyn Any + Send + Sync>) -> Option<TypedReply> {
        (Self::Object((*object).type_id()) == self).then_some(TypedReply(object))
    }
}

/// An object in place of an encoded request body.
pub struct TypedBody {
    reply: AcceptedReply,
    /// Empty after [`TypedBody::take`].
    object: Mutex<Option<Box<dyn Any + Send>>>,
    encode: EncodeFn,
}

type EncodeFn = fn(&dyn Any) -> Option<Vec<u8>>;

fn encode_as<T: Any + Serialize>(object: &dyn Any) -> Option<Vec<u8>> {
    serde_json::to_vec(object.downcast_ref::<T>()?).ok()
}

impl TypedBody {
    /// The caller accepts the reply as an object of the same type.
    pub fn new<T: Any + Send + Serialize>(object: Box<T>) -> Self {
        Self { reply: AcceptedReply::object::<T>(), object: Mutex::new(Some(object)), encode: encode_as::<T> }
    }

    /// Encodes the object as JSON, for a receiver that does not know its type. `None` if the object was taken.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        (self.encode)(&**object.as_ref()?)
    }

    /// Removes and returns the object if it is a `T`. An object of another type stays.
    pub fn take<T: Any>(&self) -> Option<Box<T>> {
        let mut slot = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.take()?.downcast() {
            Ok(object) => Some(object),
            Err(other) => {
                *slot = Some(other);
                None
            }
        }
    }
}

pub enum ReplyBody {
    Encoded(Bytes),
    Object(TypedReply),
}

impl ReplyBody {
    /// The encoded body. Empty for an object: a caller that accepted one asks for it first.
    pub fn encoded(&self) -> &[u8] {
        match self {
            Self::Encoded(bytes) => bytes,
            Self::Object(_) => &[],
        }
    }

    /// The object, if the reply carries one of type `T`.
    pub fn object<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        match self {
            Self::Encoded(_) => None,
            Self::Object(reply) => reply.object(),
        }
    }
}

/// An object in place of an encoded reply body.
#[derive(Clone)]
pub struct TypedReply(Arc<dyn Any + Send + Sync>);

impl TypedReply {
    pub fn object<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.0.clone().downcast().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_type_is_taken_and_only_once() {
        let sent = TypedBody::new(Box::new(7_u32));
        assert_eq!(sent.take::<String>(), None);
        assert_eq!(sent.encode().as_deref(), Some(&b"7"[..]));
        assert_eq!(sent.take::<u32>(), Some(Box::new(7)));
        assert_eq!((sent.take::<u32>(), sent.encode()), (None, None));
        let reply = sent.reply.reply(Arc::new(8_u32)).unwrap();
        assert_eq!((reply.object::<u32>(), reply.object::<String>()), (Some(Arc::new(8)), None));
        assert!(AcceptedReply::object::<String>().reply(Arc::new(8_u32)).is_none());
        assert!(AcceptedReply::Encoded.reply(Arc::new(8_u32)).is_none());
    }
}
