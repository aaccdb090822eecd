//! Leader election with a Lease: of several candidates, one at a time does the work.
//!
//! Guarantees: the work runs only while this candidate holds the lease. If the lease cannot be renewed within the renew
//! deadline, the work is stopped before another candidate may take over. The lease is released only after the work has ended.

pub mod decide;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::Key;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::Client;
use crate::clock::Clock;
use crate::write::{self, Part, WriteError};
use decide::Step;

/// Durations of the election. The defaults are those of the Kubernetes CSI sidecars.
#[derive(Clone, Copy, Debug)]
pub struct LeaseTiming {
    /// Other candidates take over from a leader that has not renewed for this long.
    pub lease_duration: Duration,
    /// A leader that could not renew for this long stops its work. Must be less than `lease_duration`.
    pub renew_deadline: Duration,
    /// The interval between attempts to acquire or renew the lease.
    pub retry_period: Duration,
}

impl Default for LeaseTiming {
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(5),
        }
    }
}

/// One candidate for a lease.
#[derive(Clone)]
pub struct Election {
    pub client: Client,
    pub clock: Arc<dyn Clock>,
    pub lease: Key,
    pub labels: BTreeMap<String, String>,
    /// The holder identity. Must be unique among the candidates.
    pub identity: String,
    pub timing: LeaseTiming,
}

/// Why [`Election::lead`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeadershipEnd {
    /// `stop` was cancelled, or the work returned.
    Stopped,
    /// The lease could not be renewed in time, and the work was stopped.
    Lost,
}

/// The last observed state of the lease, and when that state was first observed.
struct ObservedLease {
    lease: Option<Arc<Lease>>,
    since: Instant,
}

impl Election {
    /// Waits until this candidate holds the lease, then runs `work`. When the token that `work` receives is cancelled, it must
    /// return: this function waits for it.
    pub async fn lead<F: Future<Output = ()>>(
        &self,
        stop: CancellationToken,
        work: impl FnOnce(CancellationToken) -> F,
    ) -> LeadershipEnd {
        let mut observed = ObservedLease { lease: None, since: Instant::now() };
        tokio::select! {
            () = stop.cancelled() => return LeadershipEnd::Stopped,
            () = self.acquire(&mut observed) => {}
        }
        info!(lease = %self.lease, "lease acquired");
        let working = stop.child_token();
        let work = work(working.clone());
        tokio::pin!(work);
        let ended = tokio::select! {
            () = &mut work => return self.release(&mut observed).await,
            () = stop.cancelled() => LeadershipEnd::Stopped,
            () = self.renew(&mut observed) => LeadershipEnd::Lost,
        };
        working.cancel();
        work.await;
        match ended {
            LeadershipEnd::Stopped => self.release(&mut observed).await,
            LeadershipEnd::Lost => LeadershipEnd::Lost,
        }
    }

    async fn acquire(&self, observed: &mut ObservedLease) {
        loop {
            match self.attempt(observed).await {
                Ok(true) => return,
                Ok(false) => debug!(lease = %self.lease, "another candidate holds the lease"),
                Err(error) => warn!(lease = %self.lease, %error, "lease not acquired"),
            }
            tokio::time::sleep(self.timing.retry_period).await;
        }
    }

    /// Renews the lease and returns when this candidate must stop its work.
    async fn renew(&self, observed: &mut ObservedLease) {
        let mut renewed = Instant::now();
        loop {
            let remaining = (renewed + self.timing.renew_deadline).saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                warn!(lease = %self.lease, "lease lost: not renewed in time");
                return;
            }
            tokio::time::sleep(self.timing.retry_period.min(remaining)).await;
            let started = Instant::now();
            let remaining = (renewed + self.timing.renew_deadline).saturating_duration_since(started);
            match tokio::time::timeout(remaining, self.attempt(observed)).await {
                Ok(Ok(true)) => renewed = started,
                Ok(Ok(false)) => {
                    warn!(lease = %self.lease, "lease lost: another candidate holds it");
                    return;
                }
                Ok(Err(error)) => warn!(lease = %self.lease, %error, "lease not renewed"),
                Err(_) => warn!(lease = %self.lease, "lease not renewed: timeout"),
            }
        }
    }

    /// Reads the lease and writes it if this candidate may. Returns true if it holds the lease afterwards.
    async fn attempt(&self, observed: &mut ObservedLease) -> Result<bool, WriteError> {
        let live: Option<Arc<Lease>> = write::get_live(&self.client, &self.lease).await?.map(Arc::new);
        let revision = |lease: &Option<Arc<Lease>>| lease.as_ref().and_then(|l| l.metadata.resource_version.clone());
        if revision(&live) != revision(&observed.lease) {
            observed.since = Instant::now();
            observed.lease = live;
        }
        let spec = observed.lease.as_ref().and_then(|l| l.spec.as_ref());
        let step = decide::decide(spec, observed.since.elapsed(), &self.identity);
        let written = match (step, &observed.lease) {
            (Step::Wait, _) => return Ok(false),
            (Step::Create, _) | (_, None) => write::create(&self.client, &self.held_lease(None)).await,
            (Step::Renew | Step::TakeOver, Some(lease)) => {
                write::replace(&self.client, Part::Whole, &self.held_lease(Some(lease))).await
            }
        };
        match written {
            Ok(lease) => {
                *observed = ObservedLease { lease: Some(lease), since: Instant::now() };
                Ok(true)
            }
            // Another candidate wrote first.
            Err(error) if error.is_conflict() || error.already_exists() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The lease with this candidate as its holder, renewed now.
    fn held_lease(&self, current: Option<&Lease>) -> Lease {
        let now = MicroTime(self.clock.now());
        let spec = current.and_then(|l| l.spec.clone()).unwrap_or_default();
        let is_holder = spec.holder_identity.as_deref() == Some(&self.identity);
        let transitions = spec.lease_transitions.unwrap_or_default() + i32::from(current.is_some() && !is_holder);
        let new_metadata = ObjectMeta {
            namespace: self.lease.namespace.clone(),
            name: Some(self.lease.name.clone()),
            labels: Some(self.labels.clone()).filter(|l| !l.is_empty()),
            ..ObjectMeta::default()
        };
        Lease {
            metadata: current.map_or(new_metadata, |l| l.metadata.clone()),
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: Some(i32::try_from(self.timing.lease_duration.as_secs()).unwrap_or(i32::MAX)),
                acquire_time: spec.acquire_time.filter(|_| is_holder).or_else(|| Some(now.clone())),
                renew_time: Some(now),
                lease_transitions: Some(transitions),
                ..spec
            }),
        }
    }

    /// Removes the holder, so that the next candidate need not wait for the lease duration. A failure is only logged: the next
    /// candidate then waits.
    async fn release(&self, observed: &mut ObservedLease) -> LeadershipEnd {
        if let Some(mut lease) = observed.lease.take().map(Arc::unwrap_or_clone) {
            let spec = lease.spec.get_or_insert_default();
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            let released = write::replace(&self.client, Part::Whole, &lease);
            match tokio::time::timeout(self.timing.retry_period, released).await {
                Ok(Ok(_)) => info!(lease = %self.lease, "lease released"),
                Ok(Err(error)) => warn!(lease = %self.lease, %error, "lease not released"),
                Err(_) => warn!(lease = %self.lease, "lease not released: timeout"),
            }
        }
        LeadershipEnd::Stopped
    }
}
