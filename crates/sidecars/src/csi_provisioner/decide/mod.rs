//! Decides whether a claim gets a volume now, with which CreateVolume request, and what a failed call means; and whether a
//! volume is deleted. Pure.
//!
//! A claim is decided in two steps: [`claim`] with what the caches show and, if it is to be provisioned, [`plan`] with the
//! objects that had to be read from the API server for it. Most claims need no such object.

pub mod draft;
pub mod failure;
pub mod local;
pub mod persistent_volume;
pub mod reclaim;
pub mod secrets;
pub mod source;
pub mod topology;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{self, waits_for_consumer};
use cleat_api::key::Meta as _;
use cleat_api::well_known::{annotation, finalizer};
use cleat_api::{migrate, names};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;

pub use draft::{FetchedObjects, ProvisionDraft, ProvisionPlan};
pub use local::LocalNode;
pub use source::DataSource;

/// The driver's name and the capabilities that matter for provisioning.
#[derive(Clone, Debug, Default)]
pub struct DriverCapabilities {
    pub name: String,
    pub creates_volumes: bool,
    pub clones_volumes: bool,
    pub takes_snapshots: bool,
    pub modifies_volumes: bool,
    pub single_node_multi_writer: bool,
    pub supports_topology: bool,
}

impl DriverCapabilities {
    /// Returns true for the driver's name and for the in-tree plugin that was migrated to it.
    pub fn serves(&self, provisioner: &str) -> bool {
        provisioner == self.name || migrate::driver_of(provisioner) == Some(&self.name)
    }
}

/// The operator's choices: the flags of the provisioner.
#[derive(Clone, Debug)]
pub struct ProvisionPolicy {
    pub volume_name_prefix: String,
    /// See [`names::provisioned_volume_name`].
    pub volume_name_uuid_length: Option<usize>,
    pub default_fs_type: Option<String>,
    /// Add the names of claim and volume to the parameters of CreateVolume.
    pub extra_create_metadata: bool,
    /// Request only the topology of the selected node.
    pub strict_topology: bool,
    /// Request the topologies of all nodes if no node is selected.
    pub immediate_topology: bool,
    pub publish_read_only: bool,
    pub prevent_volume_mode_conversion: bool,
    /// Set if this provisioner serves one node only, and others serve the other nodes.
    pub local: Option<LocalNode>,
}

impl Default for ProvisionPolicy {
    fn default() -> Self {
        Self {
            volume_name_prefix: names::PROVISIONED_VOLUME_PREFIX.to_owned(),
            volume_name_uuid_length: None,
            default_fs_type: None,
            extra_create_metadata: false,
            strict_topology: false,
            immediate_topology: true,
            publish_read_only: false,
            prevent_volume_mode_conversion: true,
            local: None,
        }
    }
}

impl ProvisionPolicy {
    /// The name in the CreateVolume request, which is also the name of the PersistentVolume.
    pub fn volume_name(&self, claim_uid: &str) -> String {
        names::provisioned_volume_name(&self.volume_name_prefix, self.volume_name_uuid_length, claim_uid)
    }
}

#[derive(Clone, Debug)]
pub struct ClaimSnapshot {
    pub claim: Arc<PersistentVolumeClaim>,
    pub class: Option<Arc<StorageClass>>,
    /// The PersistentVolume for this claim exists.
    pub volume_exists: bool,
    /// The plan of an earlier CreateVolume call whose outcome is not known.
    pub pending: Option<Arc<ProvisionPlan>>,
    /// The claim carried the provisioning finalizer before this process started: an earlier process may have called
    /// CreateVolume.
    pub inherited: bool,
    pub source: DataSource,
    pub delays: RetryDelays,
}

/// Delays that the provisioner remembers for a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryDelays {
    /// The time until a request that the driver called infeasible may be repeated.
    pub infeasible: Option<Duration>,
    pub competition: Competition,
}

/// When this node may try to take a claim for which no node is selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Competition {
    NotScheduled,
    /// The time left until the next attempt.
    Scheduled(Duration),
    #[default]
    Due,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ClaimDecision {
    /// The claim belongs to another driver or node, or has its volume.
    Nothing,
    Wait(WaitReason),
    /// The claim or its class asks for something unsupported. Not retried until one of them changes.
    Refuse(String),
    /// Repeat the pending CreateVolume call unchanged, until its outcome is certain.
    RepeatCall(Arc<ProvisionPlan>),
    Provision(Box<ProvisionDraft>),
    /// No node is selected: the first provisioner that selects its own node serves the claim.
    Compete,
    /// No volume is being created for the claim and none will be: it may be deleted.
    RemoveFinalizer,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    ClassMissing,
    ForFirstConsumer,
    /// An external populator creates and fills the volume.
    ForPopulator,
    /// The claim is being deleted, and its class is missing, so that CreateVolume cannot be repeated to find out whether
    /// a volume exists.
    OutcomeUnknown,
    /// The driver called the request infeasible; it is repeated after this time.
    Infeasible(Duration),
    /// The claim is left to the provisioners of other nodes for this time. `None` if the first attempt of this node is
    /// not scheduled yet.
    ForOtherNodes(Option<Duration>),
}

