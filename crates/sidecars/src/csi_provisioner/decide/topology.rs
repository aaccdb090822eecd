//! The topology requirement of CreateVolume, and the node affinity of the PersistentVolume. Pure.
//!
//! A term is one combination of topology labels, for example of zone and rack. The requirement never depends on the order
//! in which nodes are listed, so that a repeated call has the same request.

use std::collections::BTreeMap;

use cleat_csi::v1::{Topology, TopologyRequirement};
use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, TopologySelectorTerm, VolumeNodeAffinity,
};

use super::{PlanError, ProvisionPolicy};

/// One node's registration of the driver.
#[derive(Clone, Debug, Default)]
pub struct NodeTopology {
    pub name: String,
    /// The driver's topology keys; `None` if the driver is not registered on the node.
    pub keys: Option<Vec<String>>,
    pub labels: BTreeMap<String, String>,
}

type Term = Vec<(String, String)>;

/// Returns `None` if CreateVolume gets no requirement.
pub fn requirement(
    claim: &str,
    selected: Option<&str>,
    allowed: &[TopologySelectorTerm],
    nodes: &[NodeTopology],
    policy: &ProvisionPolicy,
) -> Result<Option<TopologyRequirement>, PlanError> {
    let selected_node = selected.map(|name| selected_term(name, nodes)).transpose()?;
    let allowed = flatten(allowed);
    let mut requisite = match &selected_node {
        Some((_, own)) if policy.strict_topology => {
            if !allowed.is_empty() && !allowed.iter().any(|term| is_part(term, own)) {
                return Err(PlanError::Later(format!(
                    "node {:?} is not in the class's topology",
                    selected.unwrap_or_default()
                )));
            }
            vec![own.clone()]
        }
        _ if !allowed.is_empty() => allowed,
        None if !policy.immediate_topology => return Ok(None),
        _ => all_terms(selected_node.as_ref().map(|(keys, _)| keys.as_slice()), nodes)?,
    };
    requisite.iter_mut().for_each(|term| term.sort());
    requisite.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
    requisite.dedup();
    if requisite.is_empty() {
        return Ok(None);
    }
    let preferred = match &selected_node {
        Some((_, own)) => {
            let first = requisite.iter().position(|term| is_part(term, own));
            let first = first.ok_or_else(|| {
                PlanError::Later(format!("node {:?} is not in the class's topology", selected.unwrap_or_default()))
            })?;
            rotated(&requisite, first)
        }
        None => rotated(&requisite, spread_index(claim) % requisite.len()),
    };
    Ok(Some(TopologyRequirement {
        requisite: requisite.into_iter().map(topology).collect(),
        preferred: preferred.into_iter().map(topology).collect(),
    }))
}

/// The keys and the term of the selected node.
fn selected_term(name: &str, nodes: &[NodeTopology]) -> Result<(Vec<String>, Term), PlanError> {
    let node = nodes.iter().find(|n| n.name == name);
    let Some(keys) = node.and_then(|n| n.keys.clone()) else {
        return Err(PlanError::Reschedule(format!("error getting CSINode for selected node {name:?}: not found")));
    };
    if keys.is_empty() {
        return Err(PlanError::Later(format!("no topology key found on CSINode {name}")));
    }
    let labels = node.map(|n| &n.labels);
    let term = labels.and_then(|labels| term_of(&keys, labels));
    match term {
        Some(term) => Ok((keys, term)),
        None => Err(PlanError::Later(format!("topology labels from selected node {name:?} do not match its CSINode"))),
    }
}

fn term_of(keys: &[String], labels: &BTreeMap<String, String>) -> Option<Term> {
    let mut term = keys.iter().map(|key| Some((key.clone(), labels.get(key)?.clone()))).collect::<Option<Term>>()?;
    term.sort();
    Some(term)
}

/// The terms of all nodes that carry the labels. Without `keys`, the keys of the first node by name that has any.
fn all_terms(keys: Option<&[String]>, nodes: &[NodeTopology]) -> Result<Vec<Term>, PlanError> {
    let mut registered: Vec<_> = nodes.iter().filter(|n| n.keys.as_ref().is_some_and(|k| !k.is_empty())).collect();
    registered.sort_by(|a, b| a.name.cmp(&b.name));
    let keys = keys.or_else(|| registered.first().and_then(|n| n.keys.as_deref()));
    let keys = keys.ok_or_else(|| PlanError::Later("no available topology found".to_owned()))?;
    Ok(nodes.iter().filter_map(|node| term_of(keys, &node.labels)).collect())
}

