//! The binder: binds PersistentVolumeClaims to PersistentVolumes.
//!
//! Guarantees: a volume is never bound to two claims, and a claim never to two volumes. Both objects are written with
//! the revision that was read; the loser of a race gets a conflict, reads again and decides again. A volume is released
//! only after a live read has shown that its claim is gone, and a claim becomes Lost only after a live read of its
//! volume.
//!
//! Assumes: the provisioner creates volumes whose `claimRef` names their claim, and deletes released ones.
//!
//! Crash points: a bind is up to four writes: the volume, its status, the claim, its status. The middle two run
//! concurrently if the provisioner's finalizer holds the volume. After a crash between any two of them, the next
//! reconcile of the claim finds the volume reserved for it and continues. `bind:volume-reserved`, `bind:volume-bound`
//! and `bind:claim-pointed` are between the writes, `bind:provisioner-named` is after the request for provisioning.

mod act;
mod available_volumes;
pub mod decide;
pub mod edit;
mod matching;
mod memory;
mod observe;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::key::Key;
use cleat_api::{claim, condition};
use cleat_runtime::write::{self, WriteError};
use cleat_runtime::{Backoff, Change, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use tokio_util::sync::CancellationToken;

use crate::Context;
use decide::{ClaimBindDecision, ClaimSnapshot};
use memory::VolumeReservations;
use observe::BindObserver;

const MAX_CONCURRENT_BINDS: usize = 256;

/// The delay before the waiting claims of a class are reconciled after a reserved volume returned unused. The reason
/// why the volume was not used may last, so an immediate retry would repeat the failure.
const RETURNED_VOLUME_DELAY: Duration = Duration::from_millis(20);

/// The key of one unit of work.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum BindKey {
    Claim(Key),
    Volume(String),
    /// A volume of this class became available: queues every claim that waits for one.
    Class(String),
}

#[derive(Clone, Debug, Default)]
pub struct BindOptions {
    /// Provisioners that hold a claim with the finalizer `cleat.dev/provisioning` while they create its volume. The
    /// write that requests provisioning from one of these adds the finalizer. Other provisioners would never remove it.
    pub holding_provisioners: BTreeSet<String>,
}

#[derive(Clone)]
struct Binder {
    context: Context,
    observer: BindObserver,
    reservations: VolumeReservations,
    recorder: Recorder,
    queue: Queue<BindKey>,
}

/// Runs until `stop`.
pub async fn run(context: Context, options: BindOptions, stop: CancellationToken) {
    let queue = Queue::new(Backoff::default());
    let observer = BindObserver::new(&context.caches, options);
    let returned = queue.clone();
    let reservations = VolumeReservations::new(observer.volumes.clone(), move |volume| {
        returned.add_after(BindKey::Class(claim::volume_class(volume).to_owned()), RETURNED_VOLUME_DELAY);
    });
    let recorder = Recorder::new(context.client.clone(), "persistentvolume-controller", context.clock.clone());
    // A decision on caches that are not complete is wrong: a volume that was not listed yet would count as absent.
    tokio::select! {
        () = stop.cancelled() => return,
        () = observer.synced() => {}
    }
    subscribe(&observer, &reservations, &queue);
    let binder = Binder { context, observer, reservations, recorder, queue: queue.clone() };
    work("bind", queue, MAX_CONCURRENT_BINDS, stop, move |key| binder.clone().reconcile(key)).await;
}

