//! Collection: what nobody owns any more is deleted, and a namespace that is deleted is emptied.
//!
//! Guarantees:
//! - an object is deleted on account of its owners only after each of them was found absent live, by uid;
//! - an owner deleted in the foreground goes after every dependent that blocks it, one deleted as an orphaner after no
//!   dependent names it any more;
//! - a namespace goes after everything in it, whatever kinds there are: they come from discovery, and a kind that is
//!   defined later is watched from then on.
//!
//! Every step is a write that can be repeated: there is nothing to lose between two of them. Waiting ends with an event:
//! a change of an object wakes its owners, its dependents and, when it goes, its namespace.

mod act;
pub mod decide;
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
use observe::{Graph, Node};
use uid::Uid;

const AT_ONCE: usize = 16;
const RETRY: Duration = Duration::from_secs(1);
/// When an object is looked at again one of whose owners no watch has shown.
const UNHEARD: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    Object(Uid),
    Namespace(String),
}

#[derive(Clone)]
struct Collector {
    context: Context,
    graph: Arc<Graph>,
}

/// Runs until `stop`.
pub async fn run(context: Context, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let graph = Arc::new(Graph::new(queue.clone()));
    let stale = Arc::new(Notify::new());
    let followed = follow_kinds(context.clone(), graph.clone(), stale.clone(), stop.clone());
    let collector = Collector { context, graph: graph.clone() };
    let collected = async {
        // Whether a dependent blocks its owner is known only once everything was listed.
        tokio::select! {
            () = stop.cancelled() => return,
            () = graph.synced() => {}
        }
        work("collect", queue, AT_ONCE, stop.clone(), move |subject| collector.clone().reconcile(subject)).await;
    };
    tokio::join!(followed, collected);
}

/// Watches every kind that discovery shows, and looks again whenever a definition changed.
async fn follow_kinds(context: Context, graph: Arc<Graph>, stale: Arc<Notify>, stop: CancellationToken) {
    stale.notify_one();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = stale.notified() => {}
        }
        match observe::kinds(context.client.kube()).await {
            Ok(kinds) => graph.follow(context.client.kube(), kinds, &stale, &stop),
            Err(error) => {
                warn!(%error, "discovery failed; it is tried again");
                let stale = stale.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(RETRY).await;
                    stale.notify_one();
                });
            }
        }
    }
}

impl Collector {
    async fn reconcile(self, subject: Subject) -> Result<Outcome, CollectError> {
        match subject {
            Subject::Object(uid) => {
                self.object(&uid).await?;
                // An owner that only the server knows may come and go while its watch starts over, unheard.
                let is_heard = self.graph.get(&uid).is_none_or(|node| self.knows_owners(&node));
                return Ok(if is_heard { Outcome::Done } else { Outcome::RequeueAfter(UNHEARD) });
            }
            Subject::Namespace(name) => self.namespace(&name).await?,
        }
        Ok(Outcome::Done)
    }

    fn knows_owners(&self, node: &Node) -> bool {
        node.owners.iter().all(|owner| self.graph.get(&Uid::of(&owner.uid)).is_some())
    }

    async fn object(&self, uid: &Uid) -> Result<(), CollectError> {
        let Some(node) = self.graph.get(uid) else { return Ok(()) };
        let owners = self.owners(&node).await?;
        let dependents = self.graph.dependents(uid);
        let seen = node.seen(owners, &dependents);
        match decide::object(&seen) {
            decide::Decision::Keep => Ok(()),
            decide::Decision::Await(why) => {
                debug!(object = %node.key, kind = node.kind.resource.kind, why, "stays for now");
                Ok(())
            }
            decide::Decision::Disown(owners) => self.disown(&node, &owners).await,
            decide::Decision::Delete(how) => self.delete(&node, how).await,
            decide::Decision::Orphan => self.orphan(&node, &dependents).await,
            decide::Decision::Release(finalizer) => self.release(&node, finalizer).await,
        }
    }

    async fn namespace(&self, name: &str) -> Result<(), CollectError> {
        loop {
            let Some(seen) = self.content(name).await? else { return Ok(()) };
            match decide::namespace(&seen) {
                decide::Namespace::Keep => return Ok(()),
                decide::Namespace::Empty(kinds) => self.empty(name, &kinds).await?,
                decide::Namespace::Await(conditions) => return self.report(name, &conditions).await,
                decide::Namespace::Finalize => return self.finalize(name).await,
            }
        }
    }
}
