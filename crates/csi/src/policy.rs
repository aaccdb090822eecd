//! What a gRPC code from a driver means for the caller: one table of code × kind of method. Pure.
//!
//! "Final" never means "give up": the caller still retries with backoff, but it may change its inputs or forget the
//! request, because nothing of it runs or remains in the driver.
use tonic::Code;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Nothing is running in the driver and nothing was left behind.
    Final,
    /// Repeat the same call; nothing is known to be running.
    Transient,
    /// The call may be running, or may have taken effect: repeat it unchanged or undo it, never forget it.
    Uncertain,
}

/// Methods that react alike to a code.
#[derive(Clone, Copy)]
enum Kind {
    /// CreateVolume: exhausted resources here are a reason to choose another node.
    Create,
    /// Makes or changes something beside the volume's existence.
    Change,
    /// Always repeated until it succeeds: attach, detach and everything that takes away.
    Persist,
    /// Reads only, so no outcome is ever in doubt.
    Query,
}

/// `method` is the bare RPC name, for example `CreateVolume`.
pub fn classify(method: &str, code: Code) -> Class {
    use Class::{Final, Transient, Uncertain};
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
        // Not an error; a driver that puts it in one has said nothing about what happened.
        Code::Ok => [Uncertain, Uncertain, Uncertain, Transient],
    };
    match kind(method) {
        Kind::Create => create,
        Kind::Change => change,
        Kind::Persist => persist,
        Kind::Query => query,
    }
}

/// Whether repeating with the same size or parameters can never succeed, so that the user has to ask for something else.
pub fn infeasible(method: &str, code: Code) -> bool {
    match method {
        "ControllerExpandVolume" | "NodeExpandVolume" => {
            matches!(code, Code::InvalidArgument | Code::NotFound | Code::OutOfRange)
        }
        "ControllerModifyVolume" => code == Code::InvalidArgument,
        _ => false,
    }
}

fn kind(method: &str) -> Kind {
    match method {
        "CreateVolume" => Kind::Create,
        "ControllerExpandVolume"
        | "ControllerModifyVolume"
        | "CreateSnapshot"
        | "CreateVolumeGroupSnapshot"
        | "NodeStageVolume"
        | "NodePublishVolume"
        | "NodeExpandVolume"
        | "NotifyRegistrationStatus" => Kind::Change,
        "DeleteVolume"
        | "ControllerPublishVolume"
        | "ControllerUnpublishVolume"
        | "DeleteSnapshot"
        | "DeleteVolumeGroupSnapshot"
        | "NodeUnstageVolume"
        | "NodeUnpublishVolume" => Kind::Persist,
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
        | "GetInfo" => Kind::Query,
        // A method of a later spec: assume it changes something.
        _ => Kind::Change,
    }
}

#[cfg(test)]
mod tests {
    use super::{Class::*, *};

    #[test]
    fn each_code_means_what_the_control_plane_reads_into_it() {
        let methods = [
            "CreateVolume",
            "DeleteVolume",
            "ControllerPublishVolume",
            "ControllerUnpublishVolume",
            "ControllerExpandVolume",
            "ControllerModifyVolume",
            "CreateSnapshot",
        ];
        let in_doubt = [Uncertain; 7];
        let settled = [Final, Transient, Transient, Transient, Final, Final, Final];
        for (code, want) in [
            (Code::Cancelled, in_doubt),
            (Code::DeadlineExceeded, in_doubt),
            (Code::Unavailable, in_doubt),
            (Code::Aborted, in_doubt),
            (Code::ResourceExhausted, [Final, Transient, Transient, Transient, Uncertain, Uncertain, Uncertain]),
            (Code::InvalidArgument, settled),
            (Code::NotFound, settled),
            (Code::OutOfRange, settled),
            (Code::FailedPrecondition, settled),
            (Code::AlreadyExists, settled),
            (Code::Internal, settled),
            (Code::Unknown, settled),
            (Code::Unimplemented, settled),
            (Code::PermissionDenied, settled),
            (Code::Unauthenticated, settled),
            (Code::DataLoss, settled),
        ] {
            for (method, want) in methods.into_iter().zip(want) {
                assert_eq!(classify(method, code), want, "{method} {code:?}");
            }
        }
    }

    #[test]
    fn the_node_treats_five_codes_as_unfinished() {
        for method in ["NodeStageVolume", "NodePublishVolume", "NodeExpandVolume"] {
            for code in (0..=16).map(Code::from_i32).filter(|code| *code != Code::Ok) {
                let unfinished = matches!(
                    code,
                    Code::Cancelled
                        | Code::DeadlineExceeded
                        | Code::Unavailable
                        | Code::ResourceExhausted
                        | Code::Aborted
                );
                assert_eq!(classify(method, code) == Uncertain, unfinished, "{method} {code:?}");
            }
        }
    }

    #[test]
    fn reading_is_never_uncertain_and_taking_away_is_never_final() {
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
    fn only_requests_that_cannot_fit_are_infeasible() {
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
            assert_eq!(infeasible(method, code), want, "{method} {code:?}");
        }
    }
}
