//! The errors of all driver operations, and their mapping to gRPC codes.
use std::{error::Error, io, path::PathBuf};

use cleat_host::{
    OffloadError,
    copy::CopyError,
    filesystem::{FsckError, GrowError, MkfsError, ProbeError, StatfsError},
    freeze::FreezeError,
    loopdev::LoopError,
    mount::{MountError, MountOptionError, MountTableError},
};
use tonic::{Code, Status};

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("pool {}: {step}", .path.display())]
    Open {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("pool {}: try whether files can share blocks", .path.display())]
    Reflink {
        path: PathBuf,
        #[source]
        source: CopyError,
    },
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("volume {0:?} does not exist")]
    VolumeNotFound(String),
    #[error("snapshot {0:?} does not exist")]
    SnapshotNotFound(String),
    #[error("node {0:?} is not known: its driver has never registered itself in the pool")]
    NodeNotRegistered(String),
    #[error("node {node:?} has {limit} volumes, as many as it takes")]
    NodeVolumeLimit { node: String, limit: i64 },
    #[error("there is no pool {0:?}")]
    PoolNotFound(String),
    #[error("volume {0:?} is still being made")]
    VolumeIncomplete(String),
    #[error("snapshot {0:?} exists, of another volume")]
    SnapshotExists(String),
    #[error("group snapshot {0:?} exists, of other volumes")]
    GroupExists(String),
    #[error("the members of group snapshot {0:?} are others than these")]
    GroupMembersDiffer(String),
    #[error("snapshot {id:?} is part of group snapshot {group:?}: delete that")]
    SnapshotInGroup { id: String, group: String },
    #[error("snapshot {0:?} is not ready yet")]
    SnapshotNotReady(String),
    #[error("snapshot {0:?} was interrupted, and the volume has changed since: delete it and take another")]
    SnapshotLost(String),
    #[error("volume {id:?} cannot be frozen for a copy, and its pool cannot share blocks: {why}")]
    CannotFreeze { id: String, why: String },
    #[error("{}", .0.message())]
    Refused(Status),
    #[error("volume {0:?} exists with another size or other parameters")]
    VolumeExists(String),
    #[error("volume {id:?} is published to {}", .nodes.join(", "))]
    Published { id: String, nodes: Vec<String> },
    #[error("volume {id:?} is published to node {node:?} with another access")]
    PublishedWithOtherAccess { id: String, node: String },
    #[error("volume {id:?} is not published to node {node:?}")]
    NotPublished { id: String, node: String },
    #[error("volume {id:?} is in use at {}", .at.display())]
    InUse { id: String, at: PathBuf },
    #[error("volume {id:?} is not staged at {}", .at.display())]
    NotStaged { id: String, at: PathBuf },
    #[error("{} holds something that is not volume {id:?}", .at.display())]
    ForeignMount { id: String, at: PathBuf },
    #[error("volume {id:?} is at {} with another access", .at.display())]
    MountedWithOtherAccess { id: String, at: PathBuf },
    #[error("volume {id:?} holds {holds}, which is neither {wanted} nor blank: left as it is")]
    UnexpectedContents { id: String, holds: String, wanted: String },
    #[error("volume {id:?} is blank, and it may not be formatted {why}")]
    FormatForbidden { id: String, why: &'static str },
    #[error("the image of volume {0:?} is gone")]
    ImageLost(String),
    #[error("{} holds data, but there is no record of it", .path.display())]
    ImageWithoutRecord { path: PathBuf },
    #[error("volume {0:?} is busy in another process")]
    Busy(String),
    #[error("the pool is full: {step} {}", .path.display())]
    PoolFull { step: &'static str, path: PathBuf },
    #[error("{step} {}", .path.display())]
    Io {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("record {} is not understood", .path.display())]
    InvalidRecord {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error(transparent)]
    Pool(PoolError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    #[error(transparent)]
    Grow(#[from] GrowError),
    #[error(transparent)]
    Loop(#[from] LoopError),
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error(transparent)]
    Mkfs(#[from] MkfsError),
    #[error(transparent)]
    Fsck(#[from] FsckError),
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    MountTable(#[from] MountTableError),
    #[error(transparent)]
    MountOptions(#[from] MountOptionError),
    #[error(transparent)]
    Statfs(#[from] StatfsError),
}

impl Failure {
    pub(crate) fn grpc_code(&self) -> Code {
        match self {
            Failure::Refused(status) => status.code(),
            Failure::VolumeNotFound(_) | Failure::SnapshotNotFound(_) | Failure::NodeNotRegistered(_) => Code::NotFound,
            Failure::VolumeExists(_)
            | Failure::PublishedWithOtherAccess { .. }
            | Failure::MountedWithOtherAccess { .. }
            | Failure::SnapshotExists(_)
            | Failure::GroupExists(_) => Code::AlreadyExists,
            Failure::Published { .. }
            | Failure::NotPublished { .. }
            | Failure::InUse { .. }
            | Failure::NotStaged { .. }
            | Failure::ForeignMount { .. }
            | Failure::UnexpectedContents { .. }
            | Failure::ImageWithoutRecord { .. }
            | Failure::CannotFreeze { .. }
            // The next stage grows the file system before it mounts it.
            | Failure::Grow(GrowError::OnlineNotPermitted { .. })
            | Failure::FormatForbidden { .. } => Code::FailedPrecondition,
            Failure::MountOptions(_)
            | Failure::PoolNotFound(_)
            | Failure::SnapshotInGroup { .. }
            | Failure::GroupMembersDiffer(_) => Code::InvalidArgument,
            Failure::Busy(_) | Failure::VolumeIncomplete(_) => Code::Aborted,
            Failure::SnapshotNotReady(_) => Code::Unavailable,
            Failure::PoolFull { .. } | Failure::NodeVolumeLimit { .. } => Code::ResourceExhausted,
            Failure::Copy(error) if error.is_disk_full() => Code::ResourceExhausted,
            Failure::ImageLost(_) | Failure::SnapshotLost(_) => Code::DataLoss,
            Failure::Io { .. }
            | Failure::InvalidRecord { .. }
            | Failure::Pool(_)
            | Failure::Copy(_)
            | Failure::Freeze(_)
            | Failure::Grow(_)
            | Failure::Loop(_)
            | Failure::Probe(_)
            | Failure::Mkfs(_)
            | Failure::Fsck(_)
            | Failure::Mount(_)
            | Failure::MountTable(_)
            | Failure::Statfs(_) => Code::Internal,
        }
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Status {
        Status::new(failure.grpc_code(), error_chain(&failure))
    }
}

/// The status of an offloaded call. A call that exceeds its deadline may still take effect, so it gets a code that
/// callers treat as uncertain.
pub(crate) fn offload_status(error: OffloadError<Failure>) -> Status {
    match error {
        OffloadError::Failed(failure) => failure.into(),
        OffloadError::Deadline { .. } => Status::deadline_exceeded(error.to_string()),
        OffloadError::Panicked { .. } | OffloadError::Spawn { .. } => Status::unavailable(error_chain(&error)),
    }
}

/// The messages of an error and of all its sources.
fn error_chain(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut next = error.source();
    while let Some(inner) = next {
        message = format!("{message}: {inner}");
        next = inner.source();
    }
    message
}
