//! An object that goes from one part of a process to another as it is, beside the text of a request or an answer.

use std::any::{Any, TypeId};
use std::sync::{Arc, Mutex, PoisonError};

/// With a request: what its text says, and the type in which an answer is welcome. With an answer: what it would say.
#[derive(Clone)]
pub struct Handed {
    sort: TypeId,
    /// Whoever takes it first has it; the rest read the text.
    object: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
}

impl Handed {
    pub fn object<T: Any + Send>(object: Box<T>) -> Self {
        Self::some(TypeId::of::<T>(), Some(object))
    }

    /// With a request whose text says something else.
    pub fn wanted<T: Any>() -> Self {
        Self::some(TypeId::of::<T>(), None)
    }

    fn some(sort: TypeId, object: Option<Box<dyn Any + Send>>) -> Self {
        Self { sort, object: Arc::new(Mutex::new(object)) }
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
        assert_eq!(sent.clone().take::<u32>(), Some(Box::new(7)));
        assert_eq!(sent.take::<u32>(), None);
        let answer = sent.answer(Box::new(8_u32)).ok().and_then(|answer| answer.take::<u32>());
        assert_eq!(answer, Some(Box::new(8)));
        assert!(Handed::wanted::<String>().answer(Box::new(8_u32)).is_err());
    }
}
