//! What a failed CreateVolume means for the claim.

use cleat_csi::{CallError, Code, ErrorClass as Class};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aftermath {
    /// Nothing was made, and nothing is being made: tried again with backoff, as claim and class then are.
    Over,
    /// As `Over`, but the same request will fail again: tried again only after a long while.
    Infeasible,
    /// As `Over`, and the chosen node has no room: another one is to be chosen.
    Reschedule,
    /// The volume may be there, or in the making: the same call is repeated, whatever becomes of the claim.
    InDoubt,
}

pub fn aftermath(error: &CallError, can_reschedule: bool) -> Aftermath {
    match (error.class(), error.code()) {
        (Class::Final, Code::InvalidArgument) => Aftermath::Infeasible,
        (Class::Final, Code::ResourceExhausted) if can_reschedule => Aftermath::Reschedule,
        (Class::Final, _) => Aftermath::Over,
        (Class::Transient | Class::Uncertain, _) => Aftermath::InDoubt,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_call_that_left_nothing_behind_is_forgotten() {
        use Aftermath::{InDoubt, Infeasible, Over, Reschedule};
        for (code, chosen, want) in [
            (Code::Cancelled, true, InDoubt),
            (Code::DeadlineExceeded, true, InDoubt),
            (Code::Unavailable, false, InDoubt),
            (Code::Aborted, false, InDoubt),
            (Code::ResourceExhausted, true, Reschedule),
            (Code::ResourceExhausted, false, Over),
            (Code::InvalidArgument, true, Infeasible),
            (Code::Internal, true, Over),
            (Code::Unknown, false, Over),
            (Code::NotFound, false, Over),
            (Code::AlreadyExists, false, Over),
            (Code::OutOfRange, false, Over),
            (Code::FailedPrecondition, false, Over),
            (Code::Unimplemented, false, Over),
        ] {
            let error = CallError { method: "CreateVolume", code, message: String::new() };
            assert_eq!(aftermath(&error, chosen), want, "{code:?}, chosen: {chosen}");
        }
    }
}
