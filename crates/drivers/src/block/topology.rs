//! Where volumes can be reached from: everywhere, or only from this node if the pool is on its own disk. Pure.
use std::collections::HashMap;

use cleat_csi::{
    Status,
    v1::{Topology, TopologyRequirement},
};

pub(crate) const KEY: &str = "topology.block.cleat.dev/node";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Every node reaches the pool.
    Everywhere,
    /// Only the node of this id does.
    Node(String),
}

impl Reach {
    pub(crate) fn topology(&self) -> Option<Topology> {
        match self {
            Reach::Everywhere => None,
            Reach::Node(id) => Some(Topology { segments: HashMap::from([(KEY.to_owned(), id.clone())]) }),
        }
    }

    pub(crate) fn is_limited(&self) -> bool {
        *self != Reach::Everywhere
    }

    /// Whether a volume here is in that place. Keys of others are not ours to judge.
    pub(crate) fn is_in(&self, place: &Topology) -> bool {
        match self {
            Reach::Everywhere => true,
            Reach::Node(id) => place.segments.get(KEY).is_none_or(|wanted| wanted == id),
        }
    }

    /// Refuses what can only be made elsewhere, with the code that makes a caller choose another place.
    pub(crate) fn admit(&self, requirement: Option<&TopologyRequirement>) -> Result<(), Status> {
        let requisite = requirement.map_or(&[][..], |requirement| &requirement.requisite);
        if requisite.is_empty() || requisite.iter().any(|place| self.is_in(place)) {
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
    fn a_pool_of_one_node_serves_only_that_node() {
        let place = |key: &str, value: &str| Topology { segments: HashMap::from([(key.to_owned(), value.to_owned())]) };
        let here = Reach::Node("a".to_owned());
        for (case, requisite, want) in [
            ("nothing asked", vec![], true),
            ("here", vec![place(KEY, "a")], true),
            ("elsewhere", vec![place(KEY, "b")], false),
            ("here among others", vec![place(KEY, "b"), place(KEY, "a")], true),
            ("a zone we know nothing of", vec![place("zone", "z")], true),
        ] {
            let requirement = TopologyRequirement { requisite, preferred: Vec::new() };
            assert_eq!(here.admit(Some(&requirement)).is_ok(), want, "{case}");
            assert!(Reach::Everywhere.admit(Some(&requirement)).is_ok(), "{case}");
        }
    }
}
