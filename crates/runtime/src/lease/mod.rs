//! Leader election: of all who run for a lease, one at a time does the work.
//!
//! Guarantees: the work runs only between the moment the lease became ours and the moment it could have become another's.
//! Who cannot renew in time stops working before anybody may take over. A lease is given back only after the work has
//! ended.

pub mod decide;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::Key;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::write::{self, Part, WriteError};
use decide::Step;

/// How often and how long; the usual figures of Kubernetes' sidecars.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long others wait for a silent leader.
    pub lease: Duration,
    /// A leader that could not renew for this long steps down; less than `lease`.
    pub renew: Duration,
    /// How often to renew, or to see whether the lease is free.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { lease: Duration::from_secs(15), renew: Duration::from_secs(10), retry: Duration::from_secs(5) }
    }
}

#[derive(Clone)]
pub struct Election {
    pub client: Client,
    pub clock: Arc<dyn Clock>,
    pub lease: Key,
    pub labels: BTreeMap<String, String>,
    /// Who we are; no other candidate may have this name.
    pub identity: String,
    pub timing: Timing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// `stop` was cancelled, or the work came to its end.
    Stopped,
    /// The lease could not be renewed in time, and the work was stopped.
    Lost,
}

/// The lease as last seen, and when it was first seen like that.
struct Seen {
    lease: Option<Arc<Lease>>,
    since: Instant,
}

impl Election {
    /// Waits until we lead, then runs `work` for as long as we do. The token it is given ends it.
    pub async fn lead<F: Future<Output = ()>>(
        &self,
        stop: CancellationToken,
        work: impl FnOnce(CancellationToken) -> F,
    ) -> Ended {
        let mut seen = Seen { lease: None, since: Instant::now() };
        tokio::select! {
            () = stop.cancelled() => return Ended::Stopped,
            () = self.acquire(&mut seen) => {}
        }
        info!(lease = %self.lease, "leading");
        let working = stop.child_token();
        let work = work(working.clone());
        tokio::pin!(work);
        let ended = tokio::select! {
            () = &mut work => return self.give_back(&mut seen).await,
            () = stop.cancelled() => Ended::Stopped,
            () = self.renew(&mut seen) => Ended::Lost,
        };
        working.cancel();
        work.await;
        match ended {
            Ended::Stopped => self.give_back(&mut seen).await,
            Ended::Lost => Ended::Lost,
        }
    }

    async fn acquire(&self, seen: &mut Seen) {
        loop {
            match self.attempt(seen).await {
                Ok(true) => return,
                Ok(false) => debug!(lease = %self.lease, "somebody else leads"),
                Err(error) => warn!(lease = %self.lease, %error, "lease not acquired"),
            }
            tokio::time::sleep(self.timing.retry).await;
        }
    }

    /// Returns when we must no longer consider ourselves leader.
    async fn renew(&self, seen: &mut Seen) {
        let mut renewed = Instant::now();
        loop {
            let left = (renewed + self.timing.renew).saturating_duration_since(Instant::now());
            if left.is_zero() {
                warn!(lease = %self.lease, "lease lost: not renewed in time");
                return;
            }
            tokio::time::sleep(self.timing.retry.min(left)).await;
            let begun = Instant::now();
            let left = (renewed + self.timing.renew).saturating_duration_since(begun);
            match tokio::time::timeout(left, self.attempt(seen)).await {
                Ok(Ok(true)) => renewed = begun,
                Ok(Ok(false)) => {
                    warn!(lease = %self.lease, "lease lost: somebody else took it");
                    return;
                }
                Ok(Err(error)) => warn!(lease = %self.lease, %error, "lease not renewed"),
                Err(_) => warn!(lease = %self.lease, "lease not renewed: no answer"),
            }
        }
    }

    /// One look at the lease, and one write if it is ours to write. True if we hold it afterwards.
    async fn attempt(&self, seen: &mut Seen) -> Result<bool, WriteError> {
        let now: Option<Arc<Lease>> = write::live(&self.client, &self.lease).await?.map(Arc::new);
        let revision = |lease: &Option<Arc<Lease>>| lease.as_ref().and_then(|l| l.metadata.resource_version.clone());
        if revision(&now) != revision(&seen.lease) {
            seen.since = Instant::now();
            seen.lease = now;
        }
        let spec = seen.lease.as_ref().and_then(|l| l.spec.as_ref());
        let step = decide::step(spec, seen.since.elapsed(), &self.identity);
        let written = match (step, &seen.lease) {
            (Step::Wait, _) => return Ok(false),
            (Step::Create, _) | (_, None) => write::create(&self.client, &self.ours(None)).await,
            (Step::Renew | Step::Take, Some(lease)) => {
                write::replace(&self.client, Part::Whole, &self.ours(Some(lease))).await
            }
        };
        match written {
            Ok(lease) => {
                *seen = Seen { lease: Some(lease), since: Instant::now() };
                Ok(true)
            }
            // Another candidate was quicker.
            Err(error) if error.is_conflict() || error.already_exists() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn ours(&self, before: Option<&Lease>) -> Lease {
        let now = MicroTime(self.clock.now());
        let spec = before.and_then(|l| l.spec.clone()).unwrap_or_default();
        let held = spec.holder_identity.as_deref() == Some(&self.identity);
        let transitions = spec.lease_transitions.unwrap_or_default() + i32::from(before.is_some() && !held);
        let fresh = ObjectMeta {
            namespace: self.lease.namespace.clone(),
            name: Some(self.lease.name.clone()),
            labels: Some(self.labels.clone()).filter(|l| !l.is_empty()),
            ..ObjectMeta::default()
        };
        Lease {
            metadata: before.map_or(fresh, |l| l.metadata.clone()),
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: Some(i32::try_from(self.timing.lease.as_secs()).unwrap_or(i32::MAX)),
                acquire_time: spec.acquire_time.filter(|_| held).or_else(|| Some(now.clone())),
                renew_time: Some(now),
                lease_transitions: Some(transitions),
                ..spec
            }),
        }
    }

    /// So that the next one need not wait. If it fails, it does wait.
    async fn give_back(&self, seen: &mut Seen) -> Ended {
        if let Some(mut lease) = seen.lease.take().map(Arc::unwrap_or_clone) {
            let spec = lease.spec.get_or_insert_default();
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            let freed = write::replace(&self.client, Part::Whole, &lease);
            match tokio::time::timeout(self.timing.retry, freed).await {
                Ok(Ok(_)) => info!(lease = %self.lease, "lease given back"),
                Ok(Err(error)) => warn!(lease = %self.lease, %error, "lease not given back"),
                Err(_) => warn!(lease = %self.lease, "lease not given back: no answer"),
            }
        }
        Ended::Stopped
    }
}
