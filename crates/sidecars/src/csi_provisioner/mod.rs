//! The CSI provisioner: creates volumes for the claims of its driver's storage classes, and deletes released volumes.
//!
//! Guarantees:
//! - The name in CreateVolume is derived from the claim's uid: however often the call is repeated, there is one volume.
//! - No volume is lost. Before CreateVolume is called, the claim gets the finalizer `cleat.dev/provisioning`. It is removed
//!   when the PersistentVolume is written or when the call has certainly left no volume. A claim that is deleted in
//!   between stays until then; its PersistentVolume is written all the same, released, and deleted. After a restart,
//!   CreateVolume is called once more for every deleted claim with the finalizer, to find out whether there is a volume.
//! - A call whose outcome is uncertain is repeated unchanged until the outcome is certain.
//! - DeleteVolume is called only for a Released volume with policy Delete that no VolumeAttachment names.
//!
//! Assumes: the binder names this driver on the claims it should serve, and releases volumes. One provisioner at a time
//! serves a driver, or one serves each of its nodes. The binder may add the finalizer with its own write, and removes it
//! when it points the claim at its volume.
//!
//! What is remembered between reconciles is in `memory.rs`.
//!
//! Crash points: `provision:claim-held` (finalizer written) before CreateVolume, `provision:source-held` after that if a
//! data source needs a finalizer, `provision:volume-created` between CreateVolume and the write of the PersistentVolume,
//! `provision:volume-recorded` after that write, `provision:volume-deleted` between DeleteVolume and the removal of the
//! provisioner's finalizer, `provision:record-released` between that and the deletion of the PersistentVolume.

mod act;
pub mod decide;
mod memory;
mod observe;
pub mod snapshots;
mod subscribe;

use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::key::{Key, Meta as _};
use cleat_runtime::{Backoff, Outcome, Queue, Recorder, work};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use tokio_util::sync::CancellationToken;

use crate::driver::{Capability, PluginCapability};
use crate::{Context, Driver, SidecarError};
use decide::{ClaimDecision, DriverCapabilities, LocalNode, ProvisionPolicy};
use memory::CallState;
use observe::ProvisionerObserver;

#[derive(Clone, Debug)]
pub struct ProvisionerOptions {
    pub policy: ProvisionPolicy,
    /// The delay after a failed reconcile.
    pub retry: Backoff,
    /// The limit for claims, and separately for volumes and for snapshots.
    pub max_concurrent_reconciles: usize,
    pub call_timeout: Duration,
    /// Serve one node only; provisioners on the other nodes serve those.
    pub node_deployment: Option<NodeDeploymentOptions>,
}

/// The node to serve, and how to compete with the provisioners of other nodes for claims without a selected node.
#[derive(Clone, Debug)]
pub struct NodeDeploymentOptions {
    pub node: String,
    /// Compete for claims of classes that bind immediately.
    pub immediate: bool,
    /// The delay before the first attempt to take a claim. It doubles with each attempt up to `max_delay`; a random part
    /// of `base_delay` is subtracted each time.
    pub base_delay: Duration,
    pub max_delay: Duration,
}

impl NodeDeploymentOptions {
    fn delay(&self, earlier_attempts: u32) -> Duration {
        let doubled = self.base_delay.saturating_mul(1 << earlier_attempts.min(16)).min(self.max_delay);
        // Each RandomState has its own random keys, which is enough to make the delays of nodes differ.
        let random = std::hash::RandomState::new().hash_one(earlier_attempts) % 1000;
        doubled.saturating_sub(self.base_delay / 1000 * u32::try_from(random).unwrap_or(0))
    }
}

impl Default for ProvisionerOptions {
    fn default() -> Self {
        Self {
            policy: ProvisionPolicy::default(),
            retry: Backoff::new(Duration::from_secs(1), Duration::from_secs(300)),
            max_concurrent_reconciles: 100,
            call_timeout: Duration::from_secs(10),
            node_deployment: None,
        }
    }
}

/// The uid tells a claim from an earlier one of the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClaimId {
    key: Key,
    uid: String,
}

impl ClaimId {
    fn of(claim: &PersistentVolumeClaim) -> Self {
        Self { key: Key::of(&claim.metadata), uid: claim.metadata.uid().to_owned() }
    }
}

#[derive(Clone)]
struct Provisioner {
    context: Context,
    driver: Driver,
    capabilities: Arc<DriverCapabilities>,
    options: Arc<ProvisionerOptions>,
    observer: ProvisionerObserver,
    recorder: Recorder,
    calls: CallState,
    /// Written to each volume as an attribute: tells the volumes of this process from those of an earlier one.
    identity: String,
}

/// One queue per kind, so that deletions never delay claims.
#[derive(Clone)]
struct Queues {
    claims: Queue<ClaimId>,
    volumes: Queue<String>,
    /// VolumeSnapshots that claims are restored from.
    snapshots: Queue<Key>,
}

