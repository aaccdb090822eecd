//! Every way a call can fail, and the one place that says which gRPC code it is.
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

use super::backend::PoolError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("volume {0:?} does not exist")]
    NoVolume(String),
    #[error("snapshot {0:?} does not exist")]
    NoSnapshot(String),
    #[error("node {0:?} is not known: its driver has never announced itself")]
    NoNode(String),
    #[error("node {node:?} has {limit} volumes, as many as it takes")]
    NodeFull { node: String, limit: i64 },
    #[error("there is no pool {0:?}")]
    NoPool(String),
    #[error("volume {0:?} is still being made")]
    Unfilled(String),
    #[error("snapshot {0:?} exists, of another volume")]
    OtherSnapshot(String),
    #[error("group snapshot {0:?} exists, of other volumes")]
    OtherGroup(String),
    #[error("the members of group snapshot {0:?} are others than these")]
    OtherMembers(String),
    #[error("snapshot {id:?} is part of group snapshot {group:?}: delete that")]
    InGroup { id: String, group: String },
    #[error("snapshot {0:?} is not ready yet")]
    SnapshotUnready(String),
    #[error("snapshot {0:?} was interrupted, and the volume has changed since: delete it and take another")]
    SnapshotLost(String),
    #[error("volume {id:?} cannot be held still for a copy, and its pool cannot share blocks: {why}")]
    CannotHold { id: String, why: String },
    #[error("{}", .0.message())]
    Refused(Status),
    #[error("volume {0:?} exists with another size or other parameters")]
    Incompatible(String),
    #[error("volume {id:?} is published to {}", .nodes.join(", "))]
    Published { id: String, nodes: Vec<String> },
    #[error("volume {id:?} is published to node {node:?} with another access")]
    OtherPublication { id: String, node: String },
    #[error("volume {id:?} is not published to node {node:?}")]
    NotPublished { id: String, node: String },
    #[error("volume {id:?} is in use at {}", .at.display())]
    InUse { id: String, at: PathBuf },
    #[error("volume {id:?} is not staged at {}", .at.display())]
    NotStaged { id: String, at: PathBuf },
    #[error("{} holds something that is not volume {id:?}", .at.display())]
    Foreign { id: String, at: PathBuf },
    #[error("volume {id:?} is at {} with another access", .at.display())]
    OtherAccess { id: String, at: PathBuf },
    #[error("volume {id:?} holds {holds}, which is neither {wanted} nor blank: left as it is")]
    Holds { id: String, holds: String, wanted: String },
    #[error("volume {id:?} is blank, and it may not be formatted {why}")]
    Unformatted { id: String, why: &'static str },
    #[error("the image of volume {0:?} is gone")]
    ImageLost(String),
    #[error("{} holds data, but there is no record of it", .path.display())]
    Orphan { path: PathBuf },
    #[error("volume {0:?} is busy in another process")]
    Busy(String),
    #[error("the pool is full: {step} {}", .path.display())]
    Full { step: &'static str, path: PathBuf },
    #[error("{step} {}", .path.display())]
    Files {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("record {} is not understood", .path.display())]
    Record {
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
    Table(#[from] MountTableError),
    #[error(transparent)]
    MountOptions(#[from] MountOptionError),
    #[error(transparent)]
    Statfs(#[from] StatfsError),
}

impl Failure {
    pub(crate) fn code(&self) -> Code {
        match self {
            Failure::Refused(status) => status.code(),
            Failure::NoVolume(_) | Failure::NoSnapshot(_) | Failure::NoNode(_) => Code::NotFound,
            Failure::Incompatible(_)
            | Failure::OtherPublication { .. }
            | Failure::OtherAccess { .. }
            | Failure::OtherSnapshot(_)
            | Failure::OtherGroup(_) => Code::AlreadyExists,
            Failure::Published { .. }
            | Failure::NotPublished { .. }
            | Failure::InUse { .. }
            | Failure::NotStaged { .. }
            | Failure::Foreign { .. }
            | Failure::Holds { .. }
            | Failure::Orphan { .. }
            | Failure::CannotHold { .. }
            // The next stage grows it, before it mounts.
            | Failure::Grow(GrowError::OnlineNotPermitted { .. })
            | Failure::Unformatted { .. } => Code::FailedPrecondition,
            Failure::MountOptions(_) | Failure::NoPool(_) | Failure::InGroup { .. } | Failure::OtherMembers(_) => {
                Code::InvalidArgument
            }
            Failure::Busy(_) | Failure::Unfilled(_) => Code::Aborted,
            Failure::SnapshotUnready(_) => Code::Unavailable,
            Failure::Full { .. } | Failure::NodeFull { .. } => Code::ResourceExhausted,
            Failure::Copy(error) if error.is_disk_full() => Code::ResourceExhausted,
            Failure::ImageLost(_) | Failure::SnapshotLost(_) => Code::DataLoss,
            Failure::Files { .. }
            | Failure::Record { .. }
            | Failure::Pool(_)
            | Failure::Copy(_)
            | Failure::Freeze(_)
            | Failure::Grow(_)
            | Failure::Loop(_)
            | Failure::Probe(_)
            | Failure::Mkfs(_)
            | Failure::Fsck(_)
            | Failure::Mount(_)
            | Failure::Table(_)
            | Failure::Statfs(_) => Code::Internal,
        }
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Status {
        Status::new(failure.code(), chain(&failure))
    }
}

/// A call that hangs may yet take effect, so its caller must not take it for failed.
pub(crate) fn offloaded(error: OffloadError<Failure>) -> Status {
    match error {
        OffloadError::Failed(failure) => failure.into(),
        OffloadError::Deadline { .. } => Status::deadline_exceeded(error.to_string()),
        OffloadError::Panicked { .. } | OffloadError::Spawn { .. } => Status::unavailable(chain(&error)),
    }
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(inner) = next {
        text = format!("{text}: {inner}");
        next = inner.source();
    }
    text
}
