//! The provisioner: a claim of its driver's class gets a volume, a released volume is deleted.
//!
//! Guarantees:
//! - CreateVolume carries a name derived from the claim's uid: however often it is repeated, there is one volume.
//! - No volume is forgotten. Before CreateVolume is called its claim is held by a finalizer, until the volume is recorded
//!   or the call has certainly left nothing behind. A claim deleted meanwhile stays until then; the volume is then
//!   recorded, found without a claim, released and deleted. After a restart, a held claim that is going is called for once
//!   more, to find out.
//! - A call whose outcome is uncertain is repeated as it was until it is certain.
//! - DeleteVolume is called only for a Released volume with policy Delete that no VolumeAttachment names.
//!
//! Assumes: the binder names this driver on the claims it should serve, and releases volumes; one provisioner at a time
//! serves a driver, or one serves each of its nodes. The binder may put the hold on with its own write, and takes it off when it points the claim at its volume.
//!
//! Crash points: `provision:claim-held` before CreateVolume, `provision:source-held` after that where there is something to
//! copy, `provision:volume-created` between it and the record of it,
//! `provision:volume-recorded` after that, `provision:volume-deleted` between DeleteVolume and the deletion of the record,
//! `provision:record-released` before the last of that.

mod act;
mod compete;
pub mod decide;
mod ledger;
mod observe;
mod reclaim;
pub mod snapshots;

use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{claim_phase, claim_ref, claim_ref_key, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_runtime::{Backoff, Change, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use tokio_util::sync::CancellationToken;

use crate::driver::{Capability, PluginCapability};
use crate::{Context, Driver, Failure};
use decide::{Abilities, Choices, Local};
use ledger::Ledger;

/// How a provisioner works, apart from what it decides.
#[derive(Clone, Debug)]
pub struct Options {
    pub choices: Choices,
    pub retry: Backoff,
    /// How many claims, and how many volumes, are worked on at the same time.
    pub at_once: usize,
    /// How long one call to the driver may take.
    pub deadline: Duration,
    /// Serve one node only, as others of us serve the others.
    pub local: Option<LocalOptions>,
}

/// The node to serve, and how to compete with the provisioners of others for claims that no node was chosen for.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    pub node: String,
    /// Compete at all.
    pub immediate: bool,
    /// How long a claim is left to others: doubling from the one to the other, less some part of the first at random.
    pub base_delay: Duration,
    pub max_delay: Duration,
}

impl LocalOptions {
    fn delay(&self, tries: u32) -> Duration {
        let doubled = self.base_delay.saturating_mul(1 << tries.min(16)).min(self.max_delay);
        // A fresh RandomState is seeded by the operating system; that is random enough to tell nodes apart.
        let random = std::hash::RandomState::new().hash_one(tries) % 1000;
        doubled.saturating_sub(self.base_delay / 1000 * u32::try_from(random).unwrap_or(0))
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            choices: Choices::default(),
            retry: Backoff::new(Duration::from_secs(1), Duration::from_secs(300)),
            at_once: 100,
            deadline: Duration::from_secs(10),
            local: None,
        }
    }
}

/// A claim, and which one of that name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClaimId {
    key: Key,
    uid: String,
}

#[derive(Clone)]
struct Provisioner {
    context: Context,
    driver: Driver,
    can: Arc<Abilities>,
    options: Arc<Options>,
    observed: observe::Observed,
    recorder: Recorder,
    ledger: Ledger,
    /// Tells this process's volumes from those of an earlier one, as the attribute of each volume.
    identity: String,
}

/// The keys to look at, each kind in a queue of its own: deletions never delay claims.
#[derive(Clone)]
struct Queues {
    claims: Queue<ClaimId>,
    volumes: Queue<String>,
    /// Snapshots that a claim was restored from.
    snapshots: Queue<Key>,
}

/// Runs until `stop`.
pub async fn run(context: Context, mut driver: Driver, mut options: Options, stop: CancellationToken) {
    driver.client = driver.client.with_deadline(options.deadline);
    let can = abilities(&driver);
    if let Some(local) = &options.local {
        let Some(place) = driver.place(&stop).await else { return };
        options.choices.local = Some(Local { node: local.node.clone(), place, immediate: local.immediate });
    }
    let observed = observe::Observed::new(&context.caches, can.knows_topology && options.local.is_none());
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    let queue = options.retry;
    let queues = Queues { claims: Queue::new(queue), volumes: Queue::new(queue), snapshots: Queue::new(queue) };
    let ledger = Ledger::inheriting(observed.claims.each());
    wake(&observed, &queues, &ledger, &can);
    let recorder = Recorder::new(context.client.clone(), &driver.name, context.clock.clone());
    let mut identity =
        format!("{}-{}-{}", context.clock.now().as_millisecond(), std::process::id() % 10_000, driver.name);
    if let Some(local) = &options.local {
        identity = format!("{identity}-{}", local.node);
    }
    let at_once = options.at_once;
    let (can, options) = (Arc::new(can), Arc::new(options));
    let provisioner = Provisioner { context, driver, can, options, observed, recorder, ledger, identity };
    let (deleter, sweeper) = (provisioner.clone(), provisioner.clone());
    tokio::join!(
        work("provision", queues.claims, at_once, stop.clone(), move |id| provisioner.clone().reconcile_claim(id)),
        work("delete", queues.volumes, at_once, stop.clone(), move |name| deleter.clone().reconcile_volume(name)),
        work("restored", queues.snapshots, at_once, stop, move |key| sweeper.clone().reconcile_snapshot(key)),
    );
}

