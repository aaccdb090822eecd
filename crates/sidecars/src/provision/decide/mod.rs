//! Should a claim get a volume now, and with what request? May a volume be deleted? Pure.
//!
//! A claim is judged twice: [`claim`] by what the caches show, and, if it is to be served, [`Outline::complete`] with what
//! had to be fetched for it. Most claims need nothing fetched.

pub mod aftermath;
pub mod local;
pub mod outline;
pub mod record;
pub mod secrets;
pub mod source;
pub mod topology;
pub mod volume;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use cleat_api::claim::{self, waits_for_consumer};
use cleat_api::key::Meta as _;
use cleat_api::well_known::{annotation, finalizer};
use cleat_api::migrate;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;

pub use local::Local;
pub use outline::{Fetched, Outline, Plan};
pub use source::Source;

/// What the driver can do, and under which name.
#[derive(Clone, Debug, Default)]
pub struct Abilities {
    pub driver: String,
    pub creates_volumes: bool,
    pub clones_volumes: bool,
    pub takes_snapshots: bool,
    pub modifies_volumes: bool,
    pub tells_writers_apart: bool,
    pub knows_topology: bool,
}

impl Abilities {
    /// The name is the driver's, or that of the old plugin it took over from.
    pub fn serves(&self, provisioner: &str) -> bool {
        provisioner == self.driver || migrate::driver_of(provisioner) == Some(&self.driver)
    }
}

/// What the operator of the provisioner chose.
#[derive(Clone, Debug)]
pub struct Choices {
    pub volume_name_prefix: String,
    /// How many characters of the claim's uid a volume's name carries, without dashes; all of it, with them, if `None`.
    pub volume_name_uuid_length: Option<usize>,
    pub default_fs_type: Option<String>,
    /// Tell the driver for whom the volume is.
    pub extra_create_metadata: bool,
    /// Only the chosen node's own topology will do.
    pub strict_topology: bool,
    /// Tell the driver the topology of all nodes, where no node was chosen.
    pub immediate_topology: bool,
    pub publish_read_only: bool,
    pub prevent_volume_mode_conversion: bool,
    /// The provisioner serves one node only, and others serve the others.
    pub local: Option<Local>,
}

