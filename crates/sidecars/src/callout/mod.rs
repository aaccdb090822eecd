//! The attacher of FlexVolumes: a VolumeAttachment of [`flex::ATTACHER`] becomes a driver's `attach`, its deletion `detach`.
//!
//! Guarantees:
//! - Before a driver is called, the attachment holds our finalizer: from then on it cannot vanish without `detach`, whatever
//!   came of the call, and whoever of us died meanwhile. One whose driver was never called needs none.
//! - What a driver did not answer in time may be done: it is called again, or `detach` is.
//! - A driver that denies that a volume is where we say has its word written down before it is asked to attach it anew: the
//!   node is told the device that the last `attach` gave, or none.
//! - Attachments wait for their own driver only; the calls for one of them never run at the same time, also across a restart.
//!
//! Woken by attachments and by drivers that come, change or go.
//!
//! Crash points: `callout:held`, `callout:attached` (before the status says so), `callout:detached` (before the finalizer
//! goes).

mod act;
pub mod decide;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::flex;
use cleat_flex::Drivers;
use cleat_runtime::{Backoff, Cache, Change, Outcome, Queue, work};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::attachment::only_errors_differ;
use crate::{Context, Failure};
use decide::Seen;

/// Attachments in hand at once, most of which wait for a program.
const AT_ONCE: usize = 256;

#[derive(Clone, Debug)]
pub struct Options {
    /// How long an attachment waits after a failure.
    pub retry: Backoff,
    /// How often drivers are asked whether volumes are where the attachments say.
    pub verify_every: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let retry = Backoff::new(Duration::from_millis(500), Duration::from_secs(122));
        Self { retry, verify_every: Duration::from_secs(60) }
    }
}

#[derive(Clone)]
struct Caller {
    context: Context,
    drivers: Drivers,
    attachments: Cache<VolumeAttachment>,
    /// Attachments whose driver is to be asked whether they are true.
    doubted: Arc<Mutex<HashSet<String>>>,
    stop: CancellationToken,
}

/// Runs until `stop`.
pub async fn run(context: Context, drivers: Drivers, options: Options, stop: CancellationToken) {
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
    // Before anything is decided: no change of a driver is missed.
    let changes = drivers.changes();
    let caller = Caller { context, drivers, attachments, doubted: Arc::default(), stop: stop.clone() };
    let (follower, verifier) = (caller.clone(), caller.clone());
    tokio::join!(
        follower.follow(changes, queue.clone()),
        verifier.verify(queue.clone(), options.verify_every),
        work("callout", queue, AT_ONCE, stop, move |name| caller.clone().reconcile(name)),
    );
}

fn is_ours(attachment: &VolumeAttachment) -> bool {
    attachment.spec.attacher == flex::ATTACHER
}

impl Caller {
    async fn reconcile(self, name: String) -> Result<Outcome, Failure> {
        let doubted = self.doubted.lock().remove(&name);
        let Some(attachment) = self.attachments.named(&name).filter(|a| is_ours(a)) else { return Ok(Outcome::Done) };
        let seen = Seen::new(&attachment, |driver| self.drivers.state(driver), doubted);
        let decision = decide::attachment(&seen);
        // A driver that takes long goes on without us; its lock and our finalizer tell whoever comes after us.
        tokio::select! {
            () = self.stop.cancelled() => Ok(Outcome::Done),
            settled = self.settle(&attachment, decision) => settled.map(|()| Outcome::Done),
        }
    }

    /// Everything is looked at again when drivers change.
    async fn follow(self, mut changes: watch::Receiver<()>, queue: Queue<String>) {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
            self.names().for_each(|name| queue.add(name));
        }
    }

    async fn verify(self, queue: Queue<String>, every: Duration) {
        let mut ticks = tokio::time::interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes at once, when everything is looked at anyway.
        ticks.tick().await;
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            for name in self.names() {
                self.doubted.lock().insert(name.clone());
                queue.add(name);
            }
        }
    }

    fn names(&self) -> impl Iterator<Item = String> {
        let ours = self.attachments.each().filter(|attachment| is_ours(attachment));
        ours.filter_map(|attachment| attachment.metadata.name.clone())
    }
}