/// Every combination of values that one of the class's terms allows, as sorted terms.
fn flatten(allowed: &[TopologySelectorTerm]) -> Vec<Term> {
    let mut all = Vec::new();
    for selector in allowed {
        let mut terms: Vec<Term> = vec![Vec::new()];
        for expression in selector.match_label_expressions.iter().flatten() {
            let extended = |term: &Term| {
                let with = |value: &String| [term.as_slice(), &[(expression.key.clone(), value.clone())]].concat();
                expression.values.iter().map(with).collect::<Vec<_>>()
            };
            terms = terms.iter().flat_map(extended).collect();
        }
        all.extend(terms.into_iter().filter(|term| !term.is_empty()));
    }
    all.iter_mut().for_each(|term| term.sort());
    all
}

fn is_part(term: &Term, of: &Term) -> bool {
    term.iter().all(|pair| of.contains(pair))
}

fn rotated(terms: &[Term], first: usize) -> Vec<Term> {
    [&terms[first..], &terms[..first]].concat()
}

/// A hash that spreads claims over terms by name; consecutive claims of one StatefulSet get consecutive numbers.
fn spread_index(claim: &str) -> usize {
    let (mut hashed, mut index) = (claim, 0);
    if let Some((before, number)) = claim.rsplit_once('-')
        && let Ok(number) = number.parse::<u32>()
    {
        hashed = before.rsplit_once('-').map_or(before, |(_, last)| last);
        index = number;
    }
    // FNV-1, as in external-provisioner: claims keep their topology when one provisioner replaces the other.
    let hash = hashed.bytes().fold(2_166_136_261_u32, |hash, byte| hash.wrapping_mul(16_777_619) ^ u32::from(byte));
    hash.wrapping_add(index) as usize
}

fn topology(term: Term) -> Topology {
    Topology { segments: term.into_iter().collect() }
}