impl Default for Choices {
    fn default() -> Self {
        Self {
            volume_name_prefix: "pvc".to_owned(),
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

impl Choices {
    /// The volume's name, for the driver and for the record.
    pub fn volume_name(&self, claim_uid: &str) -> String {
        let uid = match self.volume_name_uuid_length {
            None => claim_uid.to_owned(),
            Some(length) => claim_uid.chars().filter(|c| *c != '-').take(length).collect(),
        };
        format!("{}-{uid}", self.volume_name_prefix)
    }
}

#[derive(Clone, Debug)]
pub struct ClaimSeen {
    pub claim: Arc<PersistentVolumeClaim>,
    pub class: Option<Arc<StorageClass>>,
    /// The volume of this claim is recorded already.
    pub volume_exists: bool,
    /// An earlier call whose outcome is not known.
    pub pending: Option<Arc<Plan>>,
    /// The claim was held before this provisioner began: an earlier one may have called.
    pub inherited: bool,
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ClaimDecision {
    /// Another driver's, or served already.
    Nothing,
    Wait(Wait),
    /// The claim or its class asks for something that cannot be had; trying again helps only when they change.
    Refuse(String),
    /// Call again as before, until the outcome is certain.
    Repeat(Arc<Plan>),
    Provision(Box<Outline>),
    /// No node was chosen for the claim: whoever is first to choose its own serves it.
    Compete,
    /// No volume is in the making, and none will be: the claim may go.
    LetGo,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    ClassMissing,
    ForFirstConsumer,
    /// An external populator makes and fills the volume.
    ForPopulator,
    /// The claim goes, and without its class nobody can find out whether it has a volume.
    InDoubt,
}

/// What keeps a claim from being provisioned now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Trying again helps only when claim or class change.
    Final(String),
    /// Something it needs is not there yet, or not in order; tried again with backoff.
    Later(String),
    /// The chosen node cannot have the volume: another one must be chosen.
    Reschedule(String),
}

pub fn claim(seen: &ClaimSeen, can: &Abilities, choices: &Choices) -> ClaimDecision {
    let meta = &seen.claim.metadata;
    let (held, deleting) = (meta.has_finalizer(finalizer::PROVISIONING), meta.is_deleting());
    let pointing = claim::volume_name(&seen.claim).is_some();
    // Nobody waits for the volume any more; whether there is one has to be known all the same.
    let over = deleting || pointing;
    if let (false, Some(plan)) = (seen.volume_exists, &seen.pending) {
        return ClaimDecision::Repeat(plan.clone());
    }
    // Another provisioner may be waiting for its driver's answer, and its hold looks like ours.
    if !is_asked(&seen.claim, can) || is_of_another_node(&seen.claim, choices) {
        return ClaimDecision::Nothing;
    }
    // A claim is let go by the write that points it at the volume made for it; any other is let go here.
    if over && (seen.volume_exists || !(held && seen.inherited)) {
        return if held { ClaimDecision::LetGo } else { ClaimDecision::Nothing };
    }
    match serve(seen, can, choices) {
        ClaimDecision::Refuse(_)
        | ClaimDecision::Compete
        | ClaimDecision::Wait(Wait::ForPopulator | Wait::ForFirstConsumer)
            if over =>
        {
            ClaimDecision::LetGo
        }
        ClaimDecision::Wait(Wait::ClassMissing) if over => ClaimDecision::Wait(Wait::InDoubt),
        decision => decision,
    }
}

/// Would a look at the claim come to nothing? Asked only for claims that nothing is known of besides what is on them.
pub fn claim_rests(claim: &PersistentVolumeClaim, can: &Abilities) -> bool {
    let meta = &claim.metadata;
    let served = claim::volume_name(claim).is_some() && !meta.has_finalizer(finalizer::PROVISIONING);
    (served || !is_asked(claim, can)) && hold(claim, &[]) == HoldDecision::Nothing
}

/// The binder asks the driver for a volume, or has asked the old plugin and then told who took over.
fn is_asked(claim: &PersistentVolumeClaim, can: &Abilities) -> bool {
    let meta = &claim.metadata;
    let keys = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA];
    let moved = meta.annotation(annotation::MIGRATED_TO) == Some(&can.driver);
    let asked = keys.into_iter().find_map(|key| meta.annotation(key));
    asked.is_some_and(|name| name == can.driver || (moved && can.serves(name)))
}

fn is_of_another_node(claim: &PersistentVolumeClaim, choices: &Choices) -> bool {
    let ours = choices.local.as_ref().map(|local| local.node.as_str());
    ours.is_some_and(|ours| selected_node(claim).is_some_and(|node| node != ours))
}

fn serve(seen: &ClaimSeen, can: &Abilities, choices: &Choices) -> ClaimDecision {
    if seen.volume_exists {
        return ClaimDecision::Nothing;
    }
    let Some(class) = &seen.class else { return ClaimDecision::Wait(Wait::ClassMissing) };
    if !can.serves(&class.provisioner) {
        return ClaimDecision::Nothing;
    }
    let class = match migrate::translate_class(class) {
        Ok(class) => class,
        Err(error) => return ClaimDecision::Refuse(error.to_string()),
    };
    match choices.local.as_ref().map(|local| local.turn(&seen.claim, &class, can, choices)) {
        None | Some(local::Turn::Ours) => {}
        Some(local::Turn::Open) => return ClaimDecision::Compete,
        Some(local::Turn::NotOurs) => return ClaimDecision::Nothing,
    }
    if waits_for_consumer(&class) && selected_node(&seen.claim).is_none() {
        return ClaimDecision::Wait(Wait::ForFirstConsumer);
    }
    match seen.source {
        Source::Other => return ClaimDecision::Wait(Wait::ForPopulator),
        Source::Elsewhere => {
            return ClaimDecision::Refuse("sources in other namespaces are not supported".to_owned());
        }
        Source::Nothing | Source::Claim { .. } | Source::Snapshot(_) => {}
    }
    match outline::outline(seen, &class, can, choices) {
        Ok(outline) => ClaimDecision::Provision(Box::new(outline)),
        Err(why) => ClaimDecision::Refuse(why),
    }
}

/// The node that the scheduler chose for the claim's first pod.
pub fn selected_node(claim: &PersistentVolumeClaim) -> Option<&str> {
    let keys = [annotation::SELECTED_NODE, annotation::SELECTED_NODE_ALPHA];
    keys.into_iter().find_map(|key| claim.metadata.annotation(key)).filter(|node| !node.is_empty())
}

/// What becomes of our hold on a claim that others are cloned from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldDecision {
    Nothing,
    Keep,
    LetGo,
}

/// `clones` are the claims of its namespace that name it as their source.
pub fn hold(source: &PersistentVolumeClaim, clones: &[Arc<PersistentVolumeClaim>]) -> HoldDecision {
    if !source.metadata.is_deleting() || !source.metadata.has_finalizer(finalizer::CLONING_PROTECTION) {
        return HoldDecision::Nothing;
    }
    let unfinished = clones.iter().any(|c| claim::claim_phase(c) == "Pending");
    if unfinished { HoldDecision::Keep } else { HoldDecision::LetGo }
}
