//! The CSI attacher: a VolumeAttachment becomes ControllerPublishVolume, its deletion ControllerUnpublishVolume.
//!
//! Guarantees:
//! - Before ControllerPublishVolume is called, the attachment carries the attacher's finalizer and the node id of the
//!   call. From then on it cannot disappear without ControllerUnpublishVolume, whatever the result of the call was.
//! - The volume carries the attacher's finalizer as long as an attachment may need its handle.
//! - After ControllerUnpublishVolume the finalizer is removed first and the status is written after it. In the other
//!   order, the status write would queue the attachment while it still has the finalizer, and
//!   ControllerUnpublishVolume would be called twice.
//! - If the driver lists where volumes are published, its list is compared with the attachments periodically. Where they
//!   differ, the call is repeated; the list alone never changes a status.
//!
//! Crash points: `publish:volume-held` and `publish:attachment-held` (finalizers written), `publish:published` (before the
//! status says so), `publish:confirmed`, `publish:unpublished` (before the finalizer is removed), `publish:let-go` and
//! `publish:volume-let-go` (finalizers removed).

mod act;
pub mod decide;
mod memory;
mod observe;
mod verify;

use std::sync::Arc;
use std::time::Duration;

use cleat_runtime::{Backoff, Change, Outcome, Queue, work};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::attachment::only_errors_differ;
use crate::{Context, Driver, SidecarError};
use decide::VolumeFinalizerDecision;
use memory::Mismatches;
use observe::AttachmentObserver;

/// Most of these reconciles wait for one of the `max_concurrent_calls`.
const MAX_CONCURRENT_RECONCILES: usize = 1024;

#[derive(Clone, Debug)]
pub struct CsiAttacherOptions {
    /// The limit for publish calls, and separately for unpublish calls: unpublish calls that hang never delay a publish.
    pub max_concurrent_calls: usize,
    pub call_timeout: Duration,
    /// The delay after a failed reconcile of an attachment or volume.
    pub retry: Backoff,
    /// The file system type for volumes that name none.
    pub default_fs_type: String,
    /// How often the driver's list of published volumes is compared with the attachments.
    pub verify_interval: Duration,
    /// `max_entries` of ListVolumes; 0 leaves the page size to the driver.
    pub list_page_size: i32,
}

impl Default for CsiAttacherOptions {
    fn default() -> Self {
        Self {
            max_concurrent_calls: 100,
            call_timeout: Duration::from_secs(15),
            retry: Backoff::new(Duration::from_secs(1), Duration::from_secs(300)),
            default_fs_type: String::new(),
            verify_interval: Duration::from_secs(60),
            list_page_size: 0,
        }
    }
}

#[derive(Clone)]
struct CsiAttacher {
    context: Context,
    driver: Driver,
    options: CsiAttacherOptions,
    observer: AttachmentObserver,
    mismatches: Mismatches,
    publish_permits: Arc<Semaphore>,
    unpublish_permits: Arc<Semaphore>,
}

/// Runs until `stop` is cancelled.
pub async fn run(context: Context, driver: Driver, options: CsiAttacherOptions, stop: CancellationToken) {
    let (attachments, volumes) = (Queue::new(options.retry), Queue::new(options.retry));
    let observer = AttachmentObserver::new(&context.caches);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observer.synced() => {}
    }
    subscribe(&observer, &attachments, &volumes, &driver.name);
    let driver = Driver { client: driver.client.with_deadline(options.call_timeout), ..driver };
    let permits = || Arc::new(Semaphore::new(options.max_concurrent_calls.max(1)));
    let (publish_permits, unpublish_permits) = (permits(), permits());
    let mismatches = Mismatches::default();
    let attacher = CsiAttacher { context, driver, options, observer, mismatches, publish_permits, unpublish_permits };
    let (for_volumes, verifier, verified) = (attacher.clone(), attacher.clone(), attachments.clone());
    let limit = MAX_CONCURRENT_RECONCILES;
    // Publish and unpublish share one queue, so that they never run at the same time for one attachment.
    tokio::join!(
        work("publish", attachments, limit, stop.clone(), move |name| attacher.clone().reconcile_attachment(name)),
        work("publish-volume", volumes, limit, stop.clone(), move |name| for_volumes.clone().reconcile_volume(name)),
        verifier.verify_periodically(verified, stop),
    );
}

fn subscribe(observer: &AttachmentObserver, attachments: &Queue<String>, volumes: &Queue<String>, driver: &str) {
    let q = attachments.clone();
    let add = move |attachment: &VolumeAttachment| q.add(attachment.metadata.name.clone().unwrap_or_default());
    let (add_one, q) = (add.clone(), volumes.clone());
    observer.attachments.subscribe(move |change| match change {
        Change::Applied { old, new } if old.as_ref().is_none_or(|old| !only_errors_differ(old, new)) => add_one(new),
        Change::Applied { .. } => {}
        Change::Deleted(deleted) => {
            if let Some(volume) = &deleted.spec.source.persistent_volume_name {
                q.add(volume.clone());
            }
        }
    });
    let (add_all, q, index, driver) = (add.clone(), volumes.clone(), observer.clone(), driver.to_owned());
    observer.volumes.subscribe(move |change| {
        let Change::Applied { old, new } = change else { return };
        let name = new.metadata.name.as_deref().unwrap_or_default();
        if old.is_none() {
            index.attachments_of_volume(name).iter().for_each(|attachment| add_all(attachment));
        }
        // Asked as if nothing were attached: the deletion of the last attachment queues the volume as well.
        if decide::volume(new, &driver, 0) == VolumeFinalizerDecision::Remove {
            q.add(name.to_owned());
        }
    });
    let index = observer.clone();
    observer.csi_nodes.subscribe(move |change| {
        let node = change.object().metadata.name.clone().unwrap_or_default();
        index.attachments_of_node(&node).iter().for_each(|attachment| add(attachment));
    });
}

impl CsiAttacher {
    async fn reconcile_attachment(self, name: String) -> Result<Outcome, SidecarError> {
        let Some(snapshot) = self.attachment(&name) else {
            self.mismatches.remove(&name);
            return Ok(Outcome::Done);
        };
        let decision = decide::attachment(&snapshot);
        let outcome = self.apply_attachment(&snapshot.attachment, decision).await?;
        self.mismatches.remove(&name);
        Ok(outcome)
    }

    async fn reconcile_volume(self, name: String) -> Result<Outcome, SidecarError> {
        let Some(volume) = self.observer.volumes.named(&name) else { return Ok(Outcome::Done) };
        let attachments = self.observer.attachments_of_volume(&name).len();
        let decision = decide::volume(&volume, &self.driver.name, attachments);
        self.apply_volume(&volume, decision).await
    }
}
