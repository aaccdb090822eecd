//! Waiting with a time limit. A test waits for an event where there is one (a watch, a channel); [`wait_for`] polls and is
//! for the rest: files, mounts, and conditions over several objects.

use std::time::{Duration, Instant};

/// How long a test waits before it fails. Far above what any condition takes, also on a loaded machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Awaits the future. Panics with `what` after [`WAIT_TIMEOUT`].
pub async fn within_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    let result = tokio::time::timeout(WAIT_TIMEOUT, future).await;
    result.unwrap_or_else(|_| panic!("not within {WAIT_TIMEOUT:?}: {what}"))
}

/// Calls `find` until it returns a value. Panics with `what` after [`WAIT_TIMEOUT`].
pub async fn wait_for<T>(what: &str, find: impl AsyncFn() -> Option<T>) -> T {
    within_timeout(what, async {
        loop {
            if let Some(found) = find().await {
                return found;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    })
    .await
}

/// Calls `holds` until it returns true. Panics with `what` after [`WAIT_TIMEOUT`].
pub async fn wait_until(what: &str, holds: impl AsyncFn() -> bool) {
    wait_for(what, async || holds().await.then_some(())).await;
}

/// As [`wait_until`], for a test without a runtime.
pub fn block_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {WAIT_TIMEOUT:?}: {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}
