//! Why a reconcile of a sidecar did not get through.

use cleat_csi::CallError;
use cleat_runtime::work::Severity;
use cleat_runtime::write::WriteError;

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Flex(#[from] cleat_flex::CallError),
    /// Not tried at all; what stands in the way, in words for the user.
    #[error("{0}")]
    Refused(String),
}

impl From<&Failure> for Severity {
    fn from(failure: &Failure) -> Self {
        match failure {
            Failure::Write(error) => error.into(),
            Failure::Call(_) | Failure::Flex(_) | Failure::Refused(_) => Self::Warning,
        }
    }
}
