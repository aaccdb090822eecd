//! A provisioner on every node: each serves the claims that are meant for its own node, and for those that no node was
//! chosen for all compete.

use std::collections::BTreeMap;

use cleat_api::claim::waits_for_consumer;
use cleat_api::selector;
use cleat_csi::v1::{CreateVolumeRequest, GetCapacityRequest};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::topology::{self, NodeSeen};
use super::{Abilities, Choices, selected_node};

/// The node that a provisioner is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    pub node: String,
    /// Where the driver says that the node is; `None` if it says nothing.
    pub place: Option<BTreeMap<String, String>>,
    /// Claims that do not wait for a consumer are served too, by the node that is first to take them.
    pub immediate: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Ours,
    /// Another node's, or nobody's yet who could take it from us.
    NotOurs,
    /// No node was chosen, and this one would do.
    Open,
}

impl Local {
    /// The only node that a provisioner on a node knows of.
    pub fn seen(&self) -> NodeSeen {
        let labels = self.place.clone().unwrap_or_default();
        NodeSeen { name: self.node.clone(), keys: Some(labels.keys().cloned().collect()), labels }
    }

    pub fn turn(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        can: &Abilities,
        choices: &Choices,
    ) -> Turn {
        match selected_node(claim) {
            Some(node) if node == self.node => return Turn::Ours,
            Some(_) => return Turn::NotOurs,
            None if waits_for_consumer(class) || !self.immediate => return Turn::NotOurs,
            None => {}
        }
        let allowed = class.allowed_topologies.as_deref().unwrap_or_default();
        if allowed.is_empty() || !can.knows_topology {
            return Turn::Open;
        }
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        match topology::requirement(name, Some(&self.node), allowed, &[self.seen()], choices) {
            Ok(_) => Turn::Open,
            Err(_) => Turn::NotOurs,
        }
    }

    /// A volume that can be had here was made here. One that can be had anywhere, anybody deletes.
    pub fn reaches(&self, volume: &PersistentVolume) -> bool {
        let affinity = volume.spec.as_ref().and_then(|s| s.node_affinity.as_ref());
        let (Some(place), Some(required)) = (&self.place, affinity.and_then(|a| a.required.as_ref())) else {
            return true;
        };
        let mut node = Node::default();
        node.metadata.labels = Some(place.clone());
        selector::node_matches(required, &node)
    }
}