/// Runs until `stop` is cancelled.
pub async fn run(context: Context, mut driver: Driver, mut options: ProvisionerOptions, stop: CancellationToken) {
    driver.client = driver.client.with_deadline(options.call_timeout);
    let capabilities = driver_capabilities(&driver);
    if let Some(node) = &options.node_deployment {
        let Some(topology) = driver.node_topology(&stop).await else { return };
        options.policy.local = Some(LocalNode { name: node.node.clone(), topology, immediate: node.immediate });
    }
    let needs_nodes = capabilities.supports_topology && options.node_deployment.is_none();
    let observer = ProvisionerObserver::new(&context.caches, needs_nodes);
    tokio::select! {
        () = stop.cancelled() => return,
        () = observer.synced() => {}
    }
    let retry = options.retry;
    let queues = Queues { claims: Queue::new(retry), volumes: Queue::new(retry), snapshots: Queue::new(retry) };
    let recorder = Recorder::new(context.client.clone(), &driver.name, context.clock.clone());
    let mut identity =
        format!("{}-{}-{}", context.clock.now().as_millisecond(), std::process::id() % 10_000, driver.name);
    if let Some(node) = &options.node_deployment {
        identity = format!("{identity}-{}", node.node);
    }
    let limit = options.max_concurrent_reconciles;
    let calls = CallState::new(observer.claims.each());
    let (capabilities, options) = (Arc::new(capabilities), Arc::new(options));
    let provisioner = Provisioner { context, driver, capabilities, options, observer, recorder, calls, identity };
    provisioner.subscribe(&queues);
    let (for_volumes, for_snapshots) = (provisioner.clone(), provisioner.clone());
    tokio::join!(
        work("provision", queues.claims, limit, stop.clone(), move |id| provisioner.clone().reconcile_claim(id)),
        work("delete", queues.volumes, limit, stop.clone(), move |name| for_volumes.clone().reconcile_volume(name)),
        work("restored", queues.snapshots, limit, stop, move |key| for_snapshots.clone().reconcile_snapshot(key)),
    );
}

fn driver_capabilities(driver: &Driver) -> DriverCapabilities {
    DriverCapabilities {
        name: driver.name.clone(),
        creates_volumes: driver.has_capability(Capability::CreateDeleteVolume),
        clones_volumes: driver.has_capability(Capability::CloneVolume),
        takes_snapshots: driver.has_capability(Capability::CreateDeleteSnapshot),
        modifies_volumes: driver.has_capability(Capability::ModifyVolume),
        single_node_multi_writer: driver.has_capability(Capability::SingleNodeMultiWriter),
        supports_topology: driver.has_plugin_capability(PluginCapability::VolumeAccessibilityConstraints),
    }
}

impl Provisioner {
    async fn reconcile_claim(self, id: ClaimId) -> Result<Outcome, SidecarError> {
        let Some(snapshot) = self.claim(&id) else {
            self.calls.forget(&id.uid);
            return Ok(Outcome::Done);
        };
        let clones = self.observer.clones_of(&id.key);
        self.apply_source_finalizer(&snapshot.claim, decide::source_finalizer(&snapshot.claim, &clones)).await?;
        match decide::claim(&snapshot, &self.capabilities, &self.options.policy) {
            ClaimDecision::Nothing => {
                // The PersistentVolume exists, or another provisioner serves the claim: no call of this one is uncertain.
                self.calls.forget(&id.uid);
                Ok(Outcome::Done)
            }
            ClaimDecision::Wait(reason) => Ok(self.wait(&snapshot, &reason)),
            ClaimDecision::Refuse(why) => self.refuse(&snapshot, &why).await,
            ClaimDecision::RemoveFinalizer => self.finish(&snapshot.claim).await,
            ClaimDecision::RepeatCall(plan) => self.create(&snapshot, plan).await,
            ClaimDecision::Compete => match self.has_capacity(&snapshot).await {
                true => self.take_claim(&snapshot).await,
                false => Ok(self.retry_competition(&snapshot)),
            },
            ClaimDecision::Provision(draft) => {
                self.report_start(&snapshot);
                let fetched = match self.fetch(&snapshot, &draft).await {
                    Ok(fetched) => fetched,
                    Err(error) => {
                        self.report_failure(&snapshot.claim, &error.to_string());
                        return Err(error.into());
                    }
                };
                let decision = decide::plan(*draft, &snapshot, fetched, &self.capabilities, &self.options.policy);
                self.apply_plan(&snapshot, decision).await
            }
        }
    }

    async fn reconcile_volume(self, name: String) -> Result<Outcome, SidecarError> {
        let Some(snapshot) = self.volume(&name) else { return Ok(Outcome::Done) };
        let decision = decide::reclaim::reclaim(&snapshot);
        self.apply_reclaim(&snapshot.volume, decision).await
    }

    async fn reconcile_snapshot(self, key: Key) -> Result<Outcome, SidecarError> {
        if decide::source::is_restored(&self.observer.restores_of(&key)) {
            self.remove_snapshot_finalizer(&key).await?;
        }
        Ok(Outcome::Done)
    }
}