/// What prevents a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanError {
    /// Not retried until claim or class change.
    Final(String),
    /// A required object is missing or not ready; retried with backoff.
    Later(String),
    /// The volume cannot be provided on the selected node: the scheduler must select another one.
    Reschedule(String),
}

pub fn claim(snapshot: &ClaimSnapshot, driver: &DriverCapabilities, policy: &ProvisionPolicy) -> ClaimDecision {
    let meta = &snapshot.claim.metadata;
    let has_finalizer = meta.has_finalizer(finalizer::PROVISIONING);
    // The claim needs no new volume. Whether an earlier call created one must be found out all the same.
    let needs_no_volume = needs_finalizer_removal(&snapshot.claim);
    if let (false, Some(plan)) = (snapshot.volume_exists, &snapshot.pending) {
        return ClaimDecision::RepeatCall(plan.clone());
    }
    // Another provisioner may have a call in progress; it uses the same finalizer.
    if !is_assigned(&snapshot.claim, driver) || is_of_other_node(&snapshot.claim, policy) {
        return ClaimDecision::Nothing;
    }
    // The binder removes the finalizer when it points the claim at the volume created for it. In all other cases it is
    // removed here.
    if needs_no_volume && (snapshot.volume_exists || !(has_finalizer && snapshot.inherited)) {
        return if has_finalizer { ClaimDecision::RemoveFinalizer } else { ClaimDecision::Nothing };
    }
    match serve(snapshot, driver, policy) {
        ClaimDecision::Refuse(_)
        | ClaimDecision::Compete
        | ClaimDecision::Wait(WaitReason::ForPopulator | WaitReason::ForFirstConsumer)
            if needs_no_volume =>
        {
            ClaimDecision::RemoveFinalizer
        }
        ClaimDecision::Wait(WaitReason::ClassMissing) if needs_no_volume => {
            ClaimDecision::Wait(WaitReason::OutcomeUnknown)
        }
        decision => delay(decision, snapshot.delays),
    }
}

fn delay(decision: ClaimDecision, delays: RetryDelays) -> ClaimDecision {
    match (&decision, delays) {
        (ClaimDecision::Provision(_), RetryDelays { infeasible: Some(left), .. }) => {
            ClaimDecision::Wait(WaitReason::Infeasible(left))
        }
        (ClaimDecision::Compete, RetryDelays { competition: Competition::NotScheduled, .. }) => {
            ClaimDecision::Wait(WaitReason::ForOtherNodes(None))
        }
        (ClaimDecision::Compete, RetryDelays { competition: Competition::Scheduled(left), .. }) => {
            ClaimDecision::Wait(WaitReason::ForOtherNodes(Some(left)))
        }
        _ => decision,
    }
}

/// Returns true if a reconcile of this claim would do nothing, whatever its class, its source and its volume are.
///
/// The caller must not use this for a claim about which the provisioner remembers anything. It asks [`claim`] with the
/// context in which the most claims need something: no volume exists, and the class is missing.
pub fn is_noop(
    claim_object: &Arc<PersistentVolumeClaim>,
    driver: &DriverCapabilities,
    policy: &ProvisionPolicy,
) -> bool {
    let snapshot = ClaimSnapshot {
        claim: claim_object.clone(),
        class: None,
        volume_exists: false,
        pending: None,
        inherited: false,
        source: DataSource::Unset,
        delays: RetryDelays::default(),
    };
    claim(&snapshot, driver, policy) == ClaimDecision::Nothing
        && source_finalizer(claim_object, &[]) == SourceFinalizerDecision::Nothing
}

/// Returns true if the binder assigned the claim to this driver, or to an in-tree plugin that is migrated to it.
fn is_assigned(claim: &PersistentVolumeClaim, driver: &DriverCapabilities) -> bool {
    let meta = &claim.metadata;
    let keys = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA];
    let migrated = meta.annotation(annotation::MIGRATED_TO) == Some(&driver.name);
    let provisioner = keys.into_iter().find_map(|key| meta.annotation(key));
    provisioner.is_some_and(|name| name == driver.name || (migrated && driver.serves(name)))
}

fn is_of_other_node(claim: &PersistentVolumeClaim, policy: &ProvisionPolicy) -> bool {
    let own = policy.local.as_ref().map(|local| local.name.as_str());
    own.is_some_and(|own| selected_node(claim).is_some_and(|node| node != own))
}

