//! An object that goes from one part of a process to another as it is, in place of the text of a request or an answer.

use std::any::{Any, TypeId};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

/// With a request: what its text would say, and the type in which an answer is welcome. With an answer: what it would say.
#[derive(Clone)]
pub struct Handed {
    sort: TypeId,
    /// Whoever takes it first has it.
    object: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    encode: Option<fn(&dyn Any) -> Option<Vec<u8>>>,
}

fn encoded<T: Any + Serialize>(object: &dyn Any) -> Option<Vec<u8>> {
    serde_json::to_vec(object.downcast_ref::<T>()?).ok()
}

impl Handed {
    pub fn object<T: Any + Send + Serialize>(object: Box<T>) -> Self {
        Self { encode: Some(encoded::<T>), ..Self::some(TypeId::of::<T>(), Some(object)) }
    }

    /// With a request that has a text.
    pub fn wanted<T: Any>() -> Self {
        Self::some(TypeId::of::<T>(), None)
    }

    fn some(sort: TypeId, object: Option<Box<dyn Any + Send>>) -> Self {
        Self { sort, object: Arc::new(Mutex::new(object)), encode: None }
    }

    /// The text of a request's object, for whoever does not know its type. Nothing if the object was taken.
    pub fn text(&self) -> Option<Vec<u8>> {
        let place = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        self.encode?(&**place.as_ref()?)
    }

    pub fn take<T: Any>(&self) -> Option<Box<T>> {
        let mut place = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        match place.take()?.downcast() {
            Ok(object) => Some(object),
            Err(other) => {
                *place = Some(other);
                None
            }
        }
    }

    /// The answer to a request that this came with, if whoever sent it knows the type.
    pub fn answer(&self, object: Box<dyn Any + Send>) -> Result<Self, Box<dyn Any + Send>> {
        let sort = (*object).type_id();
        if sort == self.sort { Ok(Self::some(sort, Some(object))) } else { Err(object) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_type_is_taken_and_only_once() {
        let sent = Handed::object(Box::new(7_u32));
        assert_eq!(sent.take::<String>(), None);
        assert_eq!(sent.text().as_deref(), Some(&b"7"[..]));
        assert_eq!(sent.clone().take::<u32>(), Some(Box::new(7)));
        assert_eq!((sent.take::<u32>(), sent.text()), (None, None));
        let answer = sent.answer(Box::new(8_u32)).ok().and_then(|answer| answer.take::<u32>());
        assert_eq!(answer, Some(Box::new(8)));
        assert!(Handed::wanted::<String>().answer(Box::new(8_u32)).is_err());
    }
}
