//! Allows one operation per key at a time. A second one is refused at once; it does not wait for a call that may hang.
use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tonic::Status;

#[derive(Clone, Default)]
pub struct InFlight {
    keys: Arc<Mutex<HashSet<String>>>,
}

/// Ends the operation when dropped. It has no lifetime, so that it can move into the task that does the work: a client that
/// disconnects must not end the operation early.
#[must_use]
pub struct InFlightGuard {
    keys: Arc<Mutex<HashSet<String>>>,
    key: String,
}

impl InFlight {
    pub fn new() -> InFlight {
        InFlight::default()
    }

    /// Returns ABORTED if another operation on the same key has not finished.
    pub fn begin(&self, key: &str) -> Result<InFlightGuard, Status> {
        if lock(&self.keys).insert(key.to_owned()) {
            Ok(InFlightGuard { keys: Arc::clone(&self.keys), key: key.to_owned() })
        } else {
            Err(Status::aborted(format!("another operation on {key:?} is in progress")))
        }
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        lock(&self.keys).remove(&self.key);
    }
}

// A panic cannot leave the set half changed, so a poisoned lock is still usable.
fn lock(keys: &Mutex<HashSet<String>>) -> MutexGuard<'_, HashSet<String>> {
    keys.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_operation_on_a_volume_is_aborted_until_the_first_ends() {
        let inflight = InFlight::new();
        let first = inflight.begin("a").unwrap();
        assert_eq!(inflight.begin("a").err().map(|status| status.code()), Some(tonic::Code::Aborted));
        let _other = inflight.begin("b").unwrap();
        drop(first);
        assert!(inflight.begin("a").is_ok());
    }
}
