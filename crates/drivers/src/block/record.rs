//! What the driver remembers of a volume, and the rules that need nothing else. Pure.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Stored as JSON beside the image. Fields that a later version adds need a serde default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) capacity: u64,
    pub(crate) parameters: BTreeMap<String, String>,
    /// Absent for a raw block volume.
    pub(crate) file_system: Option<String>,
    #[serde(default)]
    pub(crate) contents: Contents,
    /// By node id.
    #[serde(default)]
    pub(crate) published: BTreeMap<String, Publication>,
}

/// What may be in the image. Written before the step that makes it true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Contents {
    #[default]
    Nothing,
    /// Our own format began: anything, but nobody's data.
    Formatting,
    /// Somebody's data.
    Data,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Publication {
    pub(crate) read_only: bool,
    pub(crate) sharing: Sharing,
}

/// Which other nodes may have the volume at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Sharing {
    Exclusive,
    Readers,
    /// Raw block only: the writers coordinate among themselves.
    Writers,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Publish,
    AlreadyPublished,
    /// This node has it in another way.
    Conflict,
    /// Other nodes have it in a way that does not admit this one.
    HeldBy(Vec<String>),
}

impl Record {
    pub(crate) fn may_publish(&self, node: &str, wanted: Publication) -> Verdict {
        if let Some(existing) = self.published.get(node) {
            return if *existing == wanted { Verdict::AlreadyPublished } else { Verdict::Conflict };
        }
        let admits = |held: &Publication| held.sharing == wanted.sharing && wanted.sharing != Sharing::Exclusive;
        let holders: Vec<String> =
            self.published.iter().filter(|(_, held)| !admits(held)).map(|(node, _)| node.clone()).collect();
        if holders.is_empty() { Verdict::Publish } else { Verdict::HeldBy(holders) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Sharing::*, *};

    #[test]
    fn a_volume_is_shared_only_by_nodes_that_all_agree_to_share() {
        let publication = |sharing| Publication { read_only: sharing == Readers, sharing };
        let held_by = |nodes: &[&str]| Verdict::HeldBy(nodes.iter().map(|node| (*node).to_owned()).collect());
        for (case, held, node, wanted, want) in [
            ("nobody has it", vec![], "a", Exclusive, Verdict::Publish),
            ("again on the same node", vec![("a", Exclusive)], "a", Exclusive, Verdict::AlreadyPublished),
            ("same node, other access", vec![("a", Exclusive)], "a", Readers, Verdict::Conflict),
            ("second writer", vec![("a", Exclusive)], "b", Exclusive, held_by(&["a"])),
            ("reader beside a writer", vec![("a", Exclusive)], "b", Readers, held_by(&["a"])),
            ("writer beside readers", vec![("a", Readers), ("c", Readers)], "b", Exclusive, held_by(&["a", "c"])),
            ("reader beside readers", vec![("a", Readers), ("c", Readers)], "b", Readers, Verdict::Publish),
            ("writers that coordinate", vec![("a", Writers)], "b", Writers, Verdict::Publish),
            ("reader beside coordinating writers", vec![("a", Writers)], "b", Readers, held_by(&["a"])),
        ] {
            let record = Record {
                name: "v".into(),
                capacity: 1,
                parameters: BTreeMap::new(),
                file_system: None,
                contents: Contents::Nothing,
                published: held.into_iter().map(|(node, sharing)| (node.to_owned(), publication(sharing))).collect(),
            };
            assert_eq!(record.may_publish(node, publication(wanted)), want, "{case}");
        }
    }
}
