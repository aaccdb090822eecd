//! Decides what happens to the claim after a failed CreateVolume. Pure.

use cleat_csi::{CallError, Code, ErrorClass};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureOutcome {
    /// No volume exists and none is being created. Retried with backoff, with a new request.
    Final,
    /// As `Final`, but the same request will fail again: retried only after a long delay.
    Infeasible,
    /// As `Final`, and the selected node has no capacity: the scheduler must select another one.
    Reschedule,
    /// The volume may exist or may be being created: the same call is repeated, even if the claim is deleted.
    Uncertain,
}

pub fn classify(error: &CallError, can_reschedule: bool) -> FailureOutcome {
    match (error.class(), error.code()) {
        (ErrorClass::Final, Code::InvalidArgument) => FailureOutcome::Infeasible,
        (ErrorClass::Final, Code::ResourceExhausted) if can_reschedule => FailureOutcome::Reschedule,
        (ErrorClass::Final, _) => FailureOutcome::Final,
        (ErrorClass::Transient | ErrorClass::Uncertain, _) => FailureOutcome::Uncertain,
    }
}

/// The message of the ProvisioningFailed event. `class` is the name of the claim's StorageClass.
pub fn event_message(outcome: FailureOutcome, class: &str, error: &CallError) -> String {
    let message = format!("failed to provision volume with StorageClass {class:?}: {error}");
    match outcome {
        FailureOutcome::Infeasible => {
            format!("Volume provisioning failed with infeasible error. Retries will be delayed. {message}")
        }
        FailureOutcome::Final | FailureOutcome::Reschedule | FailureOutcome::Uncertain => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_call_that_left_no_volume_is_forgotten() {
        use FailureOutcome::{Final, Infeasible, Reschedule, Uncertain};
        for (code, can_reschedule, want) in [
            (Code::Cancelled, true, Uncertain),
            (Code::DeadlineExceeded, true, Uncertain),
            (Code::Unavailable, false, Uncertain),
            (Code::Aborted, false, Uncertain),
            (Code::ResourceExhausted, true, Reschedule),
            (Code::ResourceExhausted, false, Final),
            (Code::InvalidArgument, true, Infeasible),
            (Code::Internal, true, Final),
            (Code::Unknown, false, Final),
            (Code::NotFound, false, Final),
            (Code::AlreadyExists, false, Final),
            (Code::OutOfRange, false, Final),
            (Code::FailedPrecondition, false, Final),
            (Code::Unimplemented, false, Final),
        ] {
            let error = CallError { method: "CreateVolume", code, message: String::new() };
            assert_eq!(classify(&error, can_reschedule), want, "{code:?}, can_reschedule: {can_reschedule}");
        }
    }
}
