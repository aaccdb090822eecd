//! Creates, checks, grows and measures file systems. Formats only a blank device, unless the caller states that it may
//! overwrite more ([`Overwrite`]).

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use crate::grow::{GrowError, grow, grows_unmounted};
pub use crate::probe::{DeviceContents, FileSystemKind, ProbeError, probe};
use crate::run::{RunError, run};

/// mkfs of a very large device takes minutes although it writes little.
const MKFS_DEADLINE: Duration = Duration::from_secs(300);
/// Covers a journal replay and a full check of a large file system.
const FSCK_DEADLINE: Duration = Duration::from_secs(1800);

/// The file systems that can be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    Ext4,
    Xfs,
    Btrfs,
}

impl Format {
    /// Parses the name that Kubernetes and CSI use. An empty name means ext4.
    pub fn from_name(name: &str) -> Option<Format> {
        match name {
            "" | "ext4" => Some(Format::Ext4),
            "xfs" => Some(Format::Xfs),
            "btrfs" => Some(Format::Btrfs),
            _ => None,
        }
    }

    pub fn kind(self) -> FileSystemKind {
        match self {
            Format::Ext4 => FileSystemKind::Ext4,
            Format::Xfs => FileSystemKind::Xfs,
            Format::Btrfs => FileSystemKind::Btrfs,
        }
    }

    pub fn name(self) -> &'static str {
        self.kind().name()
    }
}

/// What `mkfs` may overwrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// Only a blank device: `mkfs` probes it first.
    IfBlank,
    /// The device, without a probe: the caller has probed it and found it blank, and no other process could write to it
    /// since.
    ProbedBlank,
    /// Anything: a durable record of the caller says that its own format of this device was started and not finished.
    OwnInterruptedFormat,
}

#[derive(Debug, thiserror::Error)]
pub enum MkfsError {
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error("{device:?} holds {holds}: it is not formatted")]
    NotBlank { device: PathBuf, holds: DeviceContents },
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("{program} of {device:?} failed: {message}")]
    Failed { program: &'static str, device: PathBuf, message: String },
}

/// Creates a file system on `device`. `options` are passed to the mkfs program, before the options of this crate.
pub fn mkfs(device: &Path, format: Format, options: &[String], overwrite: Overwrite) -> Result<(), MkfsError> {
    if overwrite == Overwrite::IfBlank {
        match probe(device)? {
            DeviceContents::Blank => {}
            holds => return Err(MkfsError::NotBlank { device: device.into(), holds }),
        }
    }
    let (program, own_options) = mkfs_command(format, options, overwrite);
    let mut arguments: Vec<OsString> = options.iter().map(Into::into).collect();
    arguments.extend(own_options.iter().map(Into::into));
    arguments.push(device.into());
    let output = run(program, &arguments, MKFS_DEADLINE)?;
    if output.status.success() {
        Ok(())
    } else {
        Err(MkfsError::Failed { program, device: device.into(), message: output.message().into() })
    }
}

/// The mkfs program, and the options that make it fast on a new device: no discard, and tables are initialised on first
/// use.
///
/// Force flags are passed only to overwrite an interrupted format. On a blank device the program's own check stays
/// active, as a second safeguard. `-F` of mkfs.ext4 is not such a flag: it makes the program non-interactive.
fn mkfs_command(format: Format, options: &[String], overwrite: Overwrite) -> (&'static str, Vec<&'static str>) {
    let force = overwrite == Overwrite::OwnInterruptedFormat;
    match format {
        Format::Ext4 => {
            let mut own_options = vec!["-q", "-F", "-m0"];
            if !options.iter().any(|o| o.starts_with("-E")) {
                own_options.extend(["-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"]);
            }
            ("mkfs.ext4", own_options)
        }
        Format::Xfs => ("mkfs.xfs", if force { vec!["-q", "-K", "-f"] } else { vec!["-q", "-K"] }),
        Format::Btrfs => ("mkfs.btrfs", if force { vec!["-q", "-K", "-f"] } else { vec!["-q", "-K"] }),
    }
}

/// The result of a check after which the file system may be mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsckOutcome {
    Clean,
    Corrected,
    /// Not checked here: file systems of this kind are checked by the kernel when they are mounted.
    CheckedByMount,
    /// Unknown: e2fsck is not installed, or failed for another reason than errors in the file system.
    Inconclusive,
}

#[derive(Debug, thiserror::Error)]
pub enum FsckError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("{device:?} has file system errors that need a person: {message}")]
    Errors { device: PathBuf, message: String },
}

/// Checks an unmounted file system, and corrects the errors that are safe to correct without a person.
pub fn fsck(device: &Path, kind: FileSystemKind) -> Result<FsckOutcome, FsckError> {
    if !matches!(kind, FileSystemKind::Ext2 | FileSystemKind::Ext3 | FileSystemKind::Ext4) {
        return Ok(FsckOutcome::CheckedByMount);
    }
    let output = match run("e2fsck", &["-p".as_ref(), device.as_os_str()], FSCK_DEADLINE) {
        Ok(output) => output,
        Err(RunError::Missing { .. }) => return Ok(FsckOutcome::Inconclusive),
        Err(e) => return Err(e.into()),
    };
    // The exit status is a set of bits: 1 errors corrected, 2 corrected and reboot advised, 4 errors left uncorrected.
    // Values from 8 on mean that the program itself failed.
    match output.status.code() {
        Some(0) => Ok(FsckOutcome::Clean),
        Some(1..=3) => Ok(FsckOutcome::Corrected),
        Some(4..=7) => Err(FsckError::Errors { device: device.into(), message: output.message().into() }),
        _ => {
            tracing::warn!(?device, output = output.message(), "e2fsck failed; the file system is mounted unchecked");
            Ok(FsckOutcome::Inconclusive)
        }
    }
}

/// Space and inodes of the file system at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystemUsage {
    pub total_bytes: u64,
    pub used_bytes: u64,
    /// What a process without privileges can still allocate.
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

pub fn statfs(path: &Path) -> Result<FileSystemUsage, StatfsError> {
    let stat = rustix::fs::statvfs(path).map_err(|e| StatfsError { path: path.into(), source: e.into() })?;
    let block_bytes = stat.f_frsize;
    Ok(FileSystemUsage {
        total_bytes: stat.f_blocks * block_bytes,
        used_bytes: stat.f_blocks.saturating_sub(stat.f_bfree) * block_bytes,
        available_bytes: stat.f_bavail * block_bytes,
        total_inodes: stat.f_files,
        used_inodes: stat.f_files.saturating_sub(stat.f_ffree),
        free_inodes: stat.f_ffree,
    })
}
