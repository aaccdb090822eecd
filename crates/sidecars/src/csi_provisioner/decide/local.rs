//! Node deployment: a provisioner on every node. Each serves the claims whose selected node is its own. For claims without
//! a selected node the provisioners compete: the first to write its node to the claim serves it.

use std::collections::BTreeMap;

use cleat_api::claim::waits_for_consumer;
use cleat_api::selector;
use cleat_api::well_known::annotation;
use cleat_csi::v1::{CreateVolumeRequest, GetCapacityRequest};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::topology::{self, NodeTopology};
use super::{
    ClaimDecision, ClaimSnapshot, DriverCapabilities, ProvisionDraft, ProvisionPolicy, RetryDelays, selected_node,
};

/// The node that this provisioner serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalNode {
    pub name: String,
    /// The topology that the driver reports for the node; `None` if it reports none.
    pub topology: Option<BTreeMap<String, String>>,
    /// Compete for claims without a selected node whose class binds immediately.
    pub immediate: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAssignment {
    ThisNode,
    /// Another node is selected, or none is and this node must not take the claim.
    NotThisNode,
    /// No node is selected, and this node may take the claim.
    Open,
}

impl LocalNode {
    /// The node in the form that [`topology::requirement`] takes.
    pub fn node_topology(&self) -> NodeTopology {
        let labels = self.topology.clone().unwrap_or_default();
        NodeTopology { name: self.name.clone(), keys: Some(labels.keys().cloned().collect()), labels }
    }

    pub fn assignment(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        driver: &DriverCapabilities,
        policy: &ProvisionPolicy,
    ) -> NodeAssignment {
        match selected_node(claim) {
            Some(node) if node == self.name => return NodeAssignment::ThisNode,
            Some(_) => return NodeAssignment::NotThisNode,
            None if waits_for_consumer(class) || !self.immediate => return NodeAssignment::NotThisNode,
            None => {}
        }
        let allowed = class.allowed_topologies.as_deref().unwrap_or_default();
        if allowed.is_empty() || !driver.supports_topology {
            return NodeAssignment::Open;
        }
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        match topology::requirement(name, Some(&self.name), allowed, &[self.node_topology()], policy) {
            Ok(_) => NodeAssignment::Open,
            Err(_) => NodeAssignment::NotThisNode,
        }
    }

    /// Returns true if the volume is accessible from this node: then its driver can delete it. A volume without node
    /// affinity is accessible from every node.
    pub fn can_access(&self, volume: &PersistentVolume) -> bool {
        let affinity = volume.spec.as_ref().and_then(|s| s.node_affinity.as_ref());
        let (Some(labels), Some(required)) = (&self.topology, affinity.and_then(|a| a.required.as_ref())) else {
            return true;
        };
        let mut node = Node::default();
        node.metadata.labels = Some(labels.clone());
        selector::node_matches(required, &node)
    }
}

/// The snapshot and draft as they would be if this node were selected and no retry were delayed. `None` if the claim would
/// not be provisioned then.
pub fn draft_for_this_node(
    snapshot: &ClaimSnapshot,
    driver: &DriverCapabilities,
    policy: &ProvisionPolicy,
) -> Option<(ClaimSnapshot, ProvisionDraft)> {
    let mut claim = snapshot.claim.as_ref().clone();
    let annotations = claim.metadata.annotations.get_or_insert_default();
    annotations.insert(annotation::SELECTED_NODE.to_owned(), policy.local.as_ref()?.name.clone());
    let snapshot = ClaimSnapshot { claim: claim.into(), delays: RetryDelays::default(), ..snapshot.clone() };
    match super::claim(&snapshot, driver, policy) {
        ClaimDecision::Provision(draft) => Some((snapshot, *draft)),
        _ => None,
    }
}