/// What to ask the driver before a node takes a claim: has one of the places where the volume may be enough room?
pub fn questions(request: &CreateVolumeRequest) -> Vec<GetCapacityRequest> {
    let ask = |accessible_topology| GetCapacityRequest {
        volume_capabilities: request.volume_capabilities.clone(),
        parameters: request.parameters.clone(),
        accessible_topology,
    };
    let places = request.accessibility_requirements.as_ref().map(|r| r.requisite.clone()).unwrap_or_default();
    if places.is_empty() { vec![ask(None)] } else { places.into_iter().map(|place| ask(Some(place))).collect() }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{able, asked, seen};
    use super::super::{ClaimDecision, ClaimSeen, Wait, claim};
    use super::*;
    use cleat_api::claim::WAIT_FOR_FIRST_CONSUMER;
    use cleat_api::well_known::{annotation, finalizer};
    use cleat_csi::v1::{Topology, TopologyRequirement};
    use cleat_testing::build::{self, DRIVER};
    use serde_json::json;

    fn here(immediate: bool) -> Choices {
        let place = Some([("zone".to_owned(), "a".to_owned())].into());
        let local = Local { node: "n1".to_owned(), place, immediate };
        Choices { local: Some(local), ..Choices::default() }
    }

    fn chosen(node: &str) -> PersistentVolumeClaim {
        let mut claim = asked("fast");
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
        let placed = Abilities { knows_topology: true, ..able() };
        let (compete, nothing) = (ClaimDecision::Compete, ClaimDecision::Nothing);
        for (case, choices, can, claim_, class_, want) in [
            ("another node's", here(true), able(), chosen("n2"), class(|_| ()), Some(nothing.clone())),
            ("open", here(true), able(), asked("fast"), class(|_| ()), Some(compete.clone())),
            (
                "open, but we wait to be chosen",
                here(false),
                able(),
                asked("fast"),
                class(|_| ()),
                Some(nothing.clone()),
            ),
            ("its pod has no node yet", here(true), able(), asked("fast"), class(wait), Some(nothing.clone())),
            (
                "open, and we are in the zone",
                here(true),
                placed.clone(),
                asked("fast"),
                class(|c| zone(c, "a")),
                Some(compete.clone()),
            ),
            (
                "open, and we are in another zone",
                here(true),
                placed,
                asked("fast"),
                class(|c| zone(c, "b")),
                Some(nothing),
            ),
            (
                "zones mean nothing to the driver",
                here(true),
                able(),
                asked("fast"),
                class(|c| zone(c, "b")),
                Some(compete),
            ),
            ("ours", here(true), able(), chosen("n1"), class(|_| ()), None),
            ("ours, by a pod", here(false), able(), chosen("n1"), class(wait), None),
        ] {
            let got = claim(&seen(claim_, class_), &can, &choices);
            match want {
                Some(want) => assert_eq!(got, want, "{case}"),
                None => assert!(matches!(got, ClaimDecision::Provision(_)), "{case}: {got:?}"),
            }
        }
    }

    #[test]
    fn a_claim_that_goes_is_let_go_by_the_node_that_may_have_called() {
        let going = |mut c: PersistentVolumeClaim, inherited: bool| {
            c.metadata.deletion_timestamp = Some(build::time(9));
            c.metadata.finalizers = Some(vec![finalizer::PROVISIONING.to_owned()]);
            ClaimSeen { inherited, ..seen(c, class(|_| ())) }
        };
        for (case, seen, want) in [
            ("another node's", going(chosen("n2"), false), ClaimDecision::Nothing),
            ("another node's from of old", going(chosen("n2"), true), ClaimDecision::Nothing),
            ("ours, and nothing was called", going(chosen("n1"), false), ClaimDecision::LetGo),
            ("nobody's: nobody has called", going(asked("fast"), true), ClaimDecision::LetGo),
        ] {
            assert_eq!(claim(&seen, &able(), &here(true)), want, "{case}");
        }
        let doubtful = claim(&going(chosen("n1"), true), &able(), &here(true));
        assert!(matches!(doubtful, ClaimDecision::Provision(_)), "ours from of old: {doubtful:?}");
        let mut lost = going(chosen("n1"), true);
        lost.class = None;
        assert_eq!(claim(&lost, &able(), &here(true)), ClaimDecision::Wait(Wait::InDoubt));
    }

    #[test]
    fn a_volume_is_deleted_where_it_can_be_had() {
        let at = |zone: Option<&str>| {
            let mut v = build::volume("v", "fast", "1Gi");
            let reachable = zone.map(|z| Topology { segments: [("zone".to_owned(), z.to_owned())].into() });
            v.spec.as_mut().unwrap().node_affinity = topology::affinity(&reachable.into_iter().collect::<Vec<_>>());
            v
        };
        let local = here(true).local.unwrap();
        let nowhere = Local { place: None, ..local.clone() };
        for (case, local, volume, want) in [
            ("here", &local, at(Some("a")), true),
            ("elsewhere", &local, at(Some("b")), false),
            ("anywhere", &local, at(None), true),
            ("the driver does not say where we are", &nowhere, at(Some("b")), true),
        ] {
            assert_eq!(local.reaches(&volume), want, "{case}");
        }
    }

    #[test]
    fn the_driver_is_asked_about_each_place_that_would_do() {
        let place = |zone: &str| Topology { segments: [("zone".to_owned(), zone.to_owned())].into() };
        let of = |requisite: Vec<Topology>| CreateVolumeRequest {
            accessibility_requirements: Some(TopologyRequirement { requisite, preferred: Vec::new() }),
            ..CreateVolumeRequest::default()
        };
        let asked = |request: &CreateVolumeRequest| {
            questions(request).into_iter().map(|q| q.accessible_topology).collect::<Vec<_>>()
        };
        assert_eq!(asked(&CreateVolumeRequest::default()), [None]);
        assert_eq!(asked(&of(Vec::new())), [None]);
        assert_eq!(asked(&of(vec![place("a"), place("b")])), [Some(place("a")), Some(place("b"))]);
    }
}
