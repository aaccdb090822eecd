//! The FlexVolume attacher: a VolumeAttachment of [`cleat_api::flex::ATTACHER`] becomes the driver's `attach`, its deletion `detach`.
//!
//! Guarantees:
//! - The attachment carries the attacher's finalizer before the driver's `attach` is called. From then on the attachment
//!   cannot disappear before `detach` has succeeded, whatever the result of `attach` was, and also if this process dies.
//!   An attachment whose driver was never called has no finalizer and needs no `detach`.
//! - A call that timed out may have taken effect: `attach` is called again, or `detach` is.
//! - If a driver denies that a volume is attached, the status is set to not attached before `attach` is called again. The
//!   node therefore always sees the device of the last `attach`, or none.
//! - An attachment waits for its own driver only. Two calls for one attachment never run at the same time, not even
//!   after a restart: `cleat_flex` locks each call.
//!
//! Woken by changes of attachments and by drivers that appear, change or disappear.
//!
//! Crash points: `callout:held` (finalizer written), `callout:attached` (before the status says so), `callout:detached`
//! (before the finalizer is removed).

mod act;
pub mod decide;
mod memory;
mod observe;

use std::time::Duration;

use cleat_flex::Drivers;
use cleat_runtime::{Backoff, Change, Outcome, Queue, work};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::attachment::only_errors_differ;
use crate::{Context, SidecarError};
use memory::PendingVerifications;
use observe::{FlexAttachmentObserver, is_ours};

/// Most of these reconciles wait for a driver process to end.
const MAX_CONCURRENT_RECONCILES: usize = 256;

#[derive(Clone, Debug)]
pub struct FlexAttacherOptions {
    /// The delay after a failed reconcile of an attachment.
    pub retry: Backoff,
    /// How often drivers are asked whether attached volumes are still attached.
    pub verify_interval: Duration,
}

impl Default for FlexAttacherOptions {
    fn default() -> Self {
        let retry = Backoff::new(Duration::from_millis(500), Duration::from_secs(122));
        Self { retry, verify_interval: Duration::from_secs(60) }
    }
}

#[derive(Clone)]
struct FlexAttacher {
    context: Context,
    observer: FlexAttachmentObserver,
    verifications: PendingVerifications,
    stop: CancellationToken,
}

/// Runs until `stop` is cancelled.
pub async fn run(context: Context, drivers: Drivers, options: FlexAttacherOptions, stop: CancellationToken) {
    let attachments = context.caches.attachments();
    tokio::select! {
        () = stop.cancelled() => return,
        () = attachments.synced() => {}
    }
    let queue: Queue<String> = Queue::new(options.retry);
    let q = queue.clone();
    attachments.subscribe(move |change| {
        let Change::Applied { old, new } = change else { return };
        if is_ours(new) && old.as_ref().is_none_or(|old| !only_errors_differ(old, new)) {
            q.add(new.metadata.name.clone().unwrap_or_default());
        }
    });
    // Subscribed before the first decision, so that no change of a driver is missed.
    let driver_changes = drivers.changes();
    let observer = FlexAttachmentObserver { attachments, drivers };
    let attacher =
        FlexAttacher { context, observer, verifications: PendingVerifications::default(), stop: stop.clone() };
    let (follower, verifier) = (attacher.clone(), attacher.clone());
    tokio::join!(
        follower.follow_drivers(driver_changes, queue.clone()),
        verifier.verify_periodically(queue.clone(), options.verify_interval),
        work("callout", queue, MAX_CONCURRENT_RECONCILES, stop, move |name| attacher.clone().reconcile(name)),
    );
}

impl FlexAttacher {
    async fn reconcile(self, name: String) -> Result<Outcome, SidecarError> {
        let needs_verification = self.verifications.take(&name);
        let Some((attachment, snapshot)) = self.observer.attachment(&name, needs_verification) else {
            return Ok(Outcome::Done);
        };
        let decision = decide::attachment(&snapshot);
        // On shutdown a running driver process is left alone. The next process waits for its lock file, and the finalizer
        // tells it that `detach` is still due.
        tokio::select! {
            () = self.stop.cancelled() => Ok(Outcome::Done),
            result = self.apply(&attachment, decision) => result.map(|()| Outcome::Done),
        }
    }

    /// Queues every attachment after each change of a driver.
    async fn follow_drivers(self, mut changes: watch::Receiver<()>, queue: Queue<String>) {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
            self.observer.names().for_each(|name| queue.add(name));
        }
    }

    async fn verify_periodically(self, queue: Queue<String>, interval: Duration) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes immediately; every attachment is reconciled at the start anyway.
        ticks.tick().await;
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            for name in self.observer.names() {
                self.verifications.request(&name);
                queue.add(name);
            }
        }
    }
}
