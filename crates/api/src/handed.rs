//! An object that goes from one part of a process to another as it is, in place of the text of a request or an answer.

use std::any::{Any, TypeId};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

/// With a request: what its text would say, and the type in which an answer is welcome.
#[derive(Clone)]
pub struct Handed {
    sort: TypeId,
    /// Whoever takes it first has it.
    object: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    encode: Option<Encode>,
}

type Encode = fn(&dyn Any) -> Option<Vec<u8>>;

fn encoded<T: Any + Serialize>(object: &dyn Any) -> Option<Vec<u8>> {
    serde_json::to_vec(object.downcast_ref::<T>()?).ok()
}

impl Handed {
    pub fn object<T: Any + Send + Serialize>(object: Box<T>) -> Self {
        Self { object: Arc::new(Mutex::new(Some(object))), encode: Some(encoded::<T>), ..Self::wanted::<T>() }
    }

    /// With a request that has a text.
    pub fn wanted<T: Any>() -> Self {
        Self { sort: TypeId::of::<T>(), object: Arc::default(), encode: None }
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
    pub fn answer(&self, object: Arc<dyn Any + Send + Sync>) -> Option<Answer> {
        ((*object).type_id() == self.sort).then_some(Answer(object))
    }
}

/// With an answer: what its text would say.
#[derive(Clone)]
pub struct Answer(Arc<dyn Any + Send + Sync>);

impl Answer {
    pub fn object<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.0.clone().downcast().ok()
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
        let answer = sent.answer(Arc::new(8_u32)).unwrap();
        assert_eq!((answer.object::<u32>(), answer.object::<String>()), (Some(Arc::new(8)), None));
        assert!(Handed::wanted::<String>().answer(Arc::new(8_u32)).is_none());
    }
}
