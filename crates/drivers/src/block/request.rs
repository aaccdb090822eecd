//! What a volume is to be, read from requests that may say anything. Pure: every refusal is a status that names the field.
use std::collections::{BTreeMap, HashMap};

use cleat_csi::{
    Status,
    v1::{
        CapacityRange, VolumeCapability, VolumeContentSource,
        volume_capability::{AccessType, MountVolume, access_mode::Mode},
        volume_content_source,
    },
    validate,
};
use cleat_host::filesystem::Format;
use sha2::{Digest, Sha256};

use super::{
    parameters,
    record::{Publication, Sharing, Source},
};

const MIB: u64 = 1 << 20;
const DEFAULT_SIZE: u64 = 1 << 30;
/// Below this mkfs.ext4 leaves out the journal.
const MIN_EXT4: u64 = 4 * MIB;
/// mkfs.xfs refuses less.
const MIN_XFS: u64 = 300 * MIB;
/// mkfs.btrfs refuses less.
const MIN_BTRFS: u64 = 128 * MIB;
/// What an ext4 pool can hold in one file, with room to spare.
pub(crate) const MAX_SIZE: u64 = 8 << 40;

/// How a caller wants to use a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Block,
    Mount { file_system: Option<Format>, flags: Vec<String> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Capability {
    pub(crate) access: Access,
    pub(crate) sharing: Sharing,
    pub(crate) read_only: bool,
    pub(crate) single_target: bool,
}

impl Capability {
    pub(crate) fn parse(field: &'static str, capability: &VolumeCapability) -> Result<Capability, Status> {
        let refuse = |why: String| Err(Status::invalid_argument(format!("{field}: {why}")));
        let access = match &capability.access_type {
            None => return refuse("access_type is missing".into()),
            Some(AccessType::Block(_)) => Access::Block,
            Some(AccessType::Mount(MountVolume { fs_type, mount_flags, .. })) => {
                let file_system = match (fs_type.as_str(), Format::from_name(fs_type)) {
                    ("", _) => None,
                    (_, None) => {
                        return refuse(format!("fs_type {fs_type:?} is not supported; use ext4, xfs or btrfs"));
                    }
                    (_, format) => format,
                };
                Access::Mount { file_system, flags: mount_flags.clone() }
            }
        };
        let mode = validate::present(field, &capability.access_mode)?.mode();
        let (sharing, read_only) = match (mode, &access) {
            (Mode::SingleNodeWriter | Mode::SingleNodeSingleWriter | Mode::SingleNodeMultiWriter, _) => {
                (Sharing::Exclusive, false)
            }
            (Mode::SingleNodeReaderOnly, _) => (Sharing::Exclusive, true),
            (Mode::MultiNodeReaderOnly, _) => (Sharing::Readers, true),
            (Mode::MultiNodeMultiWriter, Access::Block) => (Sharing::Writers, false),
            (Mode::MultiNodeMultiWriter | Mode::MultiNodeSingleWriter, _) => {
                return refuse(format!("{} needs a cluster file system", mode.as_str_name()));
            }
            (Mode::Unknown, _) => return refuse("access_mode is missing".into()),
        };
        Ok(Capability { access, sharing, read_only, single_target: mode == Mode::SingleNodeSingleWriter })
    }

    pub(crate) fn publication(&self, read_only: bool) -> Publication {
        Publication { read_only: read_only || self.read_only, sharing: self.sharing }
    }
}

/// The part of a CreateVolume request that decides what is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) range: Range,
    pub(crate) parameters: BTreeMap<String, String>,
    pub(crate) mutable: BTreeMap<String, String>,
    pub(crate) file_system: Option<Format>,
    /// Whether somebody asked for that file system, or it is only the default.
    pub(crate) chosen: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    required: u64,
    /// 0 is no limit.
    limit: u64,
}

