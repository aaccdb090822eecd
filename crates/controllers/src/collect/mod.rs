//! The garbage collector and the namespace controller: deletes objects whose owners are gone, and empties namespaces
//! that are being deleted.
//!
//! Guarantees:
//! - an object is deleted because of its owners only if the graph or a live read has shown, by uid, that each of them
//!   is absent or waits for its dependents;
//! - an owner that is deleted in the foreground is removed after every dependent that blocks it, and one that is
//!   deleted with orphaning after no dependent refers to it;
//! - a namespace is removed after everything in it. The kinds come from discovery; a kind that is defined later is
//!   watched from then on.
//!
//! There is no crash point: every step is one write that can be repeated. Waiting ends with an event: a change of an
//! object queues its owners and its dependents, and its deletion queues its namespace.

mod act;
pub mod decide;
mod memory;
mod observe;
mod uid;

use std::sync::Arc;
use std::time::Duration;

use cleat_runtime::{Backoff, Outcome, Queue, work};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::Context;
use act::CollectError;
use decide::{NamespaceDecision, ObjectDecision};
use memory::OwnershipGraph;
use uid::Uid;

const MAX_CONCURRENT_COLLECTIONS: usize = 16;
const DISCOVERY_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The delay until an object is checked again if the graph does not contain one of its owners. Such an owner may be
/// deleted while its watch restarts; then no event for it ever arrives.
const UNKNOWN_OWNER_RECHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The key of one unit of work.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum CollectionKey {
    Object(Uid),
    Namespace(String),
}

#[derive(Clone)]
struct Collector {
    context: Context,
    graph: Arc<OwnershipGraph>,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let graph = Arc::new(OwnershipGraph::new(queue.clone()));
    let discovering = follow_discovery(context.clone(), graph.clone(), stop.clone());
    let collector = Collector { context, graph: graph.clone() };
    let collecting = async {
        // Whether a dependent blocks its owner is known only after every kind was listed.
        tokio::select! {
            () = stop.cancelled() => return,
            () = graph.synced() => {}
        }
        work("collect", queue, MAX_CONCURRENT_COLLECTIONS, stop.clone(), move |key| collector.clone().reconcile(key))
            .await;
    };
    tokio::join!(discovering, collecting);
}

/// Watches every kind that discovery shows, and repeats the discovery whenever a CustomResourceDefinition changes.
async fn follow_discovery(context: Context, graph: Arc<OwnershipGraph>, stop: CancellationToken) {
    let rediscover = Arc::new(Notify::new());
    rediscover.notify_one();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = rediscover.notified() => {}
        }
        match observe::discover_kinds(context.client.kube()).await {
            Ok(kinds) => observe::watch_kinds(&graph, &context.client, kinds, &rediscover, &stop),
            Err(error) => {
                warn!(%error, retry_in = ?DISCOVERY_RETRY_INTERVAL, "discovery failed");
                let rediscover = rediscover.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(DISCOVERY_RETRY_INTERVAL).await;
                    rediscover.notify_one();
                });
            }
        }
    }
}

impl Collector {
    async fn reconcile(self, key: CollectionKey) -> Result<Outcome, CollectError> {
        match key {
            CollectionKey::Object(uid) => {
                self.reconcile_object(&uid).await?;
                let knows_owners = self.graph.get(&uid).is_none_or(|object| self.graph.contains_owners_of(&object));
                return Ok(match knows_owners {
                    true => Outcome::Done,
                    false => Outcome::RequeueAfter(UNKNOWN_OWNER_RECHECK_INTERVAL),
                });
            }
            CollectionKey::Namespace(name) => self.reconcile_namespace(&name).await?,
        }
        Ok(Outcome::Done)
    }

    async fn reconcile_object(&self, uid: &Uid) -> Result<(), CollectError> {
        let Some(object) = self.graph.get(uid) else { return Ok(()) };
        let owners = self.owners(&object).await?;
        let dependents = self.graph.dependents(uid);
        match decide::object(&object.snapshot(owners, &dependents)) {
            ObjectDecision::Keep => Ok(()),
            ObjectDecision::Wait(reason) => {
                debug!(object = %object.key, kind = object.kind.resource.kind, reason, "deletion of object waits");
                Ok(())
            }
            ObjectDecision::RemoveOwners(owners) => self.remove_owners(&object, &owners).await,
            ObjectDecision::Delete(propagation) => self.delete(&object, propagation).await,
            ObjectDecision::OrphanDependents => self.orphan_dependents(&object, &dependents).await,
            ObjectDecision::RemoveFinalizer(finalizer) => self.remove_finalizer(&object, finalizer).await,
        }
    }

    async fn reconcile_namespace(&self, name: &str) -> Result<(), CollectError> {
        loop {
            let Some(snapshot) = self.live_namespace(name).await? else { return Ok(()) };
            match decide::namespace(&snapshot) {
                NamespaceDecision::Keep => return Ok(()),
                NamespaceDecision::DeleteContent(kinds) => self.delete_content(name, &kinds).await?,
                NamespaceDecision::ReportRemaining(conditions) => return self.report(name, &conditions).await,
                NamespaceDecision::Finalize => return self.finalize(name).await,
            }
        }
    }
}
