//! Publishes how much storage a driver can provide: one CSIStorageCapacity per storage class and topology segment, for
//! the scheduler.
//!
//! Guarantees:
//! - Objects of classes and segments that no longer exist are deleted. An object that a user deleted is created again.
//! - Objects with another `managed-by` label are never touched.
//! - The driver is asked again after a volume of the class was created or deleted, and once per poll interval, because
//!   other clients may use the same storage.
//!
//! Nothing is remembered between reconciles: after a restart, the published objects are compared with the wanted ones.
//!
//! Crash points: `capacity:written` after a create or update, `capacity:deleted` after a delete.

mod act;
pub mod decide;
mod observe;

use std::time::Duration;

use cleat_api::claim::volume_class;
use cleat_api::migrate;
use cleat_runtime::{Backoff, Change, Outcome, Queue, work};
use tokio_util::sync::CancellationToken;

use crate::{Context, Driver, SidecarError};
use decide::{CapacityKey, CapacityOwner, TopologySegment};

/// Low, because no claim waits for these calls.
const MAX_CONCURRENT_CALLS: usize = 4;
/// Volumes are often created in bursts; all changes within this time lead to one GetCapacity call per key.
const COALESCE_DELAY: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub struct CapacityOptions {
    /// Which objects are managed. [`run`] fills in the driver's name.
    pub owner: CapacityOwner,
    pub poll_interval: Duration,
    /// Publish capacity also for classes with immediate binding.
    pub include_immediate: bool,
    pub call_timeout: Duration,
    /// Publish only the segment of the driver's own node; a publisher beside every other instance of the driver
    /// publishes the others.
    pub own_node_only: bool,
}

impl CapacityOptions {
    /// The defaults of external-provisioner, for objects in this namespace without an owner reference.
    pub fn new(namespace: impl Into<String>) -> Self {
        let managed_by = "external-provisioner".to_owned();
        Self {
            owner: CapacityOwner { namespace: namespace.into(), managed_by, ..CapacityOwner::default() },
            poll_interval: Duration::from_secs(60),
            include_immediate: false,
            call_timeout: Duration::from_secs(10),
            own_node_only: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum CapacityWorkItem {
    /// Delete surplus objects and queue missing ones.
    AllObjects,
    /// Ask the driver about one key and publish the answer.
    Key(CapacityKey),
}

#[derive(Clone)]
struct CapacityPublisher {
    context: Context,
    driver: Driver,
    observer: observe::CapacityObserver,
    options: CapacityOptions,
    /// Set with `own_node_only`.
    own_segment: Option<TopologySegment>,
    queue: Queue<CapacityWorkItem>,
}

/// Runs until `stop` is cancelled.
pub async fn run(context: Context, mut driver: Driver, mut options: CapacityOptions, stop: CancellationToken) {
    driver.client = driver.client.with_deadline(options.call_timeout);
    options.owner.driver.clone_from(&driver.name);
    let mut own_segment = None;
    if options.own_node_only {
        let Some(topology) = driver.node_topology(&stop).await else { return };
        own_segment = Some(topology.unwrap_or_default());
    }
    let observer = observe::CapacityObserver::new(&context.caches);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observer.synced() => {}
    }
    let queue = Queue::new(Backoff::new(Duration::from_secs(1), Duration::from_secs(300)));
    let publisher = CapacityPublisher { context, driver, observer, options, own_segment, queue: queue.clone() };
    publisher.subscribe();
    work("capacity", queue, MAX_CONCURRENT_CALLS, stop, move |item| publisher.clone().reconcile(item)).await;
}

impl CapacityPublisher {
    fn subscribe(&self) {
        self.queue.add(CapacityWorkItem::AllObjects);
        // Figures published by an earlier process may be old.
        self.wanted().into_iter().for_each(|key| self.queue.add(CapacityWorkItem::Key(key)));
        let q = self.queue.clone();
        self.observer.classes.subscribe(move |_| q.add(CapacityWorkItem::AllObjects));
        let q = self.queue.clone();
        self.observer.csi_nodes.subscribe(move |_| q.add(CapacityWorkItem::AllObjects));
        let q = self.queue.clone();
        self.observer.nodes.subscribe(move |change| {
            // Nodes update their status often; segments depend on labels only.
            let same_labels =
                matches!(change, Change::Applied { old: Some(old), new } if old.metadata.labels == new.metadata.labels);
            if !same_labels {
                q.add(CapacityWorkItem::AllObjects);
            }
        });
        let (q, owner) = (self.queue.clone(), self.options.owner.clone());
        self.observer.capacities.subscribe(move |change| {
            if decide::is_managed(change.object(), &owner) {
                q.add(CapacityWorkItem::AllObjects);
            }
        });
        let publisher = self.clone();
        self.observer.volumes.subscribe(move |change| {
            let volume = change.object();
            let csi = migrate::csi_source(volume).ok().flatten();
            let is_ours = csi.is_some_and(|csi| csi.driver == publisher.driver.name);
            let created_or_deleted = matches!(change, Change::Applied { old: None, .. } | Change::Deleted(_));
            if is_ours && created_or_deleted {
                let class = volume_class(volume);
                let keys = publisher.wanted().into_iter().filter(|key| key.class == class);
                keys.for_each(|key| publisher.queue.add_after(CapacityWorkItem::Key(key), COALESCE_DELAY));
            }
        });
    }

    async fn reconcile(self, item: CapacityWorkItem) -> Result<Outcome, SidecarError> {
        let owner = &self.options.owner;
        let wanted = self.wanted();
        let existing = self.observer.capacities.all();
        match item {
            CapacityWorkItem::AllObjects => {
                for object in decide::surplus(&existing, &wanted, owner) {
                    self.delete(&object).await?;
                }
                let missing = decide::missing(&existing, wanted, owner);
                missing.into_iter().for_each(|key| self.queue.add(CapacityWorkItem::Key(key)));
                Ok(Outcome::Done)
            }
            CapacityWorkItem::Key(key) if wanted.contains(&key) => {
                let current = decide::current(&existing, &key, owner);
                let free = self.free_capacity(&key).await?;
                self.apply(decide::publish(&key, current, free, owner)).await?;
                Ok(Outcome::RequeueAfter(self.options.poll_interval))
            }
            CapacityWorkItem::Key(_) => Ok(Outcome::Done),
        }
    }
}
