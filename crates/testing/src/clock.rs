//! A clock that only the test advances.

use std::sync::Arc;

use cleat_runtime::Clock;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;

/// Starts at the current time. Clones share the time.
#[derive(Clone)]
pub struct ManualClock(Arc<Mutex<Timestamp>>);

impl Default for ManualClock {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Timestamp::now())))
    }
}

impl ManualClock {
    pub fn advance(&self, seconds: i64) {
        *self.0.lock() += SignedDuration::from_secs(seconds);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        *self.0.lock()
    }
}
