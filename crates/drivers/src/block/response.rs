//! Converts records to the messages of CSI responses. Pure.
use cleat_csi::v1;
use prost_types::Timestamp;

use super::record::{ContentSource, SnapshotRecord, SnapshotState, UnixTime, VolumeRecord};

pub(crate) fn volume(csi_id: String, record: &VolumeRecord, accessible_topology: Option<v1::Topology>) -> v1::Volume {
    v1::Volume {
        capacity_bytes: to_i64(record.capacity),
        volume_id: csi_id,
        volume_context: record.parameters.clone().into_iter().collect(),
        content_source: record.source.as_ref().map(content_source),
        accessible_topology: accessible_topology.into_iter().collect(),
    }
}

fn content_source(source: &ContentSource) -> v1::VolumeContentSource {
    use v1::volume_content_source::{SnapshotSource, Type, VolumeSource};
    let r#type = match source {
        ContentSource::Volume(id) => Type::Volume(VolumeSource { volume_id: id.clone() }),
        ContentSource::Snapshot(id) => Type::Snapshot(SnapshotSource { snapshot_id: id.clone() }),
    };
    v1::VolumeContentSource { r#type: Some(r#type) }
}

pub(crate) fn snapshot(csi_id: String, record: &SnapshotRecord) -> v1::Snapshot {
    v1::Snapshot {
        size_bytes: to_i64(record.size),
        snapshot_id: csi_id,
        source_volume_id: record.source.clone(),
        creation_time: Some(timestamp(record.created)),
        ready_to_use: record.state == SnapshotState::Ready,
        group_snapshot_id: record.group.clone().unwrap_or_default(),
        // Optional, and csi-sanity 5.6 rejects every topology that it did not build itself. CreateVolume refuses to
        // restore a snapshot in another topology.
        accessible_topology: Vec::new(),
    }
}

pub(crate) fn timestamp(time: UnixTime) -> Timestamp {
    Timestamp { seconds: time.0, nanos: time.1 }
}

/// Sizes are signed in CSI messages.
pub(crate) fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