/// Returns true if the binder will not remove the provisioning finalizer: the claim is being deleted, or it points at a
/// volume.
pub fn needs_finalizer_removal(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.is_deleting() || claim::volume_name(claim).is_some()
}

/// The decision for a claim of this driver, regardless of finalizers, earlier calls and delays.
fn serve(snapshot: &ClaimSnapshot, driver: &DriverCapabilities, policy: &ProvisionPolicy) -> ClaimDecision {
    if snapshot.volume_exists {
        return ClaimDecision::Nothing;
    }
    let Some(class) = &snapshot.class else { return ClaimDecision::Wait(WaitReason::ClassMissing) };
    if !driver.serves(&class.provisioner) {
        return ClaimDecision::Nothing;
    }
    let class = match migrate::translate_class(class) {
        Ok(class) => class,
        Err(error) => return ClaimDecision::Refuse(error.to_string()),
    };
    match policy.local.as_ref().map(|local| local.assignment(&snapshot.claim, &class, driver, policy)) {
        None | Some(local::NodeAssignment::ThisNode) => {}
        Some(local::NodeAssignment::Open) => return ClaimDecision::Compete,
        Some(local::NodeAssignment::NotThisNode) => return ClaimDecision::Nothing,
    }
    if waits_for_consumer(&class) && selected_node(&snapshot.claim).is_none() {
        return ClaimDecision::Wait(WaitReason::ForFirstConsumer);
    }
    match snapshot.source {
        DataSource::OtherKind => return ClaimDecision::Wait(WaitReason::ForPopulator),
        DataSource::OtherNamespace => {
            return ClaimDecision::Refuse("sources in other namespaces are not supported".to_owned());
        }
        DataSource::Unset | DataSource::Claim { .. } | DataSource::Snapshot(_) => {}
    }
    match draft::draft(snapshot, &class, driver, policy) {
        Ok(draft) => ClaimDecision::Provision(Box::new(draft)),
        Err(why) => ClaimDecision::Refuse(why),
    }
}

/// The node that the scheduler selected for the claim's first pod.
pub fn selected_node(claim: &PersistentVolumeClaim) -> Option<&str> {
    let keys = [annotation::SELECTED_NODE, annotation::SELECTED_NODE_ALPHA];
    keys.into_iter().find_map(|key| claim.metadata.annotation(key)).filter(|node| !node.is_empty())
}

/// The second step for a claim that is to be provisioned.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanDecision {
    Create(Arc<ProvisionPlan>),
    /// As [`ClaimDecision::RemoveFinalizer`].
    RemoveFinalizer,
    /// As [`ClaimDecision::Refuse`].
    Refuse(String),
    /// Retry with backoff.
    RetryLater(String),
    /// Remove the selected node from the claim, so that the scheduler selects another one.
    Reschedule(String),
}

pub fn plan(
    draft: ProvisionDraft,
    snapshot: &ClaimSnapshot,
    fetched: FetchedObjects,
    driver: &DriverCapabilities,
    policy: &ProvisionPolicy,
) -> PlanDecision {
    match draft.complete(snapshot, fetched, driver, policy) {
        Ok(plan) => PlanDecision::Create(Arc::new(plan)),
        // Only a claim that an earlier process may have called for gets here while it is deleted. That process was
        // refused for the same reason, and called nothing.
        Err(PlanError::Final(_)) if snapshot.claim.metadata.is_deleting() => PlanDecision::RemoveFinalizer,
        Err(PlanError::Final(why)) => PlanDecision::Refuse(why),
        Err(PlanError::Later(why)) => PlanDecision::RetryLater(why),
        Err(PlanError::Reschedule(why)) => PlanDecision::Reschedule(why),
    }
}

/// What happens to the provisioning finalizer when no call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinalizerAction {
    Keep,
    Remove,
}

/// After a refusal the finalizer is kept only if an earlier process may have called CreateVolume.
pub fn finalizer_without_call(snapshot: &ClaimSnapshot) -> FinalizerAction {
    if snapshot.inherited { FinalizerAction::Keep } else { FinalizerAction::Remove }
}

/// The cloning finalizer on a claim that other claims are cloned from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFinalizerDecision {
    /// The source is not being deleted, or has no such finalizer.
    Nothing,
    Keep,
    Remove,
}

/// `clones` are the claims of the same namespace that name `source` as their data source.
pub fn source_finalizer(
    source: &PersistentVolumeClaim,
    clones: &[Arc<PersistentVolumeClaim>],
) -> SourceFinalizerDecision {
    if !source.metadata.is_deleting() || !source.metadata.has_finalizer(finalizer::CLONING_PROTECTION) {
        return SourceFinalizerDecision::Nothing;
    }
    let unfinished = clones.iter().any(|clone| claim::claim_phase(clone) == "Pending");
    if unfinished { SourceFinalizerDecision::Keep } else { SourceFinalizerDecision::Remove }
}
