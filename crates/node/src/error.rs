//! The error of one reconcile of a pod, a volume or the node.

use std::io;

use cleat_api::Key;
use cleat_host::OffloadError;
use cleat_runtime::work::Severity;
use cleat_runtime::write::WriteError;

use crate::csi_node::CsiNodeError;
use crate::layout::PodUid;

/// A reconcile of a pod, a volume or the node failed. The queue repeats it with backoff.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    CsiNode(#[from] CsiNodeError),
    /// The messages of all failed steps of one volume.
    #[error("{0}")]
    Steps(String),
    #[error("pod {0} is on the server but not in the cache yet")]
    CacheBehind(Key),
    #[error("directories of pod {uid}: {source}")]
    Directories { uid: PodUid, source: OffloadError<io::Error> },
}

impl From<&ReconcileError> for Severity {
    fn from(error: &ReconcileError) -> Severity {
        match error {
            ReconcileError::Write(error) => error.into(),
            ReconcileError::CacheBehind(_) => Severity::Expected,
            ReconcileError::Steps(_) | ReconcileError::CsiNode(_) | ReconcileError::Directories { .. } => {
                Severity::Warning
            }
        }
    }
}
