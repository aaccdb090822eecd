//! Checks whether a node can run a pod, and with which volumes. Pure.

use std::collections::HashSet;
use std::sync::Arc;

use cleat_api::matching::{is_available_for, is_usable};
use cleat_api::selector::{self, topology_matches};
use cleat_api::toleration::tolerates;
use cleat_api::well_known::{label, taint};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Taint, Toleration};

use super::SchedulerState;
use super::node_info::{NodeInfo, ParsedNode, VolumeHandle, provisioning_driver};
use super::requirements::{DelayedClaim, PodRequirements};
use super::storage::CapacityInfo;
use super::unschedulable::NodeRejection;

/// The provisioner of classes whose volumes are created by administrators.
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

/// What must be done about a pod's unbound claims if it runs on one node.
#[derive(Clone, Debug, Default)]
pub(super) struct VolumePlan {
    /// Existing volumes, each with the claim that gets it.
    pub(super) matched: Vec<(Arc<PersistentVolume>, Arc<PersistentVolumeClaim>)>,
    /// Claims whose volumes must be provisioned for the node.
    pub(super) provisioned: Vec<Arc<PersistentVolumeClaim>>,
}

impl SchedulerState {
    /// Runs the checks in order and returns the rejections of the first one that fails. Affinity of bound volumes,
    /// volumes for delayed claims and missing volumes are one check: their rejections are returned together.
    pub(super) fn check_node(
        &self,
        info: &NodeInfo,
        node: &ParsedNode,
        requirements: &PodRequirements,
    ) -> Result<VolumePlan, Vec<NodeRejection>> {
        check_admission(node, &requirements.pod)?;
        check_resources(info, node, requirements)?;
        if requirements.is_claim_in_use {
            return Err(vec![NodeRejection::ClaimInUse]);
        }
        let mut rejections = Vec::new();
        if !requirements.bound_volumes.iter().all(|volume| info.can_reach(&node.object, volume)) {
            rejections.push(NodeRejection::VolumeAffinity);
        }
        let plan = self.plan_volumes(info, node, requirements);
        let plan = plan.map_err(|rejection| rejections.push(rejection)).unwrap_or_default();
        if requirements.has_missing_volume {
            rejections.push(NodeRejection::VolumeNotFound);
        }
        if !rejections.is_empty() {
            return Err(rejections);
        }
        if !requirements.bound_volumes.iter().all(|volume| is_in_volume_zone(volume, node)) {
            return Err(vec![NodeRejection::VolumeZone]);
        }
        self.check_drivers(info, requirements, &plan).map_err(|rejection| vec![rejection])?;
        Ok(plan)
    }

    /// Checks that the required drivers are installed on the node, and that their volume limits are kept.
    fn check_drivers(
        &self,
        info: &NodeInfo,
        requirements: &PodRequirements,
        plan: &VolumePlan,
    ) -> Result<(), NodeRejection> {
        let mut volumes = requirements.volume_handles.clone();
        volumes.extend(plan.matched.iter().filter_map(|(volume, _)| VolumeHandle::of(volume)));
        let mut required = requirements.inline_drivers.iter().chain(volumes.iter().map(|volume| &volume.driver));
        if let Some(missing) = required.find(|driver| !info.driver_limits.contains_key(*driver)) {
            return Err(NodeRejection::DriverMissing(missing.clone()));
        }
        let provisioned = plan.provisioned.iter();
        volumes.extend(provisioned.filter_map(|claim| VolumeHandle::to_be_provisioned(claim, self.class_of(claim)?)));
        for (driver, limit) in info.driver_limits.iter().filter_map(|(driver, limit)| Some((driver, (*limit)?))) {
            let of_pod: HashSet<&str> = volumes.iter().filter(|v| v.driver == *driver).map(|v| v.id.as_str()).collect();
            if of_pod.is_empty() {
                continue;
            }
            let mut of_node: HashSet<&str> =
                info.usage.volumes.get(driver).into_iter().flat_map(|v| v.keys().map(String::as_str)).collect();
            let attached = info.attachments.values().filter(|(attacher, _)| attacher == driver);
            of_node.extend(attached.filter_map(|(_, volume)| self.volumes.get(volume)?.handle.as_deref()));
            let new = of_pod.difference(&of_node).count();
            if new > 0 && of_node.len() + new > limit {
                return Err(NodeRejection::VolumeLimit);
            }
        }
        Ok(())
    }

