//! Access modes of claims and volumes, and the one CSI access mode that a call to a driver carries.

use std::fmt;

/// All access modes, in the order in which Kubernetes lists them.
pub const ALL_MODES: [&str; 4] = [READ_WRITE_ONCE, READ_ONLY_MANY, READ_WRITE_MANY, READ_WRITE_ONCE_POD];
pub const READ_WRITE_ONCE: &str = "ReadWriteOnce";
pub const READ_ONLY_MANY: &str = "ReadOnlyMany";
pub const READ_WRITE_MANY: &str = "ReadWriteMany";
pub const READ_WRITE_ONCE_POD: &str = "ReadWriteOncePod";

/// Access modes with the numbers of the CSI specification's `VolumeCapability.AccessMode.Mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum CsiAccessMode {
    SingleNodeWriter = 1,
    MultiNodeReaderOnly = 3,
    MultiNodeMultiWriter = 5,
    SingleNodeSingleWriter = 6,
    SingleNodeMultiWriter = 7,
}

/// Whether the driver has the capability SINGLE_NODE_MULTI_WRITER: it then distinguishes one writing pod on a node from
/// several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MultiWriterSupport {
    Unsupported,
    Supported,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub struct UnsupportedModes(pub Vec<String>);

impl fmt::Display for UnsupportedModes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "access modes [{}] cannot be offered together", self.0.join(", "))
    }
}

/// The CSI mode for one Kubernetes mode, as CreateVolume carries it.
pub fn to_csi_mode(mode: &str, multi_writer: MultiWriterSupport) -> Result<CsiAccessMode, UnsupportedModes> {
    Ok(match (mode, multi_writer) {
        (READ_WRITE_ONCE | READ_WRITE_ONCE_POD, MultiWriterSupport::Unsupported) => CsiAccessMode::SingleNodeWriter,
        (READ_WRITE_ONCE, MultiWriterSupport::Supported) => CsiAccessMode::SingleNodeMultiWriter,
        (READ_WRITE_ONCE_POD, MultiWriterSupport::Supported) => CsiAccessMode::SingleNodeSingleWriter,
        (READ_ONLY_MANY, _) => CsiAccessMode::MultiNodeReaderOnly,
        (READ_WRITE_MANY, _) => CsiAccessMode::MultiNodeMultiWriter,
        _ => return Err(UnsupportedModes(vec![mode.to_owned()])),
    })
}

/// The CSI mode for all modes of a volume, as attach, stage and publish calls carry it. Fails if no CSI mode covers them.
pub fn combine_to_csi_mode(
    all: &[String],
    multi_writer: MultiWriterSupport,
) -> Result<CsiAccessMode, UnsupportedModes> {
    let has = |mode: &str| all.iter().any(|m| m == mode);
    let unsupported = || UnsupportedModes(all.to_vec());
    if has(READ_WRITE_ONCE_POD) {
        return if all.len() == 1 { to_csi_mode(READ_WRITE_ONCE_POD, multi_writer) } else { Err(unsupported()) };
    }
    match (has(READ_WRITE_MANY), has(READ_ONLY_MANY), has(READ_WRITE_ONCE)) {
        (true, _, _) => to_csi_mode(READ_WRITE_MANY, multi_writer),
        (false, true, false) => to_csi_mode(READ_ONLY_MANY, multi_writer),
        (false, false, true) => to_csi_mode(READ_WRITE_ONCE, multi_writer),
        (false, true, true) | (false, false, false) => Err(unsupported()),
    }
}

/// Returns true if the modes allow the volume on more than one node at a time. No modes at all restrict nothing.
pub fn allows_many_nodes(all: &[String]) -> bool {
    all.is_empty() || all.iter().any(|m| m == READ_WRITE_MANY || m == READ_ONLY_MANY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use CsiAccessMode::*;

    #[test]
    fn the_modes_of_a_volume_combine_to_one_csi_mode() {
        let (without, with) = (MultiWriterSupport::Unsupported, MultiWriterSupport::Supported);
        for (case, all, multi_writer, want) in [
            ("once", &["ReadWriteOnce"][..], without, Ok(SingleNodeWriter)),
            ("once, driver distinguishes writers", &["ReadWriteOnce"], with, Ok(SingleNodeMultiWriter)),
            ("one pod", &["ReadWriteOncePod"], with, Ok(SingleNodeSingleWriter)),
            (
                "ReadWriteMany covers the others",
                &["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
                without,
                Ok(MultiNodeMultiWriter),
            ),
            ("read-only many", &["ReadOnlyMany"], with, Ok(MultiNodeReaderOnly)),
            ("neither readers nor one writer cover the other", &["ReadWriteOnce", "ReadOnlyMany"], without, Err(())),
            ("one pod cannot be combined", &["ReadWriteOncePod", "ReadWriteOnce"], with, Err(())),
            ("nothing given", &[], without, Err(())),
        ] {
            let all: Vec<String> = all.iter().map(ToString::to_string).collect();
            assert_eq!(combine_to_csi_mode(&all, multi_writer).map_err(|_| ()), want, "{case}");
        }
    }

    #[test]
    fn only_many_modes_allow_a_second_node() {
        for (modes, want) in
            [(&["ReadWriteOnce"][..], false), (&["ReadWriteOncePod"], false), (&["ReadWriteMany"], true), (&[], true)]
        {
            let modes: Vec<String> = modes.iter().map(ToString::to_string).collect();
            assert_eq!(allows_many_nodes(&modes), want, "{modes:?}");
        }
    }
}
