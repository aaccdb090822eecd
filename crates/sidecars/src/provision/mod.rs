//! The provisioner: a claim of its driver's class gets a volume, a released volume is deleted.
//!
//! Guarantees:
//! - CreateVolume carries a name derived from the claim's uid: however often it is repeated, there is one volume.
//! - A call whose outcome is uncertain is repeated until it is certain, even when the claim is gone meanwhile; the volume
//!   is then recorded, found without a claim, released and deleted.
//! - DeleteVolume is called only for a Released volume with policy Delete that no VolumeAttachment names.
//!
//! Assumes: the binder names this driver on the claims it should serve, and releases volumes.
//!
//! Crash points: `provision:volume-created` between CreateVolume and the record of it, `provision:volume-recorded`
//! after it, `provision:volume-deleted` between DeleteVolume and the deletion of the record.

mod act;
pub mod decide;
mod observe;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{claim_ref, claim_ref_key};
use cleat_api::key::{Key, Meta as _};
use cleat_runtime::{Backoff, Change, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::{Context, Driver, Failure};

const AT_ONCE: usize = 100;

/// A claim, and which one of that name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClaimId {
    key: Key,
    uid: String,
}

/// A call that must be repeated as it was, whatever became of its claim and class meanwhile: the volume may be there.
#[derive(Clone)]
struct Pending {
    claim: Arc<PersistentVolumeClaim>,
    plan: decide::Plan,
}

#[derive(Clone)]
struct Provisioner {
    context: Context,
    driver: Driver,
    observed: observe::Observed,
    recorder: Recorder,
    /// CreateVolume calls whose outcome is not known, by the uid of their claim.
    uncertain: Arc<Mutex<HashMap<String, Pending>>>,
    /// Tells this process's volumes from those of an earlier one, as the attribute of each volume.
    identity: String,
}

/// Runs until `stop`.
pub async fn run(context: Context, driver: Driver, stop: CancellationToken) {
    let retry = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
    let (claims, volumes) = (Queue::new(retry), Queue::new(retry));
    let observed = observe::Observed::new(&context.caches);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observed.synced() => {}
    }
    wake(&observed, &claims, &volumes);
    let recorder = Recorder::new(context.client.clone(), &driver.name, context.clock.clone());
    let identity = format!("{}-{}-{}", context.clock.now().as_millisecond(), std::process::id() % 10_000, driver.name);
    let uncertain = Arc::default();
    let provisioner = Provisioner { context, driver, observed, recorder, uncertain, identity };
    let deleter = provisioner.clone();
    // Two queues: deletions never delay claims.
    tokio::join!(
        work("provision", claims, AT_ONCE, stop.clone(), move |id| provisioner.clone().reconcile_claim(id)),
        work("delete", volumes, AT_ONCE, stop, move |name| deleter.clone().reconcile_volume(name)),
    );
}

fn wake(observed: &observe::Observed, claims: &Queue<ClaimId>, volumes: &Queue<String>) {
    let (q, seen) = (claims.clone(), observed.clone());
    observed.claims.subscribe(move |change| {
        let claim = change.object();
        q.add(ClaimId::of(claim));
        // The claim it is cloned from may be waiting for it, and its clones for it.
        let key = Key::of(&claim.metadata);
        seen.clones_of(&key).iter().for_each(|clone| q.add(ClaimId::of(clone)));
        seen.source_of(claim).iter().for_each(|source| q.add(ClaimId::of(source)));
    });
    let (q, seen) = (claims.clone(), observed.clone());
    observed.classes.subscribe(move |_| {
        let unserved = seen.claims.all().into_iter().filter(|c| cleat_api::claim::volume_name(c).is_none());
        unserved.for_each(|claim| q.add(ClaimId::of(&claim)));
    });
    let (q, again) = (volumes.clone(), claims.clone());
    observed.volumes.subscribe(move |change| {
        let volume = change.object();
        q.add(volume.metadata.name.clone().unwrap_or_default());
        // A volume that vanished before it was bound leaves its claim unserved.
        if let (Change::Deleted(_), Some(claim)) = (change, claim_ref(volume)) {
            again.add(ClaimId { key: claim_ref_key(claim), uid: claim.uid.clone().unwrap_or_default() });
        }
    });
    let q = volumes.clone();
    observed.attachments.subscribe(move |change| {
        if let Some(name) = &change.object().spec.source.persistent_volume_name {
            q.add(name.clone());
        }
    });
}

impl ClaimId {
    fn of(claim: &PersistentVolumeClaim) -> Self {
        Self { key: Key::of(&claim.metadata), uid: claim.metadata.uid().to_owned() }
    }
}

impl Provisioner {
    async fn reconcile_claim(self, id: ClaimId) -> Result<Outcome, Failure> {
        let Some(seen) = self.claim(&id) else { return Ok(Outcome::Done) };
        let hold = decide::hold(&seen.claim, &self.observed.clones_of(&id.key));
        self.settle_hold(&seen.claim, hold).await?;
        let decision = decide::claim(&seen);
        self.settle_claim(&seen, decision).await
    }

    async fn reconcile_volume(self, name: String) -> Result<Outcome, Failure> {
        let Some(seen) = self.observed.volume(&name, &self.driver) else { return Ok(Outcome::Done) };
        let decision = decide::volume(&seen);
        self.settle_volume(&seen.volume, decision).await
    }
}