    fn plan_volumes(
        &self,
        info: &NodeInfo,
        node: &ParsedNode,
        requirements: &PodRequirements,
    ) -> Result<VolumePlan, NodeRejection> {
        let mut plan = VolumePlan::default();
        for delayed in &requirements.delayed_claims {
            let is_selected = delayed.selected_node.as_deref() == node.object.metadata.name.as_deref();
            match &delayed.selected_node {
                Some(_) if !is_selected => return Err(NodeRejection::NoMatchingVolume),
                // The provisioner is already at work: no existing volume is matched, and the provisioner itself checks
                // the capacity.
                Some(_) => self.check_provisioning(info, node, delayed)?,
                None => {
                    if let Some(volume) = self.find_existing_volume(info, node, delayed, &plan)? {
                        plan.matched.push((volume, delayed.claim.clone()));
                        continue;
                    }
                    self.check_provisioning(info, node, delayed)?;
                    self.check_capacity(node, delayed)?;
                }
            }
            plan.provisioned.push(delayed.claim.clone());
        }
        Ok(plan)
    }

    /// A volume whose claimRef names the claim, or the smallest free volume that suits it and that the node reaches.
    /// Volumes that `plan` has for other claims of the pod are excluded.
    fn find_existing_volume(
        &self,
        info: &NodeInfo,
        node: &ParsedNode,
        delayed: &DelayedClaim,
        plan: &VolumePlan,
    ) -> Result<Option<Arc<PersistentVolume>>, NodeRejection> {
        let claim = &delayed.claim;
        if let Some(reserved) = delayed.reserved_volumes.iter().find(|v| is_usable(v, claim)) {
            if !info.can_reach(&node.object, reserved) {
                return Err(NodeRejection::NoMatchingVolume);
            }
            return Ok(reserved.metadata.name.as_deref().and_then(|name| self.volume(name)));
        }
        let class = delayed.class.metadata.name.as_deref().unwrap_or_default();
        let is_planned =
            |v: &PersistentVolume| plan.matched.iter().any(|(other, _)| other.metadata.name == v.metadata.name);
        Ok(self.free_volumes(class, node.hostname(), delayed.requested_bytes).find(|v| {
            !is_planned(v) && is_usable(v, claim) && is_available_for(v, claim) && info.can_reach(&node.object, v)
        }))
    }

    /// Checks that the claim's class has a provisioner that can create a volume for the node.
    fn check_provisioning(
        &self,
        info: &NodeInfo,
        node: &ParsedNode,
        delayed: &DelayedClaim,
    ) -> Result<(), NodeRejection> {
        let class = &delayed.class;
        let provisioner = class.provisioner.as_str();
        if provisioner.is_empty() || provisioner == NO_PROVISIONER {
            return Err(NodeRejection::NoMatchingVolume);
        }
        let allowed = class.allowed_topologies.as_deref().unwrap_or_default();
        if !topology_matches(allowed, node.object.metadata.labels.as_ref()) {
            return Err(NodeRejection::NoMatchingVolume);
        }
        // A provisioner without a CSIDriver object need not run on nodes.
        let driver = provisioning_driver(class);
        if self.drivers.contains_key(driver) && !info.driver_limits.contains_key(driver) {
            return Err(NodeRejection::DriverMissing(driver.to_owned()));
        }
        Ok(())
    }

    /// Checks that the driver has enough storage for the node, if it publishes CSIStorageCapacity objects.
    fn check_capacity(&self, node: &ParsedNode, delayed: &DelayedClaim) -> Result<(), NodeRejection> {
        let Some(mut capacities) = self.capacities_for(node, delayed) else { return Ok(()) };
        let bytes = delayed.requested_bytes;
        if bytes > 0 && !capacities.any(|capacity| capacity.fits(bytes)) {
            return Err(NodeRejection::InsufficientStorage);
        }
        Ok(())
    }