impl Range {
    pub(crate) fn parse(range: Option<&CapacityRange>) -> Result<Range, Status> {
        let CapacityRange { required_bytes, limit_bytes } = range.copied().unwrap_or_default();
        let (Ok(required), Ok(limit)) = (u64::try_from(required_bytes), u64::try_from(limit_bytes)) else {
            return Err(Status::invalid_argument("capacity_range: a size is negative"));
        };
        if limit != 0 && required > limit {
            return Err(Status::invalid_argument("capacity_range: required_bytes is above limit_bytes"));
        }
        Ok(Range { required, limit })
    }

    pub(crate) fn admits(&self, capacity: u64) -> bool {
        self.required <= capacity && (self.limit == 0 || capacity <= self.limit)
    }

    /// Whether a volume of this size has what is asked for, at least.
    pub(crate) fn is_reached_by(&self, capacity: u64) -> bool {
        self.required <= capacity
    }

    /// The size to make: rounded up to what the file system and the source need, never above the limit.
    pub(crate) fn choose(&self, file_system: Option<Format>, source: Option<u64>) -> Result<u64, Status> {
        let least = minimum(file_system).max(source.unwrap_or(0));
        let wanted = match (self.required, self.limit) {
            (0, _) if source.is_some() => least,
            (0, 0) => DEFAULT_SIZE,
            (0, limit) => DEFAULT_SIZE.min(limit / MIB * MIB),
            (required, _) => required,
        };
        self.fit(wanted.max(least))
    }

    /// The size to grow to; what is large enough already stays.
    pub(crate) fn grow(&self, current: u64) -> Result<u64, Status> {
        if self.required <= current && self.admits(current) {
            Ok(current)
        } else {
            self.fit(self.required.max(current))
        }
    }

    fn fit(&self, wanted: u64) -> Result<u64, Status> {
        let size = wanted.checked_next_multiple_of(MIB).unwrap_or(u64::MAX);
        if size > MAX_SIZE {
            return Err(Status::out_of_range(format!("capacity_range: at most {MAX_SIZE} bytes are possible")));
        }
        if self.admits(size) {
            Ok(size)
        } else {
            Err(Status::out_of_range(format!("capacity_range: limit_bytes is below {size} bytes, the least possible")))
        }
    }
}

/// The least that mkfs takes.
pub(crate) fn minimum(file_system: Option<Format>) -> u64 {
    match file_system {
        None => MIB,
        Some(Format::Ext4) => MIN_EXT4,
        Some(Format::Xfs) => MIN_XFS,
        Some(Format::Btrfs) => MIN_BTRFS,
    }
}

impl Wanted {
    pub(crate) fn parse(
        range: Option<&CapacityRange>,
        capabilities: &[VolumeCapability],
        class: &HashMap<String, String>,
        mutable: &HashMap<String, String>,
    ) -> Result<Wanted, Status> {
        let parameters = parameters::check(class)?;
        let mutable = parameters::check_mutable(mutable)?;
        let of_class = parameters.get(parameters::FS_TYPE).and_then(|name| Format::from_name(name));
        let mut of_capability = None;
        let (mut block, mut mount) = (false, false);
        for capability in validate::not_empty("volume_capabilities", capabilities)? {
            match Capability::parse("volume_capabilities", capability)?.access {
                Access::Block => block = true,
                Access::Mount { file_system, .. } => {
                    mount = true;
                    of_capability = of_capability.or(file_system);
                }
            }
        }
        if block && mount {
            return Err(Status::invalid_argument("volume_capabilities: block and mount exclude each other"));
        }
        let chosen = of_capability.or(of_class);
        let file_system = mount.then(|| chosen.unwrap_or(Format::Ext4));
        parameters::check_mkfs_options(&parameters, file_system)?;
        Ok(Wanted { range: Range::parse(range)?, parameters, mutable, file_system, chosen: chosen.is_some() })
    }
}

