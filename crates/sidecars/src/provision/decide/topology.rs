//! Where a volume must be reachable from, and where it had better be.
//!
//! A term is one combination of labels, such as zone and rack. What the driver is told never depends on the order in
//! which nodes are listed, so a repeated call is the same call.

use std::collections::BTreeMap;

use cleat_csi::v1::{Topology, TopologyRequirement};
use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, TopologySelectorTerm, VolumeNodeAffinity,
};

use super::{Choices, Obstacle};

/// One node, as far as the driver's topology goes.
#[derive(Clone, Debug, Default)]
pub struct NodeSeen {
    pub name: String,
    /// The labels by which the driver tells its places apart; `None` if the node's CSINode is not there.
    pub keys: Option<Vec<String>>,
    pub labels: BTreeMap<String, String>,
}

type Term = Vec<(String, String)>;

/// What CreateVolume says about places; `None` where nothing is said.
pub fn requirement(
    claim: &str,
    selected: Option<&str>,
    allowed: &[TopologySelectorTerm],
    nodes: &[NodeSeen],
    choices: &Choices,
) -> Result<Option<TopologyRequirement>, Obstacle> {
    let chosen = selected.map(|name| place(name, nodes)).transpose()?;
    let allowed = flatten(allowed);
    let mut requisite = match &chosen {
        Some((_, here)) if choices.strict_topology => {
            if !allowed.is_empty() && !allowed.iter().any(|term| is_part(term, here)) {
                return Err(Obstacle::Later(format!(
                    "node {:?} is not in the class's topology",
                    selected.unwrap_or_default()
                )));
            }
            vec![here.clone()]
        }
        _ if !allowed.is_empty() => allowed,
        None if !choices.immediate_topology => return Ok(None),
        _ => everywhere(chosen.as_ref().map(|(keys, _)| keys.as_slice()), nodes)?,
    };
    requisite.iter_mut().for_each(|term| term.sort());
    requisite.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
    requisite.dedup();
    if requisite.is_empty() {
        return Ok(None);
    }
    let preferred = match &chosen {
        Some((_, here)) => {
            let first = requisite.iter().position(|term| is_part(term, here));
            let first = first.ok_or_else(|| {
                Obstacle::Later(format!("node {:?} is not in the class's topology", selected.unwrap_or_default()))
            })?;
            rotated(&requisite, first)
        }
        None => rotated(&requisite, spread(claim) % requisite.len()),
    };
    Ok(Some(TopologyRequirement {
        requisite: requisite.into_iter().map(topology).collect(),
        preferred: preferred.into_iter().map(topology).collect(),
    }))
}

/// The node's keys and its term.
fn place(name: &str, nodes: &[NodeSeen]) -> Result<(Vec<String>, Term), Obstacle> {
    let node = nodes.iter().find(|n| n.name == name);
    let Some(keys) = node.and_then(|n| n.keys.clone()) else {
        return Err(Obstacle::Reschedule(format!("error getting CSINode for selected node {name:?}: not found")));
    };
    if keys.is_empty() {
        return Err(Obstacle::Later(format!("no topology key found on CSINode {name}")));
    }
    let labels = node.map(|n| &n.labels);
    let term = labels.and_then(|labels| term_of(&keys, labels));
    match term {
        Some(term) => Ok((keys, term)),
        None => Err(Obstacle::Later(format!("topology labels from selected node {name:?} do not match its CSINode"))),
    }
}

fn term_of(keys: &[String], labels: &BTreeMap<String, String>) -> Option<Term> {
    let mut term = keys.iter().map(|key| Some((key.clone(), labels.get(key)?.clone()))).collect::<Option<Term>>()?;
    term.sort();
    Some(term)
}

/// The terms of all nodes that have the keys.
fn everywhere(keys: Option<&[String]>, nodes: &[NodeSeen]) -> Result<Vec<Term>, Obstacle> {
    let mut having: Vec<_> = nodes.iter().filter(|n| n.keys.as_ref().is_some_and(|k| !k.is_empty())).collect();
    having.sort_by(|a, b| a.name.cmp(&b.name));
    let keys = keys.or_else(|| having.first().and_then(|n| n.keys.as_deref()));
    let keys = keys.ok_or_else(|| Obstacle::Later("no available topology found".to_owned()))?;
    Ok(nodes.iter().filter_map(|node| term_of(keys, &node.labels)).collect())
}

