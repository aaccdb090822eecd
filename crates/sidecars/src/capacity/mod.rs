//! Tells the scheduler how much room a driver has: a CSIStorageCapacity for each class and each place.
//!
//! Guarantees: objects of classes and places that are gone go too; one that somebody deleted is made again; objects that
//! other managers made are left alone. What is free is asked again after volumes of the class came or went, and from
//! time to time, since others may use the same storage.
//!
//! Crash points: `capacity:written` and `capacity:deleted` after either. What is published is no record of anything: after
//! a restart it is compared with what there should be.

mod act;
pub mod decide;
mod observe;

use std::time::Duration;

use cleat_api::claim::volume_class;
use cleat_api::key::Meta as _;
use cleat_api::migrate;
use cleat_runtime::{Backoff, Change, Outcome, Queue, work};
use tokio_util::sync::CancellationToken;

use crate::{Context, Driver, Failure};
use decide::{Item, Manager};

/// How many calls to the driver at the same time: nobody waits for these.
const AT_ONCE: usize = 4;
/// Volumes come and go in crowds; what is free is asked once for all that come within this time.
const SETTLING: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub struct Options {
    /// Where the objects are, and who owns them. The driver is filled in.
    pub manager: Manager,
    /// How often everything is asked again.
    pub poll: Duration,
    /// Classes that do not wait for a consumer, too.
    pub immediate: bool,
    pub deadline: Duration,
    /// Only about the place of the driver's own node: the drivers of others tell about theirs.
    pub local: bool,
}

impl Options {
    /// The usual ones, for objects in this namespace that nobody owns.
    pub fn new(namespace: impl Into<String>) -> Self {
        let name = "external-provisioner".to_owned();
        let manager = Manager { namespace: namespace.into(), name, ..Manager::default() };
        let (poll, deadline) = (Duration::from_secs(60), Duration::from_secs(10));
        Self { manager, poll, immediate: false, deadline, local: false }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    /// What there should be, as a whole.
    Everything,
    Item(Item),
}

#[derive(Clone)]
struct Publisher {
    context: Context,
    driver: Driver,
    observed: observe::Observed,
    options: Options,
    /// The only place to tell about, if not all.
    here: Option<decide::Segment>,
    queue: Queue<Subject>,
}

/// Runs until `stop`.
pub async fn run(context: Context, mut driver: Driver, mut options: Options, stop: CancellationToken) {
    driver.client = driver.client.with_deadline(options.deadline);
    options.manager.driver.clone_from(&driver.name);
    let mut here = None;
    if options.local {
        let Some(place) = driver.place(&stop).await else { return };
        here = Some(place.unwrap_or_default());
    }
    let observed = observe::Observed::new(&context.caches);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    let queue = Queue::new(Backoff::new(Duration::from_secs(1), Duration::from_secs(300)));
    let publisher = Publisher { context, driver, observed, options, here, queue: queue.clone() };
    publisher.wake();
    work("capacity", queue, AT_ONCE, stop, move |subject| publisher.clone().reconcile(subject)).await;
}

impl Publisher {
    fn wake(&self) {
        self.queue.add(Subject::Everything);
        // What an earlier publisher told may be long ago.
        self.wanted().into_iter().for_each(|item| self.queue.add(Subject::Item(item)));
        let q = self.queue.clone();
        self.observed.classes.subscribe(move |_| q.add(Subject::Everything));
        let q = self.queue.clone();
        self.observed.csi_nodes.subscribe(move |_| q.add(Subject::Everything));
        let q = self.queue.clone();
        self.observed.nodes.subscribe(move |change| {
            // Nodes report themselves all the time; only their labels count.
            let same =
                matches!(change, Change::Applied { old: Some(old), new } if old.metadata.labels == new.metadata.labels);
            if !same {
                q.add(Subject::Everything);
            }
        });
        let (q, manager) = (self.queue.clone(), self.options.manager.clone());
        self.observed.capacities.subscribe(move |change| {
            if decide::is_managed(change.object(), &manager) {
                q.add(Subject::Everything);
            }
        });
        let publisher = self.clone();
        self.observed.volumes.subscribe(move |change| {
            let volume = change.object();
            let csi = migrate::csi_source(volume).ok().flatten();
            let ours = csi.is_some_and(|csi| csi.driver == publisher.driver.name);
            let came_or_went = matches!(change, Change::Applied { old: None, .. } | Change::Deleted(_));
            if ours && came_or_went {
                let class = volume_class(volume);
                let items = publisher.wanted().into_iter().filter(|item| item.class == class);
                items.for_each(|item| publisher.queue.add_after(Subject::Item(item), SETTLING));
            }
        });
    }

    async fn reconcile(self, subject: Subject) -> Result<Outcome, Failure> {
        let wanted = self.wanted();
        let existing = self.observed.capacities.all();
        match subject {
            Subject::Everything => {
                for object in decide::surplus(&existing, &wanted, &self.options.manager) {
                    self.delete(&object).await?;
                }
                let missing = decide::missing(&existing, wanted, &self.options.manager);
                missing.into_iter().for_each(|item| self.queue.add(Subject::Item(item)));
                Ok(Outcome::Done)
            }
            Subject::Item(item) if wanted.contains(&item) => {
                let manager = &self.options.manager;
                let now = existing.iter().filter(|o| decide::is_managed(o, manager) && decide::item_of(o) == item);
                let now =
                    now.min_by(|a, b| a.metadata.name.cmp(&b.metadata.name)).filter(|o| !o.metadata.is_deleting());
                let free = self.ask(&item).await?;
                self.settle(decide::refreshed(&item, now.map(AsRef::as_ref), free, manager)).await?;
                Ok(Outcome::RequeueAfter(self.options.poll))
            }
            Subject::Item(_) => Ok(Outcome::Done),
        }
    }
}
