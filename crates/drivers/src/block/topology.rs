//! From which nodes the volumes can be accessed: from all nodes, or only from one if the pool is on its local disk.
//! Pure.
use std::collections::HashMap;

use cleat_csi::{
    Status,
    v1::{Topology, TopologyRequirement},
};

pub(crate) const NODE_TOPOLOGY_KEY: &str = "topology.block.cleat.dev/node";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Accessibility {
    /// Every node can access the pool.
    AllNodes,
    /// Only the node with this id can.
    Node(String),
}

impl Accessibility {
    pub(crate) fn topology(&self) -> Option<Topology> {
        match self {
            Accessibility::AllNodes => None,
            Accessibility::Node(id) => {
                Some(Topology { segments: HashMap::from([(NODE_TOPOLOGY_KEY.to_owned(), id.clone())]) })
            }
        }
    }

    pub(crate) fn is_node_local(&self) -> bool {
        *self != Accessibility::AllNodes
    }

    /// Whether volumes of the pool can be accessed from the given topology. Keys of other drivers are ignored.
    pub(crate) fn satisfies(&self, topology: &Topology) -> bool {
        match self {
            Accessibility::AllNodes => true,
            Accessibility::Node(id) => topology.segments.get(NODE_TOPOLOGY_KEY).is_none_or(|wanted| wanted == id),
        }
    }

    /// Fails if a volume with these requirements can only be created on another node, with RESOURCE_EXHAUSTED: callers
    /// then choose another topology.
    pub(crate) fn check(&self, requirement: Option<&TopologyRequirement>) -> Result<(), Status> {
        let requisite = requirement.map_or(&[][..], |requirement| &requirement.requisite);
        if requisite.is_empty() || requisite.iter().any(|topology| self.satisfies(topology)) {
            Ok(())
        } else {
            Err(Status::resource_exhausted("accessibility_requirements: this pool is on another node"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_local_pool_serves_only_its_node() {
        let topology =
            |key: &str, value: &str| Topology { segments: HashMap::from([(key.to_owned(), value.to_owned())]) };
        let here = Accessibility::Node("a".to_owned());
        for (case, requisite, want) in [
            ("nothing asked", vec![], true),
            ("here", vec![topology(NODE_TOPOLOGY_KEY, "a")], true),
            ("elsewhere", vec![topology(NODE_TOPOLOGY_KEY, "b")], false),
            ("here among others", vec![topology(NODE_TOPOLOGY_KEY, "b"), topology(NODE_TOPOLOGY_KEY, "a")], true),
            ("a topology key of another driver", vec![topology("zone", "z")], true),
        ] {
            let requirement = TopologyRequirement { requisite, preferred: Vec::new() };
            assert_eq!(here.check(Some(&requirement)).is_ok(), want, "{case}");
            assert!(Accessibility::AllNodes.check(Some(&requirement)).is_ok(), "{case}");
        }
    }
}
