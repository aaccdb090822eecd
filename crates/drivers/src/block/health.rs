//! What is wrong with a volume, as far as it can be seen without touching it.
use std::{io, path::Path};

use cleat_csi::v1::{VolumeCondition, VolumeHealth, VolumeHealthErrorType, volume_health::VolumeHealthEntry};
use cleat_host::Access;

use super::{
    backend::Pool,
    record::{Contents, Record},
    seen::{Seen, is_node_of},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Complaint {
    pub(crate) status: VolumeHealthErrorType,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// What any process can see: the image.
pub(crate) fn of_image(pool: &Pool, id: &str, record: &Record) -> Vec<Complaint> {
    let complaint = |status, reason, message| vec![Complaint { status, reason, message }];
    match std::fs::metadata(pool.image(id)) {
        // It is made when it is needed.
        Err(error) if error.kind() == io::ErrorKind::NotFound && record.contents == Contents::Nothing => Vec::new(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            complaint(VolumeHealthErrorType::DataLoss, "ImageLost", "the image of the volume is gone".to_owned())
        }
        Err(error) => complaint(VolumeHealthErrorType::Inaccessible, "ImageUnreadable", format!("the image: {error}")),
        Ok(found) if found.len() < record.capacity && record.contents == Contents::Data => complaint(
            VolumeHealthErrorType::Degraded,
            "ImageShort",
            format!("the image has {} of {} bytes", found.len(), record.capacity),
        ),
        Ok(_) => Vec::new(),
    }
}

/// What the node can see besides: the device and the mount at `at`.
pub(crate) fn on_node(
    pool: &Pool,
    node: &str,
    id: &str,
    record: &Record,
    seen: &Seen,
    at: Option<&Path>,
) -> Vec<Complaint> {
    let mut complaints = of_image(pool, id, record);
    let writable = record.published.get(node).is_some_and(|held| !held.read_only)
        && seen.devices.iter().any(|device| device.access == Access::ReadWrite);
    let here = |path: &Path| seen.uses.iter().find(|used| used.target == path);
    if let Some(used) = at.and_then(here)
        && writable
        && !is_node_of(used, &seen.devices)
        && used.super_options.iter().any(|option| option == "ro")
    {
        complaints.push(Complaint {
            status: VolumeHealthErrorType::Degraded,
            reason: "ReadOnlyFileSystem",
            message: "the file system has become read-only; its device may have failed".to_owned(),
        });
    }
    complaints
}

/// For callers of spec 1.12.
pub(crate) fn condition(complaints: &[Complaint]) -> VolumeCondition {
    let messages: Vec<&str> = complaints.iter().map(|complaint| complaint.message.as_str()).collect();
    let message = if messages.is_empty() { "the volume is as it should be".to_owned() } else { messages.join("; ") };
    VolumeCondition { abnormal: !complaints.is_empty(), message }
}

pub(crate) fn message(volume_id: String, complaints: Vec<Complaint>) -> VolumeHealth {
    let entry = |found: Complaint| VolumeHealthEntry {
        status: found.status.into(),
        reason: found.reason.to_owned(),
        message: found.message,
    };
    VolumeHealth { volume_id, health_statuses: complaints.into_iter().map(entry).collect() }
}