/// One GetCapacity request for each topology where the volume may be created. One sufficient answer is enough.
pub fn capacity_requests(request: &CreateVolumeRequest) -> Vec<GetCapacityRequest> {
    let ask = |accessible_topology| GetCapacityRequest {
        volume_capabilities: request.volume_capabilities.clone(),
        parameters: request.parameters.clone(),
        accessible_topology,
    };
    let topologies = request.accessibility_requirements.as_ref().map(|r| r.requisite.clone()).unwrap_or_default();
    if topologies.is_empty() {
        return vec![ask(None)];
    }
    topologies.into_iter().map(|topology| ask(Some(topology))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{all_capabilities, assigned_claim, snapshot};
    use super::super::{WaitReason, claim};
    use super::*;
    use cleat_api::claim::WAIT_FOR_FIRST_CONSUMER;
    use cleat_api::well_known::finalizer;
    use cleat_csi::v1::{Topology, TopologyRequirement};
    use cleat_testing::build::{self, DRIVER};
    use serde_json::json;

    fn policy(immediate: bool) -> ProvisionPolicy {
        let topology = Some([("zone".to_owned(), "a".to_owned())].into());
        let local = LocalNode { name: "n1".to_owned(), topology, immediate };
        ProvisionPolicy { local: Some(local), ..ProvisionPolicy::default() }
    }

    fn selected(node: &str) -> PersistentVolumeClaim {
        let mut claim = assigned_claim("fast");
        build::annotate(&mut claim.metadata, annotation::SELECTED_NODE, node);
        claim
    }

    fn class(edit: fn(&mut StorageClass)) -> Option<StorageClass> {
        let mut class = build::class("fast", DRIVER);
        edit(&mut class);
        Some(class)
    }

    fn zone(class: &mut StorageClass, zone: &str) {
        let term = json!([{ "matchLabelExpressions": [{ "key": "zone", "values": [zone] }] }]);
        class.allowed_topologies = Some(serde_json::from_value(term).unwrap());
    }

    #[test]
    fn a_node_serves_its_own_claims_and_competes_for_open_ones() {
        let wait = |c: &mut StorageClass| c.volume_binding_mode = Some(WAIT_FOR_FIRST_CONSUMER.to_owned());
        let with_topology = DriverCapabilities { supports_topology: true, ..all_capabilities() };
        let (compete, nothing) = (ClaimDecision::Compete, ClaimDecision::Nothing);
        for (case, policy, driver, claim_, class_, want) in [
            (
                "another node is selected",
                policy(true),
                all_capabilities(),
                selected("n2"),
                class(|_| ()),
                Some(nothing.clone()),
            ),
            ("open", policy(true), all_capabilities(), assigned_claim("fast"), class(|_| ()), Some(compete.clone())),
            (
                "open, but this node does not compete",
                policy(false),
                all_capabilities(),
                assigned_claim("fast"),
                class(|_| ()),
                Some(nothing.clone()),
            ),
            (
                "its pod has no node yet",
                policy(true),
                all_capabilities(),
                assigned_claim("fast"),
                class(wait),
                Some(nothing.clone()),
            ),
            (
                "open, and this node is in the allowed zone",
                policy(true),
                with_topology.clone(),
                assigned_claim("fast"),
                class(|c| zone(c, "a")),
                Some(compete.clone()),
            ),
            (
                "open, and this node is in another zone",
                policy(true),
                with_topology,
                assigned_claim("fast"),
                class(|c| zone(c, "b")),
                Some(nothing),
            ),
            (
                "the driver has no topology",
                policy(true),
                all_capabilities(),
                assigned_claim("fast"),
                class(|c| zone(c, "b")),
                Some(compete),
            ),
            ("this node is selected", policy(true), all_capabilities(), selected("n1"), class(|_| ()), None),
            ("this node is selected for a pod", policy(false), all_capabilities(), selected("n1"), class(wait), None),
        ] {
            let got = claim(&snapshot(claim_, class_), &driver, &policy);
            match want {
                Some(want) => assert_eq!(got, want, "{case}"),
                None => assert!(matches!(got, ClaimDecision::Provision(_)), "{case}: {got:?}"),
            }
        }
    }

    #[test]
    fn a_deleted_claim_is_freed_by_the_node_that_may_have_called() {
        let deleting = |mut c: PersistentVolumeClaim, inherited: bool| {
            c.metadata.deletion_timestamp = Some(build::time(9));
            c.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
            ClaimSnapshot { inherited, ..snapshot(c, class(|_| ())) }
        };
        for (case, snapshot, want) in [
            ("another node is selected", deleting(selected("n2"), false), ClaimDecision::Nothing),
            ("another node is selected, inherited", deleting(selected("n2"), true), ClaimDecision::Nothing),
            (
                "this node is selected, nothing was called",
                deleting(selected("n1"), false),
                ClaimDecision::RemoveFinalizer,
            ),
            (
                "no node is selected: no node has called",
                deleting(assigned_claim("fast"), true),
                ClaimDecision::RemoveFinalizer,
            ),
        ] {
            assert_eq!(claim(&snapshot, &all_capabilities(), &policy(true)), want, "{case}");
        }
        let inherited = claim(&deleting(selected("n1"), true), &all_capabilities(), &policy(true));
        assert!(matches!(inherited, ClaimDecision::Provision(_)), "this node is selected, inherited: {inherited:?}");
        let mut without_class = deleting(selected("n1"), true);
        without_class.class = None;
        assert_eq!(
            claim(&without_class, &all_capabilities(), &policy(true)),
            ClaimDecision::Wait(WaitReason::OutcomeUnknown)
        );
    }

    #[test]
    fn a_volume_is_accessible_where_its_affinity_says() {
        let at = |zone: Option<&str>| {
            let mut v = build::volume("v", "fast", "1Gi");
            let topology = zone.map(|z| Topology { segments: [("zone".to_owned(), z.to_owned())].into() });
            v.spec.as_mut().unwrap().node_affinity = topology::affinity(&topology.into_iter().collect::<Vec<_>>());
            v
        };
        let local = policy(true).local.unwrap();
        let unknown = LocalNode { topology: None, ..local.clone() };
        for (case, local, volume, want) in [
            ("this zone", &local, at(Some("a")), true),
            ("another zone", &local, at(Some("b")), false),
            ("no affinity", &local, at(None), true),
            ("the driver reports no topology for the node", &unknown, at(Some("b")), true),
        ] {
            assert_eq!(local.can_access(&volume), want, "{case}");
        }
    }

    #[test]
    fn the_driver_is_asked_about_each_topology_of_the_request() {
        let topology = |zone: &str| Topology { segments: [("zone".to_owned(), zone.to_owned())].into() };
        let with = |requisite: Vec<Topology>| CreateVolumeRequest {
            accessibility_requirements: Some(TopologyRequirement { requisite, preferred: Vec::new() }),
            ..CreateVolumeRequest::default()
        };
        let topologies = |request: &CreateVolumeRequest| {
            capacity_requests(request).into_iter().map(|q| q.accessible_topology).collect::<Vec<_>>()
        };
        assert_eq!(topologies(&CreateVolumeRequest::default()), [None]);
        assert_eq!(topologies(&with(Vec::new())), [None]);
        assert_eq!(topologies(&with(vec![topology("a"), topology("b")])), [Some(topology("a")), Some(topology("b"))]);
    }
}
