//! Typed objects that travel beside a request or a reply between a client and a server in the same process.
//!
//! They replace the JSON body: neither side encodes or decodes. [`TypedBody`] and [`TypedReply`] are extensions of an HTTP
//! request and response. A server that does not know the type encodes the body itself and replies with JSON.

use std::any::{Any, TypeId};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

/// Extension of a request: the object that the request's body would encode, and the type that the client accepts as a
/// [`TypedReply`]. Clones share one object: the first [`TypedBody::take`] removes it from all of them.
#[derive(Clone)]
pub struct TypedBody {
    reply_type: TypeId,
    object: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    encode: Option<EncodeFn>,
}

type EncodeFn = fn(&dyn Any) -> Option<Vec<u8>>;

fn encode_as<T: Any + Serialize>(object: &dyn Any) -> Option<Vec<u8>> {
    serde_json::to_vec(object.downcast_ref::<T>()?).ok()
}

impl TypedBody {
    /// For a request with an empty body: `object` is sent, and a reply of the same type is accepted.
    pub fn with_object<T: Any + Send + Serialize>(object: Box<T>) -> Self {
        Self { object: Arc::new(Mutex::new(Some(object))), encode: Some(encode_as::<T>), ..Self::reply_only::<T>() }
    }

    /// For a request that has an encoded body, or needs none: only the reply may be typed.
    pub fn reply_only<T: Any>() -> Self {
        Self { reply_type: TypeId::of::<T>(), object: Arc::default(), encode: None }
    }

    /// Returns the object as JSON, for a server that does not know its type. Returns `None` for [`TypedBody::reply_only`],
    /// if the object was taken, and if it cannot be encoded.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        self.encode?(&**object.as_ref()?)
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

    /// Returns a typed reply with this object, or `None` if the client does not accept its type. The server then replies
    /// with JSON.
    pub fn reply(&self, object: Arc<dyn Any + Send + Sync>) -> Option<TypedReply> {
        ((*object).type_id() == self.reply_type).then_some(TypedReply(object))
    }
}

/// Extension of a response: the object that the response's body would encode. The body is empty.
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
        let sent = TypedBody::with_object(Box::new(7_u32));
        assert_eq!(sent.take::<String>(), None);
        assert_eq!(sent.encode().as_deref(), Some(&b"7"[..]));
        assert_eq!(sent.clone().take::<u32>(), Some(Box::new(7)));
        assert_eq!((sent.take::<u32>(), sent.encode()), (None, None));
        let reply = sent.reply(Arc::new(8_u32)).unwrap();
        assert_eq!((reply.object::<u32>(), reply.object::<String>()), (Some(Arc::new(8)), None));
        assert!(TypedBody::reply_only::<String>().reply(Arc::new(8_u32)).is_none());
    }
}
