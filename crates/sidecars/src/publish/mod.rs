//! The attacher: a VolumeAttachment becomes ControllerPublishVolume, its deletion ControllerUnpublishVolume.
//!
//! Guarantees:
//! - Before ControllerPublishVolume is called, the attachment holds our finalizer and the node id of the call: from then on
//!   it cannot vanish without ControllerUnpublishVolume, whatever the call's outcome was.
//! - The volume holds our finalizer as long as an attachment may need its handle.
//! - When an attachment leaves, the finalizer goes first and the status after it: the other way round would unpublish
//!   twice.
//!
//! - Where the driver lists what is published where, its list is compared with the attachments now and then; where they
//!   disagree the call is made again, and nothing is concluded from the list alone.
//!
//! Crash points: `publish:volume-held`, `publish:attachment-held`, `publish:published` (before the status says so),
//! `publish:confirmed`, `publish:unpublished` (before the finalizer goes), `publish:let-go`, `publish:volume-let-go`.

mod act;
pub mod decide;
#[cfg(test)]
mod decide_table;
mod observe;
mod verify;

use std::sync::Arc;
use std::time::Duration;

use cleat_runtime::{Backoff, Change, Outcome, Queue, work};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::attachment::only_errors_differ;
use crate::driver::Capability;
use crate::{Context, Driver, Failure};

/// Attachments in hand at once; most of them wait for one of the places below.
const AT_ONCE: usize = 1024;

#[derive(Clone, Debug)]
pub struct Options {
    /// Driver calls at once, apart for each direction: detaches that hang never delay an attach.
    pub calls: usize,
    /// How long one call may take.
    pub deadline: Duration,
    /// How long an attachment waits after a failure.
    pub retry: Backoff,
    /// What a volume is formatted with where nothing else says so.
    pub default_fs_type: String,
    /// How often the driver's list is compared with the attachments, where it says what is published where.
    pub verify_every: Duration,
    /// How many volumes to ask for at a time; 0 leaves it to the driver.
    pub page: i32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            calls: 100,
            deadline: Duration::from_secs(15),
            retry: Backoff::new(Duration::from_secs(1), Duration::from_secs(300)),
            default_fs_type: String::new(),
            verify_every: Duration::from_secs(60),
            page: 0,
        }
    }
}

#[derive(Clone)]
struct Publisher {
    context: Context,
    driver: Driver,
    options: Options,
    observed: observe::Observed,
    publishing: Arc<Semaphore>,
    unpublishing: Arc<Semaphore>,
}

/// Runs until `stop`.
pub async fn run(context: Context, driver: Driver, options: Options, stop: CancellationToken) {
    let (attachments, volumes) = (Queue::new(options.retry), Queue::new(options.retry));
    let observed = observe::Observed::new(&context.caches);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    wake(&observed, &attachments, &volumes, &driver.name);
    let driver = Driver { client: driver.client.with_deadline(options.deadline), ..driver };
    let places = || Arc::new(Semaphore::new(options.calls.max(1)));
    let (publishing, unpublishing) = (places(), places());
    let publisher = Publisher { context, driver, options, observed, publishing, unpublishing };
    let (other, verifier, disputed) = (publisher.clone(), publisher.clone(), attachments.clone());
    // One queue for both directions: an attachment is never published and unpublished at the same time.
    tokio::join!(
        work("publish", attachments, AT_ONCE, stop.clone(), move |name| publisher.clone().reconcile_attachment(name)),
        work("publish-volume", volumes, AT_ONCE, stop.clone(), move |name| other.clone().reconcile_volume(name)),
        verifier.verify(disputed, stop),
    );
}

fn wake(observed: &observe::Observed, attachments: &Queue<String>, volumes: &Queue<String>, driver: &str) {
    let q = attachments.clone();
    let add = move |attachment: &VolumeAttachment| q.add(attachment.metadata.name.clone().unwrap_or_default());
    let (add_one, q) = (add.clone(), volumes.clone());
    observed.attachments.subscribe(move |change| match change {
        Change::Applied { old, new } if old.as_ref().is_none_or(|old| !only_errors_differ(old, new)) => add_one(new),
        Change::Applied { .. } => {}
        Change::Deleted(gone) => {
            if let Some(volume) = &gone.spec.source.persistent_volume_name {
                q.add(volume.clone());
            }
        }
    });
    let (add_all, q, seen, driver) = (add.clone(), volumes.clone(), observed.clone(), driver.to_owned());
    observed.volumes.subscribe(move |change| {
        let Change::Applied { old, new } = change else { return };
        let name = new.metadata.name.as_deref().unwrap_or_default();
        if old.is_none() {
            seen.attachments_of_volume(name).iter().for_each(|a| add_all(a));
        }
        // Its attachments wake it when they go.
        if decide::volume(new, &driver, 0) == decide::VolumeDecision::LetGo {
            q.add(name.to_owned());
        }
    });
    let seen = observed.clone();
    observed.csi_nodes.subscribe(move |change| {
        let node = change.object().metadata.name.clone().unwrap_or_default();
        seen.attachments_of_node(&node).iter().for_each(|a| add(a));
    });
}

impl Publisher {
    async fn reconcile_attachment(self, name: String) -> Result<Outcome, Failure> {
        let seen = self.observed.attachment(&name, &self.driver, &self.options);
        let Some(seen) = seen else {
            self.observed.settled(&name);
            return Ok(Outcome::Done);
        };
        let decision = decide::attachment(&seen);
        let outcome = self.settle_attachment(&seen, decision).await?;
        self.observed.settled(&name);
        Ok(outcome)
    }

    async fn reconcile_volume(self, name: String) -> Result<Outcome, Failure> {
        let Some(volume) = self.observed.volumes.named(&name) else { return Ok(Outcome::Done) };
        let attachments = self.observed.attachments_of_volume(&name).len();
        let decision = decide::volume(&volume, &self.driver.name, attachments);
        self.settle_volume(&volume, decision).await
    }
}

/// What the driver's capabilities mean for publishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    pub publishes: bool,
    pub publishes_read_only: bool,
    pub tells_writers_apart: bool,
}

impl Abilities {
    fn of(driver: &Driver) -> Self {
        Self {
            publishes: driver.can(Capability::PublishUnpublishVolume),
            publishes_read_only: driver.can(Capability::PublishReadonly),
            tells_writers_apart: driver.can(Capability::SingleNodeMultiWriter),
        }
    }
}