/// Every combination of values that one of the class's terms allows.
fn flatten(allowed: &[TopologySelectorTerm]) -> Vec<Term> {
    let mut all = Vec::new();
    for selector in allowed {
        let mut terms: Vec<Term> = vec![Vec::new()];
        for expression in selector.match_label_expressions.iter().flatten() {
            let longer = |term: &Term| {
                let with = |value: &String| [term.as_slice(), &[(expression.key.clone(), value.clone())]].concat();
                expression.values.iter().map(with).collect::<Vec<_>>()
            };
            terms = terms.iter().flat_map(longer).collect();
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

/// Spreads claims over places by name; the claims of one stateful set go to places next to each other.
fn spread(claim: &str) -> usize {
    let (mut hashed, mut index) = (claim, 0);
    if let Some((before, number)) = claim.rsplit_once('-')
        && let Ok(number) = number.parse::<u32>()
    {
        hashed = before.rsplit_once('-').map_or(before, |(_, last)| last);
        index = number;
    }
    // FNV-1, as everybody else's provisioner: after an exchange of one for the other, claims go where they went.
    let hash = hashed.bytes().fold(2_166_136_261_u32, |hash, byte| hash.wrapping_mul(16_777_619) ^ u32::from(byte));
    hash.wrapping_add(index) as usize
}

fn topology(term: Term) -> Topology {
    Topology { segments: term.into_iter().collect() }
}

/// From where a volume can be reached, as its record says it.
pub fn affinity(reachable: &[Topology]) -> Option<VolumeNodeAffinity> {
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
    let terms: Vec<_> = reachable.iter().filter(|t| !t.segments.is_empty()).map(term).collect();
    let required = Some(NodeSelector { node_selector_terms: terms });
    required.filter(|r| !r.node_selector_terms.is_empty()).map(|r| VolumeNodeAffinity { required: Some(r) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::TopologySelectorLabelRequirement;

    fn node(name: &str, zone: &str, rack: &str) -> NodeSeen {
        let labels = [("zone", zone), ("rack", rack)].map(|(k, v)| (k.to_owned(), v.to_owned()));
        NodeSeen {
            name: name.to_owned(),
            keys: Some(vec!["zone".to_owned(), "rack".to_owned()]),
            labels: labels.into(),
        }
    }

    fn three() -> Vec<NodeSeen> {
        vec![node("n3", "b", "1"), node("n1", "a", "1"), node("n2", "a", "2"), node("twin", "a", "1")]
    }

    fn allowed(pairs: &[(&str, &[&str])]) -> TopologySelectorTerm {
        let one = |(key, values): &(&str, &[&str])| TopologySelectorLabelRequirement {
            key: (*key).to_owned(),
            values: values.iter().map(|v| (*v).to_owned()).collect(),
        };
        TopologySelectorTerm { match_label_expressions: Some(pairs.iter().map(one).collect()) }
    }

    /// Terms as text: `rack=1,zone=a`.
    fn shown(terms: &[Topology]) -> Vec<String> {
        let one = |t: &Topology| {
            let mut pairs: Vec<_> = t.segments.iter().map(|(k, v)| format!("{k}={v}")).collect();
            pairs.sort();
            pairs.join(",")
        };
        terms.iter().map(one).collect()
    }

    fn choices(strict: bool, immediate: bool) -> Choices {
        Choices { strict_topology: strict, immediate_topology: immediate, ..Choices::default() }
    }

    #[test]
    fn the_driver_is_told_every_place_and_the_best_first() {
        let (a1, a2, b1) = ("rack=1,zone=a", "rack=2,zone=a", "rack=1,zone=b");
        let zones = [allowed(&[("zone", &["b", "a"])])];
        let product = [allowed(&[("zone", &["a", "b"]), ("rack", &["1"])])];
        // "web" spreads to 2 of 3 places, and data-web-1 to the next.
        for (case, claim, selected, allowed, options, requisite, preferred) in [
            ("a node is chosen", "c", Some("n2"), &[][..], choices(false, true), vec![a1, b1, a2], vec![a2, a1, b1]),
            ("that node and no other", "c", Some("n2"), &[], choices(true, true), vec![a2], vec![a2]),
            (
                "the class says where",
                "c",
                Some("n3"),
                &zones,
                choices(false, true),
                vec!["zone=a", "zone=b"],
                vec!["zone=b", "zone=a"],
            ),
            ("strictly, and the class agrees", "c", Some("n3"), &zones, choices(true, true), vec![b1], vec![b1]),
            ("all combinations", "c", Some("n3"), &product, choices(false, true), vec![a1, b1], vec![b1, a1]),
        ] {
            let got = requirement(claim, selected, allowed, &three(), &options).unwrap().unwrap();
            assert_eq!(shown(&got.requisite), requisite, "{case}");
            assert_eq!(shown(&got.preferred), preferred, "{case}");
        }
    }

    #[test]
    fn without_a_chosen_node_claims_are_spread_by_name() {
        let first = |claim: &str| {
            let got = requirement(claim, None, &[], &three(), &choices(false, true)).unwrap().unwrap();
            shown(&got.preferred)[0].clone()
        };
        let places: Vec<_> = (0..3).map(|n| first(&format!("data-web-{n}"))).collect();
        let mut distinct = places.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), 3, "one stateful set goes to different places: {places:?}");
        assert_eq!(first("data-web-3"), places[0], "and begins again");
        assert_eq!(first("logs-web-0"), places[0], "what belongs together is together");
        // FNV-1 of "a" is 0x050c5d7e, of which the remainder by 3 is 1.
        assert_eq!(spread("a"), 0x050c_5d7e);
        assert_eq!(requirement("c", None, &[], &three(), &choices(false, false)), Ok(None), "not told unless asked to");
    }

    #[test]
    fn what_is_missing_is_waited_for_or_another_node_chosen() {
        let keyless = NodeSeen { keys: Some(Vec::new()), ..node("n1", "a", "1") };
        let unlabelled = NodeSeen { labels: BTreeMap::new(), ..node("n1", "a", "1") };
        let unregistered = NodeSeen { keys: None, ..node("n1", "a", "1") };
        let elsewhere = [allowed(&[("zone", &["z"])])];
        let kind = |result: Result<_, Obstacle>| match result {
            Err(Obstacle::Reschedule(_)) => "reschedule",
            Err(Obstacle::Later(_)) => "later",
            Err(Obstacle::Final(_)) => "final",
            Ok(_) => "fine",
        };
        for (case, selected, allowed, nodes, strict, want) in [
            ("the chosen node is gone", Some("n1"), &[][..], vec![], false, "reschedule"),
            ("the driver is not on it", Some("n1"), &[], vec![unregistered], false, "reschedule"),
            ("the driver has no topology there", Some("n1"), &[], vec![keyless.clone()], false, "later"),
            ("its labels are missing", Some("n1"), &[], vec![unlabelled], false, "later"),
            ("the class excludes it", Some("n1"), &elsewhere, three(), false, "later"),
            ("the class excludes it, strictly", Some("n1"), &elsewhere, three(), true, "later"),
            ("no topology anywhere", None, &[], vec![keyless], false, "later"),
        ] {
            assert_eq!(kind(requirement("c", selected, allowed, &nodes, &choices(strict, true))), want, "{case}");
        }
    }

    #[test]
    fn a_record_says_from_where_the_volume_is_reached() {
        let place = |zone: &str| Topology { segments: [("zone".to_owned(), zone.to_owned())].into() };
        assert_eq!(affinity(&[]), None);
        assert_eq!(affinity(&[Topology::default()]), None, "a place without labels is everywhere");
        let terms = affinity(&[place("a"), place("b")]).unwrap().required.unwrap().node_selector_terms;
        let values: Vec<_> =
            terms.iter().map(|t| t.match_expressions.as_ref().unwrap()[0].values.clone().unwrap()).collect();
        assert_eq!(values, [["a"], ["b"]]);
    }
}
