//! Access modes: what a claim asks for, and the single mode a driver is told.

use std::fmt;

/// The order in which modes are listed when a set of them is compared or shown.
pub const ORDER: [&str; 4] = [READ_WRITE_ONCE, READ_ONLY_MANY, READ_WRITE_MANY, READ_WRITE_ONCE_POD];
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

/// Whether the driver tells one writer on a node from several (capability SINGLE_NODE_MULTI_WRITER).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SingleNodeModes {
    One,
    Distinguished,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub struct UnsupportedModes(pub Vec<String>);

impl fmt::Display for UnsupportedModes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "access modes [{}] cannot be offered together", self.0.join(", "))
    }
}

/// One claim mode as CreateVolume carries it.
pub fn single(mode: &str, modes: SingleNodeModes) -> Result<CsiAccessMode, UnsupportedModes> {
    Ok(match (mode, modes) {
        (READ_WRITE_ONCE, SingleNodeModes::One) | (READ_WRITE_ONCE_POD, SingleNodeModes::One) => {
            CsiAccessMode::SingleNodeWriter
        }
        (READ_WRITE_ONCE, SingleNodeModes::Distinguished) => CsiAccessMode::SingleNodeMultiWriter,
        (READ_WRITE_ONCE_POD, SingleNodeModes::Distinguished) => CsiAccessMode::SingleNodeSingleWriter,
        (READ_ONLY_MANY, _) => CsiAccessMode::MultiNodeReaderOnly,
        (READ_WRITE_MANY, _) => CsiAccessMode::MultiNodeMultiWriter,
        _ => return Err(UnsupportedModes(vec![mode.to_owned()])),
    })
}

/// A volume's whole list of modes, reduced to the one that attach, stage and publish calls carry.
pub fn reduced(all: &[String], modes: SingleNodeModes) -> Result<CsiAccessMode, UnsupportedModes> {
    let has = |mode: &str| all.iter().any(|m| m == mode);
    let unsupported = || UnsupportedModes(all.to_vec());
    if has(READ_WRITE_ONCE_POD) {
        return if all.len() == 1 { single(READ_WRITE_ONCE_POD, modes) } else { Err(unsupported()) };
    }
    match (has(READ_WRITE_MANY), has(READ_ONLY_MANY), has(READ_WRITE_ONCE)) {
        (true, _, _) => single(READ_WRITE_MANY, modes),
        (false, true, false) => single(READ_ONLY_MANY, modes),
        (false, false, true) => single(READ_WRITE_ONCE, modes),
        (false, true, true) | (false, false, false) => Err(unsupported()),
    }
}

/// True where the modes allow the volume on more than one node at a time.
/// A volume without modes says nothing, so nothing is forbidden.
pub fn allows_many_nodes(all: &[String]) -> bool {
    all.is_empty() || all.iter().any(|m| m == READ_WRITE_MANY || m == READ_ONLY_MANY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use CsiAccessMode::*;

    #[test]
    fn a_volumes_modes_reduce_to_one() {
        let (one, told) = (SingleNodeModes::One, SingleNodeModes::Distinguished);
        for (case, all, modes, want) in [
            ("once", &["ReadWriteOnce"][..], one, Ok(SingleNodeWriter)),
            ("once, driver tells writers apart", &["ReadWriteOnce"], told, Ok(SingleNodeMultiWriter)),
            ("one pod", &["ReadWriteOncePod"], told, Ok(SingleNodeSingleWriter)),
            ("many wins", &["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"], one, Ok(MultiNodeMultiWriter)),
            ("read-only many", &["ReadOnlyMany"], told, Ok(MultiNodeReaderOnly)),
            ("no order between readers and one writer", &["ReadWriteOnce", "ReadOnlyMany"], one, Err(())),
            ("one pod tolerates no other", &["ReadWriteOncePod", "ReadWriteOnce"], told, Err(())),
            ("nothing given", &[], one, Err(())),
        ] {
            let all: Vec<String> = all.iter().map(ToString::to_string).collect();
            assert_eq!(reduced(&all, modes).map_err(|_| ()), want, "{case}");
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
