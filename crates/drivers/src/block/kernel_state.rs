//! The current state of a volume in the kernel: its loop devices and their mounts. Changes nothing.
use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use cleat_host::{
    loopdev::{self, LoopDevice},
    mount::{self, Mount},
};

use super::failure::Failure;

pub(crate) struct KernelState {
    pub(crate) devices: Vec<LoopDevice>,
    /// All mounts of the devices: of the file system on them, or bind mounts of the device node.
    pub(crate) mounts: Vec<Mount>,
}

impl KernelState {
    pub(crate) fn of_image(image: &Path) -> Result<KernelState, Failure> {
        let devices = loopdev::find(image)?;
        let mounts = if devices.is_empty() {
            Vec::new()
        } else {
            mount::table()?.into_iter().filter(|mount| is_mount_of(mount, &devices)).collect()
        };
        Ok(KernelState { devices, mounts })
    }

    /// The mount of the volume at `path`; `None` if nothing is mounted there, an error if something else is.
    pub(crate) fn mount_at(&self, id: &str, path: &Path) -> Result<Option<&Mount>, Failure> {
        let Some(mounted) = mount::find(path)? else { return Ok(None) };
        match self.mounts.iter().find(|mount| mount.id == mounted.id) {
            Some(mount) => Ok(Some(mount)),
            None => Err(Failure::ForeignMount { id: id.to_owned(), at: path.to_owned() }),
        }
    }

    /// Fails with [`Failure::InUse`] if the volume is mounted anywhere.
    pub(crate) fn require_unmounted(&self, id: &str) -> Result<(), Failure> {
        match self.mounts.first() {
            Some(mount) => Err(Failure::InUse { id: id.to_owned(), at: mount.target.clone() }),
            None => Ok(()),
        }
    }
}

fn is_mount_of(mount: &Mount, devices: &[LoopDevice]) -> bool {
    const LOOP_MAJOR: u32 = 7;
    let mounted = |device: &LoopDevice| {
        mount.device == (LOOP_MAJOR, device.number)
            // The mount table shows an anonymous device number for btrfs.
            || mount.fstype == "btrfs" && mount.source == device.path
    };
    devices.iter().any(mounted) || is_device_node_mount(mount, devices)
}

/// Whether the mount is a bind mount of the device node of one of the devices. The file name is compared first, so that
/// the targets of other mounts, which may hang, are not accessed.
pub(crate) fn is_device_node_mount(mount: &Mount, devices: &[LoopDevice]) -> bool {
    devices.iter().any(|device| {
        mount.root.file_name() == device.path.file_name()
            && match (fs::symlink_metadata(&mount.target), fs::metadata(&device.path)) {
                (Ok(bound), Ok(node)) => bound.file_type().is_block_device() && bound.rdev() == node.rdev(),
                _ => false,
            }
    })
}