/// The node affinity of a volume that is accessible from these topologies.
pub fn affinity(accessible: &[Topology]) -> Option<VolumeNodeAffinity> {
    let term = |topology: &Topology| {
        let mut pairs: Vec<_> = topology.segments.iter().collect();
        pairs.sort();
        let expressions = pairs.into_iter().map(|(key, value)| NodeSelectorRequirement {
            key: key.clone(),
            operator: "In".to_owned(),
            values: Some(vec![value.clone()]),
        });
        NodeSelectorTerm { match_expressions: Some(expressions.collect()), match_fields: None }
    };
    let terms: Vec<_> = accessible.iter().filter(|t| !t.segments.is_empty()).map(term).collect();
    let required = Some(NodeSelector { node_selector_terms: terms });
    required.filter(|r| !r.node_selector_terms.is_empty()).map(|r| VolumeNodeAffinity { required: Some(r) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::TopologySelectorLabelRequirement;

    fn node(name: &str, zone: &str, rack: &str) -> NodeTopology {
        let labels = [("zone", zone), ("rack", rack)].map(|(k, v)| (k.to_owned(), v.to_owned()));
        NodeTopology {
            name: name.to_owned(),
            keys: Some(vec!["zone".to_owned(), "rack".to_owned()]),
            labels: labels.into(),
        }
    }

    fn nodes() -> Vec<NodeTopology> {
        vec![node("n3", "b", "1"), node("n1", "a", "1"), node("n2", "a", "2"), node("twin", "a", "1")]
    }

    fn allowed(pairs: &[(&str, &[&str])]) -> TopologySelectorTerm {
        let one = |(key, values): &(&str, &[&str])| TopologySelectorLabelRequirement {
            key: (*key).to_owned(),
            values: values.iter().map(|v| (*v).to_owned()).collect(),
        };
        TopologySelectorTerm { match_label_expressions: Some(pairs.iter().map(one).collect()) }
    }

    /// For example `rack=1,zone=a`.
    fn format_terms(terms: &[Topology]) -> Vec<String> {
        let one = |t: &Topology| {
            let mut pairs: Vec<_> = t.segments.iter().map(|(k, v)| format!("{k}={v}")).collect();
            pairs.sort();
            pairs.join(",")
        };
        terms.iter().map(one).collect()
    }

    fn policy(strict: bool, immediate: bool) -> ProvisionPolicy {
        ProvisionPolicy { strict_topology: strict, immediate_topology: immediate, ..ProvisionPolicy::default() }
    }

    #[test]
    fn the_requirement_lists_every_term_and_prefers_the_selected_nodes() {
        let (a1, a2, b1) = ("rack=1,zone=a", "rack=2,zone=a", "rack=1,zone=b");
        let zones = [allowed(&[("zone", &["b", "a"])])];
        let product = [allowed(&[("zone", &["a", "b"]), ("rack", &["1"])])];

        for (case, claim, selected, allowed, options, requisite, preferred) in [
            ("a node is selected", "c", Some("n2"), &[][..], policy(false, true), vec![a1, b1, a2], vec![a2, a1, b1]),
            ("strict topology", "c", Some("n2"), &[], policy(true, true), vec![a2], vec![a2]),
            (
                "the class has allowed topologies",
                "c",
                Some("n3"),
                &zones,
                policy(false, true),
                vec!["zone=a", "zone=b"],
                vec!["zone=b", "zone=a"],
            ),
            (
                "strict topology within the allowed ones",
                "c",
                Some("n3"),
                &zones,
                policy(true, true),
                vec![b1],
                vec![b1],
            ),
            ("all combinations", "c", Some("n3"), &product, policy(false, true), vec![a1, b1], vec![b1, a1]),
        ] {
            let got = requirement(claim, selected, allowed, &nodes(), &options).unwrap().unwrap();
            assert_eq!(format_terms(&got.requisite), requisite, "{case}");
            assert_eq!(format_terms(&got.preferred), preferred, "{case}");
        }
    }

    #[test]
    fn without_a_selected_node_claims_are_spread_by_name() {
        let first = |claim: &str| {
            let got = requirement(claim, None, &[], &nodes(), &policy(false, true)).unwrap().unwrap();
            format_terms(&got.preferred)[0].clone()
        };
        let terms: Vec<_> = (0..3).map(|n| first(&format!("data-web-{n}"))).collect();
        let mut distinct = terms.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), 3, "one stateful set goes to different terms: {terms:?}");
        assert_eq!(first("data-web-3"), terms[0], "and starts over");
        assert_eq!(first("logs-web-0"), terms[0], "claims of one pod go to the same term");
        // FNV-1 of "a" is 0x050c5d7e, of which the remainder by 3 is 1.
        assert_eq!(spread_index("a"), 0x050c_5d7e);
        assert_eq!(
            requirement("c", None, &[], &nodes(), &policy(false, false)),
            Ok(None),
            "no requirement without immediate_topology"
        );
    }

    #[test]
    fn missing_topology_is_retried_or_another_node_is_selected() {
        let keyless = NodeTopology { keys: Some(Vec::new()), ..node("n1", "a", "1") };
        let unlabelled = NodeTopology { labels: BTreeMap::new(), ..node("n1", "a", "1") };
        let unregistered = NodeTopology { keys: None, ..node("n1", "a", "1") };
        let other_zone = [allowed(&[("zone", &["z"])])];
        let kind = |result: Result<_, PlanError>| match result {
            Err(PlanError::Reschedule(_)) => "reschedule",
            Err(PlanError::Later(_)) => "later",
            Err(PlanError::Final(_)) => "final",
            Ok(_) => "fine",
        };
        for (case, selected, allowed, nodes, strict, want) in [
            ("the selected node does not exist", Some("n1"), &[][..], vec![], false, "reschedule"),
            ("the driver is not registered on it", Some("n1"), &[], vec![unregistered], false, "reschedule"),
            ("the driver has no topology keys there", Some("n1"), &[], vec![keyless.clone()], false, "later"),
            ("its labels are missing", Some("n1"), &[], vec![unlabelled], false, "later"),
            ("the class excludes it", Some("n1"), &other_zone, nodes(), false, "later"),
            ("the class excludes it, strictly", Some("n1"), &other_zone, nodes(), true, "later"),
            ("no topology anywhere", None, &[], vec![keyless], false, "later"),
        ] {
            assert_eq!(kind(requirement("c", selected, allowed, &nodes, &policy(strict, true))), want, "{case}");
        }
    }

    #[test]
    fn the_node_affinity_lists_the_accessible_topologies() {
        let topology = |zone: &str| Topology { segments: [("zone".to_owned(), zone.to_owned())].into() };
        assert_eq!(affinity(&[]), None);
        assert_eq!(affinity(&[Topology::default()]), None, "a topology without labels is accessible everywhere");
        let terms = affinity(&[topology("a"), topology("b")]).unwrap().required.unwrap().node_selector_terms;
        let values: Vec<_> =
            terms.iter().map(|t| t.match_expressions.as_ref().unwrap()[0].values.clone().unwrap()).collect();
        assert_eq!(values, [["a"], ["b"]]);
    }
}
