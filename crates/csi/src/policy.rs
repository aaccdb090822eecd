//! Classifies the gRPC codes of drivers: one table of code × kind of method. Pure.
//!
//! "Final" does not mean "give up": the caller still retries with backoff. But it may change or drop the request, because
//! the driver neither runs it nor has kept anything of it.
use tonic::Code;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// The call does not run in the driver any more and had no effect.
    Final,
    /// The caller repeats the same call. An earlier effect, if any, is unchanged.
    Transient,
    /// The call may still run or may have taken effect. The caller must repeat it unchanged or undo it, and must not
    /// drop it.
    Uncertain,
}

/// Methods for which a code has the same meaning.
#[derive(Clone, Copy)]
enum MethodKind {
    /// CreateVolume. RESOURCE_EXHAUSTED is final: the scheduler then chooses another node.
    Create,
    /// Creates a snapshot, or changes or mounts an existing volume.
    Change,
    /// Always repeated until it succeeds: attach, and every call that removes something.
    RetryUntilSuccess,
    /// Only reads, so its outcome is never uncertain.
    Query,
}

/// `method` is the bare RPC name, for example `CreateVolume`.
pub fn classify(method: &str, code: Code) -> ErrorClass {
    use ErrorClass::{Final, Transient, Uncertain};
    let [create, change, persist, query] = match code {
        Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable | Code::Aborted => {
            [Uncertain, Uncertain, Uncertain, Transient]
        }
        Code::ResourceExhausted => [Final, Uncertain, Transient, Transient],
        Code::InvalidArgument | Code::NotFound | Code::OutOfRange | Code::FailedPrecondition | Code::AlreadyExists => {
            [Final, Final, Transient, Final]
        }
        Code::Unimplemented | Code::PermissionDenied | Code::Unauthenticated => [Final, Final, Transient, Final],
        Code::Internal | Code::Unknown | Code::DataLoss => [Final, Final, Transient, Transient],
        // A driver that sends OK as an error has not said what happened.
        Code::Ok => [Uncertain, Uncertain, Uncertain, Transient],
    };
    match method_kind(method) {
        MethodKind::Create => create,
        MethodKind::Change => change,
        MethodKind::RetryUntilSuccess => persist,
        MethodKind::Query => query,
    }
}

/// Whether the call can never succeed with the same size or parameters, so that the user must request something else.
pub fn is_infeasible(method: &str, code: Code) -> bool {
    match method {
        "ControllerExpandVolume" | "NodeExpandVolume" => {
            matches!(code, Code::InvalidArgument | Code::NotFound | Code::OutOfRange)
        }
        "ControllerModifyVolume" => code == Code::InvalidArgument,
        _ => false,
    }
}

fn method_kind(method: &str) -> MethodKind {
    match method {
        "CreateVolume" => MethodKind::Create,
        "ControllerExpandVolume"
        | "ControllerModifyVolume"
        | "CreateSnapshot"
        | "CreateVolumeGroupSnapshot"
        | "NodeStageVolume"
        | "NodePublishVolume"
        | "NodeExpandVolume"
        | "NotifyRegistrationStatus" => MethodKind::Change,
        "DeleteVolume"
        | "ControllerPublishVolume"
        | "ControllerUnpublishVolume"
        | "DeleteSnapshot"
        | "DeleteVolumeGroupSnapshot"
        | "NodeUnstageVolume"
        | "NodeUnpublishVolume" => MethodKind::RetryUntilSuccess,
        "GetPluginInfo"
        | "GetPluginCapabilities"
        | "Probe"
        | "ValidateVolumeCapabilities"
        | "ListVolumes"
        | "GetCapacity"
        | "ControllerGetCapabilities"
        | "ListSnapshots"
        | "GetSnapshot"
        | "ControllerGetVolume"
        | "ControllerGetVolumeHealth"
        | "ControllerListVolumeHealth"
        | "GroupControllerGetCapabilities"
        | "GetVolumeGroupSnapshot"
        | "GetMetadataAllocated"
        | "GetMetadataDelta"
        | "NodeGetVolumeStats"
        | "NodeGetCapabilities"
        | "NodeGetInfo"
        | "NodeGetVolumeHealth"
        | "NodeGetStorageHealth"
        | "GetInfo" => MethodKind::Query,
        // A method of a later version of the specification: assume that it changes something.
        _ => MethodKind::Change,
    }
}