fn abilities(driver: &Driver) -> Abilities {
    Abilities {
        driver: driver.name.clone(),
        creates_volumes: driver.can(Capability::CreateDeleteVolume),
        clones_volumes: driver.can(Capability::CloneVolume),
        takes_snapshots: driver.can(Capability::CreateDeleteSnapshot),
        modifies_volumes: driver.can(Capability::ModifyVolume),
        tells_writers_apart: driver.can(Capability::SingleNodeMultiWriter),
        knows_topology: driver.offers(PluginCapability::VolumeAccessibilityConstraints),
    }
}

/// Who must look again when something changes. What is certain to come to nothing is left out; whatever changes that is a
/// change of its own.
fn wake(observed: &observe::Observed, queues: &Queues, ledger: &Ledger, can: &Abilities) {
    let (q, seen, known, abilities) = (queues.clone(), observed.clone(), ledger.clone(), can.clone());
    observed.claims.subscribe(move |change| {
        if !matters(change) {
            return;
        }
        let claim = change.object();
        if known.has(claim.metadata.uid()) || !(is_gone(change) || decide::claim_rests(claim, &abilities)) {
            q.claims.add(ClaimId::of(claim));
        }
        // The claim it is cloned from may be waiting for it, and its clones for it.
        seen.clones_of(&Key::of(&claim.metadata)).iter().for_each(|clone| q.claims.add(ClaimId::of(clone)));
        seen.source_of(claim).iter().for_each(|source| q.claims.add(ClaimId::of(source)));
        if let Some(snapshot) = decide::source::restored(claim) {
            q.snapshots.add(snapshot);
        }
    });
    let (q, seen) = (queues.claims.clone(), observed.clone());
    observed.classes.subscribe(move |_| {
        let unserved = seen.claims.each().filter(|c| volume_name(c).is_none());
        unserved.for_each(|claim| q.add_low_priority(ClaimId::of(&claim)));
    });
    let (q, seen, known) = (queues.clone(), observed.clone(), ledger.clone());
    observed.volumes.subscribe(move |change| {
        let volume = change.object();
        if !is_gone(change) {
            if !decide::volume::rests(volume) {
                q.volumes.add(volume.metadata.name.clone().unwrap_or_default());
            }
            return;
        }
        // A volume that vanished before it was bound leaves its claim unserved.
        if let Some(claim) = claim_ref(volume) {
            let id = ClaimId { key: claim_ref_key(claim), uid: claim.uid.clone().unwrap_or_default() };
            let is_there = seen.claims.get(&id.key).is_some_and(|claim| claim.metadata.uid() == id.uid);
            if is_there || known.has(&id.uid) {
                q.claims.add(id);
            }
        }
    });
    let q = queues.volumes.clone();
    observed.attachments.subscribe(move |change| {
        if let Some(name) = &change.object().spec.source.persistent_volume_name {
            q.add(name.clone());
        }
    });
}

fn is_gone<K>(change: &Change<K>) -> bool {
    matches!(change, Change::Deleted(_))
}

/// Our own holds, put on and taken off with every failed try, are no reason to try again.
fn matters(change: &Change<PersistentVolumeClaim>) -> bool {
    let Change::Applied { old: Some(old), new } = change else { return true };
    old.metadata.annotations != new.metadata.annotations
        || old.metadata.deletion_timestamp != new.metadata.deletion_timestamp
        || old.spec != new.spec
        || claim_phase(old) != claim_phase(new)
}

impl ClaimId {
    fn of(claim: &PersistentVolumeClaim) -> Self {
        Self { key: Key::of(&claim.metadata), uid: claim.metadata.uid().to_owned() }
    }
}

impl Provisioner {
    async fn reconcile_claim(self, id: ClaimId) -> Result<Outcome, Failure> {
        let Some(seen) = self.claim(&id) else {
            self.ledger.settled(&id.uid);
            return Ok(Outcome::Done);
        };
        let hold = decide::hold(&seen.claim, &self.observed.clones_of(&id.key));
        self.settle_source(&seen.claim, hold).await?;
        let decision = decide::claim(&seen, &self.can, &self.options.choices);
        self.settle_claim(&seen, decision).await
    }

    async fn reconcile_volume(self, name: String) -> Result<Outcome, Failure> {
        let Some(seen) = self.volume(&name) else { return Ok(Outcome::Done) };
        let decision = decide::volume::volume(&seen);
        self.settle_volume(&seen.volume, decision).await
    }

    async fn reconcile_snapshot(self, key: Key) -> Result<Outcome, Failure> {
        if decide::source::is_restored(&self.observed.restored_from(&key)) {
            self.let_go_of_snapshot(&key).await?;
        }
        Ok(Outcome::Done)
    }
}
