//! Grows a file system to the size of its device. The caller has grown the device before.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::probe::FileSystemKind;
use crate::run::{RunError, run};

/// Growing writes metadata for each block group: little per gigabyte, but there may be many gigabytes.
const GROW_DEADLINE: Duration = Duration::from_secs(600);

#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("{program} of {device:?} failed: {message}")]
    Failed { program: &'static str, device: PathBuf, message: String },
    /// Growing a mounted ext4 requires CAP_SYS_RESOURCE, which containers often lack.
    #[error("{device:?} cannot be grown while it is mounted: the kernel does not permit it here ({message})")]
    OnlineNotPermitted { device: PathBuf, message: String },
    #[error("{kind} on {device:?} grows only while it is mounted")]
    NeedsMount { device: PathBuf, kind: FileSystemKind },
    #[error("{kind} on {device:?} cannot be grown")]
    Unsupported { device: PathBuf, kind: FileSystemKind },
}

/// Whether a file system of this kind can be grown while it is not mounted. The others must be mounted.
pub fn grows_unmounted(kind: FileSystemKind) -> bool {
    matches!(kind, FileSystemKind::Ext2 | FileSystemKind::Ext3 | FileSystemKind::Ext4)
}

/// Grows the file system to the size of its device. Succeeds if it has that size already. `mounted` is a path at which
/// it is mounted, if it is.
pub fn grow(device: &Path, kind: FileSystemKind, mounted: Option<&Path>) -> Result<(), GrowError> {
    match (kind, mounted) {
        (FileSystemKind::Ext2 | FileSystemKind::Ext3 | FileSystemKind::Ext4, Some(_)) => match resize2fs(device) {
            Err(GrowError::Failed { device, message, .. }) if message.contains("Permission denied") => {
                Err(GrowError::OnlineNotPermitted { device, message })
            }
            other => other,
        },
        (FileSystemKind::Ext2 | FileSystemKind::Ext3 | FileSystemKind::Ext4, None) => {
            // resize2fs requires a full check after the last mount. Exit statuses below 4 mean clean or corrected.
            let check = run("e2fsck", &[OsStr::new("-f"), OsStr::new("-p"), device.as_os_str()], GROW_DEADLINE)?;
            if check.status.code().is_none_or(|code| code >= 4) {
                return Err(GrowError::Failed {
                    program: "e2fsck",
                    device: device.into(),
                    message: check.message().into(),
                });
            }
            resize2fs(device)
        }
        (FileSystemKind::Xfs, Some(at)) => run_grow_program("xfs_growfs", &["-d".as_ref(), at.as_os_str()], device),
        (FileSystemKind::Btrfs, Some(at)) => run_grow_program(
            "btrfs",
            &["filesystem".as_ref(), "resize".as_ref(), "max".as_ref(), at.as_os_str()],
            device,
        ),
        (FileSystemKind::Xfs | FileSystemKind::Btrfs, None) => {
            Err(GrowError::NeedsMount { device: device.into(), kind })
        }
        (kind, _) => Err(GrowError::Unsupported { device: device.into(), kind }),
    }
}

fn resize2fs(device: &Path) -> Result<(), GrowError> {
    run_grow_program("resize2fs", &[device.as_os_str()], device)
}

fn run_grow_program(name: &'static str, arguments: &[&OsStr], device: &Path) -> Result<(), GrowError> {
    let output = run(name, arguments, GROW_DEADLINE)?;
    if output.status.success() {
        Ok(())
    } else {
        Err(GrowError::Failed { program: name, device: device.into(), message: output.message().into() })
    }
}