#[cfg(test)]
mod tests {
    use super::{ErrorClass::*, *};

    #[test]
    fn codes_are_classified_as_the_sidecars_do() {
        let methods = [
            "CreateVolume",
            "DeleteVolume",
            "ControllerPublishVolume",
            "ControllerUnpublishVolume",
            "ControllerExpandVolume",
            "ControllerModifyVolume",
            "CreateSnapshot",
        ];
        let uncertain = [Uncertain; 7];
        let refused = [Final, Transient, Transient, Transient, Final, Final, Final];
        for (code, want) in [
            (Code::Cancelled, uncertain),
            (Code::DeadlineExceeded, uncertain),
            (Code::Unavailable, uncertain),
            (Code::Aborted, uncertain),
            (Code::ResourceExhausted, [Final, Transient, Transient, Transient, Uncertain, Uncertain, Uncertain]),
            (Code::InvalidArgument, refused),
            (Code::NotFound, refused),
            (Code::OutOfRange, refused),
            (Code::FailedPrecondition, refused),
            (Code::AlreadyExists, refused),
            (Code::Internal, refused),
            (Code::Unknown, refused),
            (Code::Unimplemented, refused),
            (Code::PermissionDenied, refused),
            (Code::Unauthenticated, refused),
            (Code::DataLoss, refused),
        ] {
            for (method, want) in methods.into_iter().zip(want) {
                assert_eq!(classify(method, code), want, "{method} {code:?}");
            }
        }
    }

    #[test]
    fn five_codes_of_node_calls_are_uncertain() {
        for method in ["NodeStageVolume", "NodePublishVolume", "NodeExpandVolume"] {
            for code in (0..=16).map(Code::from_i32).filter(|code| *code != Code::Ok) {
                let want_uncertain = matches!(
                    code,
                    Code::Cancelled
                        | Code::DeadlineExceeded
                        | Code::Unavailable
                        | Code::ResourceExhausted
                        | Code::Aborted
                );
                assert_eq!(classify(method, code) == Uncertain, want_uncertain, "{method} {code:?}");
            }
        }
    }

    #[test]
    fn queries_are_never_uncertain_and_removals_are_never_final() {
        for code in (0..=16).map(Code::from_i32) {
            for method in ["Probe", "ListVolumes", "NodeGetInfo", "GetSnapshot"] {
                assert_ne!(classify(method, code), Uncertain, "{method} {code:?}");
            }
            for method in ["DeleteVolume", "NodeUnstageVolume", "NodeUnpublishVolume", "ControllerUnpublishVolume"] {
                assert_ne!(classify(method, code), Final, "{method} {code:?}");
            }
        }
    }

    #[test]
    fn only_some_codes_of_expand_and_modify_are_infeasible() {
        for (method, code, want) in [
            ("ControllerExpandVolume", Code::OutOfRange, true),
            ("ControllerExpandVolume", Code::InvalidArgument, true),
            ("ControllerExpandVolume", Code::NotFound, true),
            ("ControllerExpandVolume", Code::FailedPrecondition, false),
            ("ControllerExpandVolume", Code::Internal, false),
            ("ControllerModifyVolume", Code::InvalidArgument, true),
            ("ControllerModifyVolume", Code::OutOfRange, false),
            ("CreateVolume", Code::OutOfRange, false),
        ] {
            assert_eq!(is_infeasible(method, code), want, "{method} {code:?}");
        }
    }
}