/// Queues the claims and volumes that a change concerns. Most changes are the binder's own writes and leave nothing to
/// do; a claim or volume for which `decide` gives no work is not queued. A later change that gives it work queues it.
fn subscribe(observer: &BindObserver, reservations: &VolumeReservations, queue: &Queue<BindKey>) {
    let (q, observed) = (queue.clone(), observer.clone());
    observer.claims.subscribe(move |change: &Change<PersistentVolumeClaim>| {
        let key = Key::of(&change.object().metadata);
        for volume in observed.volumes_of(change, &key).filter(|volume| !observed.is_volume_settled(volume)) {
            q.add(BindKey::Volume(volume.metadata.name.clone().unwrap_or_default()));
        }
        if observed.needs_reconcile(change) {
            q.add(BindKey::Claim(key));
        }
    });
    let (q, observed, reservations) = (queue.clone(), observer.clone(), reservations.clone());
    observer.volumes.subscribe(move |change: &Change<PersistentVolume>| {
        let volume = change.object();
        let name = volume.metadata.name.clone().unwrap_or_default();
        for claim in observed.claims_of(volume).filter(|claim| !observed.is_claim_settled(claim)) {
            q.add(BindKey::Claim(Key::of(&claim.metadata)));
        }
        if let Some(available) = reservations.refresh(&name) {
            q.add(BindKey::Class(claim::volume_class(&available).to_owned()));
        }
        if matches!(change, Change::Applied { .. }) && !observed.is_volume_settled(volume) {
            q.add(BindKey::Volume(name));
        }
    });
    let q = queue.clone();
    observer.pods.subscribe(move |change: &Change<Pod>| {
        // An unschedulable pod is a reason to report on its claims. A pod that the scheduler has not tried yet is not:
        // it will usually get a node at once.
        let pod = change.object();
        if condition::pod_condition(pod, "PodScheduled").is_some_and(|c| c.status == "False") {
            observe::claims_of_unscheduled(pod).for_each(|claim| q.add(BindKey::Claim(claim)));
        }
    });
    let (q, observed) = (queue.clone(), observer.clone());
    observer.classes.subscribe(move |_| {
        for claim in observed.unbound_claims() {
            q.add_low_priority(BindKey::Claim(Key::of(&claim.metadata)));
        }
    });
}

impl Binder {
    async fn reconcile(self, key: BindKey) -> Result<Outcome, WriteError> {
        match key {
            BindKey::Claim(key) => self.reconcile_claim(&key).await?,
            BindKey::Volume(name) => self.reconcile_volume(&name).await?,
            BindKey::Class(class) => {
                for claim in self.observer.pending_of_class(&class) {
                    self.queue.add_low_priority(BindKey::Claim((*claim).clone()));
                }
            }
        }
        Ok(Outcome::Done)
    }

    async fn reconcile_claim(&self, key: &Key) -> Result<(), WriteError> {
        let Some(claim) = self.observer.claims.get(key) else { return Ok(()) };
        // The previous reconcile of the claim may have settled it after it was queued again.
        if self.observer.is_claim_settled(&claim) {
            return Ok(());
        }
        let mut snapshot = self.observer.claim(claim);
        // Held until the writes have ended: until then the cache may still show the volume as available.
        let _reservation = if decide::needs_available_volume(&snapshot) {
            let reservation = self.reservations.reserve(&snapshot.claim);
            snapshot.candidates.extend(reservation.iter().map(|reservation| reservation.volume().clone()));
            reservation
        } else {
            None
        };
        let mut decision = decide::claim(&snapshot);
        // The cache of volumes may be behind the cache of claims.
        if let (ClaimBindDecision::Lose(_), Some(name)) = (&decision, claim::volume_name(&snapshot.claim)) {
            let named = write::get_live(&self.context.client, &Key::cluster(name)).await?.map(Arc::new);
            decision = decide::claim(&ClaimSnapshot { named, ..snapshot.clone() });
        }
        self.apply_to_claim(&snapshot.claim, decision).await
    }

    async fn reconcile_volume(&self, name: &str) -> Result<(), WriteError> {
        let Some(volume) = self.observer.volumes.named(name) else { return Ok(()) };
        let mut decision = decide::volume(&volume, &self.observer.referenced_claim(&volume));
        // The cache of claims may be behind the cache of volumes: a claim that it does not show is read live before a
        // write.
        if !decision.is_noop() {
            decision = decide::volume(&volume, &self.live_referenced_claim(&volume).await?);
        }
        self.apply_to_volume(&volume, decision).await
    }
}
