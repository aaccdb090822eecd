//! Every way a call can fail, and the one place that says which gRPC code it is.
use std::{error::Error, io, path::PathBuf};

use cleat_host::{
    OffloadError,
    filesystem::{FsckError, MkfsError, ProbeError, StatfsError},
    loopdev::LoopError,
    mount::{MountError, OptionError, TableError},
};
use tonic::{Code, Status};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("volume {0:?} does not exist")]
    NoVolume(String),
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
    Table(#[from] TableError),
    #[error(transparent)]
    Options(#[from] OptionError),
    #[error(transparent)]
    Statfs(#[from] StatfsError),
}

impl Failure {
    pub(crate) fn code(&self) -> Code {
        match self {
            Failure::NoVolume(_) => Code::NotFound,
            Failure::Incompatible(_) | Failure::OtherPublication { .. } | Failure::OtherAccess { .. } => {
                Code::AlreadyExists
            }
            Failure::Published { .. }
            | Failure::NotPublished { .. }
            | Failure::InUse { .. }
            | Failure::NotStaged { .. }
            | Failure::Foreign { .. }
            | Failure::Holds { .. }
            | Failure::Orphan { .. }
            | Failure::Unformatted { .. } => Code::FailedPrecondition,
            Failure::Options(_) => Code::InvalidArgument,
            Failure::Busy(_) => Code::Aborted,
            Failure::Full { .. } => Code::ResourceExhausted,
            Failure::ImageLost(_) => Code::DataLoss,
            Failure::Files { .. }
            | Failure::Record { .. }
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
