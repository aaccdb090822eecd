//! What the kernel has of a volume right now: its loop devices and their mounts. Looks only; changes nothing.
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

pub(crate) struct Seen {
    pub(crate) devices: Vec<LoopDevice>,
    /// Mounts of its devices: of the file system on them, or of the device node itself.
    pub(crate) uses: Vec<Mount>,
}

impl Seen {
    pub(crate) fn of_image(image: &Path) -> Result<Seen, Failure> {
        let devices = loopdev::find(image)?;
        let uses = if devices.is_empty() {
            Vec::new()
        } else {
            mount::table()?.into_iter().filter(|mount| is_use(mount, &devices)).collect()
        };
        Ok(Seen { devices, uses })
    }

    /// The volume's mount at `path`; nothing if nothing is mounted there, an error if something else is.
    pub(crate) fn at(&self, id: &str, path: &Path) -> Result<Option<&Mount>, Failure> {
        let Some(here) = mount::find(path)? else { return Ok(None) };
        match self.uses.iter().find(|used| used.id == here.id) {
            Some(used) => Ok(Some(used)),
            None => Err(Failure::Foreign { id: id.to_owned(), at: path.to_owned() }),
        }
    }

    pub(crate) fn refuse_uses(&self, id: &str) -> Result<(), Failure> {
        match self.uses.first() {
            Some(used) => Err(Failure::InUse { id: id.to_owned(), at: used.target.clone() }),
            None => Ok(()),
        }
    }
}

fn is_use(mount: &Mount, devices: &[LoopDevice]) -> bool {
    const LOOP_MAJOR: u32 = 7;
    let mounted = |device: &LoopDevice| {
        mount.device == (LOOP_MAJOR, device.number)
            // btrfs shows a device number of its own.
            || mount.fstype == "btrfs" && mount.source == device.path
    };
    devices.iter().any(mounted) || is_node_of(mount, devices)
}

/// Whether a device node is bound there. The name is compared first, so that only candidates are touched.
pub(crate) fn is_node_of(mount: &Mount, devices: &[LoopDevice]) -> bool {
    devices.iter().any(|device| {
        mount.root.file_name() == device.path.file_name()
            && match (fs::symlink_metadata(&mount.target), fs::metadata(&device.path)) {
                (Ok(bound), Ok(node)) => bound.file_type().is_block_device() && bound.rdev() == node.rdev(),
                _ => false,
            }
    })
}