    /// The capacities of the claim's class that include the node; `None` if the driver does not publish capacities.
    pub(super) fn capacities_for<'s>(
        &'s self,
        node: &'s ParsedNode,
        delayed: &DelayedClaim,
    ) -> Option<impl Iterator<Item = &'s CapacityInfo> + use<'s>> {
        let driver = self.drivers.get(&delayed.class.provisioner);
        driver.filter(|driver| driver.spec.storage_capacity == Some(true))?;
        let class = delayed.class.metadata.name.as_deref().unwrap_or_default();
        let keys = node.capacities.get(class).into_iter().flatten();
        Some(keys.filter_map(|key| self.capacities.get(key)))
    }
}

/// Checks cordon, taints, node selector and node affinity.
fn check_admission(node: &ParsedNode, pod: &Pod) -> Result<(), Vec<NodeRejection>> {
    let Some(spec) = &pod.spec else { return Ok(()) };
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    if node.is_cordoned && !tolerates(tolerations, &unschedulable_taint()) {
        return Err(vec![NodeRejection::Unschedulable]);
    }
    if untolerated_taints(node, tolerations, &["NoSchedule", "NoExecute"]).next().is_some() {
        return Err(vec![NodeRejection::UntoleratedTaint]);
    }
    let is_selected = spec.node_selector.iter().flatten().all(|(key, value)| node.label(key) == Some(value));
    let affinity = spec.affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    if !is_selected || !required.is_none_or(|required| selector::node_matches(required, &node.object)) {
        return Err(vec![NodeRejection::NodeAffinity]);
    }
    Ok(())
}

fn unschedulable_taint() -> Taint {
    Taint { key: taint::UNSCHEDULABLE.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() }
}

pub(super) fn untolerated_taints<'a>(
    node: &'a ParsedNode,
    tolerations: &'a [Toleration],
    effects: &'a [&str],
) -> impl Iterator<Item = &'a Taint> {
    let of_effect = node.taints.iter().filter(|t| effects.contains(&t.effect.as_str()));
    of_effect.filter(|taint| !tolerates(tolerations, taint))
}

fn check_resources(
    info: &NodeInfo,
    node: &ParsedNode,
    requirements: &PodRequirements,
) -> Result<(), Vec<NodeRejection>> {
    let (usage, resources) = (&info.usage, &requirements.resources);
    if resources.ports.iter().any(|port| usage.ports.iter().any(|other| port.conflicts_with(other))) {
        return Err(vec![NodeRejection::PortConflict]);
    }
    let allocatable = |resource: &str| node.allocatable.get(resource).copied().unwrap_or(0);
    let mut rejections = Vec::new();
    if i64::try_from(usage.pods.len()).unwrap_or(i64::MAX) >= allocatable("pods") {
        rejections.push(NodeRejection::TooManyPods);
    }
    for (resource, amount) in resources.requests.iter().filter(|(_, amount)| **amount > 0) {
        let used = usage.requests.get(resource).copied().unwrap_or(0);
        if *amount > allocatable(resource) - used {
            rejections.push(NodeRejection::Insufficient(resource.clone()));
        }
    }
    if !rejections.is_empty() {
        return Err(rejections);
    }
    if resources.disks.iter().any(|disk| usage.disks.iter().any(|other| disk.conflicts_with(other))) {
        return Err(vec![NodeRejection::DiskConflict]);
    }
    Ok(())
}

/// Compares the zone and region labels of the volume with those of the node. A node without any such label matches
/// every volume.
fn is_in_volume_zone(volume: &PersistentVolume, node: &ParsedNode) -> bool {
    const KEYS: [(&str, &str); 4] = [
        (label::ZONE, label::ZONE),
        (label::REGION, label::REGION),
        (label::ZONE_BETA, label::ZONE),
        (label::REGION_BETA, label::REGION),
    ];
    if KEYS.iter().all(|(key, _)| node.label(key).is_none()) {
        return true;
    }
    KEYS.iter().all(|(key, current_key)| {
        let Some(zones) = volume.metadata.labels.as_ref().and_then(|l| l.get(*key)) else { return true };
        let of_node = node.label(key).or_else(|| node.label(current_key));
        of_node.is_some_and(|of_node| zones.split("__").any(|zone| zone == of_node))
    })
}
