//! The records of volumes, snapshots and groups, and the decisions that depend on a record alone. Pure.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The record of a volume, stored as JSON beside its image. A field that a later version adds needs a serde default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VolumeRecord {
    pub(crate) name: String,
    pub(crate) capacity: u64,
    pub(crate) parameters: BTreeMap<String, String>,
    /// `None` for a raw block volume.
    pub(crate) file_system: Option<String>,
    #[serde(default)]
    pub(crate) contents: ImageContents,
    /// The nodes that the volume is published to, by node id.
    #[serde(default)]
    pub(crate) published: BTreeMap<String, Publication>,
    /// The volume or snapshot that it was copied from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<ContentSource>,
    /// The copy of its source is not complete: CreateVolume has not returned the volume to any caller yet.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) filling: bool,
    /// The image is larger than the file system on it: the next stage grows the file system.
    #[serde(rename = "grow", default, skip_serializing_if = "is_false")]
    pub(crate) needs_grow: bool,
    /// Parameters that ControllerModifyVolume can change.
    #[serde(rename = "mutable", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) mutable_parameters: BTreeMap<String, String>,
}

/// The source of a volume, by its CSI id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum ContentSource {
    Volume(String),
    Snapshot(String),
}

impl ContentSource {
    pub(crate) fn id(&self) -> &str {
        match self {
            ContentSource::Volume(id) | ContentSource::Snapshot(id) => id,
        }
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

/// The record of a snapshot, stored beside its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotRecord {
    pub(crate) name: String,
    /// The CSI id of the volume.
    pub(crate) source: String,
    pub(crate) size: u64,
    pub(crate) file_system: Option<String>,
    pub(crate) contents: ImageContents,
    pub(crate) state: SnapshotState,
    /// The point in time whose data the snapshot contains.
    pub(crate) created: UnixTime,
    /// The id of the group snapshot that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
}

/// Seconds and nanoseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UnixTime(pub(crate) i64, pub(crate) i32);

impl UnixTime {
    pub(crate) fn now() -> UnixTime {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        UnixTime(i64::try_from(now.as_secs()).unwrap_or(i64::MAX), now.subsec_nanos() as i32)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum SnapshotState {
    /// CreateSnapshot has not returned it to any caller: a repeated call may cut it at a later point in time.
    Cutting,
    /// CreateSnapshot may have returned it, so it must contain the data of the time at which it was cut. An interrupted
    /// copy can be repeated only if the modification time of the volume's image is still `image_modified`.
    Copying {
        #[serde(rename = "unchanged")]
        image_modified: UnixTime,
    },
    Ready,
    /// Its copy was interrupted and cannot be repeated. It can only be deleted.
    Lost,
}

/// The record of a group snapshot: several snapshots of one point in time. Stored in the default pool, also if its
/// members are in other pools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GroupRecord {
    pub(crate) name: String,
    /// The CSI ids of each member: the volume, and its snapshot.
    pub(crate) members: BTreeMap<String, String>,
    pub(crate) created: UnixTime,
    pub(crate) ready: bool,
}

/// What the image may contain. Recorded before the step that changes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum ImageContents {
    #[default]
    Nothing,
    /// The driver has started to format it: it contains no user data, and may be formatted again.
    Formatting,
    /// It may contain user data, and must not be formatted.
    Data,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Publication {
    pub(crate) read_only: bool,
    pub(crate) sharing: Sharing,
}

/// To which other nodes the volume may be published at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Sharing {
    /// To no other node.
    Exclusive,
    /// To nodes that only read.
    Readers,
    /// To nodes that write. Only for raw block volumes, whose writers coordinate among themselves.
    Writers,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PublishDecision {
    Publish,
    AlreadyPublished,
    /// It is published to this node with another access or sharing.
    RefuseOtherAccess,
    /// It is published to these nodes, and their publications do not allow this one.
    RefuseOtherNodes(Vec<String>),
}

impl VolumeRecord {
    pub(crate) fn decide_publish(&self, node: &str, wanted: Publication) -> PublishDecision {
        if let Some(existing) = self.published.get(node) {
            return if *existing == wanted {
                PublishDecision::AlreadyPublished
            } else {
                PublishDecision::RefuseOtherAccess
            };
        }
        let admits =
            |existing: &Publication| existing.sharing == wanted.sharing && wanted.sharing != Sharing::Exclusive;
        let others = self.published.iter().filter(|(_, existing)| !admits(existing));
        let others: Vec<String> = others.map(|(node, _)| node.clone()).collect();
        if others.is_empty() { PublishDecision::Publish } else { PublishDecision::RefuseOtherNodes(others) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Sharing::*, *};

    #[test]
    fn a_volume_is_published_to_several_nodes_only_if_all_publications_allow_sharing() {
        let publication = |sharing| Publication { read_only: sharing == Readers, sharing };
        let refuse =
            |nodes: &[&str]| PublishDecision::RefuseOtherNodes(nodes.iter().map(|node| (*node).to_owned()).collect());
        for (case, existing, node, wanted, want) in [
            ("not published", vec![], "a", Exclusive, PublishDecision::Publish),
            ("again on the same node", vec![("a", Exclusive)], "a", Exclusive, PublishDecision::AlreadyPublished),
            ("same node, other access", vec![("a", Exclusive)], "a", Readers, PublishDecision::RefuseOtherAccess),
            ("second writer", vec![("a", Exclusive)], "b", Exclusive, refuse(&["a"])),
            ("reader beside a writer", vec![("a", Exclusive)], "b", Readers, refuse(&["a"])),
            ("writer beside readers", vec![("a", Readers), ("c", Readers)], "b", Exclusive, refuse(&["a", "c"])),
            ("reader beside readers", vec![("a", Readers), ("c", Readers)], "b", Readers, PublishDecision::Publish),
            ("writers that coordinate", vec![("a", Writers)], "b", Writers, PublishDecision::Publish),
            ("reader beside coordinating writers", vec![("a", Writers)], "b", Readers, refuse(&["a"])),
        ] {
            let record = VolumeRecord {
                published: existing
                    .into_iter()
                    .map(|(node, sharing)| (node.to_owned(), publication(sharing)))
                    .collect(),
                ..VolumeRecord::default()
            };
            assert_eq!(record.decide_publish(node, publication(wanted)), want, "{case}");
        }
    }
}
