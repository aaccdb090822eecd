//! What the driver remembers of volumes and snapshots, and the rules that need nothing else. Pure.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Stored as JSON beside the image. Fields that a later version adds need a serde default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// What it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<Source>,
    /// The copy of its source has begun and not ended: nobody was told of the volume yet.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) filling: bool,
    /// The image is larger than the file system in it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) grow: bool,
    /// Parameters that may change during its life.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) mutable: BTreeMap<String, String>,
}

/// By the id that callers know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Source {
    Volume(String),
    Snapshot(String),
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Stored beside the snapshot's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotRecord {
    pub(crate) name: String,
    /// The volume's id, as callers know it.
    pub(crate) source: String,
    pub(crate) size: u64,
    pub(crate) file_system: Option<String>,
    pub(crate) contents: Contents,
    pub(crate) state: SnapshotState,
    /// The moment it shows.
    pub(crate) created: Moment,
    /// The group snapshot it is part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
}

/// Seconds and nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moment(pub(crate) i64, pub(crate) i32);

impl Moment {
    pub(crate) fn now() -> Moment {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Moment(i64::try_from(now.as_secs()).unwrap_or(i64::MAX), now.subsec_nanos() as i32)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum SnapshotState {
    /// Nobody was told of it yet: it may be cut anew.
    Cutting,
    /// Its caller may know of it: it must show the moment it was cut, when the volume's image was last changed at `unchanged`.
    Copying {
        unchanged: Moment,
    },
    Ready,
    /// Cannot be finished any more; only deleted.
    Lost,
}

/// Several snapshots of one moment. Stored in the pool of the driver, whichever pools its members are in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GroupRecord {
    pub(crate) name: String,
    /// Volume id and snapshot id of each member, as callers know them.
    pub(crate) members: BTreeMap<String, String>,
    pub(crate) created: Moment,
    pub(crate) ready: bool,
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
                published: held.into_iter().map(|(node, sharing)| (node.to_owned(), publication(sharing))).collect(),
                ..Record::default()
            };
            assert_eq!(record.may_publish(node, publication(wanted)), want, "{case}");
        }
    }
}
