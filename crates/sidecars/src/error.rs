//! Why a reconcile of a sidecar failed.

use cleat_csi::CallError;
use cleat_runtime::work::Severity;
use cleat_runtime::write::WriteError;

#[derive(Debug, thiserror::Error)]
pub enum SidecarError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Flex(#[from] cleat_flex::CallError),
    /// No call was made. The text tells the user why.
    #[error("{0}")]
    Refused(String),
}

impl From<&SidecarError> for Severity {
    fn from(error: &SidecarError) -> Self {
        match error {
            SidecarError::Write(error) => error.into(),
            SidecarError::Call(_) | SidecarError::Flex(_) | SidecarError::Refused(_) => Self::Warning,
        }
    }
}
