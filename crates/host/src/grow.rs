//! Makes a file system as large as its device. The device has grown before; this crate's callers see to that.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::identity::Kind;
use crate::run::{RunError, run};

/// Growing writes group tables and the like: little per gigabyte, but there may be many.
const DEADLINE: Duration = Duration::from_secs(600);

#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("{program} of {device:?} failed: {said}")]
    Failed { program: &'static str, device: PathBuf, said: String },
    /// Growing ext4 while it is mounted takes CAP_SYS_RESOURCE, which containers often lack.
    #[error("{device:?} cannot be grown while it is mounted: the kernel does not permit it here ({said})")]
    OnlineNotPermitted { device: PathBuf, said: String },
    #[error("{kind} on {device:?} grows only while it is mounted")]
    NeedsMount { device: PathBuf, kind: Kind },
    #[error("{kind} on {device:?} cannot be grown")]
    Unsupported { device: PathBuf, kind: Kind },
}

/// Whether this kind grows while it is not mounted; the others do while they are.
pub fn grows_unmounted(kind: Kind) -> bool {
    matches!(kind, Kind::Ext2 | Kind::Ext3 | Kind::Ext4)
}

/// Grows the file system to its device's size. As large already is success.
pub fn grow(device: &Path, kind: Kind, mounted: Option<&Path>) -> Result<(), GrowError> {
    match (kind, mounted) {
        (Kind::Ext2 | Kind::Ext3 | Kind::Ext4, Some(_)) => match resize2fs(device) {
            Err(GrowError::Failed { device, said, .. }) if said.contains("Permission denied") => {
                Err(GrowError::OnlineNotPermitted { device, said })
            }
            other => other,
        },
        (Kind::Ext2 | Kind::Ext3 | Kind::Ext4, None) => {
            // resize2fs insists on a full check since the last mount. Its exit status says what it corrected.
            let checked = run("e2fsck", &[OsStr::new("-f"), OsStr::new("-p"), device.as_os_str()], DEADLINE)?;
            if checked.status.code().is_none_or(|code| code >= 4) {
                return Err(GrowError::Failed {
                    program: "e2fsck",
                    device: device.into(),
                    said: checked.said().into(),
                });
            }
            resize2fs(device)
        }
        (Kind::Xfs, Some(at)) => program("xfs_growfs", &["-d".as_ref(), at.as_os_str()], device),
        (Kind::Btrfs, Some(at)) => {
            program("btrfs", &["filesystem".as_ref(), "resize".as_ref(), "max".as_ref(), at.as_os_str()], device)
        }
        (Kind::Xfs | Kind::Btrfs, None) => Err(GrowError::NeedsMount { device: device.into(), kind }),
        (kind, _) => Err(GrowError::Unsupported { device: device.into(), kind }),
    }
}

fn resize2fs(device: &Path) -> Result<(), GrowError> {
    program("resize2fs", &[device.as_os_str()], device)
}

fn program(name: &'static str, arguments: &[&OsStr], device: &Path) -> Result<(), GrowError> {
    let output = run(name, arguments, DEADLINE)?;
    if output.status.success() {
        Ok(())
    } else {
        Err(GrowError::Failed { program: name, device: device.into(), said: output.said().into() })
    }
}
