//! Detects problems of a volume without changing it, and converts them to the health messages of CSI.
use std::{io, path::Path};

use cleat_csi::v1::{VolumeCondition, VolumeHealth, VolumeHealthErrorType, volume_health::VolumeHealthEntry};
use cleat_host::Access;

use super::{
    kernel_state::{KernelState, is_device_node_mount},
    pool::Pool,
    record::{ImageContents, VolumeRecord},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HealthProblem {
    pub(crate) status: VolumeHealthErrorType,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Checks the image. Any process that serves the pool can do this.
pub(crate) fn check_image(pool: &Pool, id: &str, record: &VolumeRecord) -> Vec<HealthProblem> {
    let problem = |status, reason, message| vec![HealthProblem { status, reason, message }];
    match std::fs::metadata(pool.image_path(id)) {
        // `ensure_image` creates it when it is needed.
        Err(error) if error.kind() == io::ErrorKind::NotFound && record.contents == ImageContents::Nothing => {
            Vec::new()
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            problem(VolumeHealthErrorType::DataLoss, "ImageLost", "the image of the volume is gone".to_owned())
        }
        Err(error) => problem(VolumeHealthErrorType::Inaccessible, "ImageUnreadable", format!("the image: {error}")),
        Ok(metadata) if metadata.len() < record.capacity && record.contents == ImageContents::Data => problem(
            VolumeHealthErrorType::Degraded,
            "ImageShort",
            format!("the image has {} of {} bytes", metadata.len(), record.capacity),
        ),
        Ok(_) => Vec::new(),
    }
}

/// Checks the image, and on the node also the device and the mount at `at`.
pub(crate) fn check_on_node(
    pool: &Pool,
    node: &str,
    id: &str,
    record: &VolumeRecord,
    kernel: &KernelState,
    at: Option<&Path>,
) -> Vec<HealthProblem> {
    let mut problems = check_image(pool, id, record);
    let is_writable = record.published.get(node).is_some_and(|publication| !publication.read_only)
        && kernel.devices.iter().any(|device| device.access == Access::ReadWrite);
    let mount_at = |path: &Path| kernel.mounts.iter().find(|mount| mount.target == path);
    if let Some(mount) = at.and_then(mount_at)
        && is_writable
        && !is_device_node_mount(mount, &kernel.devices)
        && mount.super_options.iter().any(|option| option == "ro")
    {
        problems.push(HealthProblem {
            status: VolumeHealthErrorType::Degraded,
            reason: "ReadOnlyFileSystem",
            message: "the file system has become read-only; its device may have failed".to_owned(),
        });
    }
    problems
}

/// The volume condition of CSI spec 1.12.
pub(crate) fn condition(problems: &[HealthProblem]) -> VolumeCondition {
    let messages: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
    let message = if messages.is_empty() { "the volume is as it should be".to_owned() } else { messages.join("; ") };
    VolumeCondition { abnormal: !problems.is_empty(), message }
}

pub(crate) fn to_message(volume_id: String, problems: Vec<HealthProblem>) -> VolumeHealth {
    let entry = |problem: HealthProblem| VolumeHealthEntry {
        status: problem.status.into(),
        reason: problem.reason.to_owned(),
        message: problem.message,
    };
    VolumeHealth { volume_id, health_statuses: problems.into_iter().map(entry).collect() }
}