/// What CreateVolume is to copy.
pub(crate) fn source(source: Option<&VolumeContentSource>) -> Result<Option<Source>, Status> {
    use volume_content_source::Type;
    let Some(source) = source else { return Ok(None) };
    match &source.r#type {
        Some(Type::Snapshot(from)) => {
            let id = validate::text("volume_content_source.snapshot.snapshot_id", &from.snapshot_id)?;
            Ok(Some(Source::Snapshot(id.to_owned())))
        }
        Some(Type::Volume(from)) => {
            let id = validate::text("volume_content_source.volume.volume_id", &from.volume_id)?;
            Ok(Some(Source::Volume(id.to_owned())))
        }
        None => Err(Status::invalid_argument("volume_content_source is of unknown type")),
    }
}

/// The same name always gives the same id, so that a repeated CreateVolume finds what the first one made.
pub(crate) fn id_for(name: &str) -> String {
    let hashed = |name: &str| name.strip_prefix("h-").is_some_and(|rest| rest.len() == 64);
    if is_id(name) && !hashed(name) {
        name.to_owned()
    } else {
        let digest: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("h-{digest}")
    }
}

/// Ids become file names: no separators, no leading dot, and short enough for a suffix.
pub(crate) fn is_id(text: &str) -> bool {
    text.len() <= validate::MAX_STRING
        && text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_csi::{Code, v1::volume_capability::AccessMode};

    fn mount(fs_type: &str, mode: Mode) -> VolumeCapability {
        let mount = MountVolume { fs_type: fs_type.into(), ..Default::default() };
        VolumeCapability {
            access_type: Some(AccessType::Mount(mount)),
            access_mode: Some(AccessMode { mode: mode.into() }),
        }
    }

    fn block(mode: Mode) -> VolumeCapability {
        VolumeCapability {
            access_type: Some(AccessType::Block(Default::default())),
            access_mode: Some(AccessMode { mode: mode.into() }),
        }
    }

    #[test]
    fn sizes_are_rounded_up_to_what_the_file_system_needs_but_never_above_the_limit() {
        let (ext4, xfs) = (Some(Format::Ext4), Some(Format::Xfs));
        for (case, required, limit, format, want) in [
            ("nothing asked", 0, 0, ext4, Ok(DEFAULT_SIZE)),
            ("only a limit", 0, 100 * MIB, ext4, Ok(100 * MIB)),
            ("only an odd limit", 0, 100 * MIB + 1, ext4, Ok(100 * MIB)),
            ("odd size", MIB * 5 + 1, 0, ext4, Ok(6 * MIB)),
            ("tiny ext4", 1, 0, ext4, Ok(MIN_EXT4)),
            ("tiny xfs", 1, 0, xfs, Ok(MIN_XFS)),
            ("tiny block", 1, 0, None, Ok(MIB)),
            ("exact", 10 * MIB, 10 * MIB, ext4, Ok(10 * MIB)),
            ("rounding would pass the limit", 10 * MIB - 1, 10 * MIB - 1, ext4, Err(Code::OutOfRange)),
            ("xfs under a low limit", MIB, 200 * MIB, xfs, Err(Code::OutOfRange)),
            ("too large", MAX_SIZE + 1, 0, ext4, Err(Code::OutOfRange)),
            ("near the end of numbers", i64::MAX as u64, 0, ext4, Err(Code::OutOfRange)),
        ] {
            let range = Range { required, limit };
            assert_eq!(range.choose(format, None).map_err(|status| status.code()), want, "{case}");
        }
        for (case, required, limit, source, want) in [
            ("as large as its source", 0, 0, 50 * MIB, Ok(50 * MIB)),
            ("larger than its source", 80 * MIB, 0, 50 * MIB, Ok(80 * MIB)),
            ("smaller than its source", 10 * MIB, 0, 50 * MIB, Ok(50 * MIB)),
            ("held below its source", 10 * MIB, 20 * MIB, 50 * MIB, Err(Code::OutOfRange)),
        ] {
            let chosen = Range { required, limit }.choose(ext4, Some(source));
            assert_eq!(chosen.map_err(|status| status.code()), want, "{case}");
        }
        for (case, required, limit, want) in [
            ("grows", 80 * MIB, 0, Ok(80 * MIB)),
            ("odd", 80 * MIB - 1, 0, Ok(80 * MIB)),
            ("large enough already", 10 * MIB, 0, Ok(50 * MIB)),
            ("nothing asked", 0, 0, Ok(50 * MIB)),
            ("never shrinks", 10 * MIB, 20 * MIB, Err(Code::OutOfRange)),
            ("too large", MAX_SIZE + 1, 0, Err(Code::OutOfRange)),
        ] {
            let grown = Range { required, limit }.grow(50 * MIB);
            assert_eq!(grown.map_err(|status| status.code()), want, "{case}");
        }
        for (case, required_bytes, limit_bytes) in [("negative", -1, 0), ("upside down", 2, 1)] {
            let range = CapacityRange { required_bytes, limit_bytes };
            assert_eq!(Range::parse(Some(&range)).unwrap_err().code(), Code::InvalidArgument, "{case}");
        }
    }

    #[test]
    fn ids_are_safe_file_names_and_stable() {
        assert_eq!(id_for("pvc-0b3c"), "pvc-0b3c");
        for name in ["../../etc/passwd", "a/b", ".hidden", "", "with space", "ü", &"x".repeat(129), &id_for("a/b")] {
            let id = id_for(name);
            assert!(is_id(&id), "{name:?} gives {id:?}");
            assert_ne!(id, name);
            assert_eq!(id, id_for(name));
        }
        for id in ["..", ".", "", "/", "a/../b", "-x", "a\0b", "a\n"] {
            assert!(!is_id(id), "{id:?}");
        }
    }

    #[test]
    fn capabilities_that_would_corrupt_data_are_refused() {
        use Mode::*;
        for (case, capability, want) in [
            ("one writer", mount("", SingleNodeWriter), Some((Sharing::Exclusive, false))),
            ("many readers", mount("xfs", MultiNodeReaderOnly), Some((Sharing::Readers, true))),
            ("coordinated writers", block(MultiNodeMultiWriter), Some((Sharing::Writers, false))),
            ("many writers on a file system", mount("", MultiNodeMultiWriter), None),
            ("one writer among readers", mount("", MultiNodeSingleWriter), None),
            ("unknown file system", mount("zfs", SingleNodeWriter), None),
            ("no mode", mount("", Unknown), None),
            ("nothing", VolumeCapability::default(), None),
        ] {
            let parsed = Capability::parse("volume_capability", &capability);
            assert_eq!(parsed.ok().map(|parsed| (parsed.sharing, parsed.read_only)), want, "{case}");
        }
    }

    #[test]
    fn the_capability_decides_the_file_system_then_the_class() {
        let parameters = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect::<HashMap<_, _>>()
        };
        let writer = Mode::SingleNodeWriter;
        for (case, capability, class, want) in [
            ("default", mount("", writer), vec![], Some(Some(Format::Ext4))),
            ("class", mount("", writer), vec![("fsType", "xfs")], Some(Some(Format::Xfs))),
            ("capability wins", mount("ext4", writer), vec![("fsType", "xfs")], Some(Some(Format::Ext4))),
            ("raw block", block(writer), vec![], Some(None)),
            (
                "sidecar keys pass",
                mount("", writer),
                vec![("csi.storage.k8s.io/pvc/name", "a")],
                Some(Some(Format::Ext4)),
            ),
            ("typing error", mount("", writer), vec![("fstyp", "xfs")], None),
            ("unknown file system", mount("", writer), vec![("fsType", "zfs")], None),
        ] {
            let wanted = Wanted::parse(None, &[capability], &parameters(&class), &HashMap::new());
            assert_eq!(wanted.ok().map(|wanted| wanted.file_system), want, "{case}");
        }
        let both = [mount("", writer), block(writer)];
        assert!(Wanted::parse(None, &both, &HashMap::new(), &HashMap::new()).is_err(), "block and mount together");
    }
}
