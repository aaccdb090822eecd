//! Making, checking, growing and measuring file systems. Formats only what is blank; what a mount or a format is for is the
//! caller's business.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use crate::grow::{GrowError, grow, grows_unmounted};
pub use crate::identity::{Identity, Kind, ProbeError, probe};
use crate::run::{RunError, run};

/// mkfs of a huge device takes a while even when it writes little.
const MKFS_DEADLINE: Duration = Duration::from_secs(300);
/// A journal replay plus a full check of a large file system.
const FSCK_DEADLINE: Duration = Duration::from_secs(1800);

/// The file systems that can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    Ext4,
    Xfs,
    Btrfs,
}

impl Format {
    /// By the name Kubernetes and CSI use; an empty name means ext4.
    pub fn named(name: &str) -> Option<Format> {
        match name {
            "" | "ext4" => Some(Format::Ext4),
            "xfs" => Some(Format::Xfs),
            "btrfs" => Some(Format::Btrfs),
            _ => None,
        }
    }

    pub fn kind(self) -> Kind {
        match self {
            Format::Ext4 => Kind::Ext4,
            Format::Xfs => Kind::Xfs,
            Format::Btrfs => Kind::Btrfs,
        }
    }

    pub fn name(self) -> &'static str {
        self.kind().name()
    }
}

/// What a format may write over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Only a device on which the probe finds nothing at all.
    Blank,
    /// What the caller has just probed and found blank, while nobody else could write to it.
    FoundBlank,
    /// Anything: the caller has a durable record that its own format of this device began and did not end.
    OwnInterruptedFormat,
}

#[derive(Debug, thiserror::Error)]
pub enum MkfsError {
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error("{device:?} holds {holds}: it is not formatted")]
    NotBlank { device: PathBuf, holds: Identity },
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("{program} of {device:?} failed: {said}")]
    Failed { program: &'static str, device: PathBuf, said: String },
}

/// Makes a file system on `device`; `options` are passed to the program before its own.
pub fn mkfs(device: &Path, format: Format, options: &[String], over: Over) -> Result<(), MkfsError> {
    if over == Over::Blank {
        match probe(device)? {
            Identity::Blank => {}
            holds => return Err(MkfsError::NotBlank { device: device.into(), holds }),
        }
    }
    let (program, own) = command(format, options, over);
    let mut arguments: Vec<OsString> = options.iter().map(Into::into).collect();
    arguments.extend(own.iter().map(Into::into));
    arguments.push(device.into());
    let output = run(program, &arguments, MKFS_DEADLINE)?;
    if output.status.success() {
        Ok(())
    } else {
        Err(MkfsError::Failed { program, device: device.into(), said: output.said().into() })
    }
}

/// The program and the arguments that make it quick on a fresh device: no discard, and tables initialised when used.
///
/// Force flags appear only over an interrupted format. On a blank device the programs' own check is a second opinion;
/// ext4's `-F` is not a force flag in that sense, it keeps the program from asking questions.
fn command(format: Format, options: &[String], over: Over) -> (&'static str, Vec<&'static str>) {
    let force = over == Over::OwnInterruptedFormat;
    match format {
        Format::Ext4 => {
            let mut own = vec!["-q", "-F", "-m0"];
            if !options.iter().any(|o| o.starts_with("-E")) {
                own.extend(["-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"]);
            }
            ("mkfs.ext4", own)
        }
        Format::Xfs => ("mkfs.xfs", if force { vec!["-q", "-K", "-f"] } else { vec!["-q", "-K"] }),
        Format::Btrfs => ("mkfs.btrfs", if force { vec!["-q", "-K", "-f"] } else { vec!["-q", "-K"] }),
    }
}

/// What a check found, when that does not forbid mounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    Clean,
    Corrected,
    /// This kind checks itself when mounted.
    ByMount,
    /// No verdict: the program is missing or did not understand. Mounting decides.
    NoVerdict,
}

#[derive(Debug, thiserror::Error)]
pub enum FsckError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("{device:?} has file system errors that need a person: {said}")]
    Errors { device: PathBuf, said: String },
}

/// Checks an unmounted file system and repairs what is safe to repair.
pub fn fsck(device: &Path, kind: Kind) -> Result<Checked, FsckError> {
    if !matches!(kind, Kind::Ext2 | Kind::Ext3 | Kind::Ext4) {
        return Ok(Checked::ByMount);
    }
    let output = match run("e2fsck", &["-p".as_ref(), device.as_os_str()], FSCK_DEADLINE) {
        Ok(output) => output,
        Err(RunError::Missing { .. }) => return Ok(Checked::NoVerdict),
        Err(e) => return Err(e.into()),
    };
    // The exit status is a set of bits: 1 corrected, 2 corrected and reboot advised, 4 errors left; from 8 on the program had trouble.
    match output.status.code() {
        Some(0) => Ok(Checked::Clean),
        Some(1..=3) => Ok(Checked::Corrected),
        Some(4..=7) => Err(FsckError::Errors { device: device.into(), said: output.said().into() }),
        _ => {
            tracing::warn!(?device, said = output.said(), "fsck gave no verdict");
            Ok(Checked::NoVerdict)
        }
    }
}

/// Space and inodes of the file system at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub total_bytes: u64,
    pub used_bytes: u64,
    /// What an unprivileged writer can still use.
    pub available_bytes: u64,
    pub total_inodes: u64,
    pub used_inodes: u64,
    pub free_inodes: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("statfs {path:?}")]
pub struct StatfsError {
    pub path: PathBuf,
    pub source: io::Error,
}

pub fn statfs(path: &Path) -> Result<Usage, StatfsError> {
    let stat = rustix::fs::statvfs(path).map_err(|e| StatfsError { path: path.into(), source: e.into() })?;
    let unit = stat.f_frsize;
    Ok(Usage {
        total_bytes: stat.f_blocks * unit,
        used_bytes: stat.f_blocks.saturating_sub(stat.f_bfree) * unit,
        available_bytes: stat.f_bavail * unit,
        total_inodes: stat.f_files,
        used_inodes: stat.f_files.saturating_sub(stat.f_ffree),
        free_inodes: stat.f_ffree,
    })
}
