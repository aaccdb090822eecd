//! Conditions of nodes, pods and claims: reading one, and the next version of one.

use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, PersistentVolumeClaimCondition, Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::well_known::UNUSED_CONDITION;

pub fn node_is_ready(node: &Node) -> bool {
    node_ready(node) == Some("True")
}

/// The status of the node's Ready condition: True, False or Unknown; `None` if there is no such condition.
pub fn node_ready(node: &Node) -> Option<&str> {
    let mut conditions = node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    conditions.find(|c| c.type_ == "Ready").map(|c| c.status.as_str())
}

pub fn pod_condition<'a>(pod: &'a Pod, type_: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|c| c.type_ == type_)
}

/// Whether pods use the claim, by its condition `Unused`; `None` if there is no such condition.
pub fn claim_in_use(claim: &PersistentVolumeClaim) -> Option<bool> {
    let mut conditions = claim.status.as_ref()?.conditions.iter().flatten();
    conditions.find(|c| c.type_ == UNUSED_CONDITION).map(|c| c.status != "True")
}

/// Returns the claim with its condition `Unused` set. The transition time changes only when the status does.
pub fn with_unused_condition(mut claim: PersistentVolumeClaim, in_use: bool, now: Time) -> PersistentVolumeClaim {
    if claim_in_use(&claim) == Some(in_use) {
        return claim;
    }
    let (status, reason, message) = match in_use {
        true => ("False", "PodUsingPVC", "A pod uses the claim"),
        false => ("True", "NoPodsUsingPVC", "No pod uses the claim"),
    };
    let conditions = claim.status.get_or_insert_default().conditions.get_or_insert_default();
    conditions.retain(|c| c.type_ != UNUSED_CONDITION);
    conditions.push(PersistentVolumeClaimCondition {
        type_: UNUSED_CONDITION.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_transition_time: Some(now),
        ..PersistentVolumeClaimCondition::default()
    });
    claim
}

/// The condition to write, or `None` if `current` already has this status, reason and message. The transition time changes
/// only when the status does.
pub fn next_pod_condition(
    current: Option<&PodCondition>,
    type_: &str,
    status: &str,
    reason: Option<&str>,
    message: Option<&str>,
    now: Time,
) -> Option<PodCondition> {
    let same_status = current.filter(|c| c.status == status);
    if same_status.is_some_and(|c| c.reason.as_deref() == reason && c.message.as_deref() == message) {
        return None;
    }
    let since = same_status.and_then(|c| c.last_transition_time.clone()).unwrap_or(now);
    Some(PodCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.map(ToOwned::to_owned),
        message: message.map(ToOwned::to_owned),
        last_transition_time: Some(since),
        ..PodCondition::default()
    })
}
